"""Show what became of the bugs: progress, survivors, score by area."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tools.mutants.trial import KILLED, Verdict

LEAST_SCORE = 0.95


class Display:
    """A progress bar on a terminal, plain lines elsewhere."""

    def __init__(self, total: int) -> None:
        self.console = Console(highlight=False, markup=False)
        columns = (TextColumn("{task.fields[stage]}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(
            *columns, TextColumn("{task.description}"), console=self.console, disable=not self.console.is_terminal
        )
        self._task = self._progress.add_task("", total=total, stage="")
        self._done, self._total = 0, total

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()

    def done(self, stage: str, text: str, *, keep: bool) -> None:
        """Count one more; `keep`: on a terminal too, the line stays."""
        self._done += 1
        self._progress.update(self._task, advance=1, description=text, stage=stage)
        if keep or not self.console.is_terminal:
            self.line(f"[{self._done}/{self._total}] {text}")

    def line(self, text: str) -> None:
        self.console.print(f"{time.strftime('%H:%M:%S')} {text}", soft_wrap=True)


def score(verdicts: Sequence[Verdict]) -> float:
    return sum(verdict.outcome in KILLED for verdict in verdicts) / len(verdicts) if verdicts else 1.0


def problems(verdicts: Sequence[Verdict]) -> list[str]:
    """Return why the exit code must be 1, one line each."""
    found = [f"{v.mutant.id}: {v.detail}" for v in verdicts if v.outcome == "error"]
    found += [
        f"{v.mutant.id}: survived {' '.join(v.mutant.tests)}; write the test, or give the reason as survives=..."
        for v in verdicts
        if v.outcome == "survived" and not v.mutant.survives
    ]
    found += [
        f"{v.mutant.id}: survives={v.mutant.survives!r}, but its tests notice it now: remove the key"
        for v in verdicts
        if v.outcome in KILLED and v.mutant.survives
    ]
    if score(verdicts) < LEAST_SCORE:
        found.append(f"score {score(verdicts):.1%} is below {LEAST_SCORE:.0%}")
    return found


def show(verdicts: Sequence[Verdict], console: Console) -> None:
    """Print the kills by timeout, the survivors, the score of every area and, as the last line, that of all."""
    timeouts = [v.mutant.id for v in verdicts if v.outcome == "killed by timeout"]
    if timeouts:
        console.print(f"Killed by timeout: {', '.join(timeouts)}", soft_wrap=True)
    survivors = [v for v in verdicts if v.outcome == "survived"]
    if survivors:
        table = Table("survivor", "file", "promise", "reason", title="Survivors", title_justify="left")
        for v in survivors:
            table.add_row(v.mutant.id, v.mutant.file, v.mutant.promise, v.mutant.survives or "NONE")
        console.print(table)
    table = Table("area", title="Score", title_justify="left")
    for name in ("bugs", "killed", "survived", "errors", "score", "seconds"):
        table.add_column(name, justify="right")
    for area in sorted({v.mutant.area for v in verdicts}):
        table.add_row(*_row(area, [v for v in verdicts if v.mutant.area == area]))
    table.add_section()
    table.add_row(*_row("all", verdicts))
    console.print(table)
    console.print(
        f"{sum(v.outcome in KILLED for v in verdicts)} of {len(verdicts)} bugs killed ({score(verdicts):.1%})"
    )


def _row(area: str, verdicts: Sequence[Verdict]) -> tuple[str, ...]:
    outcomes = [v.outcome for v in verdicts]
    killed = sum(outcome in KILLED for outcome in outcomes)
    counts = (len(outcomes), killed, outcomes.count("survived"), outcomes.count("error"))
    return (area, *map(str, counts), f"{score(verdicts):.0%}", f"{sum(v.seconds for v in verdicts):.0f}")


def write_json(verdicts: Sequence[Verdict], path: Path) -> None:
    rows = [{**asdict(v), "mutant": v.mutant.id, "file": v.mutant.file, "area": v.mutant.area} for v in verdicts]
    result = {"score": score(verdicts), "problems": problems(verdicts), "mutants": rows}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
