"""The answers of a benchmark in a file: one line is one answer, written when it is judged.

Invariant: whatever ends an evaluation costs the answers under way and nothing else.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TextIO

from rollout.types import FinishReason

Mode = Literal["greedy", "sample"]
Name = tuple[str, Mode, int]
"""(query_id, mode, number) of an answer."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One completion, judged: a line of the file."""

    query_id: str
    mode: Mode
    number: int
    """0 for the greedy one, else 0 .. num_samples - 1."""
    prompt: str
    completion: str
    answer: str
    """The part of the completion that was judged."""
    score: float | None
    """1: right, 0: wrong; None: the evaluation has no reward from which an answer is right (`right_at`)."""
    tokens: int
    """Sampled ones."""
    finish_reason: FinishReason
    reward: float | None = None
    """What the workflow returned. None: of an evaluation that has not written it."""
    unjudged: str | None = None
    """Why it counts as wrong without a verdict: judging it ended in a timeout, crash, error or lack of memory."""

    @property
    def name(self) -> Name:
        return self.query_id, self.mode, self.number


class AnswerFile:
    """The answers so far, and where further ones go; no file before the first one. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        """Reads what is there; a last line that was cut off is dropped. Raises ValueError for any other bad line."""
        self._path = path
        self._file: TextIO | None = None
        self.answers: dict[Name, Answer] = {}
        for answer in read_answers(path, repair=True) if path.exists() else ():
            self.answers[answer.name] = answer

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, answer: Answer) -> None:
        """Write it down; it survives the end of this process."""
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
        self.answers[answer.name] = answer
        self._file.write(json.dumps(asdict(answer), ensure_ascii=False) + "\n")
        self._file.flush()


def read_answers(path: Path, *, repair: bool = False) -> list[Answer]:
    """Return the answers in a file. `repair` cuts off a last line without an end, which a kill may leave."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data) and repair:
        os.truncate(path, whole)
    answers = []
    for number, line in enumerate(data[:whole].splitlines(), start=1):
        try:
            answers.append(Answer(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{path}:{number}: not an answer of an evaluation ({error}); move the file to start again"
            ) from error
    return answers
