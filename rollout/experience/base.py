"""What an experience store offers to those who sample and those who train.

    explore:  open -> journal ... -> put, or reopen, or drop          train:  lease -> values -> ack

An episode is *outstanding* from open() until it is leased, *in flight* while it is sampled, and *ready* when its value
is there. The rules of admission and selection are arguments, which a store applies atomically.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rollout.experience.episode import Episode, Event, Tags
from rollout.types import PROMPT_VERSION

OverAge = Literal["wait", "mask"]
Opened = Literal["open", "known", "full"]
"""open: the episode has begun. known: it had begun before, here or in another process. full: admission refuses it."""


class StalenessError(AssertionError):
    """Admission and selection together failed to keep the staleness bound (rollout/experience/selection.py)."""


class LesseeError(ValueError):
    """Another trainer has leases of this store."""


class StoreError(RuntimeError):
    """The database of a store does not respond, or has no room. What was stored before stays."""


class ExploreError(RuntimeError):
    """The process that samples has failed."""


class Outstanding(Protocol):
    """The outstanding episodes, as a selection sees them."""

    @property
    def by_version(self) -> Mapping[int, int]:
        """Version at the start -> number of outstanding episodes."""
        ...

    @property
    def ready_by_version(self) -> Mapping[int, int]:
        """The same for those that are ready."""
        ...

    def oldest_ready(self, count: int) -> list[str]:
        """Return the ready episodes of the lowest versions, at most `count`; those of one version as opened."""
        ...

    def first_opened(self, count: int) -> list[tuple[str, bool]]:
        """Return the episodes that were opened first, at most `count`, and whether each is ready."""
        ...

    def oldest_open(self, count: int) -> list[str]:
        """Return the episodes in flight of the lowest versions, at most `count`; those of one version as opened."""
        ...


class Admission(Protocol):
    """Decides whether another episode may be opened."""

    def admits(self, num_outstanding: int, *, next_step: int, version: int) -> bool:
        """Return whether an episode may be sampled from weights of `version` on, while so many are outstanding and the
        next lease is that of `next_step`."""
        ...


class Selection(Protocol):
    """Decides which ready episodes a step trains on."""

    def batch_of(self, step: int) -> int:
        """Return the number of episodes of a step."""
        ...

    def is_ready(self, outstanding: Outstanding, step: int) -> bool:
        """Return whether `choose` can be called. At least batch_of(step) episodes are ready.

        Raises StalenessError when no batch can keep the bound."""
        ...

    def choose(self, outstanding: Outstanding, step: int) -> list[str]:
        """Return the ids of the step's batch, in the order of the batch."""
        ...

    def partial(self, outstanding: Outstanding, step: int) -> tuple[list[str], list[str]]:
        """Return the ids of the ready episodes of the step's batch, and of the episodes in flight that would then be
        too old for every later step."""
        ...


@dataclass(frozen=True, kw_only=True)
class Lease:
    """The episodes of a step, which no other step gets."""

    step: int
    tags: Sequence[Tags]
    """Of the episodes, in the order of the batch."""
    dropped: Sequence[Tags]
    """Of those that were dropped, skipped or late since the lease before."""

    @property
    def ids(self) -> list[str]:
        return [tags.id for tags in self.tags]


@dataclass(frozen=True, kw_only=True)
class Status:
    """Numbers of a store."""

    num_opened: int
    """Since the beginning of the stream of prompts, whatever became of them."""
    next_step: int
    """The step of the next lease."""
    num_outstanding: int
    num_ready: int
    lessee: str
    """Name of the trainer; empty: there has been none."""


@dataclass(frozen=True, kw_only=True)
class Used:
    """An episode that earlier steps have trained on."""

    tags: Tags
    """`uses`: how many steps."""
    last_step: int
    """The last of them."""

    @property
    def version(self) -> int | None:
        """Version that sampled its oldest token to train on. None: there is none."""
        return min((v for v in self.tags.oldest if v != PROMPT_VERSION), default=None)


class Choose(Protocol):
    """Decides what a step replays."""

    def __call__(self, candidates: Sequence[Used]) -> Sequence[str]:
        """Return the ids of the episodes, in the order of the batch. `candidates`: in the order of their leases."""
        ...


