"""Episodes as rows of jsonl files, for looking at what an explore job samples: nothing trains on them.

    FOLDER/episodes-N.jsonl    {"tags": {...}, "trajectories": [...]}, as `slipstream experience export` writes

Each process appends to a file of its own. An episode that a file has is not sampled again.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from itertools import count
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np

from rollout.experience.base import Admission, LesseeError, Opened, StoreError
from rollout.experience.episode import Episode, Tags
from rollout.experience.stores.memory import MemoryExperience
from rollout.types import Trajectory

_DTYPES = {
    "token_ids": np.int32, "loss_mask": np.bool_, "rollout_logprobs": np.float32, "versions": np.int32,
    "routed_experts": np.int16,
}  # fmt: skip


def to_row(tags: Tags, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Return an episode as plain values."""
    return {"tags": asdict(tags), "trajectories": [_plain(trajectory) for trajectory in trajectories]}


def from_row(row: Mapping[str, Any]) -> tuple[Tags, list[Trajectory]]:
    """Return the inverse of to_row(). Raises TypeError, LookupError or ValueError for another row."""
    return Tags(**row["tags"]), [_trajectory(plain) for plain in row["trajectories"]]


def _plain(trajectory: Trajectory) -> dict[str, Any]:
    values = {field.name: getattr(trajectory, field.name) for field in fields(trajectory)}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}


def _trajectory(plain: Mapping[str, Any]) -> Trajectory:
    arrays: dict[str, Any] = {
        name: np.array(plain[name], kind) for name, kind in _DTYPES.items() if plain.get(name) is not None
    }
    return Trajectory(**{**plain, **arrays})


_ANY_VERSION = 2**31


class FileExperience(MemoryExperience):
    """A store in the folder `path`. Admission ends with the run, as no trainer is waited for."""

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self._folder = Path(path)
        self._file: IO[bytes] | None = None
        self._done: dict[str, Tags] = {}
        self._places: dict[str, tuple[Path, int]] = {}  # where the row of an episode begins
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for file in self._folder.glob("episodes-*.jsonl"):
                self._read(file)
        except (OSError, ValueError) as error:
            raise StoreError(f"experience.path={path}: {error}; name a folder of such files, or a new one") from error

    def _read(self, path: Path) -> None:
        begin = 0
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    self._add_row(Tags(**json.loads(line)["tags"]), path, begin)
                begin += len(line)

    def _add_row(self, tags: Tags, path: Path, begin: int) -> None:
        self._done[tags.id], self._places[tags.id] = tags, (path, begin)

    def _own_file(self) -> IO[bytes]:
        for number in count():
            with suppress(FileExistsError):
                return open(self._folder / f"episodes-{number}.jsonl", "xb")
        raise AssertionError("count() does not end")

    def open(self, tags: Tags, admission: Admission) -> Opened:
        if tags.id in self._numbers:
            return "known"
        if not admission.admits(self._num_opened, next_step=0, version=_ANY_VERSION):
            return "full"
        self._num_opened += 1  # from the beginning of the stream: what was in flight at a kill is sampled again
        if tags.id in self._done:
            return "known"
        self._add(tags, self._num_opened - 1)
        return "open"

    def put(self, episode: Episode, drops: Callable[[Tags, int], bool] | None = None) -> None:
        id = episode.tags.id
        if id not in self._in_flight:
            return
        tags = replace(episode.tags, version=self._in_flight[id].version, fate="ready")
        try:
            self._file = self._file or self._own_file()
            begin = self._file.tell()
            self._file.write(json.dumps(to_row(tags, episode.trajectories), default=str).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise StoreError(f"experience.path={self._folder}: {error}; free space on its disk") from error
        self._count(tags)
        self._add_row(tags, Path(self._file.name), begin)
        self._end(id, tags)
        self._dropped.clear()

    def tags(self) -> list[Tags]:
        return [*self._done.values(), *self.in_flight()]

    def enroll(self, lessee: str) -> NoReturn:
        raise LesseeError(f"{lessee!r} cannot lease: experience.store=file is for explore jobs; write sqlite")

    def values(self, ids: Sequence[str]) -> list[Episode]:
        return [self._value(*self._places[id]) for id in ids]

    def _value(self, path: Path, begin: int) -> Episode:
        with path.open("rb") as file:
            file.seek(begin)
            tags, trajectories = from_row(json.loads(file.readline()))
        return Episode(tags=tags, trajectories=trajectories)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
