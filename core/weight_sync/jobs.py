"""Weights from a train job to the servers of explore jobs, while both are up.

The train job announces where it listens in the folder of the weights. Each explore job connects, and the train job
pushes the versions that are due to the servers of all connected jobs, as to servers of its own (push.py): `JobServers`
stands for them there, and `TrainerLink` is the other end, in the explore job.

    explore -> train   {"name"} on connecting; {"held", "waits"} when it is ready for calls, and when a server that has
                       failed waits for weights
    train -> explore   [call, arguments] in JSON, answered by (whether it succeeded, result or reason)

A train job unpickles what comes from holders of its key. An explore job unpickles nothing: the folder of the weights
may be foreign, and its announcement names the address and the key.

Invariant: a job gets newer versions than the one that it samples with, and no others. Until it is ready for calls, it
takes no part in a push. Where a process was killed, its connection ends, which the other side notices at once; where a
host has vanished, it waits for 2 x push.timeout_seconds + 60 s at most. The folder remains the way for jobs that are
not connected.
"""

import json
import logging
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from allocation import RoleAllocation
from core.errors import LaunchError
from core.processes.meeting import LOOPBACK, MeetingPoint, knock, open_door
from core.weight_sync.folder import OF_ANOTHER_USER, Meeting, VersionFolder
from core.weight_sync.push import SENDER_GRACE_SECONDS, Deadline, WeightPush, in_background
from rollout.inference.backend import WeightEndpoint

logger = logging.getLogger(__name__)

_MOMENT_SECONDS = 0.2
_MESSAGE_BYTES = 1 << 16
"""Most bytes of a call."""
_RETRY_SECONDS = 10.0
"""Between two attempts to connect to a train job that does not answer."""
_OTHERS = "servers of other jobs share neither an object store nor devices with the trainer"
_GONE = (OSError, EOFError)
"""What a connection raises whose other side has ended; the first includes TimeoutError."""


@dataclass(eq=False)
class _Job:
    """An explore job that is connected."""

    connection: Connection
    name: str
    reports: bool = False
    """Whether it has reported, and answers calls from then on."""
    held: int | None = None
    waits: bool = False
    """Whether one of its servers waits for weights."""

    def hear(self, message: Mapping[str, Any]) -> None:
        """Note what the job reports."""
        self.reports, self.held, self.waits = True, message["held"], message["waits"]

    def is_behind(self, version: int) -> bool:
        """Return whether the job reports that it has no weights as new as `version` on all of its servers."""
        is_older = self.held is None or self.held < version or (self.waits and self.held == version)
        return self.reports and is_older

    def call(self, name: str, *arguments: object, limit: Deadline) -> Any:
        """Return the result of a call. Raises LaunchError where it fails in the job, and as _GONE."""
        self.connection.send_bytes(json.dumps([name, arguments]).encode())
        while self.connection.poll(limit.left()):
            message = self.connection.recv()
            if isinstance(message, dict):
                self.hear(message)
                continue
            succeeded, result = message
            if not succeeded:
                raise LaunchError(result)
            return result
        raise TimeoutError(f"no answer to {name} within {limit.seconds:g} s")


