"""The embedded generator as a backend: plain torch on the CPU, in the process that starts it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from model_specs.untrusted import read_json_object
from rollout.inference.backend import Backend, BackendSettings, Capabilities, Replica

if TYPE_CHECKING:
    from model_specs.config import ModelConfig


class EmbeddedBackend(Backend):
    """Samples dense models on the CPU."""

    label = "embedded generator"
    capabilities = Capabilities(devices=("cpu",), transports=("local",))

    def model_problems(self, model: ModelConfig, path: str) -> Iterator[tuple[str, str]]:
        if model.moe or model.mla:
            message = f"the embedded generator samples dense models, and {path} is of type {model.model_type!r}"
            yield "allocation_mode", f"{message}; use sglang"

    async def start(self, settings: BackendSettings) -> Replica:
        """Start a generator; without `load_weights` it starts paused. Raises ValueError for a model that cannot be
        loaded."""
        from rollout.inference.embedded.generator import EmbeddedGenerator

        folder = Path(settings.model_path)
        model = folder if settings.load_weights else read_json_object(folder / "config.json")
        return EmbeddedGenerator(
            model, max_running=settings.max_running, interrupt=settings.interrupt, dtype=settings.dtype
        )
