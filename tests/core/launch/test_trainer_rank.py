"""What a rank of the trainer does with its engines when it leaves the device."""

from types import SimpleNamespace
from typing import Any

from core.launch.trainer_rank import TrainerRank


class Engine:
    """Records what it is called for."""

    def __init__(self, name: str, calls: list[tuple[Any, ...]]) -> None:
        self._name, self._calls = name, calls

    def offload(self, *, weights: bool) -> None:
        self._calls.append((self._name, "offload", weights))


def test_only_the_weights_that_the_next_push_reads_stay_on_the_device() -> None:
    calls: list[tuple[Any, ...]] = []
    rank: Any = object.__new__(TrainerRank)
    rank._engines = {name: Engine(name, calls) for name in ("actor", "critic", "ref")}
    rank._device = SimpleNamespace(empty_cache=lambda: calls.append(("device", "empty_cache")))
    rank.offload("actor")
    assert calls == [
        ("actor", "offload", False), ("critic", "offload", True), ("ref", "offload", True), ("device", "empty_cache")
    ]  # fmt: skip
