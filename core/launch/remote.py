"""Actors as typed objects, Ray's object store, and every wait of the driver for its workers: it ends with an answer, or
in time with an error that contains the processes, their phase, and where the stacks are.

Invariant: an error that one worker raises because another one has exited or hangs is reported as the state of the other
one.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeAlias, TypeVar, overload

import numpy as np
import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from core.errors import LaunchError, PushFailure, first_line
from core.processes.signals import raise_if_interrupted
from core.processes.stacks import FOLDER, collect_stacks
from core.weight_sync.push import PushError
from rollout.errors import GeneratorCallError, GeneratorGone, GeneratorStartError
from rollout.inference.router import NoGeneratorError

if TYPE_CHECKING:
    from core.data.stored_batch import Ref

logger = logging.getLogger(__name__)


@contextmanager
def without_unused_processes() -> Iterator[None]:
    """Start Ray here without three Python processes of the head node: a run never requests more machines, its workers
    write their own log files, and no dashboard is served.

    `ray start` has options for the autoscaler and the log monitor (--no-monitor, --include-log-monitor); ray.init has
    not. include_dashboard=False leaves the dashboard's process, which then reports usage statistics only.
    """
    parameter, services = ray._private.parameter, ray._private.services
    params = partial(parameter.RayParams, no_monitor=True, include_log_monitor=False)  # type: ignore[arg-type]
    replaced = ((parameter, "RayParams", params), (services, "start_api_server", lambda *args, **options: (None, None)))
    before = [getattr(module, name) for module, name, _ in replaced]
    for module, name, own in replaced:
        setattr(module, name, own)
    try:
        yield
    finally:
        for (module, name, _), theirs in zip(replaced, before, strict=True):
            setattr(module, name, theirs)


SMALL_BYTES = 64 * 2**10
"""Of arrays that travel inside a message; Ray keeps messages of up to 100 KiB out of its store."""

T = TypeVar("T")


def place(value: T, arrays: Iterable[np.ndarray]) -> Ref:
    """Return a reference to `value` in the store, or `value` itself where its `arrays` are small together."""
    return value if sum(array.nbytes for array in arrays) <= SMALL_BYTES else ray.put(value)


def fetch(placed: Sequence[Ref]) -> list[Any]:
    """Return what place() was given, in order; arrays are views of the store's read-only memory."""
    refs = [value for value in placed if isinstance(value, ray.ObjectRef)]
    found = iter(ray.get(refs) if refs else ())
    return [next(found) if isinstance(value, ray.ObjectRef) else value for value in placed]


def has_ended(call: Ref) -> bool:
    """Return whether a call has ended, with a result or an error."""
    return bool(ray.wait([call], timeout=0)[0])


A = TypeVar("A")
P = ParamSpec("P")
R = TypeVar("R")
Pending: TypeAlias = Coroutine[object, None, R]
"""What an asynchronous method returns."""


