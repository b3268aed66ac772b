"""Qwen2: the layers of Llama, with biases of queries, keys and values."""

from __future__ import annotations

from mcore_adapter.models.family import MegatronFamily
from mcore_adapter.models.llama import decoder_layer

QWEN2 = MegatronFamily(layer=decoder_layer)
