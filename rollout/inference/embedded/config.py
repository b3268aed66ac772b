"""The shape of a model, read from a Hugging Face config.json: all that the inference transformer needs to know.

Invariant: a config that gets through describes a model whose forward pass `model.py` reproduces; everything else is an
error that names the key, never a silently different model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES: dict[str, dict[str, bool]] = {
    "qwen2": {"qkv_bias": True, "qk_norm": False},
    "qwen3": {"qkv_bias": False, "qk_norm": True},
    "llama": {"qkv_bias": False, "qk_norm": False},
    "mistral": {"qkv_bias": False, "qk_norm": False},
}
"""model_type -> what distinguishes the family."""

MUST_BE: dict[str, Any] = {
    "hidden_act": "silu",
    "use_sliding_window": False,
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1,
}
"""Keys whose other values change the forward pass in ways that are not implemented; absent is fine."""


@dataclass(frozen=True, kw_only=True)
class Llama3Rope:
    """Rope scaling of Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, the rest blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """A dense Qwen2/Qwen2.5, Qwen3, Llama or Mistral model."""

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
    rope_scaling: Llama3Rope | None
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> InferenceConfig:
        """From the parsed config.json. Raises ValueError naming the key whose value is missing or not supported."""
        family = config.get("model_type")
        if family not in ARCHITECTURES:
            raise ValueError(f"model_type={family!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
        for key, value in MUST_BE.items():
            if config.get(key) not in (value, None):
                raise ValueError(f"{key}={config[key]!r} is not supported for model_type={family}; use {value!r}")
        window, positions = config.get("sliding_window"), config.get("max_position_embeddings", 0)
        if family == "mistral" and window is not None and window < positions:
            raise ValueError(f"sliding_window={window} is below max_position_embeddings={positions}; lower the latter")
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            return cls(
                vocab_size=int(config["vocab_size"]),
                hidden_size=hidden,
                intermediate_size=int(config["intermediate_size"]),
                num_layers=int(config["num_hidden_layers"]),
                num_heads=heads,
                num_kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden // heads),
                max_position_embeddings=int(config["max_position_embeddings"]),
                rms_norm_eps=float(config["rms_norm_eps"]),
                tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
                rope_theta=_rope_theta(config),
                rope_scaling=_rope_scaling(config),
                qkv_bias=ARCHITECTURES[family]["qkv_bias"],
                qk_norm=ARCHITECTURES[family]["qk_norm"],
            )
        except KeyError as e:
            raise ValueError(f"config.json of a {family} model has no key {e}") from e

    @classmethod
    def from_folder(cls, path: str | Path) -> InferenceConfig:
        """From <path>/config.json. Raises ValueError where the folder is not a Hugging Face model folder."""
        file = Path(path) / "config.json"
        try:
            return cls.from_hf(json.loads(file.read_text(encoding="utf-8")))
        except OSError as e:
            raise ValueError(f"{path} is not a Hugging Face model folder: cannot read {file} ({e.strerror})") from e
        except json.JSONDecodeError as e:
            raise ValueError(f"{file} is not valid JSON: {e}") from e
        except ValueError as e:
            raise ValueError(f"{file}: {e}") from e


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Both spellings in one: rope_parameters, or rope_theta beside rope_scaling."""
    return {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}


def _rope_theta(config: Mapping[str, Any]) -> float:
    rope = _rope(config)
    return float(rope["rope_theta"] if "rope_theta" in rope else config["rope_theta"])


def _rope_scaling(config: Mapping[str, Any]) -> Llama3Rope | None:
    rope = _rope(config)
    if rope.get("partial_rotary_factor", 1) != 1:
        raise ValueError(f"partial_rotary_factor={rope['partial_rotary_factor']!r} is not supported; use 1")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(f"rope_type={kind!r} is not supported; supported: default, llama3")
    if kind == "default":
        return None
    return Llama3Rope(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
    )
