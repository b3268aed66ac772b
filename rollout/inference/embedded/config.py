"""What the inference transformer needs of a model, taken from its ModelConfig.

Invariant: a config that exists describes a model whose forward pass `model.py` reproduces; everything else is an error
that names the key, never a silently different model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from model_specs.config import ModelConfig
from model_specs.hf_config import parse_config, read_config
from model_specs.rope import Llama3RopeScaling


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """A dense decoder with plain attention. Every field has the name and meaning that it has in ModelConfig."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None
    rotary_dim: int
    rope_interleaved: bool
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    post_norms: bool
    fused_gate_up: bool

    @classmethod
    def of(cls, model: ModelConfig) -> InferenceConfig:
        """Select the fields of a dense model. Raises ValueError for a model with experts or latent attention."""
        if model.moe is not None or model.mla is not None:
            raise ValueError(
                f"model_type={model.model_type!r} has experts or latent attention, and the embedded generator samples "
                "dense models with plain attention; use sglang"
            )
        halves = not model.rope_interleaved and model.rotary_dim == model.head_dim
        assert halves or (model.rope_interleaved and not model.qk_norm), "what weights.py lays out"
        return cls(**{field.name: getattr(model, field.name) for field in fields(cls)})

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> InferenceConfig:
        """Return the config of a decoded config.json. Raises ValueError naming the key that is missing or whose value
        is not supported."""
        return cls.of(parse_config(config))

    @classmethod
    def from_folder(cls, path: str | Path) -> InferenceConfig:
        """Return the config of <path>/config.json. Raises ValueError naming the file."""
        return cls.of(read_config(path))
