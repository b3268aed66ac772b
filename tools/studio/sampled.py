"""The samples of a run: an index with the fields for filters and orders. Texts are read from the files when shown.

Invariant: a search that ends early returns how many answers it has compared and where the next one continues.
"""

import re
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import numpy as np

from rollout.experience import without_epoch
from tools.studio.folders import NotFound, Run
from tools.studio.table import (
    CACHED_BYTES,
    PIECE_BYTES,
    UNREADABLE,
    Columns,
    Source,
    cache_folder,
    pieces,
    row_at,
    source_of,
)

_CURRENT, _CLOSED = "samples.jsonl", "samples-*.jsonl"
_SHORT_CHARS = 300
_SEARCH_SECONDS = 1.5
_MOST_IN_GROUP = 256
_MOST_NAMES = 256
"""Evaluation sets, and task sets, that an index distinguishes."""
_NOTABLE = ("best", "worst", "longest")
_FINISHES = ("", "stop", "length", "abort")
_NAMES = (
    "file", "offset", "step", "reward", "answer_tokens", "prompt_tokens", "oldest_version", "finish", "notable", "set",
    "query", "episode", "task",
)  # fmt: skip
SORTS = ("step", "reward", "answer_tokens", "prompt_tokens", "oldest_version")


@dataclass(frozen=True, kw_only=True)
class Query:
    """Conditions and order of the answers; None and empty: any."""

    first_step: int | None = None
    last_step: int | None = None
    least_reward: float | None = None
    most_reward: float | None = None
    least_version: int | None = None
    most_version: int | None = None
    """Of the weights that sampled the first token."""
    finish: str = ""
    notable: str = ""
    of: str = ""
    """training, evaluation, or a name of an evaluation set."""
    task: str = ""
    """Name of the task set of its prompt."""
    query_id: str = ""
    episode: str = ""
    text: str = ""
    """Must occur in prompt, answer or reference, in any case."""
    sort: str = "step"
    descending: bool = True
    start: int = 0
    """Matches of the index to leave out, as `next` of the answer before."""
    count: int = 50


