"""samples.jsonl and the files before it, samples-000001.jsonl ... in the order in which they were written.

SampleWriter writes them beside the training: in the rollout process, where tokens and tokenizer are. Invariant: the
files hold whole rows in the order of their steps, and no step twice after a recovery.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from core.monitoring.journal import Journal, drop_later, read_rows
from core.monitoring.samples import Decode, Sample, choose_evaluation_samples, choose_samples
from rollout.types import Prompt, Trajectory

if TYPE_CHECKING:
    from core.config.runtime import SamplesConfig
    from rollout.evaluation import Episode

_CURRENT = "samples.jsonl"
_CLOSED = re.compile(r"samples-(\d{6,})\.jsonl")


class SampleFile:
    """Appends samples; a file that has `max_bytes` is closed under a number, and the oldest ones beyond `keep` files
    are deleted."""

    def __init__(self, folder: Path, *, continue_after: int, max_bytes: int, keep: int) -> None:
        """Rows of steps after `continue_after` are removed first."""
        self._path, self._max_bytes, self._keep = folder / _CURRENT, max_bytes, keep
        for closed in reversed(closed_files(folder)):
            if not drop_later(closed, continue_after):
                break  # earlier files have earlier steps
            if not closed.stat().st_size:
                closed.unlink()
        self._journal = Journal(self._path, continue_after=continue_after)

    def write(self, samples: Iterable[Sample]) -> None:
        """Append the samples of a step. Raises OSError, with the free disk space, if they cannot be written."""
        if self._path.stat().st_size >= self._max_bytes:
            self._begin_another()
        for sample in samples:
            self._journal.write(sample.step, sample.to_row())

    def close(self) -> None:
        self._journal.close()

    def _begin_another(self) -> None:
        self._journal.close()
        closed = closed_files(self._path.parent)
        number = _number(closed[-1]) + 1 if closed else 1
        self._path.rename(self._path.with_name(f"samples-{number:06d}.jsonl"))
        for old in closed_files(self._path.parent)[: -(self._keep - 1) or None]:
            old.unlink()
        self._journal = Journal(self._path, continue_after=None)


def closed_files(folder: Path) -> list[Path]:
    """Return the closed files of a folder, oldest first."""
    return sorted((p for p in folder.glob("samples-*.jsonl") if _CLOSED.fullmatch(p.name)), key=_number)


def read_samples(folder: Path) -> Iterator[Sample]:
    """Yield the samples of a run's log folder, oldest first. Raises FileNotFoundError if there are none, and ValueError
    for a file of something else."""
    for path in [*closed_files(folder), folder / _CURRENT]:
        yield from _samples_of(path)


def last_samples(folder: Path) -> list[Sample]:
    """Return the samples of the last step of training that has any, of evaluations none. Raises ValueError for a file
    of something else."""
    for path in [folder / _CURRENT, *reversed(closed_files(folder))]:  # each has whole steps
        with suppress(FileNotFoundError):  # it is about to be closed under a number
            if samples := [sample for sample in _samples_of(path) if not sample.evaluation]:
                return [sample for sample in samples if sample.step == samples[-1].step]
    return []


def _samples_of(path: Path) -> Iterator[Sample]:
    try:
        for row in read_rows(path):
            yield Sample.from_row(row)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a file of samples: {error}") from error


def _number(path: Path) -> int:
    found = _CLOSED.fullmatch(path.name)
    assert found, "only closed files have a number"
    return int(found[1])


class SampleWriter:
    """One file of samples, and the notable ones of the last batch. A thread decodes and writes; the next batch waits
    for it. Raises OSError from the call after a failed write."""

    def __init__(
        self, config: SamplesConfig, folder: Path, decode: Decode, references: Mapping[str, str] | None = None
    ) -> None:
        """`references`: the right answers by without_epoch() of the ids of episodes."""
        self._config, self._folder, self._decode, self._references = config, folder, decode, references or {}
        self._file: SampleFile | None = None
        self._writing: asyncio.Task[list[Sample]] | None = None
        self._notable: list[Sample] = []

    def begin(self, step: int) -> None:
        """Open the file of a run that continues after `step` steps. One that begins evaluates before the first step
        again."""
        if self._config.share:
            max_bytes, keep = self._config.max_file_mib * 2**20, self._config.keep_files
            self._file = SampleFile(self._folder, continue_after=step or -1, max_bytes=max_bytes, keep=keep)

    async def write(self, groups: Sequence[Sequence[Trajectory]], episodes: Sequence[str], *, step: int) -> None:
        """Start writing the samples of a batch, after those of the last one."""
        await self.written()
        if self._file is not None:
            self._writing = asyncio.create_task(asyncio.to_thread(self._write, self._file, groups, episodes, step))

    def _write(
        self, file: SampleFile, groups: Sequence[Sequence[Trajectory]], episodes: Sequence[str], step: int
    ) -> list[Sample]:
        samples = choose_samples(
            groups, episodes, self._decode, step=step, share=self._config.share, references=self._references
        )
        file.write(samples)
        return [sample for sample in samples if sample.notable]

    async def write_evaluation(self, name: str, answers: Sequence[tuple[Prompt, Episode]], *, step: int) -> None:
        """Write the samples of an evaluation after `step` steps, on the set `name`. Raises OSError."""
        await self.written()
        if self._file is not None and answers:
            samples = await asyncio.to_thread(
                choose_evaluation_samples, name, answers, self._decode, step=step, share=self._config.share
            )
            await asyncio.to_thread(self._file.write, samples)

    async def written(self) -> None:
        """Wait until the samples of the last batch are in the file."""
        if (writing := self._writing) is not None:
            try:
                self._notable = await asyncio.shield(writing)
            finally:
                if writing.done() and self._writing is writing:
                    self._writing = None

    async def notable(self) -> list[Sample]:
        """Return the best, worst and longest answer of the last batch."""
        await self.written()
        return self._notable

    async def close(self) -> None:
        """Write what is left and close the file."""
        await self.written()
        if self._file is not None:
            self._file.close()
            self._file = None
