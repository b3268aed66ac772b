"""Rope of a model, read from config.json: base and one of the supported scalings."""

from __future__ import annotations

from dataclasses import dataclass

from model_specs.values import ModelConfigError, RawConfig, json_object, number, positive, positive_number

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
