"""A train job and explore jobs in one group: real connections, folders, broadcasts and kills; the generators are
doubles that hold what their receiver gets."""

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from core.errors import LaunchError, PushFailure
from core.processes import meeting
from core.processes.meeting import LOOPBACK, MeetingPoint, knock, open_door
from core.weight_sync import jobs
from core.weight_sync.folder import FOLDER_ALONE, VersionFolder
from core.weight_sync.jobs import JobServers, TrainerLink
from core.weight_sync.publisher import Group, Publisher
from core.weight_sync.push import PushError, SenderSettings, SendReport, WeightPush
from helpers.forks.calls import Inbox, calling
from helpers.other_user import as_another_user, folder_for_all
from helpers.push_doubles import sender_of
from rollout.inference.receiver import BroadcastReceiver

LAST = 6
SECONDS = 60.0
"""Time limit of pushes, which no test waits for."""


def weights(version: int) -> dict[str, Tensor]:
    return {f"layer.{i}": torch.full((50,), 10.0 * version + i) for i in range(3)}


def buckets(version: int, before: Callable[[int], None]) -> Iterator[Mapping[str, Tensor]]:
    for number, (name, tensor) in enumerate(weights(version).items()):
        before(number)
        yield {name: tensor}


def save(version: int, into: Path) -> None:
    save_file(weights(version), into / "model.safetensors")


class Ranks:
    """The trainer's ranks: one, with a real sender."""

    def __init__(self, before: Callable[[int, int], None] = lambda version, bucket: None) -> None:
        """`before(version, bucket)`: is called before a bucket is gathered, of which one is ahead."""
        self.version, self._before = 0, before
        self._sender: Any = None

    def push_connect(self, plan: SenderSettings, servers: list[Any]) -> None:
        self._sender = sender_of("nccl", Path(), timeout_seconds=SECONDS, staged_bytes=0)
        self._sender.connect(servers)

    def push_prepare(self, engine: str, bucket_bytes: int, *, verify: bool, timeout_seconds: float) -> None:
        version = self.version
        self._sender.prepare(buckets(version, lambda bucket: self._before(version, bucket)), verify=verify)

    def push_send(self, timeout_seconds: float) -> SendReport:
        try:
            return self._sender.send()
        except PushError as error:
            raise PushFailure(str(error), servers=error.servers) from error

    def push_close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._sender = None


class TrainJob:
    def __init__(self, folder: Path, ranks: Ranks, *, interval: int = 1, patience_seconds: float = SECONDS) -> None:
        """`patience_seconds`: for answers of jobs."""
        versions = VersionFolder(folder)
        self.jobs, self.ranks = JobServers(versions, LOOPBACK, timeout_seconds=patience_seconds), ranks
        plan = SenderSettings(type="nccl", dtype="float32", bucket_bytes=1 << 20, timeout_seconds=patience_seconds)
        push = WeightPush(
            ranks, self.jobs, SimpleNamespace(), plan=plan, slots=None, shares_gpus=False, verify="never",  # type: ignore[arg-type]
            patience_seconds=0.0,
        )  # fmt: skip
        self.written: list[int] = []
        group = Group(jobs=self.jobs, push=push)
        self.publisher = Publisher(self._save, versions, interval=interval, last_step=LAST, group=group)

    def _save(self, into: Path) -> None:
        self.written.append(self.ranks.version)
        save(self.ranks.version, into)

    def publish(self, version: int) -> None:
        self.ranks.version = version
        self.publisher.push(version)

    def wait_for(self, num_jobs: int) -> None:
        """As the loop does while it waits for a batch, until so many jobs have what they need."""
        wait_until(lambda: self.num_reporting() == num_jobs and not self.publisher.sync_rejoined())

    def num_reporting(self) -> int:
        self.jobs.choose(LAST)
        return sum(job.reports for job in self.jobs._jobs)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.02)


class Servers:
    """The generators of an explore job: one double."""

    waiting = False

    def __init__(self, dies_at: int | None = None) -> None:
        """`dies_at`: the version in whose second bucket this process is killed."""
        self.version: int | None = None
        self.held: dict[str, Tensor] = {}
        self.receiver = BroadcastReceiver("generator-0", LOOPBACK, timeout_seconds=SECONDS)
        self._dies_at = dies_at
        receive = self.receiver._receive
        self.receiver._receive = lambda body: self._receive(receive, body)  # type: ignore[method-assign]
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        self.endpoint = asyncio.run_coroutine_threadsafe(self.receiver.start(), loop).result()

    def _receive(self, receive: Callable[[dict[str, Any]], None], body: dict[str, Any]) -> None:
        if self._dies_at is not None and (self.version or 0) + 1 == self._dies_at and "layer.1" in body["names"]:
            os.kill(os.getpid(), signal.SIGKILL)
        receive(body)

    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        self.held, self.version = dict(tensors), version

    def admit(self) -> int:
        return 1

    def failures(self) -> str:
        return ""

    def mark_dead_generators(self) -> bool:
        return False

    def pause(self, timeout_seconds: float) -> None:
        self.receiver.take()

    def resume(self, version: int, timeout_seconds: float) -> list[float]:
        self.load({name: t for bucket in self.receiver.take() for name, t in bucket.tensors().items()}, version)
        return [0.0]