class SampleIndex:
    """The samples of one run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._files: dict[int, Source] = {}
        """By inode: a file that is closed keeps it under its new name."""
        self._columns = _new_columns()
        self._sets: list[str] = [""]
        self._tasks: list[str] = [""]
        self._saved_at = 0
        self._loaded = False

    def refresh(self, *, stop: Callable[[], bool] = lambda: False) -> None:
        """Read the rows that were added, those of the newest file first. `stop`: checked before each piece."""
        if not self._loaded:
            self._load()
        paths = [*self._run.files(_CURRENT), *reversed(self._run.files(_CLOSED))]
        present = {}
        for path in paths:
            with suppress(OSError):
                found = source_of(path)
                present[found.inode] = found
        with self._lock:
            changed = False
            for inode, known in list(self._files.items()):
                now = present.get(inode)
                if now is None or now.size < known.offset:
                    del self._files[inode]
                    changed = True
                else:
                    known.path, known.size = now.path, now.size
            if changed:  # a file was deleted, or written anew after a recovery
                self._files, self._columns = {}, _new_columns()
            for inode, source in present.items():
                self._files.setdefault(inode, source)
        for source in [self._files[inode] for inode in present]:
            for rows in pieces(source, stop):
                plain = [self._entry(source.inode, offset, row) for offset, row in rows]
                with self._lock:
                    if plain:
                        self._columns.append(_NAMES, list(zip(*plain, strict=True)))
        if self._num_read - self._saved_at > CACHED_BYTES:
            self._save()

    def _entry(self, inode: int, offset: int, row: Mapping[str, object]) -> tuple[float, ...]:
        """Return the columns _NAMES of a row."""
        evaluation = str(row.get("evaluation") or "")
        notable = row.get("notable")
        notable = notable if isinstance(notable, list) else ()
        finish = str(row.get("finish_reason", ""))
        return (
            inode, offset, _whole(row["step"]), _number(row.get("reward"), float("nan")),
            _whole(row.get("answer_tokens")), _whole(row.get("prompt_tokens")), _whole(row.get("oldest_version")),
            _FINISHES.index(finish) if finish in _FINISHES else 0,
            sum(1 << i for i, name in enumerate(_NOTABLE) if name in notable) if notable else 0,
            _number_of(evaluation, self._sets), _checksum(row.get("query_id")), _checksum(row.get("episode")),
            _number_of("" if evaluation else _task_of(row), self._tasks),
        )  # fmt: skip

    @property
    def _folder(self) -> Path:
        return cache_folder(f"{self._run.id}-samples")

    def _load(self) -> None:
        self._loaded = True
        columns = _new_columns()
        with suppress(*UNREADABLE):
            state = columns.load(self._folder)
            sources = [Source(**{**kept, "path": self._run.logs / kept["path"]}) for kept in state["files"]]
            self._sets, self._tasks = state["sets"], state["tasks"]
            self._columns, self._files = columns, {source.inode: source for source in sources}
            self._saved_at = self._num_read

    def _save(self) -> None:
        with self._lock, suppress(OSError):
            files = [source.as_row() for source in self._files.values()]
            self._columns.save(self._folder, {"files": files, "sets": self._sets, "tasks": self._tasks})
            self._saved_at = self._num_read

    @property
    def _num_read(self) -> int:
        """Bytes of all files."""
        return sum(source.offset for source in self._files.values())

    @property
    def has_rows(self) -> bool:
        """Whether an answer was read."""
        return self._columns.num_rows > 0

    @property
    def is_long(self) -> bool:
        """Whether much of the files is still to be read."""
        return sum(source.size - source.offset for source in list(self._files.values())) > PIECE_BYTES

    def status(self) -> dict[str, object]:
        """Return the number of samples, their steps and sets, what is damaged, and how much of the files was read."""
        with self._lock:
            columns = self._columns
            steps = columns["step"] if columns.num_rows else np.zeros(0)
            size = sum(source.size for source in self._files.values())
            return {
                "samples": columns.num_rows,
                "first_step": int(steps.min()) if steps.size else None,
                "last_step": int(steps.max()) if steps.size else None,
                "sets": [name for name in self._sets if name],
                "tasks": [name for name in self._tasks if name],
                "read": self._num_read / size if size else 1.0,
                "notes": [note for source in self._files.values() for note in source.notes],
            }

    def steps(self, of: str) -> np.ndarray:
        """Return the steps [N] that have answers of training, of evaluations, or of a set, in order."""
        with self._lock:
            if not self._columns.num_rows:
                return np.zeros(0, int)
            return np.unique(self._columns["step"][self._kept(Query(of=of))])

    def find(self, query: Query) -> dict[str, object]:
        """Return {rows, matched, looked_at, next}: at most query.count answers. `matched`: answers that the conditions
        keep, without the text; `next`: start of the following page, None at the end. Raises ValueError."""
        places, wanted = self._places(query), _pattern(query)
        rows: list[dict[str, object]] = []
        until = time.monotonic() + _SEARCH_SECONDS
        at = query.start
        while at < len(places) and len(rows) < query.count and (wanted is None or time.monotonic() < until):
            if row := self._read(places[at], wanted):
                rows.append(_short(row, wanted))
            at += 1
        return {"rows": rows, "matched": len(places), "looked_at": at, "next": at if at < len(places) else None}

    def _places(self, query: Query) -> np.ndarray:
        """Return (inode, offset) [N, 2] of the answers that the conditions keep, without the text. Raises
        ValueError."""
        with self._lock:
            if not self._columns.num_rows:
                return np.zeros((0, 2), int)
            matches = self._matches(query)
            return np.stack([self._columns[name][matches] for name in ("file", "offset")], axis=1)

    def _matches(self, query: Query) -> np.ndarray:
        """Return the rows that the conditions keep [N], in the order of the query. Raises ValueError."""
        columns, found = self._columns, self._kept(query)
        values = columns[SORTS[_place("sort", query.sort, SORTS)]][found].astype(np.float64)
        values = np.nan_to_num(-values if query.descending else values, nan=np.inf)
        order = np.lexsort((columns["offset"][found], -columns["step"][found], values))
        return found[order]

    def _kept(self, query: Query) -> np.ndarray:
        """Return the rows that the conditions keep [N], without the text. Raises ValueError."""
        columns = self._columns
        keep = np.ones(columns.num_rows, bool)
        for name, least, most in (
            ("step", query.first_step, query.last_step),
            ("reward", query.least_reward, query.most_reward),
            ("oldest_version", query.least_version, query.most_version),
        ):
            if least is not None:
                keep &= columns[name] >= least
            if most is not None:
                keep &= columns[name] <= most
        if query.finish:
            keep &= columns["finish"] == _place("finish", query.finish, _FINISHES)
        if query.notable:
            keep &= (columns["notable"] & (1 << _place("notable", query.notable, _NOTABLE))) > 0
        if query.of in ("training", "evaluation"):
            keep &= (columns["set"] == 0) == (query.of == "training")
        elif query.of:
            keep &= columns["set"] == (self._sets.index(query.of) if query.of in self._sets else -1)
        if query.task:
            keep &= columns["task"] == (self._tasks.index(query.task) if query.task in self._tasks else -1)
        if query.query_id:
            keep &= columns["query"] == _checksum(query.query_id)
        if query.episode:
            keep &= columns["episode"] == _checksum(query.episode)
        return np.flatnonzero(keep)

    def _read(self, place: Iterable[str | int], wanted: re.Pattern[str] | None = None) -> dict[str, object] | None:
        """Return the answer at (inode, offset) in full; None where it is gone, or no text of it has `wanted`."""
        inode, offset = map(int, place)
        source = self._files.get(inode)
        if source is None:
            return None
        with suppress(OSError):
            row = row_at(source.path, offset)
            if row is not None and (wanted is None or any(wanted.search(text) for text in _texts(row))):
                return {**row, "at": f"{inode}:{offset}"}
        return None

    def sample(self, at: str) -> dict[str, object]:
        """Return an answer in full, with `group`: all that were kept of its prompt in this step. Raises NotFound."""
        inode, _, offset = at.partition(":")
        row = self._read((inode, offset)) if inode.isdigit() and offset.isdigit() else None
        if row is None:
            raise NotFound("there is no such answer any more; the oldest files of samples are deleted")
        step = int(_whole(row["step"]))
        query = Query(
            first_step=step, last_step=step, of=str(row.get("evaluation") or "training"),
            query_id=str(row.get("query_id", "")), sort="step", descending=False,
        )  # fmt: skip
        group = [found for place in self._places(query)[:_MOST_IN_GROUP] if (found := self._read(place))]
        group = [one for one in group if all(one.get(k) == row.get(k) for k in ("query_id", "episode"))]
        return {**row, "group": sorted(group, key=lambda one: _number(one.get("index")))}

    def all(self, query: Query) -> Iterator[dict[str, object]]:
        """Return every answer that a query keeps, in full, read as they are iterated. Raises ValueError."""
        places, wanted = self._places(query), _pattern(query)
        return (row for place in places if (row := self._read(place, wanted)))


def _new_columns() -> Columns:
    wide = dict.fromkeys(("file", "offset", "query", "episode"), "i8")
    return Columns(
        dtype="i4", dtypes={**wide, "reward": "f4", "finish": "i1", "notable": "i1", "set": "i2", "task": "i2"}
    )


def _pattern(query: Query) -> re.Pattern[str] | None:
    return re.compile(re.escape(query.text), re.IGNORECASE) if query.text else None


def _place(name: str, value: str, choices: Sequence[str]) -> int:
    if value not in choices:
        raise ValueError(f"{name}={value}: one of {', '.join(filter(None, choices))}")
    return choices.index(value)


def _number_of(name: str, names: list[str]) -> int:
    """Return the place of a name in a list, to which a new one is added; that of no name where there are too many."""
    if name not in names and len(names) < _MOST_NAMES:
        names.append(name)
    return names.index(name) if name in names else 0


def _task_of(row: Mapping[str, object]) -> str:
    """Return the task set that the id of an episode, [task set/]row/epoch, begins with."""
    head = without_epoch(str(row.get("episode") or ""))
    return unquote(head.removesuffix(str(row.get("query_id"))).rstrip("/"))


def _number(value: object, otherwise: float = 0) -> float:
    return value if isinstance(value, int | float) else otherwise


def _whole(value: object) -> float:
    """Return a number that the columns of whole numbers hold; 0 for anything else."""
    return value if isinstance(value, int | float) and abs(value) < 1 << 31 else 0


def _checksum(value: object) -> int:
    return zlib.crc32(str(value or "").encode(errors="replace"))


def _texts(row: Mapping[str, object]) -> Iterator[str]:
    for name in ("prompt", "answer", "reference"):
        yield str(row.get(name) or "")


def _short(row: dict[str, object], wanted: re.Pattern[str] | None) -> dict[str, object]:
    """Return a row with the part of its texts that a table shows: their end, or the place that was searched."""
    turns = row.get("turns")
    short = {**row, "turns": len(turns) if isinstance(turns, list) else 0}
    for name in ("prompt", "answer"):
        text = str(row.get(name) or "")
        found = wanted.search(text) if wanted else None
        begin = max(0, found.start() - 80) if found else 0
        cut = text[begin : begin + _SHORT_CHARS]
        short[name] = ("…" if begin else "") + cut + ("…" if begin + _SHORT_CHARS < len(text) else "")
    return short
