"""Qwen3: the layers of Llama, with norms of queries and keys."""

from __future__ import annotations

from mcore_adapter.models.family import MegatronFamily
from mcore_adapter.models.llama import decoder_layer

QWEN3 = MegatronFamily(layer=decoder_layer)
