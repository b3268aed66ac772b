"""The weight push: version n + 1 from the trainer's ranks to every replica, while these continue sampling.

`WeightPush.push()` is the whole of it: wait for replicas, gather, pause, send, resume, and repeat what has failed. The
senders (nccl.py, ipc.py, disk.py) are in the trainer's ranks and post to the servers themselves, so the process that
waits in a broadcast sees a refusal. What a replica does with its running requests is its own `interrupt` setting.

Where trainer and replicas share GPUs they take turns: offload_generators() stops the replicas, which return what they
were answering and release weights and cache; the push moves the trainer's other state to the host, and the replicas
take their memory back. Nothing samples in between.

Invariants: a replica resumes only on complete weights, so after a failure all stay paused with their requests until the
repetition. When push() returns, every replica that takes part samples with the pushed version, and the rollout side
sends requests to all of them.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from allocation import RoleAllocation, Slot
from core.config.runtime import Changes, Verify
from core.errors import LaunchError, PushFailure
from core.processes.signals import raise_if_interrupted
from rollout.errors import GeneratorCallError, GeneratorGone
from rollout.inference.backend import TransportName, WeightEndpoint

P = ParamSpec("P")
T = TypeVar("T")

_POLL_SECONDS = 0.0003
SENDER = "the sender"
"""Name of the work of this process itself, in Deadline.wait()."""


class PushError(RuntimeError):
    """A weight push failed; the generators hold old and new weights mixed and must not continue. The message names the
    server, or the trainer's rank, and the cause."""

    servers: tuple[str, ...] = ()
    """Names of the servers that did not take what was sent; empty where the trainer failed."""

    def __init__(self, message: str, *, servers: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.servers = tuple(servers)


class Awaited(Protocol):
    """A Future, whatever it returns."""

    def done(self) -> bool: ...

    def result(self) -> object: ...


class Deadline:
    """One time limit for all steps of a push."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._end = seconds, time.monotonic() + seconds

    def left(self) -> float:
        return max(0.001, self._end - time.monotonic())

    def wait(self, pending: Mapping[str, Awaited], what: str, *, also: Callable[[], bool] = lambda: True) -> None:
        """Return when all futures are done and `also()` holds. Raises PushError: for the first failure at once, and
        with the names of those that did not answer when the time is over."""
        while True:
            left = [name for name, future in pending.items() if not _is_done(name, future)]
            if not left and also():
                return
            if time.monotonic() > self._end:
                raise PushError(
                    f"{what}: no answer within push.timeout_seconds={self.seconds:g} from "
                    f"{', '.join(left) or 'the sender, although every server responded'}",
                    servers=[name for name in left if name != SENDER],
                )
            time.sleep(_POLL_SECONDS)


def _is_done(name: str, future: Awaited) -> bool:
    if not future.done():
        return False
    try:
        future.result()
    except (GeneratorCallError, GeneratorGone, RuntimeError) as error:  # the last: a process group's
        raise PushError(str(error), servers=() if name == SENDER else (name,)) from error
    return True


def in_background(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Run in a thread that does not prevent the process from exiting: it may hang on a server that is gone."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as e:  # noqa: BLE001 (handed over to whoever waits)
            future.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    return future


def call_all(
    servers: Sequence[WeightEndpoint], call: Callable[[WeightEndpoint, float], T], deadline: Deadline
) -> dict[str, Future[T]]:
    """Run `call(server, timeout_seconds)` on many servers at once; return server name -> future of its answer."""
    left = deadline.left()
    return {server.name: in_background(call, server, left + 5) for server in servers}


@dataclass(frozen=True, kw_only=True)
class SenderSettings:
    """Settings of a run's weight updates, and the place of one rank of the trainer."""

    type: TransportName
    model_path: str = ""
    """The servers' model folder: pushed folders get its config.json."""
    dtype: str
    """Format that the servers hold weights in."""
    bucket_bytes: int
    timeout_seconds: float
    """Time limit for `send` as a whole, and for joining the servers."""
    quantizes: bool = False
    """Weights of linear layers are quantized to FP8, once, by every rank that receives full tensors."""
    folder: Path = Path()
    """disk: a folder of this run alone, on a file system that trainer and servers share."""
    changes: Changes = "never"
    """disk: whether to send only the values that have changed."""
    staged_bytes: int | None = None
    """Most bytes laid out before the pause, on every rank. None: what the device has to spare."""
    rank: int = 0
    world_size: int = 1
    device: str = "cpu"
    host: str = "127.0.0.1"
    """Address of the rank's node that the servers reach."""


@dataclass(frozen=True, kw_only=True)
class SendReport:
    """Cost of one `send`."""

    seconds: float
    num_bytes: int
    num_buckets: int
    compared: str = ""
    """Result of compare_checksums, where it was requested."""
    changed: float | None = None
    """Share of the values that have changed, where only those were sent."""


def with_colocated_ranks(
    servers: Sequence[WeightEndpoint], replicas: Sequence[Sequence[Slot]], trainer: RoleAllocation
) -> list[WeightEndpoint]:
    """Return the endpoints, each on the slots of its replica, with the trainer's rank on each of a server's GPUs filled
    in (empty where there is none)."""
    rank_at = {slot: rank for rank, slot in enumerate(trainer.slots)}
    return [
        server.beside(tuple(rank_at[slot] for slot in slots[: server.tp] if slot in rank_at))
        for server, slots in zip(servers, replicas, strict=True)
    ]


logger = logging.getLogger(__name__)

PUSHED = "actor"
"""The engine whose weights the generators sample with."""
SENDER_GRACE_SECONDS = 60.0
"""The sender's own deadline is push.timeout_seconds, and it can name the servers that did not answer and abort its
communicator before the driver gives up."""
_LOOK_EVERY_SECONDS = 0.5
_WEIGHTS, _CACHE = ["weights"], ["kv_cache"]


@dataclass(frozen=True, kw_only=True)
class PushReport:
    """Cost of one push."""

    seconds: float
    longest_pause_seconds: float
    """The longest time that one generator did not sample."""
    gather_seconds: float
    """Before the pause: gathering, converting and laying out what fits."""
    send_seconds: float
    num_bytes: int
    changed: float | None = None
    """Share of the values that have changed, where only those were sent."""

    def metrics(self) -> dict[str, float]:
        return {
            "push/seconds": self.seconds,
            "push/pause_seconds": self.longest_pause_seconds,
            "push/gather_seconds": self.gather_seconds,
            "push/send_seconds": self.send_seconds,
            "push/gigabytes": self.num_bytes / 1e9,
            **({} if self.changed is None else {"push/changed_values": self.changed}),
        }


class Trainer(Protocol):
    """The ranks of the trainer (core/launch/trainer_group.py). Every call reaches all of them."""

    def push_connect(self, plan: SenderSettings, servers: Sequence[WeightEndpoint]) -> None: ...
    def push_prepare(self, engine: str, bucket_bytes: int, *, verify: bool, timeout_seconds: float) -> None: ...
    def push_send(self, timeout_seconds: float) -> SendReport: ...
    def push_close(self) -> None: ...

    def export_weights(
        self, engine: str, bucket_bytes: int, timeout_seconds: float
    ) -> tuple[Sequence[object], int]: ...

    def offload(self, keep: str) -> None: ...
    def reload(self) -> None: ...


class Replicas(Protocol):
    """The generators of a run, with their failures and restarts (core/launch/generators.py), or those of other jobs
    (jobs.py)."""

    @property
    def waiting(self) -> bool: ...
    def endpoints(self, trainer: RoleAllocation) -> list[WeightEndpoint]: ...
    def receive(self, buckets: Sequence[object], version: int, timeout_seconds: float) -> list[float]: ...
    def pause(self, timeout_seconds: float) -> None: ...
    def resume(self, version: int, timeout_seconds: float) -> list[float]: ...
    def release_memory(self, tags: Sequence[str], timeout_seconds: float) -> None: ...
    def resume_memory(self, tags: Sequence[str], timeout_seconds: float) -> None: ...
    def admit(self) -> int: ...
    def membership_changed(self) -> bool: ...
    def mark_dead_generators(self) -> bool: ...
    def lose_named(self, names: Collection[str], why: str) -> bool: ...
    def participated(self) -> Sequence[tuple[str, object]]: ...
    def joined(self, name: str) -> None: ...
    def raise_if_all_gone(self) -> None: ...
    def failures(self) -> str: ...
    def look(self) -> None: ...


class RolloutSide(Protocol):
    """The process that sends requests to the generators (core/launch/rollout_client.py)."""

    def replace_generator(self, name: str, actor: object) -> None: ...


class WeightPush:
    """See the file. With shared GPUs it begins with the replicas running and the trainer's engines not yet made: call
    offload_generators() before they are."""

    def __init__(
        self,
        trainer: Trainer,
        generators: Replicas,
        rollout: RolloutSide,
        *,
        plan: SenderSettings,
        slots: RoleAllocation,
        shares_gpus: bool,
        verify: Verify,
        patience_seconds: float,
    ) -> None:
        """`slots`: of the trainer. `patience_seconds`: how long a push waits while there is no generator."""
        self._trainer, self.generators, self._rollout = trainer, generators, rollout
        self._plan, self._slots, self._shares_gpus = plan, slots, shares_gpus
        self._verify, self._patience, self._timeout = verify, patience_seconds, plan.timeout_seconds
        self._num_pushes = 0
        """Pushes since generators joined for the last time. The first finds parameters by names, later ones copy."""
        self._version: int | None = None

    @property
    def is_local(self) -> bool:
        """True if the generators keep complete weights until they have got all of the next ones."""
        return self._plan.type == "local"

    def connect(self) -> None:
        """Make a sender in each of the trainer's ranks, and let it join the generators, which are up."""
        if self._plan.type != "local":
            self._trainer.push_connect(self._plan, self.endpoints())

    def endpoints(self) -> list[WeightEndpoint]:
        """Return the servers that take part."""
        return self.generators.endpoints(self._slots)

    def close(self) -> None:
        """Leave the generators, and remove what a push left on disk."""
        if self._plan.type != "local":
            self._trainer.push_close()

    def offload_generators(self) -> None:
        """Free the devices that generators share with the trainer, after the loop has its batch and before it
        trains."""
        if not self._shares_gpus:
            return
        start = time.perf_counter()
        self.generators.pause(self._timeout)
        self.generators.release_memory(_CACHE + _WEIGHTS, self._timeout)
        released = time.perf_counter()
        self._trainer.reload()
        logger.info(
            "Servers released their memory in %.3f s, the trainer reloaded its state in %.3f s",
            released - start,
            time.perf_counter() - released,
        )

    def push(self, version: int) -> PushReport:
        """Return when every generator samples with the trainer's current weights, under this version. Raises
        LaunchError when no generator is left, or the push fails although no generator has failed."""
        self._version = version
        failure: LaunchError | None = None
        repeated: frozenset[str] | None = None
        """The generators that the first failure named."""
        while True:
            self._wait_for_generators()
            try:
                if self.generators.membership_changed() or failure is not None:
                    self.close()
                    self.connect()
                    self._num_pushes = 0
                report = self._push_once(version)
                break
            except LaunchError as error:
                failure = error
                if self.generators.mark_dead_generators():
                    logger.warning(
                        "The push of version %d failed (%s); retrying with the remaining generators", version, error
                    )
                    continue
                repeated = self._repeat(error, version, repeated)
        self.use_generators(version)
        logger.debug("Pushed version %d: %s", version, report)
        return report

    def use_generators(self, version: int) -> None:
        """Let the rollout process use the generators that got their first weights by the push of `version`."""
        self._version = version
        for name, actor in self.generators.participated():
            self._rollout.replace_generator(name, actor)
            self.generators.joined(name)

    def _push_once(self, version: int) -> PushReport:
        if self._plan.type == "local":
            return self._push_through_store(version)
        start = time.perf_counter()
        if self._shares_gpus:
            self._trainer.offload(PUSHED)
            self.generators.resume_memory(_WEIGHTS, self._timeout)
        limit, resumed = self._timeout + SENDER_GRACE_SECONDS, time.perf_counter()
        verify = self._verify == "always" or (self._verify == "first" and self._num_pushes < 2)
        self._trainer.push_prepare(PUSHED, self._plan.bucket_bytes, verify=verify, timeout_seconds=limit)
        gather_seconds = time.perf_counter() - resumed
        if not self._shares_gpus:  # else offload_generators() has paused them
            self.generators.pause(self._timeout)
        sent = self._trainer.push_send(limit)
        if self._shares_gpus:
            self._trainer.offload(PUSHED)  # now what the buckets took
            self.generators.resume_memory(_CACHE, self._timeout)
        pauses = self.generators.resume(version, self._timeout)
        self._num_pushes += 1
        return _report(version, sent, pauses, start=start, gather_seconds=gather_seconds)

    def _push_through_store(self, version: int) -> PushReport:
        """Push through the object store: every generator fetches the buckets before it pauses."""
        start = time.perf_counter()
        buckets, num_bytes = self._trainer.export_weights(PUSHED, self._plan.bucket_bytes, self._timeout)
        exported = time.perf_counter()
        pauses = self.generators.receive(buckets, version, self._timeout)
        end = time.perf_counter()
        return PushReport(
            seconds=end - start,
            longest_pause_seconds=max(pauses),
            gather_seconds=exported - start,
            send_seconds=end - exported,
            num_bytes=num_bytes,
        )

    def _repeat(self, failure: LaunchError, version: int, named_before: frozenset[str] | None) -> frozenset[str]:
        """Return the generators that a failure names, when the push is to be repeated: once with all of them, through
        new groups, then without those that both failures name. `named_before`: by the failure that it was repeated for,
        if it was. Raises the failure."""
        if self._plan.type == "local" or self._shares_gpus or not isinstance(failure, PushFailure):
            raise failure
        if named_before is None:
            logger.warning("The push of version %d failed (%s); repeating it", version, failure)
            return frozenset(failure.servers)
        again = named_before.intersection(failure.servers)
        if not self.generators.lose_named(again, str(failure)):
            raise failure
        logger.warning("The push of version %d failed again (%s); restarting %s", version, failure, ", ".join(again))
        return frozenset()

    def sync_rejoined(self) -> None:
        """Send the weights of the last push to generators that have rejoined. The loop calls it about once a second
        while it waits for the generators."""
        if self._version is None:
            return
        self.generators.raise_if_all_gone()
        if self.generators.waiting:
            report = self.push(self._version)
            logger.info("Pushed version %d to the restarted generators in %.2f s", self._version, report.seconds)

    def _wait_for_generators(self) -> None:
        deadline = time.monotonic() + self._patience
        self.generators.raise_if_all_gone()
        while not self.generators.admit():
            self.generators.raise_if_all_gone()
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"no generator restarted within generator.patience_seconds={self._patience:g}: "
                    f"{self.generators.failures()}"
                )
            raise_if_interrupted()
            time.sleep(_LOOK_EVERY_SECONDS)
            self.generators.look()


def _report(
    version: int, sent: SendReport, pauses: Sequence[float], *, start: float, gather_seconds: float
) -> PushReport:
    """Log and return what a push cost that began at `start`."""
    report = PushReport(
        seconds=time.perf_counter() - start,
        longest_pause_seconds=max(pauses),
        gather_seconds=gather_seconds,
        send_seconds=sent.seconds,
        num_bytes=sent.num_bytes,
        changed=sent.changed,
    )
    changed = "" if sent.changed is None else f" (the {sent.changed:.2%} of the values that have changed)"
    logger.info(
        "Pushed version %d: %.2f GB in %d buckets%s, sent in %.3f s (%.1f GB/s) after %.3f s of gathering; "
        "generators paused for at most %.3f s%s",
        *(version, sent.num_bytes / 1e9, sent.num_buckets, changed, sent.seconds, sent.num_bytes / 1e9 / sent.seconds),
        *(report.gather_seconds, report.longest_pause_seconds, sent.compared and f"; {sent.compared}"),
    )
    return report
