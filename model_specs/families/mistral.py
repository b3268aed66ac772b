"""Mistral 7B, as far as its window covers every position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model_specs.config import ModelConfig, parse_decoder
from model_specs.family import Family
from model_specs.values import ModelConfigError, optional, positive


def _parse(raw: Mapping[str, Any]) -> ModelConfig:
    window = optional(raw, "sliding_window", 4096)
    context = positive(raw, "max_position_embeddings")
    if window is not None and window < context:
        raise ModelConfigError(
            f"sliding_window={window} is shorter than max_position_embeddings={context}, and only full attention is "
            f"supported; where no sequence is longer than the window both are the same: set max_position_embeddings "
            f"to {window}"
        )
    return parse_decoder(raw, default_num_kv_heads=8)


MISTRAL = Family(architecture="MistralForCausalLM", parse=_parse)
