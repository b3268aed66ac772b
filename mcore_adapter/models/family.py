"""How Megatron builds the models of one family; families.FAMILIES lists them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_adapter.models.parts import Part
from model_specs.config import ModelConfig


def _nothing(config: ModelConfig) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True)
class MegatronFamily:
    """Layers and settings. What the checkpoint is stands in model_specs.families, under the same name."""

    layer: Callable[[ModelConfig, int], Part]
    """Return layer number i (from 0, over the whole model)."""
    overrides: Callable[[ModelConfig], Mapping[str, Any]] = _nothing
    """Fields of Megatron's TransformerConfig that differ from a dense decoder's and from the device's."""
