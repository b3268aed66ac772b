"""How far an evaluation is: bars on a terminal, lines in a log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rollout.answer_file import Answer

logger = logging.getLogger(__name__)

ALL = "all sets"
"""What the line is called that counts everything."""
_LOG_EVERY_SECONDS = 10.0


class Meter:
    """Answers of each benchmark and of all together, and the tokens/s of the pool that all of them share, from the
    first request to the last answer. Use as a context manager around the sampling."""

    def __init__(self, sets: Mapping[str, tuple[int, int]]) -> None:
        """sets: (existing answers, requested answers) of each benchmark."""
        self._counts = {name: _Count(done, wanted) for name, (done, wanted) in sets.items()}
        self._all = _Count(sum(done for done, _ in sets.values()), sum(wanted for _, wanted in sets.values()))
        self._tokens = 0
        self._start = self._last = self._said = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bars = Progress(
            *columns, TextColumn("{task.fields[rate]}"), console=Console(stderr=True), disable=not sys.stderr.isatty()
        )
        self._bar_of = {
            name: self._bars.add_task(name, total=count.wanted, completed=count.done, rate="")
            for name, count in {**self._counts, ALL: self._all}.items()
        }

    def __enter__(self) -> Meter:
        self._bars.__enter__()
        self._start = self._last = self._said = time.monotonic()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._bars.__exit__(*exc_info)
        if self._all.new:
            logger.info("%s", self._line())

    def add(self, name: str, answer: Answer) -> None:
        """Count one more answer of the benchmark `name`."""
        self._last = time.monotonic()
        self._tokens += answer.tokens
        count = self._counts[name]
        for one in (count, self._all):
            one.new += 1
            one.right += answer.score > 0
        self._bars.advance(self._bar_of[name])
        self._bars.update(self._bar_of[ALL], advance=1, rate=self._rate())
        if not self._bars.disable:
            return
        if count.done + count.new == count.wanted:
            logger.info("%s: %s, %s", name, count.answers(), count.share())
        if self._last - self._said >= _LOG_EVERY_SECONDS:
            self._said = self._last
            logger.info("%s", self._line())

    def _rate(self) -> str:
        return f"{self._tokens / max(self._last - self._start, 1e-9):,.0f} tokens/s"

    def _line(self) -> str:
        return f"{ALL}: {self._all.answers()}, {self._rate()}, {self._all.share()}"


class _Count:
    def __init__(self, done: int, wanted: int) -> None:
        self.done, self.wanted = done, wanted
        self.new = self.right = 0

    def answers(self) -> str:
        return f"{self.done + self.new}/{self.wanted} answers"

    def share(self) -> str:
        return f"{100 * self.right / self.new:.1f} % of the new ones right"
