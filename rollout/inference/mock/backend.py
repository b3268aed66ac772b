"""The mock generator as a backend: random tokens, no weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rollout.inference.backend import ALL_INTERRUPTS, BackendSettings, Capabilities, FlagValue, Replica

if TYPE_CHECKING:
    from model_specs.hf_config import ModelConfig


class MockBackend:
    """See rollout.inference.backend.Backend."""

    label = "mock generator"
    capabilities = Capabilities(
        devices=("cpu",), transports=("local",), staged_transports=("local",), staged_interrupts=ALL_INTERRUPTS,
        holds_weights=False,
    )  # fmt: skip
    memory_flag = None
    shared_memory_names = ()

    def refused_flags(self, flags: Mapping[str, FlagValue]) -> Iterator[tuple[str, str]]:
        """Accept all flags: there are none, and unknown ones are ignored."""
        return iter(())

    def model_problems(self, model: ModelConfig, path: str) -> Iterator[tuple[str, str]]:
        """Accept every model: each has a vocabulary."""
        return iter(())

    def host_problems(self, python: str | None, flags: Mapping[str, FlagValue]) -> Iterator[tuple[str, str]]:
        """Accept every host: it needs nothing that this package does not."""
        return iter(())

    async def start(self, settings: BackendSettings) -> Replica:
        from rollout.inference.mock.generator import MockGenerator

        return MockGenerator(settings.model_path, seconds_per_token=settings.config.mock_seconds_per_token)
