"""Shape and features of a model, typed, and the reading of what every family's config.json has in common.

Mixture of experts, latent attention and rope are what several families read of it. Invariant: a `ModelConfig` that
exists describes a model that Megatron can build here; everything else (sliding windows, biases that Megatron has no
place for, ...) raises ModelConfigError with the key and the value.
"""

from dataclasses import dataclass, field
from typing import Literal

from model_specs.untrusted import (
    ModelConfigError,
    RawConfig,
    boolean,
    json_object,
    num_layers,
    number,
    optional,
    positive,
    positive_number,
    require,
)


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Which layers have experts, and how a token chooses among them."""

    num_experts: int
    top_k: int
    intermediate_size: int
    """Of each expert."""
    shared_intermediate_size: int
    """Of the experts that every token passes through, together; 0: none."""
    sparse_layers: tuple[bool, ...]
    """For each layer, whether it has experts (or a dense MLP)."""
    score_function: Literal["softmax", "sigmoid"]
    normalize: bool
    """The chosen experts' scores are divided by their sum."""
    scaling: float
    num_groups: int
    top_k_groups: int
    """Experts are chosen out of this many of num_groups groups; equal: out of all."""
    group_score: Literal["max", "top2"]
    """What ranks the groups: their best expert, or the sum of their best two."""
    correction_bias: bool
    """A bias per expert, no parameter, is added to the scores for choosing (balance without an auxiliary loss)."""


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Multi-latent attention: keys and values (queries, where q_lora_rank is set) come from a compressed vector; a part
    of each head is rotated."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


def gathers_tokens(num_ranks: int, top_k: int) -> bool:
    """Return whether expert-parallel ranks gather each other's tokens, instead of the copies for their experts: those
    take more bytes where each token has more experts than there are ranks."""
    return 1 < num_ranks <= top_k


def parse_experts(raw: RawConfig) -> tuple[int, int]:
    """Return the number of experts of a layer and of those that a token passes through. Raises ModelConfigError."""
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    key = next((key for key in keys if raw.get(key) is not None), "num_experts")
    num_experts, top_k = positive(raw, key, most=4096), positive(raw, "num_experts_per_tok")
    if any(raw.get(other) not in (None, num_experts) for other in keys):
        raise ModelConfigError(f"{', '.join(f'{other}={raw.get(other)!r}' for other in keys)}: they must be equal")
    if top_k > num_experts:
        raise ModelConfigError(f"num_experts_per_tok={top_k} must not exceed {key}={num_experts}")
    return num_experts, top_k


def parse_groups(raw: RawConfig) -> tuple[int, int]:
    """Return the number of groups of experts and of those that a token's experts come from. Raises ModelConfigError."""
    num_experts, top_k = parse_experts(raw)
    num_groups, top_k_groups = positive(raw, "n_group"), positive(raw, "topk_group")
    if num_experts % num_groups or top_k_groups > num_groups or top_k > num_experts // num_groups * top_k_groups:
        raise ModelConfigError(
            f"n_group={num_groups}, topk_group={top_k_groups}: {num_experts} experts must divide into the groups, and "
            f"topk_group of them must hold num_experts_per_tok={top_k} experts"
        )
    return num_groups, top_k_groups


def parse_mla(raw: RawConfig) -> MLAConfig:
    """Return the latent attention of a DeepSeek model. Raises ModelConfigError."""
    # The norms of the compressed vectors take transformers' default there, whatever rms_norm_eps is.
    require(raw, {"rms_norm_eps": 1e-6, "rope_interleave": True})
    heads = positive(raw, "num_attention_heads")
    require(raw, {"num_key_value_heads": heads})
    require(raw, {"head_dim": raw.get("qk_rope_head_dim")})
    if positive(raw, "qk_rope_head_dim") % 2:
        raise ModelConfigError(f"qk_rope_head_dim={raw['qk_rope_head_dim']} is rotated in pairs; it must be even")
    return MLAConfig(
        q_lora_rank=optional(raw, "q_lora_rank", 1536),
        kv_lora_rank=positive(raw, "kv_lora_rank"),
        qk_nope_head_dim=positive(raw, "qk_nope_head_dim"),
        qk_rope_head_dim=positive(raw, "qk_rope_head_dim"),
        v_head_dim=positive(raw, "v_head_dim"),
    )


_DEFAULT_ROPE_THETA = 10_000.0
_CONTEXT = "original_max_position_embeddings"


