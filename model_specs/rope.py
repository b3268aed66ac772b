"""Rope of a model, read from config.json: base and one of the supported scalings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model_specs.values import ModelConfigError, json_object, number, positive, positive_number

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
    kept above beta_fast; cosines and scores are scaled by mscale and mscale_all_dim."""

    factor: float
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    original_max_position_embeddings: int


RopeScaling = Llama3RopeScaling | YarnRopeScaling | None


def parse_rope(raw: Mapping[str, Any], supported: tuple[str, ...]) -> tuple[float, RopeScaling]:
    """Return base and scaling; older files have rope_theta and rope_scaling, newer ones one dict rope_parameters."""
    parameters = {**json_object(raw, "rope_scaling"), **json_object(raw, "rope_parameters")}
    theta = positive_number(parameters, "rope_theta", number(raw, "rope_theta", _DEFAULT_ROPE_THETA))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in supported:
        raise ModelConfigError(f"rope_type={kind!r} is not supported; supported: {', '.join(supported)}")
    if kind == "default":
        return theta, None
    if parameters.get(_CONTEXT) is None:
        parameters[_CONTEXT] = raw.get(_CONTEXT, raw.get("max_position_embeddings") if kind == "yarn" else None)
    if kind == "yarn":
        return theta, _yarn(parameters)
    for key in ("factor", "low_freq_factor", "high_freq_factor", _CONTEXT):
        if parameters.get(key) is None:
            raise ModelConfigError(f"rope_type='llama3' needs {key}")
    return theta, Llama3RopeScaling(
        factor=number(parameters, "factor", 1.0),
        low_freq_factor=number(parameters, "low_freq_factor", 1.0),
        high_freq_factor=number(parameters, "high_freq_factor", 1.0),
        original_max_position_embeddings=positive(parameters, _CONTEXT),
    )


def rotary_factor(raw: Mapping[str, Any], default: float, supported: tuple[float, ...]) -> float:
    """Return the fraction of each head's dimensions that are rotated. Newer files have it in rope_parameters. Raises
    ModelConfigError where it is not one of `supported`."""
    key = "partial_rotary_factor"
    parameters = {key: raw.get(key), **json_object(raw, "rope_scaling"), **json_object(raw, "rope_parameters")}
    factor = number(parameters, key, default)
    if factor not in supported:
        raise ModelConfigError(f"{key}={factor!r} is not supported; supported: {', '.join(map(str, supported))}")
    return factor


def _yarn(parameters: Mapping[str, Any]) -> YarnRopeScaling:
    if parameters.get("factor") is None:
        raise ModelConfigError("rope_type='yarn' needs factor")
    for key in ("attention_factor", "truncate"):
        if parameters.get(key) not in (None, True):
            raise ModelConfigError(f"{key}={parameters[key]!r} of rope_type='yarn' is not supported; leave it out")
    all_dim = number(parameters, "mscale_all_dim", 0.0)
    mscale = number(parameters, "mscale", 0.0)
    return YarnRopeScaling(
        factor=number(parameters, "factor", 1.0),
        beta_fast=number(parameters, "beta_fast", 32.0),
        beta_slow=number(parameters, "beta_slow", 1.0),
        # Without both of them the cosines are scaled as with mscale=1 alone.
        mscale=mscale if mscale and all_dim else 1.0,
        mscale_all_dim=all_dim,
        original_max_position_embeddings=positive(parameters, _CONTEXT),
    )
