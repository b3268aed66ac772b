"""What the start of a PPO run waits for, and in which order."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from core.experiments import ppo
from core.monitoring.screen import Screen


def calls_of_a_start(monkeypatch: pytest.MonkeyPatch, *, checkpoint: Path | None, colocated: bool) -> list[str]:
    """Return the names of what a start calls, in its order."""
    calls: list[str] = []

    def noted(name: str) -> Any:
        return lambda *_, **__: calls.append(name)

    weights: Any = SimpleNamespace(offload_generators=noted("offload generators"), connect=noted("connect"))
    generators: Any = SimpleNamespace(wait_started=noted("wait for generators"))
    monkeypatch.setattr(ppo, "build_ppo_engines", noted("build engines"))
    trained = SimpleNamespace(load=noted("load checkpoint"), prepare_saves=noted("prepare saves"))
    trainer: Any = SimpleNamespace(trained=trained)
    config: Any = SimpleNamespace(recovers=True, num_minibatches=1)
    start = SimpleNamespace(checkpoint=checkpoint, state=SimpleNamespace(step=2))
    context: Any = SimpleNamespace(start=start, screen=Screen(Console(), compact=False))
    schedule: Any = SimpleNamespace(total_steps=3)
    ppo.load_beside(generators, weights, config, trainer, context, schedule, takes_turns=colocated)
    return calls


def test_a_checkpoint_is_loaded_while_generators_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading and the start of a server take half a minute each with a large model."""
    assert calls_of_a_start(monkeypatch, checkpoint=Path("globalstep2"), colocated=False) == [
        "build engines", "load checkpoint", "prepare saves", "wait for generators", "connect",
    ]  # fmt: skip
    assert calls_of_a_start(monkeypatch, checkpoint=None, colocated=False) == [
        "build engines", "prepare saves", "wait for generators", "connect",
    ]  # fmt: skip


def test_colocated_servers_measure_free_memory_before_a_model_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of_a_start(monkeypatch, checkpoint=Path("globalstep2"), colocated=True)
    assert calls[:3] == ["wait for generators", "offload generators", "build engines"]
