"""Writes the samples of each batch beside the training: in the rollout process, where tokens and tokenizer are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from core.monitoring.sample_file import SampleFile
from core.monitoring.samples import Decode, Sample, SampleSettings, choose_evaluation_samples, choose_samples
from rollout.types import Prompt, Trajectory

if TYPE_CHECKING:
    from rollout.evaluation import Episode


class SampleWriter:
    """One file of samples, and the notable ones of the last batch. A thread decodes and writes; the next batch waits
    for it. Raises OSError from the call after a failed write."""

    def __init__(self, settings: SampleSettings, decode: Decode) -> None:
        self._settings, self._decode = settings, decode
        self._file: SampleFile | None = None
        self._writing: asyncio.Task[list[Sample]] | None = None
        self._notable: list[Sample] = []

    def begin(self, step: int) -> None:
        """Open the file of a run that continues after `step` steps. One that begins evaluates before the first step
        again."""
        if self._settings.share:
            self._file = SampleFile(
                Path(self._settings.folder), continue_after=step or -1, max_bytes=self._settings.max_file_bytes,
                keep=self._settings.keep_files,
            )  # fmt: skip

    async def write(self, groups: Sequence[Sequence[Trajectory]], episodes: Sequence[str], *, step: int) -> None:
        """Start writing the samples of a batch, after those of the last one."""
        await self.written()
        if self._file is not None:
            self._writing = asyncio.create_task(asyncio.to_thread(self._write, self._file, groups, episodes, step))

    def _write(
        self, file: SampleFile, groups: Sequence[Sequence[Trajectory]], episodes: Sequence[str], step: int
    ) -> list[Sample]:
        samples = choose_samples(groups, episodes, self._decode, step=step, share=self._settings.share)
        file.write(samples)
        return [sample for sample in samples if sample.notable]

    async def write_evaluation(self, name: str, answers: Sequence[tuple[Prompt, Episode]], *, step: int) -> None:
        """Write the samples of an evaluation after `step` steps, on the set `name`. Raises OSError."""
        await self.written()
        if self._file is not None and answers:
            samples = await asyncio.to_thread(
                choose_evaluation_samples, name, answers, self._decode, step=step, share=self._settings.share
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