class Remote(Generic[A]):
    """A Ray actor made of a plain class `A`: `Remote[A](handle).send(A.method, ...)`.

    A reference (ObjectRef) may be sent in place of a value; give that parameter a type that allows both.
    """

    def __init__(self, handle: ActorHandle) -> None:
        self.handle = handle
        """Ray's handle, which may be sent to another process."""

    @overload
    def send(
        self, method: Callable[Concatenate[A, P], Pending[R]], *args: P.args, **kwargs: P.kwargs
    ) -> ObjectRef[R]: ...

    @overload
    def send(self, method: Callable[Concatenate[A, P], R], *args: P.args, **kwargs: P.kwargs) -> ObjectRef[R]: ...

    def send(self, method: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Start a call and return the reference of its result."""
        return getattr(self.handle, method.__name__).remote(*args, **kwargs)

    def send_parts(
        self, count: int, method: Callable[Concatenate[A, P], object], *args: P.args, **kwargs: P.kwargs
    ) -> Sequence[Ref]:
        """Start a call that returns a tuple of `count` values, and return the reference of each."""
        return getattr(self.handle, method.__name__).options(num_returns=count).remote(*args, **kwargs)


_Names = dict[ObjectRef[Any], str]
"""Call -> its worker."""

_LOOK_EVERY_SECONDS = 1.0  # for a signal, while workers are waited for
_OTHERS_SECONDS = 5.0  # for the news of a worker's death to arrive after what it did to another one
_LOG_AFTER_SECONDS = 10.0  # and whenever the wait has become twice as long
_NAMES_TOLD = 3


class Waiter:
    """Waits for calls on the workers of one attempt."""

    def __init__(self, log_folder: Path) -> None:
        self._log_folder = log_folder
        self.ask_nodes: Callable[[str], dict[str, str]] | None = None
        """Requests the stacks of processes on other machines: (why) -> name and state."""
        self._chores: list[Callable[[], None]] = []
        self._chores_done = 0.0

    def every_second(self, chore: Callable[[], None]) -> None:
        """Call `chore` about once a second, whether the waits are short or long. It must neither wait nor raise."""
        self._chores.append(chore)

    def _do_chores(self) -> None:
        now = time.monotonic()
        if now - self._chores_done >= _LOOK_EVERY_SECONDS:
            self._chores_done = now
            for chore in self._chores:
                chore()

    def gather(
        self,
        refs: Sequence[ObjectRef[T]],
        *,
        names: Sequence[str],
        phase: str,
        timeout_seconds: float,
        key: str,
        meanwhile: Callable[[], None] = lambda: None,
        logs_waiting: bool = False,
        beside: list[ObjectRef[None]] | None = None,
    ) -> list[T]:
        """Return the results of `refs` in order; the first failure ends the wait. `names` are the workers', `key` the
        configuration key of the timeout; `meanwhile` is called about once a second. `logs_waiting`: log the workers
        that are waited for when that takes long. `beside`: calls of the first worker that need not end, but whose
        failure ends the wait; those that end leave the list.

        Raises LaunchError when a worker, or a server of its, exited or did not answer in time; otherwise the worker's
        own exception, with a note that names the worker and holds its traceback."""
        beside = [] if beside is None else beside
        by_ref: _Names = {**dict.fromkeys(beside, names[0]), **dict(zip(refs, names, strict=True))}
        pending = list(by_ref)
        begin, log_after = time.monotonic(), _LOG_AFTER_SECONDS if logs_waiting else math.inf
        deadline = begin + timeout_seconds
        results: dict[ObjectRef[T], T] = {}
        while len(results) < len(refs):
            raise_if_interrupted()
            self._do_chores()
            if (waited := time.monotonic() - begin) >= log_after:
                log_after = 2 * waited
                late = _listed([by_ref[r] for r in pending])
                logger.info("%s: waiting for %s, %.0f s so far; logs: %s", phase, late, waited, self._log_folder)
            left = max(0.0, deadline - time.monotonic())
            ready, pending = ray.wait(pending, num_returns=1, timeout=min(left, _LOOK_EVERY_SECONDS))
            if ready:
                try:
                    result = ray.get(ready[0])
                except RayError as e:
                    failure = self._failure(e, by_ref[ready[0]], phase, {r: by_ref[r] for r in pending})
                    raise failure from (e if isinstance(failure, LaunchError) else None)
                if ready[0] in beside:
                    beside.remove(ready[0])
                else:
                    results[ready[0]] = result
                continue
            if left == 0:
                late = self._late([by_ref[r] for r in pending], f"no answer in {phase}")
                raise LaunchError(f"{phase}: no answer within {key}={timeout_seconds:g} from {late}")
            meanwhile()
        return [results[r] for r in refs]

    def _failure(self, error: RayError, worker: str, phase: str, others: _Names) -> Exception:
        """Return the error that ends the wait. A rank that fails may do so because another one has exited or
        stopped."""
        if isinstance(error, RayTaskError):
            failure = as_driver_sees(error, worker=worker)
            if isinstance(failure, LaunchError) or not isinstance(failure, RuntimeError) or not others:
                return failure
            reason = f"{worker} failed: {first_line(failure)}"
        else:
            reason = f"{worker} exited: {first_line(error)}"
            failure = LaunchError(f"{phase}: {reason}")
        ready, hanging = (
            ray.wait(list(others), num_returns=len(others), timeout=_OTHERS_SECONDS) if others else ([], [])
        )
        died = [others[ref] for ref in ready if _has_died(ref)]
        if died:
            return LaunchError(f"{phase}: {', '.join(died)} exited; {reason}")
        if hanging:
            late = self._late([others[r] for r in hanging], f"no answer in {phase} after {reason}")
            return LaunchError(f"{phase}: {reason}; no answer from {late}")
        return failure

    def _late(self, names: Sequence[str], why: str) -> str:
        """Return these workers with their state, after the stacks of all processes are written."""
        states = self.write_stacks(why)
        listed = ", ".join(f"{name} ({states[name]})" if name in states else name for name in names)
        return f"{listed}. All stacks are in {self._log_folder / FOLDER}"

    def write_stacks(self, why: str) -> dict[str, str]:
        """Let every process of the run write its stacks; name -> state."""
        logger.error("%s: writing the stacks of all processes to %s", why, self._log_folder / FOLDER)
        states = collect_stacks(self._log_folder, why=why)
        with open(self._log_folder / FOLDER / "driver.txt", "a") as file:
            file.write(f"\n--- {why}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        return states | (self.ask_nodes(why) if self.ask_nodes is not None else {})


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMES_TOLD]) + (f" and {len(names) - _NAMES_TOLD} more" if names[_NAMES_TOLD:] else "")


def as_driver_sees(error: RayTaskError, *, worker: str) -> Exception:
    """Return the error of a call on `worker`: LaunchError where new processes may succeed, else its own exception."""
    cause = error.cause if isinstance(error.cause, Exception) else error
    if isinstance(cause, NoGeneratorError):
        return LaunchError(f"{worker}: no generator is left: {cause}")
    # A server that is gone, or weights that did not arrive: the servers may hold old and new ones mixed. The messages
    # name the server.
    if isinstance(cause, PushError):
        return PushFailure(str(cause), servers=cause.servers)
    if isinstance(cause, GeneratorCallError | GeneratorGone | GeneratorStartError):
        return LaunchError(str(cause))
    if isinstance(cause, RayTaskError) and cause is not error:  # of another worker, which this one has called
        return as_driver_sees(cause, worker=worker)
    if isinstance(cause, RayError):  # Ray's own: its store is full, an object is lost
        return LaunchError(f"{worker}: {type(cause).__name__}: {first_line(cause)}")
    cause.add_note(f"in {worker}:\n{error}")
    return cause


def _has_died(ref: ObjectRef[T]) -> bool:
    try:
        ray.get(ref)
    except RayActorError:
        return True
    except RayError:
        return False
    return False
