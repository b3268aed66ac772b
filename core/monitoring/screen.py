"""What a run shows on the terminal: five lines at the start, its phases, a row for each step, answers, and the end.

With monitor.style=areal, and with --verbose, the terminal has the log lines of the tutorial instead. The log file has
those in any case. The columns of a row are those of which the first row has a figure; they are left out from the right
where the line is too short. Invariant: a phase of the start is named when it begins, and every few seconds while it
lasts.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.status import Status
from rich.text import Text

from rollout.data.source import printable

if TYPE_CHECKING:
    from core.monitoring.samples import Sample


Row = Mapping[str, object]
"""Metrics of a step by name, as in metrics.jsonl."""
_STEP_WIDTH = 11
_GAP = 2


@dataclass(frozen=True)
class _Column:
    title: str
    width: int
    cell: Callable[[Row], str]
    """Raises KeyError for a row without the figure."""
    style: Callable[[Row], str] = lambda row: ""


def number(row: Row, name: str) -> float:
    """Return a figure of a row. Raises KeyError."""
    value = row[name]
    assert isinstance(value, int | float), f"{name} is a number"
    return float(value)


def _plain(name: str, spec: str) -> Callable[[Row], str]:
    return lambda row: f"{number(row, name):{spec}}"


def _share(name: str) -> Callable[[Row], str]:
    return lambda row: f"{100 * number(row, name):.0f}%"


def _reward(row: Row) -> str:
    return f"{number(row, 'reward/mean'):.3f} ±{number(row, 'reward/std'):.2f}"


def _kl(row: Row) -> str:
    """Return the divergence from the reference, or without one from the policy before the update."""
    return f"{number(row, 'ref_kl' if 'ref_kl' in row else 'ppo_approx_kl'):.4f}"


def _above(name: str, limit: float) -> Callable[[Row], str]:
    """Return the style of a figure that is worth a look above `limit`."""
    return lambda row: "yellow" if number(row, name) > limit else ""


def _finite(name: str) -> Callable[[Row], str]:
    return lambda row: "" if math.isfinite(number(row, name)) else "bold red"


def _waiting(row: Row) -> str:
    return "yellow" if number(row, "time/wait_for_rollout") > 0.5 * number(row, "time/step") else ""


COLUMNS = (
    _Column("reward", 13, _reward, lambda row: "bold cyan"),
    _Column("right", 5, _share("reward/right")),
    _Column("loss", 8, lambda row: "" if "reward/mean" in row else f"{number(row, 'loss'):.4f}", _finite("loss")),
    _Column("accuracy", 8, _share("accuracy")),
    _Column("equal", 5, _share("groups/equal"), _above("groups/equal", 0.9)),
    _Column("length", 6, _plain("answer_length/mean", ".1f")),
    _Column("kl", 7, _kl),
    _Column("clip", 5, _share("actor_clip_ratio"), _above("actor_clip_ratio", 0.3)),
    _Column("age", 4, _plain("staleness/mean", ".1f")),
    _Column("grad", 7, _plain("grad_norm", ".3g"), _finite("grad_norm")),
    _Column("tok/s", 7, lambda row: f"{number(row, 'n_tokens') / number(row, 'time/step'):,.0f}"),
    _Column("step s", 7, _plain("time/step", ".2f")),
    _Column("wait s", 7, _plain("time/wait_for_rollout", ".2f"), _waiting),
    _Column("update s", 8, _plain("time/update", ".2f")),
    _Column("push s", 7, _plain("time/push", ".2f")),
)


class StepTable:
    """The columns of one run, chosen by its first row."""

    def __init__(self, first: Row, *, total_steps: int | None, width: int) -> None:
        """`total_steps`: None where it is not known; `width`: characters of a line."""
        self._total_steps = total_steps
        self._columns = []
        left = width - _STEP_WIDTH
        for column in COLUMNS:
            try:
                is_known = bool(column.cell(first))
            except KeyError:
                continue
            if is_known and left >= column.width + _GAP:
                self._columns.append(column)
                left -= column.width + _GAP

    def header(self) -> Text:
        """Return the titles."""
        cells = [f"{'step':>{_STEP_WIDTH}}", *(f"{c.title:>{c.width + _GAP}}" for c in self._columns)]
        return Text("".join(cells), style="dim")

    def line(self, step: int, row: Row) -> Text:
        """Return the cells of a step; a figure that this row lacks is a dash."""
        of_all = "" if self._total_steps is None else f"/{self._total_steps}"
        text = Text(f"{f'{step}{of_all}':>{_STEP_WIDTH}}")
        for column in self._columns:
            try:
                cell, style = column.cell(row), column.style(row)
            except KeyError:
                cell, style = "-", "dim"
            text.append(f"{cell:>{column.width + _GAP}}", style=style)
        return text


_TICK_SECONDS = 4.0
"""Seconds between the lines of a phase that lasts, where there is no spinner."""
_HEADER_STEPS = 20
"""Steps between two lines with the titles of the columns."""
_PIPE_WIDTH = 120


class Screen:
    """The terminal of one run. `compact`: it shows rows; else log lines are written to it by their handler."""

    def __init__(self, console: Console, *, compact: bool) -> None:
        self.console, self.compact = console, compact
        self._began = time.monotonic()
        self._phase: _Phase | None = None
        self._progress: Progress | None = None
        self._table: StepTable | None = None
        self._rewards: list[tuple[int, float]] = []
        """Step and reward of the first and the last row."""
        self._rows = 0
        self._evaluated: list[Text] = []
        """Lines about evaluations of the step whose row comes next."""

    @property
    def width(self) -> int:
        """Characters of a line; a pipe has room for all columns."""
        return self.console.width if self.console.is_terminal else max(_PIPE_WIDTH, self.console.width)

    def print(self, *lines: Text | str) -> None:
        """Print lines, cut off at the width of a terminal."""
        for line in lines if self.compact else ():
            text = Text(line) if isinstance(line, str) else line
            if self.console.is_terminal:
                text.truncate(self.width, overflow="ellipsis")
            self.show(text, soft_wrap=True, highlight=False)

    def show(self, what: RenderableType, *, soft_wrap: bool | None = None, highlight: bool | None = None) -> None:
        """Print as rich does; the run goes on where the terminal or the reader of a pipe is gone."""
        with suppress(OSError, SystemExit):  # which rich raises for a broken pipe
            self.console.print(what, soft_wrap=soft_wrap, highlight=highlight)

    def begin(self, phase: str) -> None:
        """Name a phase of the start; it ends when the next one or training begins."""
        self.end_phase()
        if self.compact:
            self._phase = _Phase(self, phase)

    def end_phase(self) -> None:
        """Say how long the phase took that is under way, if there is one."""
        if self._phase is not None:
            self._phase.end()
            self._phase = None

    def open(self, *, total_steps: int, done_steps: int) -> None:
        """Begin the progress bar."""
        self._progress = Progress(
            TextColumn("step"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
            TextColumn("{task.description}"), console=self.console, disable=not self.console.is_terminal,
        )  # fmt: skip
        self._progress.add_task("", total=total_steps, completed=done_steps)
        self._total_steps = total_steps
        if not self.compact:
            self._progress.start()

    def close(self) -> None:
        """End what moves on the terminal."""
        self.end_phase()
        self._show_evaluations()
        if self._progress is not None:
            self._progress.stop()

    def step(self, step: int, row: Row, headline: str) -> None:
        """Show a step that has finished. `headline`: its figure beside the progress bar."""
        assert self._progress is not None, "open() comes first"
        self.end_phase()
        self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=step, description=headline)
        if not self.compact:
            return
        if self._table is None:
            self._table = StepTable(row, total_steps=self._total_steps, width=self.width)
        if self._rows % _HEADER_STEPS == 0:
            self.print(self._table.header())
        self._rows += 1
        self.print(self._table.line(step, row))
        self._show_evaluations()
        with suppress(KeyError):
            self._rewards[1:] = [(step, number(row, "reward/mean"))]

    def evaluation(self, step: int, figures: Row) -> None:
        """Show the figures of an evaluation after `step` steps, below the row of that step."""
        said = "  ".join(f"{name.removeprefix('eval/')} {value:.4g}" for name, value in figures.items())
        self._evaluated.append(Text(f"{'eval':>11}  {said}", style="magenta"))
        if step == 0:
            self._show_evaluations()

    def _show_evaluations(self) -> None:
        self.print(*self._evaluated)
        self._evaluated.clear()

    def samples(self, samples: Sequence[Sample]) -> None:
        """Show the best and the worst answer of a step, with the right one; one of them where they are equal."""
        rated = {name: s for s in samples for name in s.notable if name in ("best", "worst")}
        if len({s.reward for s in rated.values()}) == 1:
            rated = {"answer": next(iter(rated.values()))}
        for name, sample in rated.items():
            self._sample(name, sample)

    def _sample(self, name: str, sample: Sample) -> None:
        right = f"  (right: {_line(sample.reference, 40)})" if sample.reference else ""
        text = Text(f"{name:>11}  {sample.reward:.3f}  ", style={"best": "green", "worst": "red"}.get(name, ""))
        room = max(20, (self.width - len(text) - len(right) - 3) // 2)
        text.append(_line(sample.prompt, room), style="dim")
        text.append(f" → {_line(sample.answer, room)}", style="default")
        self.print(text.append(right, style="dim"))

    def finish(self, *, model: Path | None, logs: Path, experiment: str) -> None:
        """Print the closing box: rewards, time, model, and what to do next."""
        seconds = time.monotonic() - self._began
        lines = []
        if self._rewards:
            (first, before), (last, after) = self._rewards[0], self._rewards[-1]
            lines.append(f"reward  {before:.3f} → {after:.3f} (steps {first} and {last})")
        lines.append(f"model   {model or 'none was saved'}")
        lines.append(f"next    slipstream watch {logs}")
        if experiment == "ppo-math":
            lines.append(f"        slipstream samples {logs}")
        if model is not None:
            lines.append(f"        slipstream eval --model_path {logs} --output_path eval --data_names YOURS.jsonl")
        self.box(f"done in {duration(seconds)}", lines if self.compact else ())

    def box(self, title: str, lines: Sequence[str]) -> None:
        """Print lines in a box."""
        title = f" {title} "
        bar = "─" * (min(self.width, 80) - len(title) - 2)
        self.print("")
        self.print(Text(f"╭─{title}{bar}", style="green"))
        for line in lines:
            self.show(Text("│ ", style="green").append(line, style="default"), soft_wrap=True, highlight=False)
        self.print(Text(f"╰{'─' * (min(self.width, 80) - 1)}", style="green"))


class _Phase:
    """A phase of the start: a spinner on a terminal, elsewhere a line, and one every few seconds."""

    def __init__(self, screen: Screen, name: str) -> None:
        self._screen, self._name, self._began = screen, name, time.monotonic()
        self._over = threading.Event()
        self._status: Status | None = None
        if screen.console.is_terminal:
            self._status = screen.console.status(f"{name} ...")
            self._status.start()
        else:
            screen.print(f"{name} ...")
        self._ticker = threading.Thread(target=self._tick, daemon=True)
        self._ticker.start()

    def _tick(self) -> None:
        while not self._over.wait(1.0 if self._status else _TICK_SECONDS):
            said = f"{self._name} ... {time.monotonic() - self._began:.0f} s"
            if self._status:
                self._status.update(said)
            else:
                self._screen.print(said)

    def end(self) -> None:
        self._over.set()
        self._ticker.join()
        if self._status is not None:
            self._status.stop()
        self._screen.print(Text(f"{self._name}: {time.monotonic() - self._began:.1f} s", style="dim"))


def _line(text: str, chars: int) -> str:
    """Return a text in one line of at most `chars` characters: its start and its end."""
    text = " ".join(printable(text).split())
    if len(text) <= chars:
        return text
    head = chars // 3
    return f"{text[:head]} … {text[head + 3 - chars :]}"


def duration(seconds: float) -> str:
    """Return a time as 43 s, 2 min 5 s or 3 h 20 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
