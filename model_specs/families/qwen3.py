"""Qwen3, dense: norms of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model_specs.config import ModelConfig, parse_decoder
from model_specs.family import Family


def _parse(raw: Mapping[str, Any]) -> ModelConfig:
    return parse_decoder(raw, qk_norm=True, default_head_dim=128, default_num_kv_heads=32)


QWEN3 = Family(architecture="Qwen3ForCausalLM", parse=_parse)
