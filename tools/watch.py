"""Watch a run in the terminal: its reward curve, its last steps, and its best and worst answers.

    slipstream watch RUN [--once]

RUN is the folder of a run's logs or models. On a terminal the view is renewed until the run ends; Ctrl-C leaves the
run alone.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from core.monitoring.health import Rows, judge
from core.monitoring.samples import Sample, last_samples
from core.monitoring.screen import StepTable, duration
from core.runs.paths import RunPaths
from tools import arguments
from tools.runs import history_of, rows_of, state_of, steps_of

_BARS = "▁▂▃▄▅▆▇█"
_STEPS = 12
_REFRESH_SECONDS = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    """Show the run until it ends; return 0, 2 where there is no such run."""
    parser = arguments.parser_of("tools.watch", __doc__)
    parser.add_argument("run", type=Path, help="folder of a run's logs or models")
    parser.add_argument("--once", action="store_true", help="show the present state and end")
    given = parser.parse_args(argv)
    paths = RunPaths.of_folder(given.run)
    if paths is None or not paths.logs.is_dir():
        return arguments.refused(f"{given.run}: not the folder of a run; `slipstream runs` lists them")
    console = Console(highlight=False, force_terminal=sys.stdout.isatty())
    if given.once or not console.is_terminal:
        console.print(view(paths.logs, console.width))
        return 0
    with Live(view(paths.logs, console.width), console=console, auto_refresh=False) as live:
        while state_of(paths.logs) == "running":
            time.sleep(_REFRESH_SECONDS)
            live.update(view(paths.logs, console.width), refresh=True)
    return 0


def view(logs: Path, width: int) -> RenderableType:
    """Return what is shown of a run, for a terminal of this width."""
    metrics = rows_of(logs)
    rows = steps_of(metrics)
    title = Text(f"{logs.parent.name}/{logs.name} · {state_of(logs)}", style="bold")
    if not rows:
        return Group(title, Text("no step has finished yet"))
    name = "reward/mean" if "reward/mean" in rows[-1] else "loss"
    values = [row[name] for row in rows if name in row]
    seconds = sum(row["time/step"] for row in rows)
    curve = f"{name} {values[0]:.3f} → {values[-1]:.3f}  {sparkline(values, width - 40)}  {duration(seconds)}"
    table = StepTable(rows[-1], total_steps=None, width=width)
    steps = [table.line(int(row["step"]), row) for row in rows[-_STEPS:]]
    found = judge(history_of(logs, Rows(metrics)))
    health = [Text(f"{one.title}: {one.reason}", style="yellow") for one in found if one.is_problem]
    return Group(title, Text(curve), *health, Text(""), table.header(), *steps, *_answers(logs, width))


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a curve of at most `width` characters: each the mean of as many neighbours."""
    size = -(-len(values) // max(width, 1))
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def _answers(logs: Path, width: int) -> list[Text]:
    """Return the best and the worst answer of the last step that has any."""
    return [Text(""), *(_answer(s, width) for s in last_samples(logs) if {"best", "worst"} & set(s.notable))]


def _answer(sample: Sample, width: int) -> Text:
    right = f" (right: {sample.reference})" if sample.reference else ""
    said = f"{sample.notable[0]:>6} {sample.reward:.3f}  {sample.prompt} → {sample.answer}{right}"
    text = Text(" ".join(said.split()), style="green" if "best" in sample.notable else "red")
    text.truncate(width, overflow="ellipsis")
    return text


if __name__ == "__main__":
    sys.exit(main())
