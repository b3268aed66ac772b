"""Shape and features of a model, typed, and the reading of what every family's config.json has in common.

Invariant: a `ModelConfig` that exists describes a model that Megatron can build here; everything else (sliding windows,
biases that Megatron has no place for, ...) raises ModelConfigError with the key and the value.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from model_specs.moe import MLAConfig, MoEConfig
from model_specs.rope import RopeScaling, parse_rope, rotary_factor
from model_specs.values import (
    ModelConfigError,
    RawConfig,
    boolean,
    num_layers,
    number,
    positive,
    positive_number,
    require,
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of one of `families.FAMILIES`."""

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
    rotary_dim: int
    """Leading dimensions of each head that are rotated."""
    rope_interleaved: bool
    """Dimension 2i is rotated with 2i + 1; otherwise dimension i with i + rotary_dim / 2."""
    tied: bool
    """The output layer is the embedding."""
    qkv_bias: bool
    qk_norm: bool
    post_norms: bool
    """The outputs of attention and MLP are normed too, before they are added to the residual."""
    fused_gate_up: bool
    """The checkpoint holds the gate and up projections of an MLP as one tensor."""
    moe: MoEConfig | None = None
    """None: every layer has a dense MLP."""
    mla: MLAConfig | None = None
    """Latent attention; num_kv_heads and head_dim do not describe it."""
    raw: RawConfig = field(compare=False, repr=False)
    """The file's own content, for writing it back."""

    @property
    def is_critic(self) -> bool:
        """The weights beside this file end in a value head."""
        names = self.raw.get("architectures")
        return isinstance(names, list) and any(str(name).endswith("ForSequenceClassification") for name in names)

    @property
    def dtype(self) -> str | None:
        """Name of the dtype of the weights beside this file, if given: "float32", "bfloat16"."""
        name = self.raw.get("dtype") or self.raw.get("torch_dtype")
        return str(name) if name in ("float32", "bfloat16", "float16") else None


def parse_decoder(
    raw: RawConfig,
    *,
    attention_bias: bool | None = False,
    default_head_dim: int | None = None,
    default_num_kv_heads: int | None = None,
    default_rms_norm_eps: float = 1e-6,
    default_rotary_factor: float = 1.0,
    rotary_factors: tuple[float, ...] = (1.0,),
    rope_types: tuple[str, ...] = ("default", "llama3"),
    rope_interleaved: bool = False,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    post_norms: bool = False,
    fused_gate_up: bool = False,
    moe: MoEConfig | None = None,
    mla: MLAConfig | None = None,
) -> ModelConfig:
    """Return the ModelConfig of a decoded config.json whose family has these features.

    attention_bias: the only value of that key that the family supports; None: the family does not read the key.
    default_*: what an absent key means in transformers; default_head_dim=None: hidden_size / num_attention_heads,
    default_num_kv_heads=None: num_attention_heads. rotary_factors: the supported values of partial_rotary_factor.
    Raises ModelConfigError.
    """
    require(raw, {"hidden_act": "silu", "mlp_bias": False})
    if raw.get("quantization_config") is not None:
        raise ModelConfigError(
            "quantization_config: quantized weights cannot be trained; take the model in bfloat16, whose config.json "
            "has no such key"
        )
    if attention_bias is not None:
        require(raw, {"attention_bias": attention_bias})
    _require_full_attention(raw)
    hidden_size, num_heads = positive(raw, "hidden_size"), positive(raw, "num_attention_heads")
    head_dim = positive(raw, "head_dim", default_head_dim or hidden_size // num_heads)
    absent = "num_key_value_heads" not in raw
    num_kv_heads = positive(raw, "num_key_value_heads", absent and default_num_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise ModelConfigError(f"num_key_value_heads={num_kv_heads} must divide num_attention_heads={num_heads}")
    rope_theta, rope_scaling = parse_rope(raw, rope_types)
    rotary_dim = int(head_dim * rotary_factor(raw, default_rotary_factor, rotary_factors))
    if mla is None and rotary_dim % 2:
        raise ModelConfigError(f"head_dim={head_dim}: {rotary_dim} dimensions are rotated in pairs; it must be even")
    return ModelConfig(
        model_type=str(raw["model_type"]),
        vocab_size=positive(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=positive(raw, "intermediate_size"),
        num_layers=num_layers(raw),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positive(raw, "max_position_embeddings"),
        rms_norm_eps=positive_number(raw, "rms_norm_eps", default_rms_norm_eps),
        initializer_range=number(raw, "initializer_range", 0.02),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        rotary_dim=rotary_dim,
        rope_interleaved=rope_interleaved,
        tied=boolean(raw, "tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        post_norms=post_norms,
        fused_gate_up=fused_gate_up,
        moe=moe,
        mla=mla,
        raw=dict(raw),
    )


def _require_full_attention(raw: RawConfig) -> None:
    require(raw, {"use_sliding_window": False})
    kinds = raw.get("layer_types")
    if kinds is not None and kinds != ["full_attention"] * num_layers(raw):
        raise ModelConfigError(
            f"layer_types={kinds!r} is not supported; only full_attention, once for each of num_hidden_layers"
        )
