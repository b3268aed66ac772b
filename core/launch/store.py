"""The object store, for arrays that are worth an object of their own.

An object costs about a millisecond of processor time, in the processes that write, read and free it, whatever its size.
Small arrays travel inside the message instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import ray

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