class ExploreJob:
    def __init__(self, folder: Path, name: str, *, dies_at: int | None = None, joins=True, local=True) -> None:
        self.servers, self.versions = Servers(dies_at), VersionFolder(folder)
        push = SimpleNamespace(
            generators=self.servers, endpoints=lambda: [self.servers.endpoint], is_local=local,
            use_generators=lambda version: None,
        )  # fmt: skip
        self.link = TrainerLink(self.versions, name, push, joins=joins, timeout_seconds=SECONDS)  # type: ignore[arg-type]
        self.link.connect()
        self.subscription = self.versions.subscribe(name)

    def look(self) -> None:
        pushed = self.link.look(self.servers.version, wait_seconds=0.05)
        if pushed is None and (published := self.subscription.claim()) is not None:
            self.servers.load(load_file(Path(published.where) / "model.safetensors"), published.version)
            pushed = published.version
        if pushed is not None:
            self.subscription.hold(pushed)

    def holds(self, version: int) -> bool:
        expected = weights(version)
        return self.servers.version == version and all(torch.equal(self.servers.held[n], expected[n]) for n in expected)


def explore(folder: Path, name: str, dies_at: int | None, out: Any) -> None:
    torch.set_num_threads(1)
    job = ExploreJob(folder, name, dies_at=dies_at)
    known = None
    while known != LAST:
        job.look()
        if job.servers.version != known:
            known = job.servers.version
            out.put((name, known, job.holds(known)))


def train_until_killed(folder: Path, first: int, dies_at: int) -> None:
    """Publish from `first` on; this process is killed while the last bucket of `dies_at` is sent."""
    torch.set_num_threads(1)

    def before(version: int, bucket: int) -> None:
        if version == dies_at and bucket == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    job = TrainJob(folder, Ranks(before))
    for version in range(first, LAST):
        job.publish(version)
        job.wait_for(1)


def test_versions_reach_the_jobs_that_are_up_and_a_kill_in_a_broadcast_stops_neither_the_trainer_nor_the_others(
    tmp_path: Path,
) -> None:
    """The folder gets the first and the last version, that of a checkpoint, and none in between."""
    out = Inbox()
    train = TrainJob(tmp_path, Ranks())
    train.publish(0)
    with calling(explore, tmp_path, "a", None, out), calling(explore, tmp_path, "b", 2, out) as killed:
        train.wait_for(2)
        train.publish(1)
        train.publish(2)
        assert killed.wait(SECONDS) == -signal.SIGKILL and train.jobs.names == {"a"}
        train.publisher.before_checkpoint()
        train.publish(3)
        with calling(explore, tmp_path, "c", None, out):
            train.wait_for(2)
            for version in range(4, LAST + 1):
                train.publish(version)
            seen = [out.get(timeout=SECONDS)]
            while sum(version == LAST for _, version, _ in seen) < 2:
                seen.append(out.get(timeout=SECONDS))
    assert train.written == [0, 2, LAST]
    assert all(is_right for _, _, is_right in seen)
    of = {name: [version for job, version, _ in seen if job == name] for name in "abc"}
    assert of["a"] == [*range(LAST + 1)] and of["b"] == [0, 1]
    assert of["c"][0] in (2, 3) and of["c"][-4:] == [*range(3, LAST + 1)], "from LATEST, or at once from the group"


@pytest.mark.parametrize("local", [True, False])
def test_an_explore_job_outlives_a_train_job_that_is_killed_in_a_broadcast_and_joins_the_next(tmp_path, local) -> None:
    explore = ExploreJob(tmp_path, "a", local=local)
    with calling(train_until_killed, tmp_path, 0, 2):
        wait_until(lambda: not explore.look() and explore.servers.version == 1)
        if not local:
            with pytest.raises(LaunchError, match="unfinished .it has ended.: the servers hold parts of two versions"):
                wait_until(lambda: not explore.look() and explore.link._connection is None)
            return
        wait_until(lambda: not explore.look() and explore.link._connection is None)
    assert explore.holds(1)
    with calling(train_until_killed, tmp_path, 1, 4):  # from its checkpoint: version 1 again
        wait_until(lambda: not explore.look() and explore.servers.version == 3)
    assert explore.holds(3)


