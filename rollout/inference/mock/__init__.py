"""The mock generator as a backend: random tokens, no weights; for tests and measurements."""

from __future__ import annotations

from rollout.inference.backend import ALL_INTERRUPTS, Backend, BackendSettings, Capabilities, Replica


class MockBackend(Backend):
    """Makes up tokens for any model: each has a vocabulary."""

    label = "mock generator"
    capabilities = Capabilities(
        devices=("cpu",), transports=("local",), staged_transports=("local",), staged_interrupts=ALL_INTERRUPTS,
        holds_weights=False,
    )  # fmt: skip

    async def start(self, settings: BackendSettings) -> Replica:
        from rollout.inference.mock.generator import MockGenerator

        return MockGenerator(settings.model_path, seconds_per_token=settings.config.mock_seconds_per_token)
