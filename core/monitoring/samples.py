"""Sampled answers as text: the best, worst and longest of a step, and the file samples.jsonl with those before it,
samples-000001.jsonl ... in the order in which they were written.

SampleWriter writes them beside the training: in the rollout process, where tokens and tokenizer are. Invariants: which
prompts are written is a function of their query_id alone, so that the same prompts appear in every epoch and in every
run over the same data. The files hold whole rows in the order of their steps, and no step twice after a recovery.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from core.monitoring.metrics import Journal, drop_later, read_rows
from rollout.data.source import printable
from rollout.experience import without_epoch
from rollout.types import PROMPT_VERSION, Prompt, Trajectory

if TYPE_CHECKING:
    from core.config.runtime import SamplesConfig
    from core.runs.checkpoints import State
    from rollout.evaluation import Episode


Decode = Callable[[np.ndarray], str]
"""Token ids -> text, special tokens included."""

_SHOWN_CHARS = 400
"""Of a text in a log line, from its start and its end together."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Consecutive tokens of one origin."""

    by: str
    """"model", or "environment" for tokens that no policy sampled."""
    text: str


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One answer of a step as text."""

    step: int
    """Counts from 1."""
    query_id: str
    episode: str
    """Id of the episode, as in consumed.jsonl."""
    index: int
    """Of the answer in the group of its prompt."""
    prompt: str
    answer: str
    reward: float
    finish_reason: str
    prompt_tokens: int
    answer_tokens: int
    """All tokens after the prompt."""
    oldest_version: int
    newest_version: int
    """Of the weights that sampled it."""
    notable: tuple[str, ...] = ()
    """Of "best", "worst", "longest" among all answers of the step."""
    turns: tuple[Turn, ...] = ()
    """The parts of an answer that has tokens of an environment too; empty: the model wrote all of it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the workflow reports of it."""
    reference: str = ""
    """The right answer, where the data set has it."""
    evaluation: str = ""
    """Name of the evaluation set of its prompt; empty: an answer of training."""
    rollout: int | None = None
    """Number of the rollout in its group that it is a branch of; None: it is a rollout by itself."""

    def to_row(self) -> dict[str, object]:
        """Return the row of samples.jsonl, without its step."""
        row = asdict(self)
        del row["step"]
        return row

    @classmethod
    def from_row(cls, row: State) -> Sample:
        """Return the inverse of to_row(), of a row with its step. Raises TypeError for a row of another file."""
        turns = tuple(Turn(**turn) for turn in row.get("turns", ()))
        return cls(**{**row, "notable": tuple(row.get("notable", ())), "turns": turns})


def choose_samples(
    groups: Sequence[Sequence[Trajectory]],
    episodes: Sequence[str],
    decode: Decode,
    *,
    step: int,
    share: float,
    references: Mapping[str, str] | None = None,
) -> list[Sample]:
    """Return the answers of a step to keep: all of about `share` of the prompts, of one at least, and the best, the
    worst and the longest answer of the step. `episodes`: id of each group; `references`: right answers by
    without_epoch() of those."""
    every = [(g, i) for g, group in enumerate(groups) for i in range(len(group))]
    answers = [groups[g][i] for g, i in every]
    notable = _notable(every, [t.reward for t in answers], [len(t.token_ids) - _prompt_length(t) for t in answers])
    picked = _picked([group[0].query_id for group in groups], share)
    samples = []
    for g, i in every:
        if g not in picked and (g, i) not in notable:
            continue
        trajectory = groups[g][i]
        begin, tokens, versions = _prompt_length(trajectory), trajectory.token_ids, trajectory.versions
        sampled = versions[versions != PROMPT_VERSION]
        sample = Sample(
            step=step,
            query_id=trajectory.query_id,
            episode=episodes[g],
            index=i,
            prompt=decode(tokens[:begin]),
            answer=decode(tokens[begin:]),
            reward=float(trajectory.reward),
            finish_reason=trajectory.finish_reason,
            prompt_tokens=begin,
            answer_tokens=len(tokens) - begin,
            oldest_version=int(sampled.min()),
            newest_version=int(sampled.max()),
            notable=notable.get((g, i), ()),
            turns=_turns(tokens[begin:], versions[begin:] != PROMPT_VERSION, decode),
            metrics={name: float(value) for name, value in trajectory.metrics.items()},
            reference=(references or {}).get(without_epoch(episodes[g]), ""),
            rollout=trajectory.rollout,
        )
        samples.append(sample)
    return samples


def choose_evaluation_samples(
    name: str, answers: Sequence[tuple[Prompt, Episode]], decode: Decode, *, step: int, share: float
) -> list[Sample]:
    """Return the answers of an evaluation to keep, chosen as those of a step. `name`: of the evaluation set."""
    episodes = [episode for _, episode in answers]
    notable = _notable(range(len(episodes)), [e.score for e in episodes], [e.tokens for e in episodes])
    picked = _picked([prompt.query_id for prompt, _ in answers], share)
    return [
        Sample(
            step=step, query_id=prompt.query_id, episode=f"{name}/{prompt.query_id}", index=0,
            prompt=decode(prompt.token_ids), answer=episode.text, reward=episode.score,
            finish_reason=episode.finish_reason,
            prompt_tokens=len(prompt.token_ids), answer_tokens=episode.tokens, oldest_version=step,
            newest_version=step, notable=notable.get(i, ()), evaluation=name,
            reference=" or ".join(prompt.answers),
        )
        for i, (prompt, episode) in enumerate(answers)
        if i in picked or i in notable
    ]  # fmt: skip


Place = TypeVar("Place")


def _notable(places: Sequence[Place], rewards: Sequence[float], tokens: Sequence[int]) -> dict[Place, tuple[str, ...]]:
    """Return what is notable about the answers at `places`; of equal ones the first is."""
    found: dict[Place, tuple[str, ...]] = {}
    for name, index in (("best", np.argmax(rewards)), ("worst", np.argmin(rewards)), ("longest", np.argmax(tokens))):
        place = places[int(index)]
        found[place] = (*found.get(place, ()), name)
    return found


def _picked(query_ids: Sequence[str], share: float) -> set[int]:
    """Return the indices of about `share` of the prompts, of one at least."""
    places = [_place(query_id) for query_id in query_ids]
    return {i for i, place in enumerate(places) if place < share} or {int(np.argmin(places))}


def _place(query_id: str) -> float:
    """Return a number in [0, 1) for a prompt, the same in every run."""
    return int.from_bytes(hashlib.blake2b(query_id.encode(errors="replace"), digest_size=6).digest()) / 2**48


def _prompt_length(trajectory: Trajectory) -> int:
    return int((trajectory.versions != PROMPT_VERSION).argmax())


def _turns(tokens: np.ndarray, by_model: np.ndarray, decode: Decode) -> tuple[Turn, ...]:
    if by_model.all():
        return ()
    cuts = [0, *(np.flatnonzero(np.diff(by_model)) + 1).tolist(), len(tokens)]
    return tuple(
        Turn(by="model" if by_model[begin] else "environment", text=decode(tokens[begin:end]))
        for begin, end in zip(cuts, cuts[1:], strict=False)
    )


def shortened(text: str, chars: int = _SHOWN_CHARS) -> str:
    """Return the start and the end of a long text, with the number of characters between them."""
    if len(text) <= chars:
        return text
    head, tail = text[: chars // 2], text[len(text) - chars // 2 :]
    return f"{head} [... {len(text) - len(head) - len(tail)} characters ...] {tail}"


def headline(sample: Sample) -> str:
    """Return what is known of an answer, in one line."""
    versions = f"{sample.oldest_version}"
    if sample.newest_version != sample.oldest_version:
        versions += f" to {sample.newest_version}"
    length = "1 token" if sample.answer_tokens == 1 else f"{sample.answer_tokens} tokens"
    return (
        f"reward {sample.reward:.3f}, {length} ({sample.finish_reason}), weights of version {versions}, "
        f"prompt {printable(sample.query_id)}, answer {sample.index}"
    )


def log_text(sample: Sample) -> str:
    """Return an answer as the log shows it: a headline, then prompt and answer, shortened."""
    parts = [f"Step {sample.step}, {' and '.join(sample.notable)} answer: {headline(sample)}"]
    right = (("right answer", sample.reference),) if sample.reference else ()
    for name, text in (("prompt", sample.prompt), ("answer", sample.answer), *right):
        parts.append(f"  {name}: " + printable(shortened(text)).replace("\n", "\n    "))
    return "\n".join(parts)


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
