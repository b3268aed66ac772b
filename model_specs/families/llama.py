"""Llama 2, 3, 3.1 and 3.2: the decoder that the other families vary."""

from __future__ import annotations

from model_specs.config import parse_decoder
from model_specs.family import Family

LLAMA = Family(architecture="LlamaForCausalLM", parse=parse_decoder)
