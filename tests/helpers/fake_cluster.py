"""A cluster whose actors answer, fail or hang as a test says, and a clock that stands still."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from allocation import parse
from core.errors import LaunchError
from core.launch import generators as launch_generators
from core.launch.generators import GeneratorPool
from core.train.recover import MemoryLimits
from core.weight_sync.push import SenderSettings, WeightPush
from rollout.inference.backend import BackendSettings, GeneratorConfig
from rollout.inference.sglang.client import SGLangEndpoint

PENDING = object()
ENDPOINT = SGLangEndpoint(name="generator", url="http://127.0.0.1:9", tp=1)
ALLOCATION = parse("mock.d2m1p1+d1m1p1", n_nodes=1, n_gpus_per_node=3, default_backend="mock")


class Ref:
    """A call on an actor; whoever asks gets what the actor says by then, which is nothing good once it is dead."""

    def __init__(self, actor: Actor, method: str) -> None:
        self._actor, self._method = actor, method

    @property
    def result(self) -> Any:
        return self._actor.answers[self._method]


class Actor:
    """`answers`: result of each method; an exception is raised by whoever gets it."""

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, Any] = {"start": None, "health": None, "receive": 0.25, "endpoint": ENDPOINT, **answers}

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args: Ref(self, method))

    def die(self) -> None:
        self.answers = dict.fromkeys(self.answers, RayActorError(error_msg="killed"))


class FakeRay:
    def remote(self, kind: type) -> type:
        return kind

    def wait(self, refs: list[Ref], **options: Any) -> tuple[list[Ref], list[Ref]]:
        return [r for r in refs if r.result is not PENDING], [r for r in refs if r.result is PENDING]

    def get(self, ref: Ref) -> Any:
        if isinstance(ref.result, Exception):
            raise ref.result
        return ref.result

    def kill(self, actor: Actor, **options: Any) -> None:
        actor.die()


class Cluster:
    """Hands out `actors` in order; does the chores before it gathers, as the real one does while it waits."""

    startup_seconds = 60.0
    host = "127.0.0.1"

    def __init__(self, log_folder: Path, actors: list[Actor]) -> None:
        self.log_folder, self.actors = log_folder, iter(actors)
        self.waiter = self
        self.before_gather: dict[str, Callable[[], None]] = {}
        self._chores: list[Callable[[], None]] = []

    def start_actor(self, *args: Any, **options: Any) -> Actor:
        return next(self.actors)

    def gather_started(self, refs: list[Ref], **options: Any) -> None: ...

    def every_second(self, chore: Callable[[], None]) -> None:
        self._chores.append(chore)

    def gather(self, refs: list[Ref], *, phase: str, **options: Any) -> list[Any]:
        self.before_gather.pop(phase, lambda: None)()
        for chore in self._chores:
            chore()
        failures = [r.result for r in refs if isinstance(r.result, Exception)]
        if failures:
            raise LaunchError(f"{phase}: {failures[0]}")
        return [r.result for r in refs]


_SHORTEST_WAIT = 0.05


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Seconds, which pass when somebody sleeps. Who looks for an answer of a real server every few milliseconds really
    waits, and no second passes."""
    now = SimpleNamespace(seconds=1000.0)

    def sleep(seconds: float) -> None:
        if seconds < _SHORTEST_WAIT:
            time.sleep(seconds)
        else:
            now.seconds += seconds

    fake = SimpleNamespace(monotonic=lambda: now.seconds, perf_counter=lambda: now.seconds, sleep=sleep)
    monkeypatch.setattr(launch_generators, "time", fake)
    monkeypatch.setattr("core.weight_sync.push.time", fake)
    monkeypatch.setattr(launch_generators, "ray", FakeRay())
    return now


def make_pool(cluster: Cluster, num_generators: int, *, restarts: bool = True) -> GeneratorPool:
    allocation = parse(
        f"mock.d{num_generators}m1p1+d1m1p1", n_nodes=1, n_gpus_per_node=num_generators + 1, default_backend="mock"
    )
    pool = GeneratorPool(
        cluster,  # type: ignore[arg-type]
        allocation.generator,
        BackendSettings(
            model_path="",
            dtype="float32",
            device="cpu",
            config=GeneratorConfig(max_running=8, health_timeout_seconds=20.0),
        ),
        threads=1,
        restarts=restarts,
        memory=MemoryLimits(),
    )
    pool.wait_started()
    return pool


class Trainer:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def export_weights(self, *args: Any) -> tuple[list[Any], int]:
        self._cluster.gather([], phase="export")
        return [], 0


class Rollout:
    """The rollout side: it checks the actors that it uses, and knows which came back."""

    def __init__(self, pool: GeneratorPool) -> None:
        self._actors: dict[str, Actor] = pool.actors
        self.replaced: list[str] = []
        self.lost: dict[str, str] = {}
        pool.judge = self  # type: ignore[assignment]

    def replace_generator(self, name: str, actor: Any) -> None:
        self.replaced.append(name)
        self._actors[name] = actor
        self.lost.pop(name, None)

    def wait_lost(self, known: Sequence[str]) -> Any:
        """A call that ends when a generator is lost that is not known."""

        class Report:
            @property
            def result(_) -> Any:  # noqa: N805
                return dict(self.lost) if self.lost.keys() - set(known) else PENDING

        return Report()

    def check_generators(self) -> dict[str, str]:
        for name, actor in self._actors.items():
            answer = actor.answers["health"]
            if isinstance(answer, Exception) or answer is PENDING:
                self.lost.setdefault(name, str(answer))
        return dict(self.lost)


def make_run(
    folder: Path, actors: list[Actor], num_generators: int, *, restarts: bool = True
) -> tuple[Cluster, GeneratorPool, Rollout, WeightPush]:
    """The actors that start in this order, and both sides around the first `num_generators` of them."""
    cluster = Cluster(folder, actors)
    pool = make_pool(cluster, num_generators, restarts=restarts)
    rollout = Rollout(pool)
    plan = SenderSettings(type="local", dtype="float32", bucket_bytes=1, timeout_seconds=60.0, folder=folder)
    push = WeightPush(
        Trainer(cluster), pool, rollout, plan=plan, slots=ALLOCATION.trainer, shares_gpus=False,  # type: ignore[arg-type]
        verify="never", patience_seconds=60.0,
    )  # fmt: skip
    return cluster, pool, rollout, push