class JobServers:
    """The servers of all explore jobs that are connected, in the place of push.Replicas."""

    def __init__(self, versions: VersionFolder, host: str, *, timeout_seconds: float) -> None:
        """Listen on the address `host`, and announce it in the folder. `timeout_seconds`: of a call to a job."""
        self._timeout = timeout_seconds
        self._arrived: list[_Job] = []
        self._lock = threading.Lock()  # of _arrived
        self._jobs: list[_Job] = []
        self._chosen: list[_Job] = []
        """The jobs that take part in the push."""
        self._joined: list[_Job] = []
        """The jobs whose servers the senders have joined."""
        self._changed = True
        self._why: dict[str, str] = {}
        self.ended: set[str] = set()
        """Names of the jobs that have ended."""
        point = open_door(host, secrets.token_bytes(32), self._arrive)
        assert point.key is not None, "as given"
        versions.announce(
            Meeting(
                id=uuid.uuid4().hex, node=socket.gethostname(), host=host, port=point.port, key=point.key.hex()
            )
        )  # fmt: skip

    def _arrive(self, connection: Connection) -> None:
        """Wait for the name of a job, in a thread of its own: one that stops before it delays no other job."""
        try:
            if not connection.poll(self._timeout):
                raise TimeoutError(f"no name within {self._timeout:g} s")
            job = _Job(connection, connection.recv()["name"])
        except _GONE as error:
            logger.warning("An explore job has left before it joined the group of the weights: %s", error)
            connection.close()
            return
        with self._lock:
            self._arrived.append(job)

    @property
    def names(self) -> set[str]:
        """Names of the jobs that are connected."""
        return {job.name for job in self._jobs}

    def choose(self, version: int) -> bool:
        """Let the jobs that are behind `version` take part in the next push; return whether there is one."""
        self._hear_all()
        self._chosen = [job for job in self._jobs if job.is_behind(version)]
        return bool(self._chosen)

    def _hear_all(self) -> None:
        with self._lock:
            arrived, self._arrived = self._arrived, []
        self._jobs += arrived
        for job in [*self._jobs]:
            try:
                while job.connection.poll():
                    is_new = not job.reports
                    job.hear(job.connection.recv())
                    if is_new:
                        self.ended.discard(job.name)  # it has connected again
                        logger.info("%s has joined the group of the weights, with version %s.", job.name, job.held)
            except _GONE as error:
                self._lose(job, error)

    def _lose(self, job: _Job, why: Exception) -> None:
        """Forget a job. Its weights come through the folder, until it connects again."""
        if job not in self._jobs:
            return
        self._jobs.remove(job)
        if job in self._chosen:
            self._chosen.remove(job)
            self._changed = True
        if has_ended := isinstance(why, EOFError | ConnectionError):
            self.ended.add(job.name)
        self._why[job.name] = "it has ended" if has_ended else str(why)
        job.connection.close()
        logger.warning("%s has left the group of the weights: %s", job.name, self._why[job.name])

    def lose_all(self, why: Exception) -> None:
        """Forget the jobs of the push."""
        for job in [*self._chosen]:
            self._lose(job, why)

    def _everywhere(self, name: str, *arguments: object, timeout_seconds: float) -> dict[_Job, Any]:
        """Make a call on every job of the push at once; return the results. Raises LaunchError when a job fails it, or
        has gone and is forgotten."""
        limit = Deadline(timeout_seconds)
        calls = {job: in_background(job.call, name, *arguments, limit=limit) for job in self._chosen}
        results, failure = {}, None
        for job, call in calls.items():
            try:
                results[job] = call.result()
            except _GONE as error:
                self._lose(job, error)
                failure = LaunchError(f"{name}: {self.failures()}")
            except LaunchError as error:
                failure = LaunchError(f"{job.name}: {error}")
        if failure is not None:
            raise failure
        return results

    # What a push calls.

    @property
    def waiting(self) -> bool:
        """False: the caller has chosen the jobs of the push."""
        return False

    def admit(self) -> int:
        """Return the number of jobs that take part. One without a server that is up does not."""
        self._ask_each("admit", Deadline(self._timeout))
        self._changed |= self._chosen != self._joined
        return len(self._chosen)

    def _ask_each(self, name: str, limit: Deadline) -> None:
        """Ask each job whether its servers are others than those that the senders have joined. A job without a server
        leaves the push."""
        for job in [*self._chosen]:
            try:
                self._changed |= job.call(name, limit=limit)
            except _GONE as error:
                self._lose(job, error)
            except LaunchError as error:
                self._chosen.remove(job)
                self._changed, self._why[job.name] = True, str(error)

    def membership_changed(self) -> bool:
        """Return whether servers have come or gone since the last call."""
        changed, self._changed = self._changed, False
        return changed

    def endpoints(self, trainer: RoleAllocation) -> list[WeightEndpoint]:
        """Return the servers of the jobs of the push, by the name of their job and their own."""
        self._joined = [*self._chosen]
        found = self._everywhere("endpoints", timeout_seconds=self._timeout)
        return [one.named(f"{job.name}/{one.name}") for job, servers in found.items() for one in servers]

    def pause(self, timeout_seconds: float) -> None:
        """Return when no server of the push samples, or all keep what they get until resume()."""
        self._everywhere("pause", timeout_seconds, timeout_seconds=timeout_seconds)

    def resume(self, version: int, timeout_seconds: float) -> list[float]:
        """Resume with this version; return how long each server stopped sampling, in seconds."""
        pauses = self._everywhere("resume", version, timeout_seconds, timeout_seconds=timeout_seconds)
        for job in pauses:
            job.held, job.waits = version, False
        return [seconds for of_job in pauses.values() for seconds in of_job]

    def receive(self, buckets: Sequence[object], version: int, timeout_seconds: float) -> list[float]:
        raise AssertionError(_OTHERS)

    def release_memory(self, tags: Sequence[str], timeout_seconds: float) -> None:
        raise AssertionError(_OTHERS)

    def resume_memory(self, tags: Sequence[str], timeout_seconds: float) -> None:
        raise AssertionError(_OTHERS)

    def mark_dead_generators(self) -> bool:
        """Let each job check its servers after a push has failed; return whether one is lost since
        membership_changed()."""
        self._ask_each("check", Deadline(self._timeout))
        return self._changed

    def lose_named(self, names: Collection[str], why: str) -> bool:
        """Forget the jobs of these servers, while others take part; return whether one was."""
        named = [job for job in self._chosen if any(name.startswith(f"{job.name}/") for name in names)]
        if len(named) == len(self._chosen):
            return False
        for job in named:
            self._lose(job, LaunchError(why))
        return bool(named)

    def raise_if_all_gone(self) -> None:
        """Raise LaunchError when no job takes part any more."""
        if not self._chosen:
            raise LaunchError(f"no explore job is left: {self.failures()}")

    def failures(self) -> str:
        """Return why jobs are missing."""
        return "; ".join(f"{name}: {why}" for name, why in self._why.items())

    def participated(self) -> Sequence[tuple[str, object]]:
        """Return nothing: each job has a rollout process of its own."""
        return ()

    def joined(self, name: str) -> None:
        """Do nothing, as participated()."""

    def look(self) -> None:
        """Do nothing: each job looks after its own servers."""