def stop_responding(folder: Path, before: str) -> None:
    """Be an explore job that stops before it answers this call; its connection does not end."""
    job = ExploreJob(folder, "a")
    job.subscription.hold(0)
    job.link._calls[before] = lambda *arguments: time.sleep(2 * SECONDS)  # type: ignore[index]
    job.link.look(0, wait_seconds=SECONDS)


@pytest.mark.parametrize("call", ["admit", "pause"])
def test_a_job_that_stops_responding_is_left_behind_and_its_weights_are_in_the_folder(tmp_path, call: str) -> None:
    train = TrainJob(tmp_path, Ranks(), patience_seconds=1.0)
    train.publish(0)
    with calling(stop_responding, tmp_path, call):
        train.wait_for(1)
        train.publish(1)
        assert train.written == [0, 1] and not train.jobs.names and not train.jobs.ended


def test_a_job_that_connects_and_stops_before_it_reports_keeps_nobody_waiting(tmp_path: Path) -> None:
    """With this time limit a trainer that waits for either of the two never ends."""
    train = TrainJob(tmp_path, Ranks(), patience_seconds=1e6)
    train.publish(0)
    meeting = VersionFolder(tmp_path).meeting()
    assert meeting is not None
    nameless = knock(MeetingPoint(host=LOOPBACK, port=meeting["port"], key=bytes.fromhex(meeting["key"])))
    silent = ExploreJob(tmp_path, "a")
    while silent.link._connection is None:
        silent.link.connect()
    wait_until(lambda: not train.publisher.sync_rejoined() and train.jobs.names == {"a"})
    train.publish(1)
    assert train.written == [0], "it may connect, and is not asked"
    silent.look()
    wait_until(lambda: train.jobs.choose(1))
    nameless.close()


def test_between_two_versions_that_are_due_a_job_that_is_behind_gets_the_weights_of_now(tmp_path: Path) -> None:
    """Those of the last version are gone, and the trainer waits for prompts of the job."""
    train, out = TrainJob(tmp_path, Ranks(), interval=2), Inbox()
    for version in range(4):
        train.publish(version)
    with calling(explore, tmp_path, "a", None, out):
        train.wait_for(1)
        seen = [out.get(timeout=SECONDS)]
        while seen[-1] != ("a", 3, True):
            seen.append(out.get(timeout=SECONDS))
    assert {version for _, version, _ in seen} <= {0, 3} and train.written == [0]


def test_a_recovered_train_job_gives_weights_between_two_versions_that_are_due(tmp_path: Path) -> None:
    """Version 2 was broadcast and is gone, and the steps after the checkpoint cannot be sampled with version 0."""
    killed = TrainJob(tmp_path, Ranks(), interval=2)
    for version in range(4):
        killed.publish(version)
    killed.publisher.before_checkpoint()
    explore = ExploreJob(tmp_path, "a", joins=False)
    explore.look()
    assert explore.holds(0)
    TrainJob(tmp_path, Ranks(), interval=2).publish(3)
    explore.look()
    assert explore.holds(3)


def test_a_job_that_was_away_and_fails_a_push_gets_the_weights_from_the_folder(tmp_path: Path) -> None:
    train = TrainJob(tmp_path, Ranks(), patience_seconds=1.0)
    train.publish(0)
    explore = ExploreJob(tmp_path, "a")
    explore.look()
    explore.link._connection.close()  # type: ignore[union-attr]
    explore.link._connection = None
    wait_until(lambda: not explore.look() and train.num_reporting() == 1)
    train.publish(1)  # it does not answer
    assert train.written == [0, 1]


def test_a_job_whose_servers_start_again_is_asked_until_they_are_up_and_logged_once(tmp_path, caplog) -> None:
    def no_servers() -> None:
        raise LaunchError("no generator is left; generator-0: killed")

    def explore() -> None:
        while not has_ended.is_set():
            job.look()

    train, has_ended = TrainJob(tmp_path, Ranks()), threading.Event()
    train.publish(0)
    job = ExploreJob(tmp_path, "a")
    wait_until(lambda: not job.look() and train.num_reporting() == 1)
    job.link._push.endpoints = no_servers  # type: ignore[method-assign, assignment]
    thread = threading.Thread(target=explore)
    thread.start()
    try:
        train.publish(1)
        for _ in range(3):
            train.publisher.sync_rejoined()
    finally:
        has_ended.set()
        thread.join()
    said = "The push of version 1 failed: no explore job is left: a: no generator is left; generator-0: killed"
    assert caplog.messages == [said] and train.written == [0] and train.jobs.names == {"a"}


