"""A weight push over a fleet that changes: real senders into test doubles, actors that live or die as a test asks."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from core.errors import LaunchError, PushFailure
from core.weight_sync.push import PushError, SenderSettings, SendReport, WeightPush
from helpers.fake_cluster import ALLOCATION, Actor, Cluster, Rollout, clock, make_pool
from helpers.push_doubles import UPDATE_OF, address, buckets, holds, sender_of
from helpers.sglang_double import model
from helpers.sglang_double.server import SGLangDouble

__all__ = ["clock"]  # a fixture


class Trainer:
    """One rank with its sender; what it raises ends a phase, as in the ranks' actors."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._kind, self._folder = kind, folder
        self.sender: Any = None
        self.num_connects = self.num_sends = 0
        self.verified: list[bool] = []
        self.version = 0

    def push_close(self) -> None:
        self.sender.close()

    def push_connect(self, plan: SenderSettings, servers: list[Any]) -> None:
        self.num_connects += 1
        self.sender = sender_of(self._kind, self._folder, timeout_seconds=120.0)
        self.sender.connect(servers)

    def push_prepare(self, engine: str, bucket_bytes: int, *, verify: bool, timeout_seconds: float) -> None:
        self.verified.append(verify)
        with as_the_driver_sees():
            self.sender.prepare(buckets(self.version), verify=verify)

    def push_send(self, timeout_seconds: float) -> SendReport:
        self.num_sends += 1
        assert self.num_sends < 10, "the push is repeated for ever"
        with as_the_driver_sees():
            return self.sender.send()

    def offload(self, keep: str) -> None: ...

    def reload(self) -> None: ...


@contextmanager
def as_the_driver_sees() -> Iterator[None]:
    try:
        yield
    except PushError as e:
        raise PushFailure(str(e), servers=e.servers) from e


class ServerActor(Actor):
    """The actor of one generator, whose server is a double. It pauses and resumes it when it is asked."""

    def __init__(self, double: SGLangDouble, index: int) -> None:
        self.server = address(double, index, trainer_ranks=())
        self._calls = {
            "pause": ("/pause_generation", {"mode": "in_place"}),
            "resume": ("/continue_generation", {"rid": "1"}),
        }
        super().__init__(endpoint=self.server, pause=None, resume=0.25, release_memory=None, resume_memory=None)

    def __getattr__(self, method: str) -> Any:
        remote = super().__getattr__(method).remote

        def call(*args: Any) -> Any:
            if method in self._calls and not isinstance(self.answers[method], Exception):
                self.server.post(self._calls[method], timeout_seconds=30)
            return remote(*args)

        return SimpleNamespace(remote=call)


class Fleet:
    """Two generators, a third server for one that comes back, and the push around them."""

    def __init__(self, kind: str, folder: Path, doubles: list[SGLangDouble]) -> None:
        self.doubles = doubles
        self.actors = [ServerActor(double, min(i, 1)) for i, double in enumerate(doubles)]
        self.pool = make_pool(Cluster(folder, list(self.actors)), 2)
        self.rollout, self.trainer = Rollout(self.pool), Trainer(kind, folder)
        plan = SenderSettings(
            type=kind,  # type: ignore[arg-type]
            model_path=str(folder), dtype="float32", bucket_bytes=1, timeout_seconds=120.0, folder=folder,
        )  # fmt: skip
        self._push = WeightPush(
            self.trainer, self.pool, self.rollout, plan=plan, slots=ALLOCATION.trainer, shares_gpus=False,  # type: ignore[arg-type]
            verify="always", patience_seconds=60.0,
        )  # fmt: skip
        self._push.connect()

    def push(self, version: int) -> None:
        self.trainer.version = version
        self._push.push(version)


@pytest.fixture(params=["nccl", "disk"])
def fleet(request: pytest.FixtureRequest, tmp_path: Path, clock: SimpleNamespace) -> Iterator[Fleet]:
    with ExitStack() as stack:
        doubles = [stack.enter_context(SGLangDouble()) for _ in range(3)]
        fleet = Fleet(request.param, model.write(tmp_path / "model"), doubles)
        yield fleet
        fleet.trainer.sender.close()


def update_path(fleet: Fleet) -> str:
    return UPDATE_OF[fleet.trainer._kind]


def test_the_senders_stay_connected_while_the_fleet_stays_the_same(fleet: Fleet, caplog) -> None:
    caplog.set_level(logging.DEBUG, logger="core")
    for version in (1, 2, 3):
        fleet.push(version)
        assert [holds(double, version) for double in fleet.doubles] == [True, True, False]
        assert f"Pushed version {version}: PushReport(seconds=" in caplog.text
    assert fleet.trainer.num_connects == 1 and fleet.trainer.num_sends == 3


