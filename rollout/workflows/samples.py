"""The samples of a group, which run at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

T = TypeVar("T")


async def all_of(samples: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results of all samples, in order. One that fails cancels the others and raises its error."""
    running = [asyncio.ensure_future(sample) for sample in samples]
    try:
        return await asyncio.gather(*running)
    finally:
        for sample in running:
            sample.cancel()
