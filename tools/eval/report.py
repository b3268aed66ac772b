"""From answers to the table of an evaluation: as text, JSON, markdown and a bar chart; no model, no generator here."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rollout.answer_file import Answer, Mode
from tools.demo.plot import draw_horizontal_lines

PASS_AT = (8, 16)
COLUMNS = ("dataset", "num_questions", "greedy_length", "sample_length", "greedy_acc", "sample_pass@1") + tuple(
    f"pass@{k}" for k in PASS_AT
)


@dataclass(frozen=True)
class Result:
    """One row of the table: of a dataset, or of all."""

    dataset: str
    num_questions: int
    greedy_length: float
    """Mean tokens of a greedy answer."""
    sample_length: float | None
    """Mean tokens of a sampled one; None where none was sampled, as below."""
    greedy_acc: float
    """Percent."""
    pass_at: Mapping[int, float]
    """k -> percent, for 1 and those of PASS_AT for which there are enough samples."""

    def values(self) -> dict[str, str | int | float | None]:
        """Return the cells by the names of the columns."""
        cells: tuple[str | int | float | None, ...] = (
            self.dataset, self.num_questions, self.greedy_length, self.sample_length, self.greedy_acc,
            *(self.pass_at.get(k) for k in (1, *PASS_AT)),
        )  # fmt: skip
        return dict(zip(COLUMNS, cells, strict=True))


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return the probability that at least one of k of the samples, drawn without replacement, is correct: the unbiased
    estimator 1 - C(n - c, k) / C(n, k) of Chen et al. 2021, "Evaluating Large Language Models Trained on Code",
    equation 1.

    Raises ValueError for k > num_samples."""
    if k > num_samples:
        raise ValueError(f"pass@{k} of {num_samples} samples: at least {k} are needed")
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def by_question(answers: Sequence[Answer], mode: Mode) -> dict[str, list[Answer]]:
    """Return query_id -> its answers of one mode, by number."""
    found: dict[str, list[Answer]] = {}
    for answer in sorted((a for a in answers if a.mode == mode), key=lambda a: (a.query_id, a.number)):
        found.setdefault(answer.query_id, []).append(answer)
    return found


def summarise(dataset: str, answers: Sequence[Answer]) -> Result:
    """Return the row of a dataset, from all its answers."""
    greedy = [a for a in answers if a.mode == "greedy"]
    sampled = by_question(answers, "sample")
    fewest = min((len(of_question) for of_question in sampled.values()), default=0)
    rights = [(len(s), sum(a.score > 0 for a in s)) for s in sampled.values()]
    return Result(
        dataset=dataset,
        num_questions=len(greedy),
        greedy_length=float(np.mean([a.tokens for a in greedy])),
        sample_length=float(np.mean([a.tokens for s in sampled.values() for a in s])) if sampled else None,
        greedy_acc=100 * float(np.mean([a.score > 0 for a in greedy])),
        pass_at={
            k: 100 * float(np.mean([pass_at_k(n, c, k) for n, c in rights])) for k in (1, *PASS_AT) if k <= fewest
        },
    )


def text_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a frame of +, - and |, every cell centred."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(c) for c in column) + 2 for column in zip(columns, *cells, strict=True)]
    line = "+" + "+".join("-" * width for width in widths) + "+"
    body = ["|" + "|".join(c.center(w) for c, w in zip(row, widths, strict=True)) + "|" for row in (columns, *cells)]
    return "\n".join([line, body[0], line, *body[1:], line])


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]) + "\n"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def unjudged_line(answers: Iterable[Answer]) -> str | None:
    """Return how many answers count as wrong because judging them failed; None: none does."""
    counts = Counter(a.unjudged for a in answers if a.unjudged is not None)
    if not counts:
        return None
    why = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    return f'{counts.total()} answers count as wrong because judging them failed ({why}): see "unjudged" in their rows.'


def write_report(
    folder: Path, results: Sequence[Result], settings: Mapping[str, object], *, reward: str | None = None
) -> str:
    """Write results.json, results.md and results.png; return the table for the terminal.

    reward: named below the table and in the title of the chart; None: the default one, which is not named.
    """
    rows = [list(result.values().values()) for result in results]
    (folder / "results.json").write_text(
        json.dumps({"settings": settings, "results": [result.values() for result in results]}, indent=1) + "\n"
    )
    below = "" if reward is None else f"\nReward: {reward}"
    (folder / "results.md").write_text(markdown_table(COLUMNS, rows) + (f"{below}\n" if below else ""))
    draw_bars(folder / "results.png", results, title=f"{settings['model_path']}{below}")
    return text_table(COLUMNS, rows) + below


def draw_bars(path: Path, results: Sequence[Result], *, title: str) -> None:
    """Draw a PNG: for every dataset a group of bars, one per measure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    series = {"greedy": [r.greedy_acc for r in results]}
    for k in (1, *PASS_AT):
        if all(k in r.pass_at for r in results):
            series[f"pass@{k}"] = [r.pass_at[k] for r in results]
    figure, axes = plt.subplots(figsize=(max(5.0, 1.2 + 1.6 * len(results)), 4.0), dpi=150)
    width = 0.8 / len(series)
    colors = ("#666666", "#2a78d6", "#7db1ec", "#bcd7f6")
    for i, ((name, values), color) in enumerate(zip(series.items(), colors, strict=False)):
        places = np.arange(len(results)) + (i - (len(series) - 1) / 2) * width
        bars = axes.bar(places, values, 0.92 * width, label=name, color=color)
        axes.bar_label(bars, fmt="%.1f", fontsize=6.5, color="#444444", padding=1)
    axes.set_xticks(range(len(results)), [f"{r.dataset}\n{r.num_questions} questions" for r in results])
    axes.set_ylim(0, 112)
    axes.set_yticks(range(0, 101, 25), [f"{p} %" for p in range(0, 101, 25)])
    draw_horizontal_lines(axes)
    axes.legend(ncols=len(series), loc="upper left", bbox_to_anchor=(0, 1.1), frameon=False, fontsize=8)
    axes.set_title(title, loc="left", fontsize=9, pad=26)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