def test_senders_join_the_server_that_came_back_and_the_next_push_reaches_it(fleet: Fleet) -> None:
    fleet.push(1)
    fleet.pool.lose("generator-1", "killed")
    fleet.pool.look()  # its successor has started
    fleet.push(2)
    assert [holds(double, 2) for double in fleet.doubles] == [True, False, True]
    assert fleet.trainer.num_connects == 2 and fleet.rollout.replaced == ["generator-1"]
    fleet.push(3)
    assert [holds(double, 3) for double in fleet.doubles] == [True, False, True]
    assert fleet.trainer.num_connects == 2


def test_a_server_that_came_back_is_verified_as_at_the_start(fleet: Fleet) -> None:
    fleet._push._verify = "first"
    for version in (1, 2, 3):
        fleet.push(version)
    fleet.pool.lose("generator-1", "killed")
    fleet.pool.look()  # its successor has started
    for version in (4, 5, 6):
        fleet.push(version)
    assert fleet.trainer.verified == [True, True, False] * 2


def test_a_push_that_fails_as_a_server_dies_is_repeated_with_those_that_live(fleet: Fleet) -> None:
    fleet.push(1)
    fleet.doubles[1].faults.drop(update_path(fleet))
    fleet.actors[1].answers = dict.fromkeys(fleet.actors[1].answers, RayActorError(error_msg="killed"))
    fleet.actors[1].answers |= {"pause": None}  # it dies between the pause and the update
    fleet.push(2)
    assert holds(fleet.doubles[0], 2) and not holds(fleet.doubles[1], 2)
    assert fleet.trainer.num_connects == 2 and fleet.trainer.num_sends == 3
    assert not fleet.doubles[0].scheduler.paused


def refuse(fleet: Fleet, *servers: int, times: int) -> list[int]:
    """Let servers refuse updates; return how often each server has resumed so far."""
    for server in servers:
        fleet.doubles[server].faults.refuse(update_path(fleet), "no such parameter", times=times)
    return [len(double.bodies("/continue_generation")) for double in fleet.doubles]


def test_a_push_that_fails_once_while_every_generator_lives_is_repeated_with_all_of_them(fleet: Fleet) -> None:
    fleet.push(1)
    resumed = refuse(fleet, 1, times=1)
    fleet.push(2)
    assert [holds(double, 2) for double in fleet.doubles] == [True, True, False]
    assert fleet.trainer.num_sends == 3 and fleet.trainer.num_connects == 2
    now = [len(double.bodies("/continue_generation")) for double in fleet.doubles]
    assert now == [resumed[0] + 1, resumed[1] + 1, resumed[2]], "not on old and new weights mixed"
    fleet.push(3)
    assert fleet.trainer.num_connects == 2


def test_a_generator_that_fails_the_repetition_too_is_restarted_and_the_others_continue(fleet: Fleet) -> None:
    fleet.push(1)
    resumed = refuse(fleet, 1, times=100)
    fleet.push(2)
    assert holds(fleet.doubles[0], 2) and not fleet.doubles[0].scheduler.paused
    assert fleet.trainer.num_sends == 4 and fleet.trainer.num_connects == 3
    assert len(fleet.doubles[1].bodies("/continue_generation")) == resumed[1]
    assert "generator-1: generator-1: " + update_path(fleet) in fleet.pool.failures()
    fleet.pool.look()  # its successor has started
    fleet.push(3)
    assert [holds(double, 3) for double in fleet.doubles] == [True, False, True]


@pytest.mark.parametrize("repeats", [True, False])
def test_a_push_that_no_generator_takes_ends_and_nothing_resumes(fleet: Fleet, repeats: bool) -> None:
    fleet.push(1)
    fleet._push._shares_gpus = not repeats
    fleet._push.offload_generators()
    resumed = refuse(fleet, 0, 1, times=100)
    with pytest.raises(LaunchError, match=rf"generator-\d: {update_path(fleet)} failed .*: no such parameter"):
        fleet.push(2)
    if not repeats:
        assert fleet.trainer.num_sends == 2 and fleet.trainer.num_connects == 1
    assert fleet.trainer.num_sends <= 4
    assert all(double.scheduler.paused for double in fleet.doubles[:2])
    assert [len(double.bodies("/continue_generation")) for double in fleet.doubles] == resumed