def test_a_job_connects_to_a_train_job_that_was_stopped_at_the_first_attempt(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(meeting, "_HANDSHAKE_SECONDS", 0.3)
    monkeypatch.setattr(jobs, "_RETRY_SECONDS", 0.1)
    with calling(train_until_killed, tmp_path, 0, LAST) as train:
        wait_until(lambda: VersionFolder(tmp_path).latest() is not None)
        os.kill(train.pid, signal.SIGSTOP)
        explore = ExploreJob(tmp_path, "a")
        wait_until(lambda: not explore.look() and "does not answer (timed out)" in caplog.text)
        os.kill(train.pid, signal.SIGCONT)
        wait_until(lambda: not explore.look() and explore.servers.version == 1)
    assert explore.holds(1)


class Attack:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def test_a_folder_of_somebody_else_runs_no_code_in_an_explore_job(tmp_path: Path) -> None:
    """Its announcement names a program of the attacker, which has the key."""
    kept: list[Any] = []

    def attack(connection: Any) -> None:
        kept.append(connection)
        connection.send(Attack(tmp_path / "executed"))

    point = open_door(LOOPBACK, bytes(32), attack)
    VersionFolder(tmp_path / "weights").announce(
        {"id": "1", "node": socket.gethostname(), "host": LOOPBACK, "port": point.port, "key": "00" * 32}
    )
    explore = ExploreJob(tmp_path / "weights", "a")
    with pytest.raises(ValueError, match="decode|Expecting"):
        wait_until(lambda: bool(explore.look()))
    assert not (tmp_path / "executed").exists()


def test_jobs_with_different_settings_say_so_and_use_the_folder(tmp_path: Path, caplog) -> None:
    """A train job of one method, explore jobs of the other; and one that nobody reaches."""
    caplog.set_level(logging.WARNING)
    train = TrainJob(tmp_path / "group", Ranks())
    explore = ExploreJob(tmp_path / "group", "a", joins=False)
    for version in range(3):
        train.publish(version)
        explore.look()
        assert explore.holds(version)
    assert train.written == [0, 1, 2]
    (said,) = caplog.messages
    assert said.startswith("synchronizer.method=folder, and nccl in the train job; write the same in both")
    caplog.clear()
    versions = VersionFolder(tmp_path / "alone")
    versions.announce(FOLDER_ALONE)
    explore = ExploreJob(tmp_path / "alone", "a")
    for version in range(2):
        versions.write(version, partial(save, version))
        explore.look()
        assert explore.holds(version)
    (said,) = caplog.messages
    assert said.startswith("synchronizer.method=nccl, and folder in the train job; write the same in both")
    modes = [(tmp_path / folder / "TRAINER").stat().st_mode & 0o077 for folder in ("group", "alone")]
    assert modes[0] == 0 and modes[1], "others read where there is no key"
    caplog.clear()
    with socket.socket() as nobody:
        nobody.bind((LOOPBACK, 0))
        port = nobody.getsockname()[1]
        versions.announce({"id": "1", "node": socket.gethostname(), "host": LOOPBACK, "port": port, "key": "00" * 32})
        for _ in range(3):
            explore.look()
    (said,) = caplog.messages
    assert f"127.0.0.1:{port}" in said and "does not answer ([Errno 111] Connection refused)" in said
    versions.announce({"id": "2", "node": "elsewhere", "host": LOOPBACK, "port": port, "key": "00" * 32})
    explore.look()
    assert "nccl connects jobs of one host, and the train job is on elsewhere" in caplog.messages[-1]


@pytest.mark.parametrize("joins", [True, False])
def test_the_job_of_another_user_says_so_and_uses_the_folder(joins: bool, caplog) -> None:
    with folder_for_all() as folder:
        TrainJob(folder, Ranks()).publish(0)
        (folder / "replicas").chmod(0o777)
        (folder / "TRAINER").chmod(0)
        next(folder.glob("version-0-*/*")).chmod(0o644)
        with as_another_user():
            explore = ExploreJob(folder, "a", joins=joins)
            explore.look()
            explore.look()
    assert explore.holds(0)
    (said,) = caplog.messages
    assert said.startswith("synchronizer.method=nccl connects jobs of one user, and the train job is another user's")
