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


class ModelConfigError(ValueError):
    """A config.json that cannot be read or that describes a model outside the supported families."""


@dataclass(frozen=True, kw_only=True)
class Llama3RopeScaling:
    """Rope frequencies of Llama 3.1 and later: long wavelengths are divided by `factor`, short ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A dense decoder of one of `SUPPORTED` model types."""

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
    rope_scaling: Llama3RopeScaling | None
    tied: bool
    """The output layer is the embedding."""
    qkv_bias: bool
    qk_norm: bool
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


SUPPORTED: Mapping[str, str] = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
"""Model type -> architecture name of its language model."""

_DEFAULT_HEAD_DIM = {"qwen3": 128}
_DEFAULT_ROPE_THETA = 10_000.0


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
    hidden_size, num_heads = _positive(raw, "hidden_size"), _positive(raw, "num_attention_heads")
    head_dim = _positive(raw, "head_dim", _DEFAULT_HEAD_DIM.get(model_type, hidden_size // num_heads))
    num_kv_heads = _positive(raw, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelConfigError(f"num_key_value_heads={num_kv_heads} must divide num_attention_heads={num_heads}")
    rope_theta, rope_scaling = _rope(raw)
    return ModelConfig(
        model_type=model_type,
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(raw, "intermediate_size"),
        num_layers=_positive(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_positive(raw, "max_position_embeddings"),
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        initializer_range=_number(raw, "initializer_range", 0.02),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
        raw=dict(raw),
    )


def _positive(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """`default` stands for a key that is absent or null; None: there is no default."""
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or value < 1:
        raise ModelConfigError(f"{key}={value!r} must be a positive integer")
    return value


def _number(values: Mapping[str, Any], key: str, default: float) -> float:
    value = values.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float):
        raise ModelConfigError(f"{key}={value!r} must be a number")
    return float(value)


def _object(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The json object at `key`; empty where it is absent or null."""
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ModelConfigError(f"{key}={value!r} must be a json object")
    return value


def _refuse_unsupported(raw: Mapping[str, Any], model_type: str) -> None:
    """Settings that would change the computation in a way that the Megatron model here does not follow."""
    required = {"hidden_act": "silu", "mlp_bias": False, "partial_rotary_factor": 1.0}
    if model_type != "qwen2":  # Qwen2 always has q/k/v biases and never an output bias, whatever its file says
        required["attention_bias"] = False
    for key, value in required.items():
        if raw.get(key, value) not in (value, None):
            raise ModelConfigError(f"{key}={raw[key]!r} is not supported; only {value!r}")
    sliding = raw.get("use_sliding_window", False) or "sliding_attention" in (raw.get("layer_types") or ())
    if sliding:
        raise ModelConfigError("use_sliding_window=True is not supported; only full attention")


def _rope(raw: Mapping[str, Any]) -> tuple[float, Llama3RopeScaling | None]:
    """Base and scaling; older files have rope_theta and rope_scaling, newer ones one dict rope_parameters."""
    parameters = {**_object(raw, "rope_scaling"), **_object(raw, "rope_parameters")}
    theta = _number(parameters, "rope_theta", _number(raw, "rope_theta", _DEFAULT_ROPE_THETA))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ModelConfigError(f"rope_type={kind!r} is not supported; supported: default, llama3")
    context = "original_max_position_embeddings"
    parameters.setdefault(context, raw.get(context))
    for key in ("factor", "low_freq_factor", "high_freq_factor", context):
        if parameters.get(key) is None:
            raise ModelConfigError(f"rope_type='llama3' needs {key}")
    return theta, Llama3RopeScaling(
        factor=_number(parameters, "factor", 1.0),
        low_freq_factor=_number(parameters, "low_freq_factor", 1.0),
        high_freq_factor=_number(parameters, "high_freq_factor", 1.0),
        original_max_position_embeddings=_positive(parameters, context),
    )
