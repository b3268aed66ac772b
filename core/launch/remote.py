"""Typed calls of Ray actors: a call names a method of the actor's class, so that a type checker sees its arguments."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

if TYPE_CHECKING:
    from ray import ObjectRef

A = TypeVar("A")
P = ParamSpec("P")
R = TypeVar("R")


class Remote(Generic[A]):
    """A Ray actor made of a plain class `A`: `Remote[A](handle).send(A.method, ...)`.

    A reference (ObjectRef) may be sent in place of a value; give that parameter a type that allows both.
    """

    def __init__(self, handle: Any) -> None:
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
