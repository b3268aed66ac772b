"""Memory limits of a run: limits that were lowered when it ran out, for the rest of the run.

A pass that does not fit is cut into more microbatches: the same sequences, the same sums. Invariant: a limit never
grows, and what is here is what a recover checkpoint and the next attempt get. Where a sequence is longer than a lowered
limit, its batch gets as much as the sequence needs, up to what is configured (mcore_adapter/engine.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

from allocation import GPU
from core.errors import LaunchError
from mcore_adapter.data.planner import PassLimits
from mcore_adapter.memory.out_of_memory import StepOutOfMemory
from rollout.inference.backend import BackendSettings, MemoryFlag

logger = logging.getLogger(__name__)

T = TypeVar("T")

_WORDS = ("out of memory", "can't allocate memory", "not enough memory", "memoryerror", "outofmemory")
_LESS_MEM_FRACTION, _LEAST_MEM_FRACTION = 0.1, 0.3


def reports_out_of_memory(message: str) -> bool:
    """Return whether an error or log line reports that memory ran out."""
    return any(word in message.lower() for word in _WORDS)


class MemoryLimits:
    """Limits by name: the roles of the trainer in tokens (`actor_train`), and the generators' settings."""

    def __init__(
        self, learnt: Mapping[str, float] = {}, *, on_lowered: Callable[[dict[str, float]], None] = lambda _: None
    ):
        """`learnt`: limits of an earlier attempt. `on_lowered` gets all limits whenever one was lowered."""
        self._learnt = dict(learnt)
        self._on_lowered = on_lowered

    def state_dict(self) -> dict[str, float]:
        return dict(self._learnt)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Take the lower of each limit here and in `state`."""
        for name, value in state.items():
            self._learnt[name] = min(value, self._learnt.get(name, value))

    def tokens(self, role: str, configured: int) -> int:
        """Return max_tokens_per_mb of a role."""
        return int(min(configured, self._learnt.get(role, configured)))

    def limits(self, role: str, configured: int) -> PassLimits:
        """Return the limits of a pass of a role."""
        return PassLimits(self.tokens(role, configured), max_sequence_tokens=configured)

    def fitting(self, role: str, configured: int, call: Callable[[PassLimits], T]) -> T:
        """Run `call(limits)`, again with half of the tokens whenever memory ran out without changing anything.

        Raises LaunchError when the call cannot be repeated in these processes, or not even one sequence fits."""
        while True:
            limits = self.limits(role, configured)
            try:
                return call(limits)
            except StepOutOfMemory as e:
                self._halve(role, limits.max_tokens_per_mb, e)
                if not e.repeatable:
                    raise LaunchError(
                        f"{e}; {role} continues with {self.tokens(role, configured)} tokens per microbatch"
                    ) from e

    def fit_generator(self, settings: BackendSettings, flag: MemoryFlag | None) -> BackendSettings:
        """Return the generators' settings, lowered as far as was necessary. `flag`: the backend's share of GPU
        memory."""
        running = int(self._learnt.get("max_running", settings.max_running))
        flags = dict(settings.flags)
        if flag is not None and flag.name in self._learnt:
            flags[flag.name] = self._learnt[flag.name]
        return settings.lowered(max_running=running, flags=flags)

    def lower_generator(self, settings: BackendSettings, flag: MemoryFlag | None) -> None:
        """Halve the sequences of a generator that ran out of memory; on a GPU also reduce its share of the memory."""
        fitted = self.fit_generator(settings, flag)
        lowered: dict[str, float] = {"max_running": max(1, fitted.max_running // 2)}
        if flag is not None and fitted.device == GPU:
            given = fitted.flags.get(flag.name)
            fraction = float(given) if isinstance(given, int | float | str) and given else flag.default
            lowered[flag.name] = round(max(_LEAST_MEM_FRACTION, fraction - _LESS_MEM_FRACTION), 3)
        self._lower(lowered, "a generator ran out of memory")

    def _halve(self, role: str, limit: int, error: StepOutOfMemory) -> None:
        lowered = max(error.longest, min(limit, error.largest) // 2)
        if lowered >= error.largest:
            raise LaunchError(
                f"{error}; its largest microbatch cannot be smaller: it holds {error.largest} tokens, the "
                f"longest sequence {error.longest}. Use more tensor or pipeline parallelism (allocation_mode), "
                "or shorter sequences"
            ) from error
        self._lower({role: lowered}, str(error))

    def _lower(self, lowered: Mapping[str, float], why: str) -> None:
        for name, value in lowered.items():
            logger.warning("%s: for the rest of the run %s is %.10g", why, name, value)
        self._learnt |= lowered
        self._on_lowered(self.state_dict())
