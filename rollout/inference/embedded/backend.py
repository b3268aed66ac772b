"""The embedded generator as a backend: plain torch on the CPU, in the process that starts it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from model_specs.untrusted import read_json_object
from rollout.inference.backend import BackendSettings, Capabilities, FlagValue, Replica

if TYPE_CHECKING:
    from model_specs.hf_config import ModelConfig


class EmbeddedBackend:
    """See rollout.inference.backend.Backend."""

    label = "embedded generator"
    capabilities = Capabilities(devices=("cpu",), transports=("local",))
    memory_flag = None
    shared_memory_names = ()

    def refused_flags(self, flags: Mapping[str, FlagValue]) -> Iterator[tuple[str, str]]:
        """Accept all flags: there are none, and unknown ones are ignored."""
        return iter(())

    def model_problems(self, model: ModelConfig, path: str) -> Iterator[tuple[str, str]]:
        if model.moe or model.mla:
            message = f"the embedded generator samples dense models, and {path} is of type {model.model_type!r}"
            yield "allocation_mode", f"{message}; use sglang"

    def host_problems(self, python: str | None, flags: Mapping[str, FlagValue]) -> Iterator[tuple[str, str]]:
        """Accept every host: it needs nothing that this package does not."""
        return iter(())

    async def start(self, settings: BackendSettings) -> Replica:
        """Start a generator; without `load_weights` it starts paused. Raises ValueError for a model that cannot be
        loaded."""
        from rollout.inference.embedded.generator import EmbeddedGenerator

        folder = Path(settings.model_path)
        model = folder if settings.load_weights else read_json_object(folder / "config.json")
        return EmbeddedGenerator(
            model, max_running=settings.config.max_running, interrupt=settings.interrupt, dtype=settings.dtype
        )
