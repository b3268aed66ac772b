"""What can go wrong with a call to the double: each fault is used up by one call of its path."""

import asyncio
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(eq=False)
class Hold:
    """A call that is late: on its way to the server, or with its answer on the way back."""

    where: Literal["call", "answer"]
    _reached: threading.Event = field(default_factory=threading.Event)
    _released: threading.Event = field(default_factory=threading.Event)

    async def reached(self) -> None:
        """Return when the call is being held."""
        await asyncio.to_thread(self._reached.wait)

    def release(self) -> None:
        """Let it go on. Safe to call twice."""
        self._released.set()

    async def here(self) -> None:
        """In the server: wait for release()."""
        self._reached.set()
        while not self._released.is_set():
            await asyncio.sleep(0.001)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """An answer in place of the effect."""

    status: int
    answer: dict[str, Any]


@dataclass(frozen=True)
class Drop:
    """The connection is closed without an answer."""


Fault = Hold | Refusal | Drop


class Faults:
    """By path, first in, first used."""

    def __init__(self) -> None:
        self._by_path: dict[str, list[Fault]] = defaultdict(list)

    def refuse(self, path: str, message: str, *, status: int = 400, times: int = 1) -> None:
        """Answer {"success": false} with this status: SGLang does so with 200 as well as with 400."""
        answer = {"success": False, "message": message}
        self._by_path[path] += [Refusal(status=status, answer=answer)] * times

    def drop(self, path: str) -> None:
        self._by_path[path].append(Drop())

    def hold_call(self, path: str) -> Hold:
        """The call is under way, and has no effect until it is released."""
        return self._hold(path, Hold("call"))

    def hold_answer(self, path: str) -> Hold:
        """The call has its effect, and its answer is late."""
        return self._hold(path, Hold("answer"))

    def _hold(self, path: str, hold: Hold) -> Hold:
        self._by_path[path].append(hold)
        return hold

    def next(self, path: str) -> Fault | None:
        waiting = self._by_path[path]
        return waiting.pop(0) if waiting else None
