"""Qwen2 and Qwen2.5: biases of queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model_specs.config import ModelConfig, parse_decoder
from model_specs.family import Family


def _parse(raw: Mapping[str, Any]) -> ModelConfig:
    # It always has biases of q, k and v and never one of the output, whatever attention_bias is.
    return parse_decoder(raw, qkv_bias=True, attention_bias=None, default_num_kv_heads=32)


QWEN2 = Family(architecture="Qwen2ForCausalLM", parse=_parse)
