"""A generator inside this process, in plain torch: what a run samples with where there is no GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout.inference.embedded.config import InferenceConfig
    from rollout.inference.embedded.generator import EmbeddedGenerator, GeneratorError

__all__ = ["EmbeddedGenerator", "GeneratorError", "InferenceConfig"]


def __getattr__(name: str) -> Any:
    """Import with the first use: the registry of backends reads this package, and must not load torch."""
    if name == "InferenceConfig":
        from rollout.inference.embedded.config import InferenceConfig

        return InferenceConfig
    if name in __all__:
        from rollout.inference.embedded import generator

        return getattr(generator, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
