"""Shape of a model, read from a Hugging Face config.json: everything the Megatron side needs to know, typed.

Invariant: a `ModelConfig` that exists describes a model that this package can build; whatever cannot be built (another
architecture, sliding windows, biases that Megatron has no place for) is refused here, with the key and the value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model_specs.moe import MLAConfig, MoEConfig, parse_mla, parse_moe
from model_specs.rope import Llama3RopeScaling, RopeScaling, parse_rope
from model_specs.values import ModelConfigError, number, positive, require

__all__ = ["SUPPORTED", "Llama3RopeScaling", "ModelConfig", "ModelConfigError", "parse_config", "read_config"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of one of `SUPPORTED` model types."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    initializer_range: float
    rope_theta: float
    rope_scaling: RopeScaling
    tied: bool
    """The output layer is the embedding."""
    qkv_bias: bool
    qk_norm: bool
    moe: MoEConfig | None = None
    """None: every layer has a dense MLP."""
    mla: MLAConfig | None = None
    """Latent attention; num_kv_heads and head_dim do not describe it."""
    raw: Mapping[str, Any] = field(compare=False, repr=False)
    """The file's own content, for writing it back."""

    @property
    def is_critic(self) -> bool:
        """The weights beside this file end in a value head."""
        return any(str(name).endswith("ForSequenceClassification") for name in self.raw.get("architectures") or ())

    @property
    def dtype(self) -> str | None:
        """Name of the dtype of the weights beside this file, where it says so: "float32", "bfloat16"."""
        return self.raw.get("dtype") or self.raw.get("torch_dtype")


SUPPORTED: Mapping[str, str] = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
"""Model type -> architecture name of its language model."""

_DEFAULT_HEAD_DIM = {"qwen3": 128}


def read_config(folder: str | Path) -> ModelConfig:
    """The ModelConfig of `folder`/config.json. Raises ModelConfigError naming the file."""
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelConfigError(f"{path}: no such file; expected a Hugging Face model folder") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ModelConfigError(f"{path}: expected a json object, found {type(raw).__name__}")
    try:
        return parse_config(raw)
    except ModelConfigError as error:
        raise ModelConfigError(f"{path}: {error}") from None


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a decoded config.json. Raises ModelConfigError naming key, value and what is supported."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in SUPPORTED:
        raise ModelConfigError(f"model_type={model_type!r} is not supported; supported: {', '.join(sorted(SUPPORTED))}")
    _refuse_unsupported(raw, model_type)
    hidden_size, num_heads = positive(raw, "hidden_size"), positive(raw, "num_attention_heads")
    head_dim = positive(raw, "head_dim", _DEFAULT_HEAD_DIM.get(model_type, hidden_size // num_heads))
    num_kv_heads = positive(raw, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelConfigError(f"num_key_value_heads={num_kv_heads} must divide num_attention_heads={num_heads}")
    mla = parse_mla(raw, model_type)
    rope_theta, rope_scaling = parse_rope(raw, ("default", "yarn") if mla else ("default", "llama3"))
    return ModelConfig(
        model_type=model_type,
        vocab_size=positive(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=positive(raw, "intermediate_size"),
        num_layers=positive(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positive(raw, "max_position_embeddings"),
        rms_norm_eps=number(raw, "rms_norm_eps", 1e-6),
        initializer_range=number(raw, "initializer_range", 0.02),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type in ("qwen3", "qwen3_moe"),
        moe=parse_moe(raw, model_type),
        mla=mla,
        raw=dict(raw),
    )


def _refuse_unsupported(raw: Mapping[str, Any], model_type: str) -> None:
    """Settings that would change the computation in a way that the Megatron model here does not follow."""
    required = {"hidden_act": "silu", "mlp_bias": False, "partial_rotary_factor": 1.0}
    if model_type != "qwen2":  # Qwen2 always has q/k/v biases and never an output bias, whatever its file says
        required["attention_bias"] = False
    require(raw, required)
    sliding = raw.get("use_sliding_window", False) or "sliding_attention" in (raw.get("layer_types") or ())
    if sliding:
        raise ModelConfigError("use_sliding_window=True is not supported; only full attention")
    window, context = raw.get("sliding_window"), positive(raw, "max_position_embeddings")
    if model_type == "mistral" and window is not None and window < context:
        raise ModelConfigError(
            f"sliding_window={window} is shorter than max_position_embeddings={context}, and only full attention is "
            f"supported; where no sequence is longer than the window both are the same: set max_position_embeddings "
            f"to {window}"
        )
