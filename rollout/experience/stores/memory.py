"""Episodes in the memory of one process, from their start until their lease is acknowledged.

Invariant: an episode is outstanding, leased, or gone; `_by_version` and `_ready_by_version` count the outstanding ones.
A state holds everything that is not acknowledged, so a run that continues from it trains each episode once.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from rollout.experience.base import (
    Admission,
    Choose,
    Lease,
    LesseeError,
    Opened,
    Patience,
    Selection,
    Status,
    Used,
)  # fmt: skip
from rollout.experience.episode import Episode, Event, Tags, mean_reward, sampled_lengths
from rollout.experience.serial import (
    SCHEMA,
    check_schema,
    episode_from_plain,
    episode_to_plain,
    event_from_plain,
    event_to_plain,
)


class MemoryExperience:
    """The store of a run that samples and trains under one driver. Its state is part of recover checkpoints."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self._lessee = ""
        self._clear(0, 0)

    def _clear(self, next_step: int, num_opened: int) -> None:
        self._next_step, self._num_opened = next_step, num_opened
        self._behind_leased = num_opened  # number of the episode after the last one that was leased
        self._numbers: dict[str, int] = {}  # id -> how many were opened before it; of outstanding and leased episodes
        self._in_flight: dict[str, Tags] = {}
        self._left: set[str] = set()  # those of an earlier process that nobody has adopted
        self._ready: dict[str, Episode] = {}
        self._leased: dict[str, Episode] = {}
        self._leases: dict[int, Lease] = {}  # by step, not acknowledged
        self._kept: dict[str, Episode] = {}  # trained ones, until prune()
        self._replays: dict[int, list[str]] = {}  # by step
        self._dropped: list[Tags] = []  # since the last lease
        self._journals: dict[str, dict[str, Event]] = {}
        self._settled: dict[str, Any] = {}
        self._success: dict[str, dict[str, tuple[int, float]]] = {}  # number of finished episodes, sum of their rewards
        self._by_version: Counter[int] = Counter()
        self._ready_by_version: Counter[int] = Counter()

    def open(self, tags: Tags, admission: Admission) -> Opened:
        if tags.id in self._numbers:
            return "known"
        if not admission.admits(self._num_outstanding, next_step=self._next_step, version=tags.version):
            return "full"
        self._add(tags, self._num_opened)
        self._num_opened += 1
        return "open"

    def adopt(self) -> list[Tags]:
        left, self._left = self._left, set()
        return [tags for tags in self.in_flight() if tags.id in left]

    def _add(self, tags: Tags, number: int) -> None:
        self._numbers[tags.id] = number
        self._in_flight[tags.id] = tags
        self._journals[tags.id] = {}
        self._by_version[tags.version] += 1

    @property
    def _num_outstanding(self) -> int:
        return len(self._in_flight) + len(self._ready)

    def reopen(self, id: str, version: int) -> None:
        if (tags := self._in_flight.get(id)) is None:
            return
        _decrease(self._by_version, tags.version)
        self._by_version[version] += 1
        self._in_flight[id] = replace(tags, version=version)
        self._journals[id] = {}
        self._changed.set()

    def journal(self, id: str, *events: Event) -> None:
        if id in self._journals:
            self._journals[id] |= {event.key: event for event in events}

    def events(self, id: str) -> list[Event]:
        return list(self._journals.get(id, {}).values())

    def put(self, episode: Episode, drops: Callable[[Tags, int], bool] | None = None) -> None:
        tags = episode.tags
        if tags.id not in self._in_flight:
            return
        self._count(tags)
        if drops is not None and drops(tags, self._numbers[tags.id] - self._behind_leased):
            self._end(tags.id, replace(tags, fate="dropped"))
            return
        version = self._in_flight.pop(tags.id).version
        del self._journals[tags.id]
        self._ready[tags.id] = replace(episode, tags=replace(tags, version=version, fate="ready", uses=0, step=None))
        self._ready_by_version[version] += 1
        self._changed.set()

    def _count(self, tags: Tags, times: int = 1) -> None:
        rows = self._success.setdefault(tags.task_set, {})
        count, total = rows.get(tags.row, (0, 0.0))
        rows[tags.row] = count + times, total + times * mean_reward(tags)

    def settle(self, key: str, make: Callable[[], Any]) -> Any:
        if key not in self._settled:
            self._settled[key] = make()
        return self._settled[key]

    def success(self, task_set: str) -> Mapping[str, tuple[int, float]]:
        rows = self._success.get(task_set, {})
        return {row: (count, total / count) for row, (count, total) in rows.items() if count}

    def drop(self, id: str, *, reason: str = "") -> None:
        if id in self._in_flight:
            self._end(id, self._late(id, reason) if reason else replace(self._in_flight[id], fate="skipped"))

    def _late(self, id: str, reason: str = "") -> Tags:
        return replace(self._in_flight[id], fate="late", reason=reason, lengths=sampled_lengths(self.events(id)))

    def _end(self, id: str, tags: Tags) -> None:
        _decrease(self._by_version, self._in_flight.pop(id).version)
        del self._numbers[id], self._journals[id]
        self._dropped.append(tags)
        self._changed.set()

    def fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._changed.set()

    def in_flight(self) -> list[Tags]:
        return sorted(self._in_flight.values(), key=lambda tags: self._numbers[tags.id])

    @property
    def by_version(self) -> Mapping[int, int]:
        return self._by_version

    @property
    def ready_by_version(self) -> Mapping[int, int]:
        return self._ready_by_version

    def oldest_ready(self, count: int) -> list[str]:
        return sorted(self._ready, key=lambda id: (self._ready[id].tags.version, self._numbers[id]))[:count]

    def first_opened(self, count: int) -> list[tuple[str, bool]]:
        first = sorted([*self._in_flight, *self._ready], key=self._numbers.__getitem__)[:count]
        return [(id, id in self._ready) for id in first]

    def oldest_open(self, count: int) -> list[str]:
        return sorted(self._in_flight, key=lambda id: (self._in_flight[id].version, self._numbers[id]))[:count]

    def enroll(self, lessee: str) -> None:
        if self._lessee and lessee != self._lessee:
            raise LesseeError(f"{lessee!r} cannot lease: {self._lessee!r} trains on the episodes of this store")
        self._lessee = lessee

    async def lease(self, selection: Selection, step: int, lessee: str, *, patience: Patience | None = None) -> Lease:
        self.enroll(lessee)
        if step in self._leases:
            return self._leases[step]
        if step != self._next_step:
            raise ValueError(f"lease({step}): the next step is {self._next_step}")
        while self._error is None:
            if len(self._ready) >= selection.batch_of(step) and selection.is_ready(self, step):
                return self._lease(selection.choose(self, step), step)
            left = math.inf if patience is None else patience.left(len(self._ready))
            if not left and (lease := self._lease_part(selection, step)):
                return lease
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left if 0 < left < math.inf else None)
        raise self._error

    def _lease_part(self, selection: Selection, step: int) -> Lease | None:
        ids, late = selection.partial(self, step)
        for id in late:
            self._end(id, self._late(id))
        return self._lease(ids, step) if ids else None

    def _lease(self, ids: Sequence[str], step: int) -> Lease:
        for id in ids:
            episode = self._ready.pop(id)
            self._leased[id] = replace(episode, tags=replace(episode.tags, fate="leased", uses=1, step=step))
            _decrease(self._by_version, episode.tags.version)
            _decrease(self._ready_by_version, episode.tags.version)
            self._behind_leased = max(self._behind_leased, self._numbers[id] + 1)
        self._next_step = step + 1
        dropped, self._dropped = self._dropped, []
        self._leases[step] = Lease(step=step, tags=[self._leased[id].tags for id in ids], dropped=dropped)
        return self._leases[step]

    def replay(self, step: int, choose: Choose) -> list[Tags]:
        candidates = {one.tags.id: one for one in self._used_before(step)}
        if step not in self._replays:
            self._replays[step] = [*choose([*candidates.values()])]
        used = [candidates[id].tags for id in self._replays[step]]
        return [replace(tags, uses=tags.uses + 1) for tags in used]

    def _used_before(self, step: int) -> list[Used]:
        """Return the episodes of earlier steps that have values, with the uses of those steps."""
        leased = [e.tags for e in (*self._kept.values(), *self._leased.values())]
        steps = {tags.id: [tags.due] for tags in leased if tags.due < step}
        for of, ids in self._replays.items():
            for id in ids if of < step else ():
                steps[id].append(of)
        return [
            Used(tags=replace(tags, uses=len(steps[tags.id])), last_step=max(steps[tags.id]))
            for tags in leased
            if tags.id in steps
        ]

    def values(self, ids: Sequence[str]) -> list[Episode]:
        return [self._leased.get(id) or self._ready.get(id) or self._kept[id] for id in ids]

    def ack(self, lease: Lease) -> None:
        if self._leases.pop(lease.step, None) is not None:
            for id in lease.ids:
                episode = self._leased.pop(id)
                self._kept[id] = replace(episode, tags=replace(episode.tags, fate="trained"))
                del self._numbers[id]

    def prune(self, keep_steps: int) -> int:
        last = max((episode.tags.due for episode in self._kept.values()), default=0)
        kept = {id: episode for id, episode in self._kept.items() if episode.tags.due > last - keep_steps}
        dropped, self._kept = self._kept.keys() - kept.keys(), kept
        self._replays = {step: [id for id in ids if id not in dropped] for step, ids in self._replays.items()}
        return len(dropped)

    def tags(self) -> list[Tags]:
        held = [e.tags for e in (*self._ready.values(), *self._leased.values())]
        outstanding = sorted([*self._in_flight.values(), *held], key=lambda tags: self._numbers[tags.id])
        return [*(episode.tags for episode in self._kept.values()), *outstanding]

    def status(self) -> Status:
        return Status(
            num_opened=self._num_opened, next_step=self._next_step, num_outstanding=self._num_outstanding,
            num_ready=len(self._ready), lessee=self._lessee,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        leases = list(self._leases.values())
        next_step = leases[0].step if leases else self._next_step
        ready = [*self._leased.values(), *self._ready.values()]
        return {
            "schema": SCHEMA,
            "next_step": next_step,
            "num_opened": self._num_opened,
            "behind_leased": min([self._behind_leased, *(self._numbers[id] for id in self._leased)]),
            "ready": [(self._numbers[e.tags.id], episode_to_plain(e)) for e in ready],
            "kept": [episode_to_plain(e) for e in self._kept.values()],
            "replays": [(step, list(ids)) for step, ids in self._replays.items() if step < next_step],
            "in_flight": [
                (self._numbers[tags.id], asdict(tags), [event_to_plain(e) for e in self.events(tags.id)])
                for tags in self.in_flight()
            ],
            "settled": dict(self._settled),
            "success": {
                name: {row: list(found) for row, found in rows.items()} for name, rows in self._success.items()
            },
            "dropped": [asdict(tags) for tags in [*(t for lease in leases for t in lease.dropped), *self._dropped]],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_schema(state.get("schema"))
        self._clear(state["next_step"], state["num_opened"])
        self._behind_leased = state["behind_leased"]
        for number, tags, events in state["in_flight"]:
            self._add(Tags(**tags), number)
            self.journal(tags["id"], *map(event_from_plain, events))
        for number, plain in state["ready"]:
            episode = episode_from_plain(plain)
            self._add(episode.tags, number)
            self.put(episode)
        self._kept = {episode.tags.id: episode for episode in map(episode_from_plain, state.get("kept", ()))}
        self._replays = {step: list(ids) for step, ids in state.get("replays", ())}
        self._dropped = [Tags(**tags) for tags in state["dropped"]]
        self._left = set(self._in_flight)
        self._settled = dict(state.get("settled", {}))
        self._success = {
            name: {row: (int(count), float(total)) for row, (count, total) in rows.items()}
            for name, rows in state.get("success", {}).items()
        }

    def resample(self, step: int) -> None:
        for id, episode in self._ready.items():
            self._count(episode.tags, -1)
            self._in_flight[id] = replace(episode.tags, fate="open")
        self._ready, self._ready_by_version = {}, Counter()
        self._journals = {id: {} for id in self._in_flight}
        self._left = set(self._in_flight)

    def begin_at(self, step: int, *, num_opened: int) -> None:
        self._clear(step, num_opened)

    def close(self) -> None: ...


def _decrease(counter: Counter[int], key: int) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
