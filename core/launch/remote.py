"""Actors as typed objects, and Ray's object store."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import numpy as np
import ray
from ray.actor import ActorHandle

if TYPE_CHECKING:
    from ray import ObjectRef


@contextmanager
def without_unused_processes() -> Iterator[None]:
    """Start Ray here without three Python processes of the head node: a run never requests more machines, its workers
    write their own log files, and no dashboard is served.

    `ray start` has options for the autoscaler and the log monitor (--no-monitor, --include-log-monitor); ray.init has
    not. include_dashboard=False leaves the dashboard's process, which then reports usage statistics only.
    """
    parameter: Any = ray._private.parameter
    services: Any = ray._private.services
    params, start_api_server = parameter.RayParams, services.start_api_server
    parameter.RayParams = functools.partial(params, no_monitor=True, include_log_monitor=False)
    services.start_api_server = lambda *args, **options: (None, None)
    try:
        yield
    finally:
        parameter.RayParams, services.start_api_server = params, start_api_server


SMALL_BYTES = 64 * 2**10
"""Of arrays that travel inside a message; Ray keeps messages of up to 100 KiB out of its store."""

T = TypeVar("T")


def place(value: T, arrays: Iterable[np.ndarray]) -> Any:
    """Return a reference to `value` in the store, or `value` itself where its `arrays` are small together."""
    return value if sum(array.nbytes for array in arrays) <= SMALL_BYTES else ray.put(value)


def fetch(placed: Sequence[Any]) -> list[Any]:
    """Return what place() was given, in order; arrays are views of the store's read-only memory."""
    refs = [value for value in placed if isinstance(value, ray.ObjectRef)]
    found = iter(ray.get(refs) if refs else ())
    return [next(found) if isinstance(value, ray.ObjectRef) else value for value in placed]


def has_ended(call: Any) -> bool:
    """Return whether a call has ended, with a result or an error."""
    return bool(ray.wait([call], timeout=0)[0])


A = TypeVar("A")
P = ParamSpec("P")
R = TypeVar("R")


class Remote(Generic[A]):
    """A Ray actor made of a plain class `A`: `Remote[A](handle).send(A.method, ...)`.

    A reference (ObjectRef) may be sent in place of a value; give that parameter a type that allows both.
    """

    def __init__(self, handle: ActorHandle) -> None:
        self.handle = handle
        """Ray's handle, which may be sent to another process."""

    @overload
    def send(
        self, method: Callable[Concatenate[A, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> ObjectRef[R]: ...

    @overload
    def send(self, method: Callable[Concatenate[A, P], R], *args: P.args, **kwargs: P.kwargs) -> ObjectRef[R]: ...

    def send(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Start a call and return the reference of its result."""
        return getattr(self.handle, method.__name__).remote(*args, **kwargs)

    def send_parts(
        self, count: int, method: Callable[Concatenate[A, P], Any], *args: P.args, **kwargs: P.kwargs
    ) -> Sequence[Any]:
        """Start a call that returns a tuple of `count` values, and return the reference of each."""
        return getattr(self.handle, method.__name__).options(num_returns=count).remote(*args, **kwargs)
