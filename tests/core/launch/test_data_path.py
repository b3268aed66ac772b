"""Tokens go from the rollout process to the ranks; the driver gets numbers and references.

The loop, its clients and both kinds of actors are the real ones. An object store in this process stands for Ray.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from allocation import CPU
from core.algorithms.policy_gradient import PolicyGradient
from core.config.algorithm import AlgorithmSettings
from core.config.runtime import DeadlineConfig
from core.data.rollout_batch import RolloutBatch, pack_trajectories
from core.launch import remote as object_store
from core.launch import rollout_client, trainer_group
from core.launch.remote import Remote
from core.launch.rollout_client import BatchActor, RolloutClient
from core.launch.trainer_group import TrainerGroup
from core.launch.trainer_rank import TrainerRank
from core.monitoring.monitor import Monitor, StepTimer
from core.monitoring.screen import Screen
from core.train.recover import MemoryLimits, RunState
from core.trainer import EngineRef, PPOTrainer
from core.weight_sync.push import PushReport
from mcore_adapter.data.planner import BatchShard, Planner
from mcore_adapter.device import get_device
from rollout.experience import Schedule
from rollout.types import PROMPT_VERSION, Trajectory

RANKS, STEPS = 2, 2


class Ref:
    """A reference to an object; its size does not depend on the object."""

    def __init__(self, store: Store, value: Any) -> None:
        self.store, self.value = store, value

    def __reduce__(self) -> tuple[Any, ...]:
        return (str, ("a reference",))

    def __await__(self) -> Iterator[Any]:
        yield from ()
        return self.value


class Store:
    """In place of Ray: objects, and calls that run at once."""

    def __init__(self) -> None:
        self.driver_bytes = self.num_objects = 0
        self.fetched: list[Counter[Ref]] = []
        """Of each rank, since its batch was opened."""
        self.calls: Counter[str] = Counter()
        """Of actors, and of the service in the rollout actor."""

    def put(self, value: Any) -> Ref:
        self.num_objects += 1
        return Ref(self, value)

    def get_in_driver(self, refs: Sequence[Ref]) -> list[Any]:
        self.driver_bytes += sum(len(pickle.dumps(ref.value)) for ref in refs)
        return [ref.value for ref in refs]

    def gather(self, refs: Sequence[Ref], **_: Any) -> list[Any]:
        return self.get_in_driver(refs)

    def actor(self, instance: Any) -> Any:
        return Actor(self, instance)


class Actor:
    def __init__(self, store: Store, instance: Any) -> None:
        self._store, self._instance = store, instance

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._store.calls[name] += 1
            method = getattr(self._instance, name)
            result = method(*(a.value if isinstance(a, Ref) else a for a in args), **kwargs)
            return asyncio.run(result) if inspect.iscoroutine(result) else result

        def options(*, num_returns: int) -> SimpleNamespace:
            def remote(*args: Any) -> list[Ref]:
                results = [Ref(self._store, result) for result in call(*args)]
                assert len(results) == num_returns
                return results

            return SimpleNamespace(remote=remote)

        return SimpleNamespace(remote=lambda *args, **kw: Ref(self._store, call(*args, **kw)), options=options)


class Rank(TrainerRank):
    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._parallel = SimpleNamespace(dp_rank=rank)  # type: ignore[assignment]
        self._device = get_device(CPU)
        self._engines = {"actor": Engine(rank)}  # type: ignore[dict-item]

    def open_batch(self, batch: Any, group: str) -> None:
        self._store.fetched.append(Counter())
        self._counter = self._store.fetched[-1]
        super().open_batch(batch, group)

    def _fetch(self, refs: list[Any]) -> list[Any]:
        self._counter.update(ref for ref in refs if isinstance(ref, Ref))
        return [ref.value if isinstance(ref, Ref) else ref for ref in refs]


class Engine:
    """Reads its microbatches and computes nothing."""

    def __init__(self, dp_rank: int) -> None:
        self._planner, self._dp_rank = Planner(dp=RANKS), dp_rank

    def train_step(self, shard: BatchShard, loss_fn: Any, *, max_tokens_per_mb: int, **_: object) -> dict[str, float]:
        for sequences in self._planner.plan(shard.shape, max_tokens_per_mb)[self._dp_rank]:
            shard.select(sequences)
        return {"loss": 0.0}

    def logprobs(self, shard: BatchShard, *, max_tokens_per_mb: int, **_: object) -> Any:
        plan = self._planner.plan(shard.shape, max_tokens_per_mb, shard.owners)[self._dp_rank]
        lens = [shard.select(sequences).num_tokens for sequences in plan]
        return SimpleNamespace(sequences=[i for part in plan for i in part], values=torch.zeros(sum(lens)))


class Rollout(BatchActor):
    """Two prompts a step with four answers of half to all of `tokens`."""

    def __init__(self, store: Store, tokens: int) -> None:
        self._tokens, self._rng, self._batch = tokens, np.random.default_rng(0), None
        self._put, self._fetch, self._store = rollout_client.put, object_store.fetch, store

    async def lease(self, version: int) -> tuple[RolloutBatch, dict[str, float]]:
        return pack_trajectories([[self._trajectory(version) for _ in range(4)] for _ in "ab"], ["a", "b"]), {}

    def _trajectory(self, version: int) -> Trajectory:
        total = int(self._rng.integers(self._tokens // 2, self._tokens + 1))
        mask = np.arange(total) >= 10
        return Trajectory(
            query_id="", token_ids=self._rng.integers(0, 32_000, total, np.int32), loss_mask=mask,
            rollout_logprobs=-self._rng.random(total, np.float32), versions=np.where(mask, version, PROMPT_VERSION),
            reward=float(self._rng.integers(2)), finish_reason="stop",
        )  # fmt: skip

    async def write_samples(self) -> None:
        self._store.calls["service.write_samples"] += 1

    async def set_version(self, version: int) -> None: ...


class Push:
    """No weights travel."""

    def sync_rejoined(self) -> None: ...

    def offload_generators(self) -> None: ...

    def push(self, version: int) -> PushReport:
        return PushReport(seconds=0.0, longest_pause_seconds=0.0, gather_seconds=0.0, send_seconds=0.0, num_bytes=0)


class Hooks:
    def whole_step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def after_step(self, step: int, timer: StepTimer) -> None: ...

    def after_report(self, step: int, timer: StepTimer) -> None: ...


def run_steps(
    monkeypatch: pytest.MonkeyPatch, *, tokens: int, decoupled: bool, small_bytes: int = object_store.SMALL_BYTES
) -> Store:
    """Two steps of 2 prompts with 4 answers each, in 2 minibatches."""
    store = Store()
    fetch_there = SimpleNamespace(put=store.put, get=lambda refs: [ref.value for ref in refs], ObjectRef=Ref)
    monkeypatch.setattr(object_store, "ray", fetch_there)
    monkeypatch.setattr(object_store, "SMALL_BYTES", small_bytes)
    monkeypatch.setattr(trainer_group, "ray", SimpleNamespace(put=store.put))
    cluster = SimpleNamespace(waiter=store, deadlines=DeadlineConfig(call_seconds=1.0, batch_seconds=1.0))
    rollout, group = RolloutClient.__new__(RolloutClient), TrainerGroup.__new__(TrainerGroup)
    service = Rollout(store, tokens)
    vars(rollout).update(_cluster=cluster, _actor=Remote(store.actor(service)), _announced=[])
    ranks = [Remote(store.actor(Rank(store, i))) for i in range(RANKS)]
    vars(group).update(
        name="trainer", _cluster=cluster, _ranks=ranks, _names=["r0", "r1"], _announced=[],
        _planners={"actor": Planner(dp=RANKS)},
    )  # fmt: skip
    algorithm = AlgorithmSettings(
        ppo_n_minibatches=2, kl_in="loss", advantage="group", adv_norm=True, disable_value=True,
        correction="decoupled" if decoupled else "bypass",
    )  # fmt: skip
    engine = EngineRef(
        group=group, name="actor", train_role="actor_train", inference_role="actor_inf",
        train_tokens_per_mb=tokens, inference_tokens_per_mb=tokens,
    )  # fmt: skip
    schedule = Schedule(num_prompts=STEPS, batch_size=1, total_epochs=1)
    with Monitor(
        screen=Screen(Console(file=io.StringIO()), compact=False),
        sinks=[],
        consumed=None,
        schedule=schedule,
        done_steps=0,
        elapsed=0.0,
    ) as monitor:
        trainer = PPOTrainer(
            actor=engine, critic=None, reference=None, rollout=rollout, weights=Push(), memory=MemoryLimits(),
            algorithm=PolicyGradient(algorithm), num_minibatches=2, temperature=1.0,
            schedule=schedule, monitor=monitor,
            timer=StepTimer(lambda phase: None), mean_batch_tokens=0.0,
        )  # fmt: skip
        start = RunState(step=0, version=0, elapsed_seconds=0.0, extra={})
        trainer.run(start, Hooks())  # type: ignore[arg-type]
    return store


@pytest.mark.parametrize("decoupled", [False, True], ids=["no passes", "old log-probabilities"])
def test_what_the_driver_receives_does_not_grow_with_the_tokens(monkeypatch, decoupled: bool) -> None:
    few, many = 20_000, 80_000
    short, long = (run_steps(monkeypatch, tokens=n, decoupled=decoupled).driver_bytes for n in (few, many))
    assert 0 < short == long


@pytest.mark.parametrize("decoupled", [False, True], ids=["no passes", "old log-probabilities"])
def test_small_batches_need_no_objects_and_large_ones_few(monkeypatch: pytest.MonkeyPatch, decoupled: bool) -> None:
    small, large = (run_steps(monkeypatch, tokens=n, decoupled=decoupled).num_objects for n in (300, 20_000))
    assert small == 0
    pieces = 2 * RANKS  # tokens and fields
    assert large == STEPS * (pieces + RANKS * decoupled)


@pytest.mark.parametrize("decoupled", [False, True], ids=["no passes", "old log-probabilities"])
def test_a_rank_fetches_nothing_twice_in_a_step(monkeypatch: pytest.MonkeyPatch, decoupled: bool) -> None:
    fetched = run_steps(monkeypatch, tokens=300, decoupled=decoupled, small_bytes=0).fetched
    assert len(fetched) == RANKS * STEPS
    assert all(counts and set(counts.values()) == {1} for counts in fetched)
    if not decoupled:
        assert all(len(counts) == 2 for counts in fetched), "tokens once, fields once"


def test_advantages_that_need_no_pass_cost_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples of every batch are written, by the same call or by one of their own."""
    alone, passes = (run_steps(monkeypatch, tokens=300, decoupled=decoupled).calls for decoupled in (False, True))
    assert (alone["score"], alone["write_samples"], alone["service.write_samples"]) == (0, STEPS, STEPS)
    assert (passes["score"], passes["write_samples"], passes["service.write_samples"]) == (STEPS, 0, STEPS)