@dataclass(frozen=True, kw_only=True)
class Llama3RopeScaling:
    """Rope frequencies of Llama 3.1 and later: long wavelengths are divided by `factor`, short ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class YarnRopeScaling:
    """Rope frequencies of DeepSeek: interpolated by `factor` below beta_slow rotations within the original context,
    kept above beta_fast. With m(x) = 0.1 x ln(factor) + 1, cosines are scaled by m(mscale) / m(mscale_all_dim), and
    scores by m(mscale_all_dim) squared."""

    factor: float
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    original_max_position_embeddings: int


RopeScaling = Llama3RopeScaling | YarnRopeScaling | None


def parse_rope(raw: RawConfig, supported: tuple[str, ...]) -> tuple[float, RopeScaling]:
    """Return base and scaling. Raises ModelConfigError."""
    rope = rope_parameters(raw)
    if rope["rope_theta"] is None:
        raise ModelConfigError("rope_theta=None must be a number above 0")
    theta = positive_number(rope, "rope_theta", _DEFAULT_ROPE_THETA)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in supported:
        raise ModelConfigError(f"rope_type={kind!r} is not supported; supported: {', '.join(supported)}")
    if kind == "default":
        return theta, None
    for key in ("factor",) if kind == "yarn" else ("factor", "low_freq_factor", "high_freq_factor"):
        if rope.get(key) is None:
            raise ModelConfigError(f"rope_type={kind!r} needs {key}")
    if kind == "yarn":
        return theta, _yarn(rope)
    return theta, Llama3RopeScaling(
        factor=positive_number(rope, "factor", 1.0),
        low_freq_factor=positive_number(rope, "low_freq_factor", 1.0),
        high_freq_factor=positive_number(rope, "high_freq_factor", 1.0),
        original_max_position_embeddings=positive(rope, _CONTEXT),
    )


def rope_parameters(raw: RawConfig) -> RawConfig:
    """Return everything that a config.json has about rope, where transformers looks for it: older files have
    rope_scaling, newer ones rope_parameters, of which the first wins as a whole; some keys may stand beside them."""
    source = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    rope = dict(json_object(raw, source))
    for key, value in rope.items():
        if isinstance(value, dict):
            raise ModelConfigError(f"{source}={{{key!r}: ...}}: only one rope for all layers is supported")
    rope.setdefault("rope_theta", raw.get("rope_theta", _DEFAULT_ROPE_THETA))
    if raw.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", raw["partial_rotary_factor"])
    rope.setdefault(_CONTEXT, raw.get("max_position_embeddings"))
    if raw.get(_CONTEXT) is not None:
        rope[_CONTEXT] = raw[_CONTEXT]
    return rope


def rotary_factor(raw: RawConfig, default: float, supported: tuple[float, ...]) -> float:
    """Return the fraction of each head's dimensions that are rotated. Raises ModelConfigError where it is not one of
    `supported`."""
    key = "partial_rotary_factor"
    factor = number(rope_parameters(raw), key, default)
    if factor not in supported:
        raise ModelConfigError(f"{key}={factor!r} is not supported; supported: {', '.join(map(str, supported))}")
    return factor


def _yarn(rope: RawConfig) -> YarnRopeScaling:
    if rope.get("attention_factor") is not None:
        raise ModelConfigError(
            f"attention_factor={rope['attention_factor']!r} of rope_type='yarn' is not supported; leave it out"
        )
    if rope.get("truncate", True) is not True:
        raise ModelConfigError(f"truncate={rope['truncate']!r} of rope_type='yarn' is not supported; leave it out")
    mscale, all_dim = number(rope, "mscale", 0.0), number(rope, "mscale_all_dim", 0.0)
    if not (mscale and all_dim) and (mscale not in (0.0, 1.0) or all_dim):
        raise ModelConfigError(
            f"mscale={mscale:g} and mscale_all_dim={all_dim:g}: transformers and inference servers scale cosines "
            "differently where one of both is absent; write both, or neither"
        )
    return YarnRopeScaling(
        factor=positive_number(rope, "factor", 1.0),
        beta_fast=number(rope, "beta_fast", 0.0) or 32.0,
        beta_slow=number(rope, "beta_slow", 0.0) or 1.0,
        mscale=mscale or 1.0,
        mscale_all_dim=all_dim,
        original_max_position_embeddings=positive(rope, _CONTEXT),
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
