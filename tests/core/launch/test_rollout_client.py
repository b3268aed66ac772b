"""Which calls of the rollout actor a call waits for."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from core.config.runtime import DeadlineConfig
from core.launch.remote import Remote
from core.launch.rollout_client import RolloutClient


class Handle:
    """Ray's handle of the actor: a call's reference is its method, or with several results the method and a number."""

    def __init__(self, method: str = "", num_returns: int = 1) -> None:
        self._method, self._num_returns = method, num_returns

    def __getattr__(self, method: str) -> Handle:
        return Handle(method)

    def options(self, *, num_returns: int) -> Handle:
        return Handle(self._method, num_returns)

    def remote(self, *args: object) -> Any:
        several = self._num_returns > 1
        return [f"{self._method} {i}" for i in range(self._num_returns)] if several else self._method


class Waiter:
    def __init__(self) -> None:
        self.waits: list[tuple[list[str], list[str]]] = []
        """Calls that were waited for, and calls beside them."""

    def gather(self, calls: Sequence[str], *, beside: Sequence[str] | None = None, **options: Any) -> list[Any]:
        self.waits.append((list(calls), list(beside or ())))
        return [("facts", {"figure": 1.0}, None)] * len(calls)


@pytest.fixture
def client() -> RolloutClient:
    made = RolloutClient.__new__(RolloutClient)
    deadlines = DeadlineConfig(call_seconds=1.0, batch_seconds=1.0)
    cluster = SimpleNamespace(waiter=Waiter(), deadlines=deadlines)
    vars(made).update(_actor=Remote(Handle()), _announced=[], _cluster=cluster)
    return made


def test_a_batch_waits_for_its_own_call_and_any_other_call_for_all_that_were_announced(client: RolloutClient) -> None:
    client.take("request", None)  # type: ignore[arg-type]
    client.set_version(3)
    taken = client.wait_taken(meanwhile=lambda: None)
    assert (taken.batch, taken.facts, taken.figures, taken.scored) == ("take 0", "facts", {"figure": 1.0}, None)
    client.write_samples()
    client.state_dict()
    client.samples()
    assert client._cluster.waiter.waits == [  # type: ignore[attr-defined]
        (["take 2"], ["set_version"]), (["set_version", "write_samples", "state_dict"], []), (["samples"], []),
    ]  # fmt: skip


def test_an_evaluation_waits_for_what_was_announced(client: RolloutClient) -> None:
    client.write_samples()
    client.evaluate(1, meanwhile=lambda: None)
    assert client._cluster.waiter.waits == [(["write_samples", "evaluate"], [])]  # type: ignore[attr-defined]