class TrainerLink:
    """The end of an explore job: connects it to the train job that has announced itself, and does what that one calls
    for."""

    def __init__(
        self, versions: VersionFolder, name: str, push: WeightPush, *, joins: bool, timeout_seconds: float
    ) -> None:
        """`name`: of this job, in the folder. `push`: of its servers. `joins`: False: follow the folder alone.
        `timeout_seconds`: of a push."""
        self._versions, self._name, self._push = versions, name, push
        self._joins, self._timeout = joins, timeout_seconds
        self._given: Sequence[WeightEndpoint] = ()
        """The servers that the train job has."""
        self._connection: Connection | None = None
        self._connecting: Future[Connection] | None = None
        self._meeting: Meeting | None = None
        """That of the last attempt to connect."""
        self._why_not = ""
        self._next_attempt = 0.0
        self._told: tuple[int | None, bool] | None = None
        """What this job has last reported."""
        self._calls: Mapping[str, Callable[..., Any]] = {
            "admit": self._admit,
            "check": self._check,
            "endpoints": self._endpoints,
            "pause": push.generators.pause,
            "resume": self._resume,
        }

    def look(self, held: int | None, *, wait_seconds: float) -> int | None:
        """Return the version that the train job has just pushed, or None after `wait_seconds` without one. `held`: the
        version that the servers sample with.

        Raises LaunchError where the train job ended in a push and left the servers with parts of two versions."""
        if self._connection is None:
            self.connect()
        if self._connection is None:
            time.sleep(wait_seconds)
            return None
        is_pushed_to = False
        try:
            self._tell(held)
            version = None
            while self._connection.poll(self._push_seconds if is_pushed_to else wait_seconds):
                call, arguments = json.loads(self._connection.recv_bytes(_MESSAGE_BYTES))
                is_pushed_to |= call == "pause"
                try:
                    answer = True, self._calls[call](*arguments)
                except LaunchError as error:
                    answer = False, str(error)
                if call == "resume" and answer[0]:
                    version, is_pushed_to = arguments[0], False
                    self._told = version, False
                elif call in ("admit", "check") and not answer[0]:
                    is_pushed_to = False
                self._connection.send(answer)
                if version is not None:
                    return version
            if is_pushed_to:
                raise TimeoutError(f"no call within {self._push_seconds:g} s, in a push")
        except _GONE as error:
            self._leave(error, held, in_push=is_pushed_to)
        return None

    @property
    def _push_seconds(self) -> float:
        """Longest time between two calls of a push: sending, and closing a group that has failed."""
        return 2 * self._timeout + SENDER_GRACE_SECONDS

    def _admit(self) -> bool:
        """Return whether servers have come or gone. Raises LaunchError when none is up."""
        self._push.generators.admit()
        return self._push.endpoints() != self._given

    def _check(self) -> bool:
        """Return the same after a failure."""
        self._push.generators.mark_dead_generators()
        return self._push.endpoints() != self._given

    def _endpoints(self) -> Sequence[WeightEndpoint]:
        self._given = self._push.endpoints()
        return self._given

    def _resume(self, version: int, timeout_seconds: float) -> list[float]:
        pauses = self._push.generators.resume(version, timeout_seconds)
        self._push.use_generators(version)
        return pauses

    def _tell(self, held: int | None) -> None:
        """Report this job where that is news to the train job."""
        assert self._connection is not None, "look() has connected"
        news = held, self._push.generators.waiting
        if news != self._told:
            self._connection.send({"held": held, "waits": news[1]})
            self._told = news

    def connect(self) -> None:
        """Connect where a train job has announced itself; return after a moment in any case."""
        meeting, known = self._versions.meeting(), self._meeting
        if meeting is None:
            return
        if known is None or known["id"] != meeting["id"]:
            self._meeting, self._connecting, self._next_attempt = meeting, None, 0.0
            self._why_not = _why_not(meeting, self._joins)
            if self._why_not:
                logger.warning("%s: its weights come through %s.", self._why_not, self._versions.path)
        if self._why_not or not self._joins or time.monotonic() < self._next_attempt:
            return
        if self._connecting is None:
            point = MeetingPoint(host=meeting["host"], port=meeting["port"], key=bytes.fromhex(meeting["key"]))
            self._connecting = in_background(knock, point)
        if not wait([self._connecting], timeout=_MOMENT_SECONDS).done:
            return
        try:
            connection = self._connecting.result()
            connection.send({"name": self._name})
            self._connection, self._told = connection, None
            logger.info("Joined the group of the weights of the train job at %s.", _address(meeting))
        except OSError as error:  # also a TimeoutError of the handshake
            if not self._next_attempt:
                logger.warning(
                    "The train job at %s does not answer (%s): its weights come through %s until it does.",
                    _address(meeting), error, self._versions.path,
                )  # fmt: skip
            self._next_attempt = time.monotonic() + _RETRY_SECONDS
        self._connecting = None

    def _leave(self, why: Exception, held: int | None, *, in_push: bool) -> None:
        assert self._connection is not None, "it has failed"
        self._connection.close()
        self._connection, self._next_attempt = None, time.monotonic() + _RETRY_SECONDS
        has_ended = isinstance(why, EOFError | ConnectionError)
        reason = "it has ended" if has_ended else str(why)
        if in_push and not self._push.is_local:
            raise LaunchError(
                f"the train job left a weight update unfinished ({reason}): the servers hold parts of two versions"
            )
        logger.warning(
            "The connection to the train job is lost: %s. Sampling with version %s, as far as staleness.max_staleness "
            "allows, until it is back.", reason, held,
        )  # fmt: skip


def _address(meeting: Meeting) -> str:
    return f"{meeting['host']}:{meeting['port']} on {meeting['node']}"


def _why_not(meeting: Meeting, joins: bool) -> str:
    """Return why this job does not connect to the train job although one of them would; empty: it does, or neither
    would."""
    if meeting == OF_ANOTHER_USER:
        return "synchronizer.method=nccl connects jobs of one user, and the train job is another user's"
    if joins == (not meeting["key"]):
        here, there = ("nccl", "folder") if joins else ("folder", "nccl")
        return f"synchronizer.method={here}, and {there} in the train job; write the same in both"
    if joins and meeting["host"] == LOOPBACK and meeting["node"] != socket.gethostname():
        return f"synchronizer.method=nccl connects jobs of one host, and the train job is on {meeting['node']}"
    return ""
