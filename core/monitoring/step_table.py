"""One step as a row of aligned columns, for the terminal of a run and for `slipstream watch`.

The columns are those of which the first row has a figure; they are left out from the right where the line is too short.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich.text import Text

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


def _plain(name: str, spec: str, unit: str = "") -> Callable[[Row], str]:
    return lambda row: f"{number(row, name):{spec}}{unit}"


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