class Patience:
    """How long a step waits for its batch of `batch_size` episodes: `seconds` from now on, and `wait_seconds` from
    the moment on in which a share of 1 - `ratio` is ready."""

    def __init__(
        self, batch_size: int, *, seconds: float | None = None, ratio: float = 0.0, wait_seconds: float = 0.0
    ) -> None:
        self._end = math.inf if seconds is None else time.monotonic() + seconds
        self._wait_seconds = wait_seconds
        self._enough = max(1, math.ceil((1.0 - ratio) * batch_size)) if ratio else math.inf

    def left(self, num_ready: int) -> float:
        """Return the seconds until the step trains what is ready, of which there are so many now: 0 from the end on."""
        if num_ready >= self._enough:
            self._end, self._enough = min(self._end, time.monotonic() + self._wait_seconds), math.inf
        return max(0.0, self._end - time.monotonic())


class Experience(Protocol):
    """A store of episodes. Calls that do not wait return when what they did survives the end of this process."""

    def open(self, tags: Tags, admission: Admission) -> Opened:
        """Begin an episode if `admission` allows it; do nothing for one that is open already."""
        ...

    def adopt(self) -> list[Tags]:
        """Take over the episodes in flight whose process has ended; return their tags as they were opened."""
        ...

    def reopen(self, id: str, version: int) -> None:
        """Count an episode as begun at `version`, with an empty journal: its sampling failed and begins again."""
        ...

    def journal(self, id: str, *events: Event) -> None:
        """Record what calls of the workflow have brought, all of it or nothing. No effect on an episode that is not in
        flight."""
        ...

    def events(self, id: str) -> list[Event]:
        """Return the journal of an episode."""
        ...

    def put(self, episode: Episode, drops: Callable[[Tags, int], bool] | None = None) -> None:
        """Store the value of an episode in flight, whose journal ends. `drops(tags, ahead)`: drop it instead; `ahead`
        is the number of episodes opened between the last one that was leased and this one. A repeated call, or one for
        an episode that is not in flight, has no effect."""
        ...

    def drop(self, id: str, *, reason: str = "") -> None:
        """Skip an episode in flight, whose sampling keeps failing: another one takes its place. With a `reason`, it is
        late, and keeps the lengths of what it has sampled. Only runs with a dynamic time limit pass one."""
        ...

    def settle(self, key: str, make: Callable[[], Any]) -> Any:
        """Return the plain value of a key. The first call, in any process or attempt, stores what `make()` returns."""
        ...

    def success(self, task_set: str) -> Mapping[str, tuple[int, float]]:
        """Return for each row of a task set how many of its episodes are finished, and their mean reward."""
        ...

    def fail(self, error: Exception) -> None:
        """Raise `error`, in other processes an ExploreError with its text, from every lease() that waits or comes."""
        ...

    def in_flight(self) -> list[Tags]:
        """Return the tags of the episodes in flight, of all processes, as opened."""
        ...

    def enroll(self, lessee: str) -> None:
        """Become the one trainer of the store. Raises LesseeError where another one has leases."""
        ...

    async def lease(self, selection: Selection, step: int, lessee: str, *, patience: Patience | None = None) -> Lease:
        """Wait until the batch of `step` can be chosen, and lease it to the trainer named `lessee`. Steps increase by
        one; a repeated call returns the same lease. Where `patience` ends, lease what is ready of it, at least one
        episode. Only runs with such a limit pass it: a store without the parameter serves all others.

        Raises StalenessError when no batch can keep the bound, LesseeError where another trainer has leases, ValueError
        for another step than the next, and as fail()."""
        ...

    def replay(self, step: int, choose: Choose) -> list[Tags]:
        """Let a step that is leased train again on what `choose` returns of the episodes of earlier steps that have
        values; return their tags. A repeated call for a step returns the same. Only runs that replay call it."""
        ...

    def values(self, ids: Sequence[str]) -> list[Episode]:
        """Return episodes in the order of `ids`. Raises KeyError for one that has no value, or none any more."""
        ...

    def ack(self, lease: Lease) -> None:
        """Count the episodes of a lease as trained. A repeated call has no effect."""
        ...

    def prune(self, keep_steps: int) -> int:
        """Drop the values of trained episodes, but those of the last `keep_steps` steps; return their number."""
        ...

    def tags(self) -> list[Tags]:
        """Return the tags of every episode that the store still has, as opened. A store that outlives its processes
        keeps those that are over, too."""
        ...

    def status(self) -> Status: ...

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and arrays that load_state_dict() continues from: leases that are not acknowledged are
        ready again then."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. Raises SchemaError where another release took it."""
        ...

    def resample(self, step: int) -> None:
        """Sample every episode that steps from `step` on are to train again, from its beginning, ready or leased by a
        trainer that is gone. What they brought no longer counts in success()."""
        ...

    def begin_at(self, step: int, *, num_opened: int) -> None:
        """Begin at `step` with no episode, as if so many had been opened."""
        ...

    def close(self) -> None: ...
