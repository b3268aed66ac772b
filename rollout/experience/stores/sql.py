"""Episodes in a SQL database, for processes that share nothing else: one schema and one set of statements.

Every call is one transaction, so a process that is killed between any two statements leaves the store as before or as
after the call. A lease belongs to a process: its lock ends with it, whatever ends it, and leases that were not
acknowledged are ready again for the next trainer. sqlite.py and postgres.py connect, lock and begin transactions.

    meta           next_step, num_opened, lessee, error, what curricula have settled; values are JSON
    episodes       the tags of every episode
    trajectories   the value of episodes that are ready, leased or kept: SQLite writes a row anew when its fate changes
    journals       the events of episodes in flight
    replays        further steps that train on an episode
    success        view: finished episodes and mean reward of each prompt
"""

import asyncio
import json
import math
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, ClassVar, Protocol

from rollout.experience.base import (
    Admission,
    Choose,
    ExploreError,
    Lease,
    LesseeError,
    Opened,
    Patience,
    Selection,
    Status,
    StoreError,
    Used,
)  # fmt: skip
from rollout.experience.episode import Episode, Event, Fate, Tags, mean_reward, sampled_lengths
from rollout.experience.serial import (
    SCHEMA,
    SchemaError,
    check_schema,
    dumps,
    event_from_plain,
    event_to_plain,
    loads,
    records_from_plain,
    records_to_plain,
)
from rollout.types import Completion, Trajectory

_TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT);
CREATE TABLE IF NOT EXISTS episodes (
    number INTEGER PRIMARY KEY,  -- how many were opened before it
    id TEXT NOT NULL UNIQUE,
    task_set TEXT NOT NULL,
    prompt TEXT NOT NULL,
    fate TEXT NOT NULL,
    version INTEGER NOT NULL,
    explorer TEXT NOT NULL,      -- the process that samples it, or has sampled it
    step INTEGER,                -- of its lease, or of the first lease after it was dropped
    place INTEGER,               -- in the batch of its lease
    reward DOUBLE PRECISION,     -- mean of its completions, NULL until it is finished
    tags TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS trajectories (number INTEGER PRIMARY KEY, value {blob} NOT NULL);
CREATE INDEX IF NOT EXISTS finished ON episodes (task_set, prompt, reward) WHERE reward IS NOT NULL;
CREATE {view} success AS
    SELECT task_set, prompt, count(*) AS episodes, avg(reward) AS reward FROM episodes
    WHERE reward IS NOT NULL GROUP BY task_set, prompt;
CREATE INDEX IF NOT EXISTS outstanding ON episodes (version, number, fate) WHERE fate IN ('open', 'ready');
CREATE INDEX IF NOT EXISTS opened ON episodes (number, fate) WHERE fate IN ('open', 'ready');
CREATE INDEX IF NOT EXISTS gone ON episodes (step, number) WHERE fate IN ('dropped', 'skipped', 'late');
CREATE INDEX IF NOT EXISTS leased ON episodes (step, place) WHERE fate = 'leased';
CREATE TABLE IF NOT EXISTS replays (step INTEGER, place INTEGER, id TEXT NOT NULL, PRIMARY KEY (step, place));
CREATE INDEX IF NOT EXISTS replayed ON replays (id, step);
CREATE TABLE IF NOT EXISTS journals (id TEXT, key TEXT, event {blob} NOT NULL, PRIMARY KEY (id, key));
"""
_GONE = "fate IN ('dropped', 'skipped', 'late')"
_LAYOUT = 3
"""Version of the tables."""
_OUTSTANDING = "fate IN ('open', 'ready')"
_OPEN = f"{_OUTSTANDING} AND fate = 'open'"
"""The partial indices serve a query that has their own condition."""
_KEPT = "fate = 'trained' AND number IN (SELECT number FROM trajectories)"
_OF_REPLAYS = "(SELECT {} FROM replays WHERE replays.id = episodes.id)"
_USED = f"tags, fate, version, step, {_OF_REPLAYS.format('count(*)')}, {_OF_REPLAYS.format('max(step)')}"
_VALUE = "SELECT value FROM trajectories JOIN episodes USING (number) WHERE id = ?"
_HELD_SECONDS = 1.0
"""In which a finished episode takes its sampled answers along, before they are written to its journal."""
_LOOK_EVERY_SECONDS = 0.02
"""For what another process has put, while a lease waits."""
_INSERT_META = "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key)"
_IF_NEW = f"{_INSERT_META} DO NOTHING"
_JOURNAL = """INSERT INTO journals SELECT ?, ?, ? WHERE EXISTS (SELECT 1 FROM episodes WHERE id = ? AND fate = 'open')
ON CONFLICT (id, key) DO UPDATE SET event = excluded.event"""


def check_versions(name: str, *, layout: object, schema: object) -> None:
    """Raise SchemaError for a store that this release cannot continue. `layout`: version of its tables; `schema`: of
    the serial form of its values."""
    if layout != _LAYOUT:
        raise SchemaError(
            f"{name} has tables of version {layout or 1}, this release has version {_LAYOUT}: continue with the "
            "release that made it, or export its episodes there and import them into another store"
        )
    check_schema(schema)


class Rows(Protocol):
    """Result of a statement."""

    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...
    def __iter__(self) -> Iterator[Any]: ...


class SQLExperience(ABC):
    """A store in a database, which the first process makes. Each process opens it for itself.

    `lease` polls while it waits. Raises SchemaError for the tables of another release, and StoreError where the
    database does not respond."""

    BLOB: ClassVar[str]
    VIEW: ClassVar[str]
    """How a view is made that may exist."""
    BEGIN: Sequence[str]
    """Statements that begin a transaction which waits for that of another process."""

    def __init__(self, name: str) -> None:
        """`name`: of the database in messages."""
        self._name = name
        self._is_lessee = False
        self._settled = False  # what the trainer before this one has leased
        self._explorer = ""  # before the first open() or adopt()
        self._held: dict[str, dict[str, tuple[Event, float]]] = {}  # events by episode and key, and since when
        self._timer: asyncio.TimerHandle | None = None
        with self._transaction():
            self._check_layout()
            for statement in _TABLES.format(blob=self.BLOB, view=self.VIEW).split(";")[:-1]:
                self._execute(statement)
            for key, value in (("schema", SCHEMA), ("layout", _LAYOUT), ("next_step", 0), ("num_opened", 0)):
                self._execute(_IF_NEW, (key, json.dumps(value)))

    @abstractmethod
    def _run(self, statement: str, values: Sequence[Any]) -> Rows:
        """Run a statement with `?` for each value. Raises what the driver raises."""

    @abstractmethod
    def _failure(self, error: Exception) -> str | None:
        """Return what to do about an error of the driver; None for an error of another kind."""

    @abstractmethod
    def _lock(self, name: str) -> bool:
        """Take the lock of this name until the process ends; return whether no other process has it."""

    @abstractmethod
    def _is_locked(self, name: str) -> bool:
        """Return whether another process has the lock of this name."""

    @abstractmethod
    def _changes(self) -> object:
        """Return what differs after any change of the store, by another connection or this one."""

    @abstractmethod
    def _has_tables(self) -> bool:
        """Return whether the tables are there."""

    def _execute(self, statement: str, values: Sequence[Any] = ()) -> Rows:
        try:
            return self._run(statement, values)
        except Exception as error:
            if (way_out := self._failure(error)) is None:
                raise
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise StoreError(f"experience.path={self._name}: {reason}; {way_out}") from error

    def _execute_many(self, statement: str, rows: Iterable[Sequence[Any]]) -> None:
        for values in rows:
            self._execute(statement, values)

    def _check_layout(self) -> None:
        """Raise SchemaError for tables that another release has made."""
        if self._has_tables():
            check_versions(self._name, layout=self._meta("layout"), schema=self._meta("schema"))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        for statement in self.BEGIN:
            self._execute(statement)
        try:
            yield
            self._execute("COMMIT")
        except BaseException:
            with suppress(StoreError):  # the connection may have ended
                self._execute("ROLLBACK")
            raise

    def _meta(self, key: str) -> Any:
        found = self._execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if found is None else json.loads(found[0])

    def _set_meta(self, key: str, value: object) -> None:
        self._execute(f"{_INSERT_META} DO UPDATE SET value = excluded.value", (key, json.dumps(value)))

    def _count(self, where: str) -> int:
        (count,) = self._execute(f"SELECT count(*) FROM episodes WHERE {where}").fetchone()
        return int(count)

    def open(self, tags: Tags, admission: Admission) -> Opened:
        explorer = self._become_explorer()
        with self._transaction():
            if self._execute("SELECT 1 FROM episodes WHERE id = ?", (tags.id,)).fetchone():
                return "known"
            next_step, num_opened = self._meta("next_step"), self._meta("num_opened")
            if not admission.admits(self._count(_OUTSTANDING), next_step=next_step, version=tags.version):
                return "full"
            self._execute(
                "INSERT INTO episodes (number, id, task_set, prompt, fate, version, explorer, tags) "
                "VALUES (?, ?, ?, ?, 'open', ?, ?, ?)",
                (num_opened, tags.id, tags.task_set, tags.row, tags.version, explorer, _tags_to_text(tags)),
            )
            self._set_meta("num_opened", num_opened + 1)
        return "open"

    def adopt(self) -> list[Tags]:
        own = self._become_explorer()
        with self._transaction():
            found = self._execute(f"SELECT DISTINCT explorer FROM episodes WHERE {_OPEN}").fetchall()
            dead = [name for (name,) in found if name != own and not (name and self._is_locked(name))]
            if not dead:
                return []
            marks = ", ".join("?" * len(dead))
            where = f"{_OPEN} AND explorer IN ({marks})"
            left = self._tags(f"{where} ORDER BY number", dead)
            self._execute(f"UPDATE episodes SET explorer = ? WHERE {where}", (own, *dead))
        return left

    def _become_explorer(self) -> str:
        """Return the name of this process among those that sample. It holds the lock of that name."""
        if not self._explorer:
            name = uuid.uuid4().hex
            assert self._lock(name), "the name is new"
            self._explorer = name
            with self._transaction():  # leases wait again: a process that failed has been started anew
                self._execute("DELETE FROM meta WHERE key = 'error'")
        return self._explorer

    def reopen(self, id: str, version: int) -> None:
        self._held.pop(id, None)
        with self._transaction():
            self._execute("UPDATE episodes SET version = ? WHERE id = ? AND fate = 'open'", (version, id))
            self._execute("DELETE FROM journals WHERE id = ?", (id,))

    def journal(self, id: str, *events: Event) -> None:
        """Record events. In an event loop, sampled tokens are written after a second or two, together, or with the
        next result of a tool: a process that is killed before that samples them again. An episode that ends first
        needs no write."""
        loop = _running_loop()
        if loop is None or not all(isinstance(event.value, Completion) for event in events):
            self._write_held(also=[(id, event) for event in events])
            return
        self._held.setdefault(id, {}).update({event.key: (event, loop.time()) for event in events})
        self._timer = self._timer or loop.call_later(_HELD_SECONDS, self._write_in_time)

    def _write_held(self, until: float = math.inf, *, also: Sequence[tuple[str, Event]] = ()) -> None:
        """Write what is held since `until`, in seconds of the event loop, and further events of episodes."""
        due = [(id, event) for id, held in self._held.items() for event, since in held.values() if since <= until]
        if due or also:
            with self._transaction():
                for id, event in (*due, *also):
                    self._execute(_JOURNAL, (id, event.key, dumps(event_to_plain(event)), id))
            for id, event in due:
                del self._held[id][event.key]
            self._held = {id: held for id, held in self._held.items() if held}

    def _write_in_time(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(StoreError):  # what needs the database next raises it
            self._write_held(loop.time() - _HELD_SECONDS)
        self._timer = loop.call_later(_HELD_SECONDS, self._write_in_time) if self._held else None

    def _write_rest(self) -> None:
        with suppress(StoreError):
            self._write_held()

    def _is_in_flight(self, id: str) -> bool:
        return self._execute("SELECT 1 FROM episodes WHERE id = ? AND fate = 'open'", (id,)).fetchone() is not None

    def events(self, id: str) -> list[Event]:
        rows = self._execute("SELECT event FROM journals WHERE id = ?", (id,))
        written = [event_from_plain(loads(data)) for (data,) in rows]
        held = [event for event, _ in self._held.get(id, {}).values()]
        by_key = {event.key: event for event in written + held}
        return [by_key[key] for key in sorted(by_key)]

    def put(self, episode: Episode, drops: Callable[[Tags, int], bool] | None = None) -> None:
        tags = episode.tags
        self._held.pop(tags.id, None)
        value = dumps(records_to_plain(episode.trajectories))
        with self._transaction():
            if not self._is_in_flight(tags.id):
                return
            dropped = drops is not None and drops(tags, self._ahead(tags.id))
            self._execute(
                "UPDATE episodes SET fate = ?, reward = ?, tags = ? WHERE id = ?",
                ("dropped" if dropped else "ready", mean_reward(tags), _tags_to_text(tags), tags.id),
            )
            if not dropped:
                self._execute("INSERT INTO trajectories SELECT number, ? FROM episodes WHERE id = ?", (value, tags.id))
            self._execute("DELETE FROM journals WHERE id = ?", (tags.id,))

    def _ahead(self, id: str) -> int:
        """Return the number of episodes between the last one that was leased and this one."""
        (number,) = self._execute("SELECT number FROM episodes WHERE id = ?", (id,)).fetchone()
        return int(number - (self._meta("behind_leased") or 0))

    def drop(self, id: str, *, reason: str = "") -> None:
        with self._transaction():
            if not reason:
                self._end(id, "skipped")
            elif self._is_in_flight(id):
                self._end_late(id, reason)

    def _end_late(self, id: str, reason: str = "") -> None:
        (tags,) = self._tags("id = ?", (id,))
        known = replace(tags, reason=reason, lengths=sampled_lengths(self.events(id)))
        self._execute("UPDATE episodes SET tags = ? WHERE id = ?", (_tags_to_text(known), id))
        self._end(id, "late")

    def _end(self, id: str, fate: Fate) -> None:
        self._execute("UPDATE episodes SET fate = ? WHERE id = ? AND fate = 'open'", (fate, id))
        self._execute("DELETE FROM journals WHERE id = ?", (id,))

    def settle(self, key: str, make: Callable[[], Any]) -> Any:
        if (found := self._meta(f"settled {key}")) is None:
            made = json.dumps(make())
            with self._transaction():
                self._execute(_IF_NEW, (f"settled {key}", made))
            found = self._meta(f"settled {key}")
        return found

    def success(self, task_set: str) -> Mapping[str, tuple[int, float]]:
        rows = self._execute("SELECT prompt, episodes, reward FROM success WHERE task_set = ?", (task_set,))
        return {row: (count, mean) for row, count, mean in rows}

    def fail(self, error: Exception) -> None:
        with self._transaction():
            if self._meta("error") is None:
                self._set_meta("error", f"{type(error).__name__}: {error}")

    def in_flight(self) -> list[Tags]:
        return self._tags(f"{_OPEN} ORDER BY number")

    def _tags(self, where: str, values: Sequence[str | int] = ()) -> list[Tags]:
        return [used.tags for used in self._used(where, values)]

    def _used(self, where: str, values: Sequence[str | int] = ()) -> list[Used]:
        """Return the tags of episodes, with their uses, and the last steps that train on them."""
        rows = self._execute(f"SELECT {_USED} FROM episodes WHERE {where}", values).fetchall()
        found = []
        for text, fate, version, step, replays, last in rows:
            uses = replays + (fate in ("leased", "trained"))
            tags = replace(Tags(**json.loads(text)), fate=fate, version=version, step=step, uses=uses)
            found.append(Used(tags=tags, last_step=max(step or 0, last or 0)))
        return found

    @property
    def by_version(self) -> Mapping[int, int]:
        return self._by_version(_OUTSTANDING)

    @property
    def ready_by_version(self) -> Mapping[int, int]:
        return self._by_version(f"{_OUTSTANDING} AND fate = 'ready'")

    def _by_version(self, where: str) -> Mapping[int, int]:
        return dict(self._execute(f"SELECT version, count(*) FROM episodes WHERE {where} GROUP BY version"))

    def oldest_ready(self, count: int) -> list[str]:
        where = f"{_OUTSTANDING} AND fate = 'ready' ORDER BY version, number LIMIT ?"
        return [id for (id,) in self._execute(f"SELECT id FROM episodes WHERE {where}", (count,))]

    def first_opened(self, count: int) -> list[tuple[str, bool]]:
        rows = self._execute(f"SELECT id, fate FROM episodes WHERE {_OUTSTANDING} ORDER BY number LIMIT ?", (count,))
        return [(id, fate == "ready") for id, fate in rows]

    def oldest_open(self, count: int) -> list[str]:
        where = f"{_OPEN} ORDER BY version, number LIMIT ?"
        return [id for (id,) in self._execute(f"SELECT id FROM episodes WHERE {where}", (count,))]

    async def lease(self, selection: Selection, step: int, lessee: str, *, patience: Patience | None = None) -> Lease:
        self.enroll(lessee)
        if not self._settled:
            self._settle(step)
        seen = None
        while True:
            ready = 0 if patience is None else self._count(f"{_OUTSTANDING} AND fate = 'ready'")
            changes, in_part = self._changes(), patience is not None and not patience.left(ready)
            if (changes, in_part) != seen:
                seen = changes, in_part
                with self._transaction():
                    lease = self._try_lease(selection, step, in_part=in_part)
                if lease is not None:
                    return lease
            await asyncio.sleep(_LOOK_EVERY_SECONDS)

    def enroll(self, lessee: str) -> None:
        if self._is_lessee:
            if lessee != self._meta("lessee"):
                raise LesseeError(self._refusal(lessee))
            return
        if not self._lock("lessee"):
            raise LesseeError(self._refusal(lessee))
        self._is_lessee = True
        with self._transaction():
            self._set_meta("lessee", lessee)
            self._set_meta("lessee_process", os.getpid())

    def _settle(self, step: int) -> None:
        """Decide on what a trainer that is gone has leased: the steps before `step`, which are trained, are
        acknowledged, the others are returned."""
        with self._transaction():
            self._execute("UPDATE episodes SET fate = 'trained' WHERE fate = 'leased' AND step < ?", (step,))
            self._execute("DELETE FROM replays WHERE step >= ?", (step,))
            self._return_leases()
        self._settled = True

    def _refusal(self, lessee: str) -> str:
        return (
            f"{lessee!r} cannot lease: {self._meta('lessee')!r} (process {self._meta('lessee_process')}) trains on the "
            f"episodes of {self._name}"
        )

    def _return_leases(self) -> None:
        first, number = self._execute("SELECT min(step), min(number) FROM episodes WHERE fate = 'leased'").fetchone()
        if first is not None:
            self._set_meta("next_step", first)
            self._set_meta("behind_leased", min(number, self._meta("behind_leased")))
            self._execute("UPDATE episodes SET fate = 'ready', step = NULL WHERE fate = 'leased'")
            self._execute(f"UPDATE episodes SET step = NULL WHERE {_GONE} AND step >= ?", (first,))

    def _try_lease(self, selection: Selection, step: int, *, in_part: bool) -> Lease | None:
        next_step, error = self._meta("next_step"), self._meta("error")
        if self._execute("SELECT 1 FROM episodes WHERE fate = 'leased' AND step = ?", (step,)).fetchone():
            return self._leased(step)
        if step != next_step:
            raise ValueError(
                f"lease({step}): the next step is {next_step}; {self._name} is of another run, or of later steps than "
                "the recover checkpoint that the run continues from. Begin with another experience.path"
            )
        if error is not None:
            raise ExploreError(error)
        is_whole = self._count(f"{_OUTSTANDING} AND fate = 'ready'") >= selection.batch_of(step)
        if is_whole and selection.is_ready(self, step):
            ids = selection.choose(self, step)
        elif in_part:
            ids, late = selection.partial(self, step)
            for id in late:
                self._end_late(id)
        else:
            return None
        if not ids:
            return None
        self._execute_many(
            "UPDATE episodes SET fate = 'leased', step = ?, place = ? WHERE id = ?",
            [(step, place, id) for place, id in enumerate(ids)],
        )
        self._execute(f"UPDATE episodes SET step = ? WHERE {_GONE} AND step IS NULL", (step,))
        (last,) = self._execute("SELECT max(number) FROM episodes WHERE fate = 'leased'").fetchone()
        self._set_meta("behind_leased", max(last + 1, self._meta("behind_leased") or 0))
        self._set_meta("next_step", step + 1)
        return self._leased(step)

    def _leased(self, step: int) -> Lease:
        return Lease(
            step=step,
            tags=self._tags(f"fate = 'leased' AND step = {step} ORDER BY place"),
            dropped=self._tags(f"{_GONE} AND step = {step} ORDER BY number"),
        )

    def replay(self, step: int, choose: Choose) -> list[Tags]:
        with self._transaction():
            if not self._replayed(step):
                earlier = [*self._used(f"{_KEPT} AND step < ? ORDER BY step, place", (step,))]
                earlier += self._used("fate = 'leased' AND step < ? ORDER BY step, place", (step,))
                rows = [(step, place, id) for place, id in enumerate(choose(earlier))]
                self._execute_many("INSERT INTO replays VALUES (?, ?, ?)", rows)
            return [tag for id in self._replayed(step) for tag in self._tags("id = ?", (id,))]

    def _replayed(self, step: int) -> list[str]:
        return [id for (id,) in self._execute("SELECT id FROM replays WHERE step = ? ORDER BY place", (step,))]

    def values(self, ids: Sequence[str]) -> list[Episode]:
        episodes = []
        for id in ids:
            row = self._execute(_VALUE, (id,)).fetchone()
            if row is None:
                raise KeyError(f"{self._name} has no value of episode {id}")
            (tags,) = self._tags("id = ?", (id,))
            episodes.append(Episode(tags=tags, trajectories=records_from_plain(Trajectory, loads(row[0]))))
        return episodes

    def ack(self, lease: Lease) -> None:
        with self._transaction():
            self._execute("UPDATE episodes SET fate = 'trained' WHERE fate = 'leased' AND step = ?", (lease.step,))

    def prune(self, keep_steps: int) -> int:
        with self._transaction():
            (last,) = self._execute(f"SELECT max(step) FROM episodes WHERE {_KEPT}").fetchone()
            if last is None:
                return 0
            old = f"SELECT number FROM episodes WHERE {_KEPT} AND step <= ?"
            return self._execute(f"DELETE FROM trajectories WHERE number IN ({old})", (last - keep_steps,)).rowcount

    def tags(self) -> list[Tags]:
        return self._tags("TRUE ORDER BY number")

    def status(self) -> Status:
        return Status(
            num_opened=self._meta("num_opened"), next_step=self._meta("next_step"),
            num_outstanding=self._count(_OUTSTANDING), num_ready=self._count(f"{_OUTSTANDING} AND fate = 'ready'"),
            lessee=self._meta("lessee") or "",
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return nothing but the version of the form: the file survives. Acknowledge leases after their checkpoint."""
        self._write_held()
        return {"schema": SCHEMA}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_schema(state.get("schema"))

    def resample(self, step: int) -> None:
        self._held.clear()
        if self._is_lessee and not self._settled:
            self._settle(step)
        with self._transaction():
            ready, reset = "fate = 'ready'", "fate = 'open', explorer = '', reward = NULL"
            self._execute(f"DELETE FROM trajectories WHERE number IN (SELECT number FROM episodes WHERE {ready})")
            self._execute(f"UPDATE episodes SET {reset} WHERE {ready}")
            self._execute("DELETE FROM journals")

    def begin_at(self, step: int, *, num_opened: int) -> None:
        self._held.clear()
        with self._transaction():
            for table in ("episodes", "trajectories", "replays", "journals"):
                self._execute(f"DELETE FROM {table}")
            self._execute("DELETE FROM meta WHERE key LIKE 'settled %'")
            for key, value in (("next_step", step), ("num_opened", num_opened), ("behind_leased", num_opened)):
                self._set_meta(key, value)

    @abstractmethod
    def close(self) -> None:
        """Leave the store, and if this process is the lessee, to another trainer."""


def _running_loop() -> asyncio.AbstractEventLoop | None:
    with suppress(RuntimeError):
        return asyncio.get_running_loop()
    return None


def _tags_to_text(tags: Tags) -> str:
    return json.dumps(vars(tags), default=dict)
