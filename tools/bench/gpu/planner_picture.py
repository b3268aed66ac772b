"""Draw what the planner predicted against what was measured, from the tables of benchmarks/planner.md.

python -m tools.bench.gpu.planner_picture    # writes docs/images/planner.png
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FormatStrFormatter, LogLocator, NullFormatter

_ROOT = Path(__file__).parents[3]
LOG_BOOK = _ROOT / "benchmarks/planner.md"
BEFORE, SINCE = "predicted before", "known before, or with causes found since"
_PANELS = (
    "Peak memory of an update, GB",
    "Time of an update, seconds",
    "Updates, tokens/s",
    "Server, new tokens/s",
    "Cache of a server, tokens",
    "Whole run, trained tokens/s",
)
_BANDS = (0.1, 0.05)


@dataclass(frozen=True, kw_only=True)
class Point:
    """A figure, predicted and measured."""

    panel: str
    kind: str
    predicted: float
    measured: float


def points(text: str) -> Iterator[Point]:
    """Yield what has a prediction and a measurement in the tables of a log-book."""
    for table in re.findall(r"(?:^\|.*\|$\n?)+", text, re.MULTILINE):
        header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
        for row in rows:
            yield from _of_row(header, row)


def _of_row(header: Sequence[str], row: Sequence[str]) -> Iterator[Point]:
    """Yield the points of a row: a prediction beside its measurement, and what the arithmetic of today is off."""
    panel, kind, measured = "", "", 0.0
    for i, (heading, cell) in enumerate(zip(header, row, strict=True)):
        if heading == "plan" or "predicted" in heading:
            if header[i - 1] == "measured":
                kind, measured = SINCE, _number(row[i - 1])
            elif header[i + 1] == "measured":
                kind, measured = SINCE if header[0] == "model" else BEFORE, _number(row[i + 1])
            else:
                continue  # of figures that others publish
            panel = _panel(header[0], heading, row)
            yield Point(panel=panel, kind=kind, predicted=_number(cell), measured=measured)
        elif heading == "with causes found" and cell:
            yield Point(panel=panel, kind=SINCE, predicted=measured * (1 + _number(cell) / 100), measured=measured)


def _panel(subject: str, heading: str, row: Sequence[str]) -> str:
    memory, seconds, updates, server, cache, run = _PANELS
    if subject == "load":
        return cache if row[0].endswith("cache") else server
    if subject == "run":
        return run
    if heading.startswith("seconds"):
        return seconds
    return updates if any(cell.endswith("tokens/s") for cell in row) else memory


def _number(cell: str) -> float:
    found = re.match(r"[-+]?[\d,.]+", cell)
    assert found, f"{cell!r} is no number"
    return float(found[0].replace(",", ""))


def draw(found: Sequence[Point], path: Path) -> None:
    """Write a picture with a panel for each kind of figure, and bands of 5 and 10 %."""
    figure = Figure(figsize=(13, 8.5), layout="constrained")
    for ax, panel in zip(figure.subplots(2, 3).flat, _PANELS, strict=True):
        own = [point for point in found if point.panel == panel]
        ends = [0.85 * min(p.measured for p in own), 1.18 * max(p.measured for p in own)]
        for band in _BANDS:
            ax.fill_between(
                ends, [e * (1 - band) for e in ends], [e * (1 + band) for e in ends], color="0.2", alpha=0.12
            )
        ax.plot(ends, ends, color="black", linewidth=0.8)
        for kind, marker in ((BEFORE, "o"), (SINCE, "x")):
            of_kind = [point for point in own if point.kind == kind]
            ax.plot([p.measured for p in of_kind], [p.predicted for p in of_kind], marker, markersize=5, label=kind)
        ax.set(xscale="log", yscale="log", xlabel="measured", ylabel="predicted", title=panel)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(EngFormatter(sep="") if ends[0] > 100 else FormatStrFormatter("%g"))
            axis.set_minor_formatter(NullFormatter())
    figure.axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    draw([*points(LOG_BOOK.read_text(encoding="utf-8"))], _ROOT / "docs/images/planner.png")
