"""What the driver and the senders in the trainer's ranks share: settings, reports, calls to many servers at once with
one deadline for all steps of a push, and the error of a push.

Without the libraries of the senders, which load for seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from allocation import RoleAllocation, Slot
from core.config.runtime import Changes
from rollout.errors import GeneratorCallError, GeneratorGone
from rollout.inference.backend import Quantization, TransportName, WeightEndpoint

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
    weight_format: Quantization = "auto"
    """fp8_block: weights of linear layers are quantized, once, by every rank that receives full tensors."""
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
