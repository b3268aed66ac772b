"""From answers to the table of an evaluation: as text, JSON, markdown and a bar chart; no model, no generator here."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from rollout.evaluation import Answer, Mode
from tools.demo.plot import draw_horizontal_lines

PASS_AT = (8, 16)
COLUMNS = ("dataset", "num_questions", "greedy_length", "sample_length", "greedy_acc", "sample_pass@1") + tuple(
    f"pass@{k}" for k in PASS_AT
)
REWARDS = ("greedy_reward", "sample_reward")
"""Columns of mean rewards, each with the half-width of its 95 % interval; left out of the table of right and wrong."""


@dataclass(frozen=True)
class MeanReward:
    """The mean reward of a question, and half of its 95 % interval over the questions."""

    mean: float
    interval: float

    @classmethod
    def of(cls, questions: Iterable[Sequence[Answer]]) -> Self | None:
        """Return the mean over questions of the mean reward of their answers; None without any reward."""
        means = [
            np.mean([a.reward for a in of if a.reward is not None]) for of in questions if of[0].reward is not None
        ]
        if not means:
            return None
        deviation = float(np.std(means, ddof=1)) if len(means) > 1 else 0.0
        return cls(float(np.mean(means)), 1.96 * deviation / math.sqrt(len(means)))

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.interval:.3f}"


@dataclass(frozen=True)
class Result:
    """One row of the table: of a dataset, or of all."""

    dataset: str
    num_questions: int
    greedy_length: float
    """Mean tokens of a greedy answer."""
    sample_length: float | None
    """Mean tokens of a sampled one; None where none was sampled, as below."""
    greedy_acc: float | None
    """Percent; None where no answer is called right, as below."""
    pass_at: Mapping[int, float]
    """k -> percent, for 1 and those of PASS_AT for which there are enough samples."""
    greedy_reward: MeanReward | None
    """None: an earlier release has written no rewards, as below."""
    sample_reward: MeanReward | None

    def values(self) -> dict[str, str | int | float | None]:
        """Return the cells by the names of the columns."""
        cells: tuple[str | int | float | None, ...] = (
            self.dataset, self.num_questions, self.greedy_length, self.sample_length, self.greedy_acc,
            *(self.pass_at.get(k) for k in (1, *PASS_AT)),
        )  # fmt: skip
        values = dict(zip(COLUMNS, cells, strict=True))
        for column, reward in self._rewards():
            values[column] = None if reward is None else reward.mean
            values[f"{column}_interval"] = None if reward is None else reward.interval
        return values

    def row(self, columns: Sequence[str]) -> list[object]:
        """Return the cells of a table with these columns."""
        cells: dict[str, object] = {**self.values(), **dict(self._rewards())}
        return [cells[column] for column in columns]

    def _rewards(self) -> Iterator[tuple[str, MeanReward | None]]:
        yield from zip(REWARDS, (self.greedy_reward, self.sample_reward), strict=True)


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
    is_graded = any(a.score is not None for a in greedy)
    rights = [(len(s), sum(bool(a.score) for a in s)) for s in sampled.values()] if is_graded else []
    return Result(
        dataset=dataset,
        num_questions=len(greedy),
        greedy_length=float(np.mean([a.tokens for a in greedy])),
        sample_length=float(np.mean([a.tokens for s in sampled.values() for a in s])) if sampled else None,
        greedy_acc=100 * float(np.mean([bool(a.score) for a in greedy])) if is_graded else None,
        pass_at={
            k: 100 * float(np.mean([pass_at_k(n, c, k) for n, c in rights]))
            for k in (1, *PASS_AT)
            if rights and k <= fewest
        },
        greedy_reward=MeanReward.of([a] for a in greedy),
        sample_reward=MeanReward.of(sampled.values()),
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
    columns = list(COLUMNS) if reward is None else _columns(results)
    rows = [result.row(columns) for result in results]
    (folder / "results.json").write_text(
        json.dumps({"settings": settings, "results": [result.values() for result in results]}, indent=1) + "\n"
    )
    below = "" if reward is None else f"\nReward: {reward}"
    (folder / "results.md").write_text(markdown_table(columns, rows) + (f"{below}\n" if below else ""))
    draw_bars(folder / "results.png", results, title=f"{settings['model_path']}{below}")
    return text_table(columns, rows) + below


def _columns(results: Sequence[Result]) -> list[str]:
    """Return the columns of a reward other than right and wrong: its means first, accuracies where they are known."""
    name, count, *lengths = COLUMNS[:4]
    known = [column for column in COLUMNS[4:] if any(r.values()[column] is not None for r in results)]
    return [name, count, *REWARDS, *lengths, *known]


def draw_bars(path: Path, results: Sequence[Result], *, title: str) -> None:
    """Draw a PNG: for every dataset a group of bars, one per measure: accuracies, or mean rewards with their intervals
    where no answer is called right."""
    from matplotlib.figure import Figure

    is_graded = all(r.greedy_acc is not None for r in results)
    series = _accuracies(results) if is_graded else _mean_rewards(results)
    figure = Figure(figsize=(max(5.0, 1.2 + 1.6 * len(results)), 4.0), dpi=150)
    axes = figure.subplots()
    width = 0.8 / len(series)
    colors = ("#666666", "#2a78d6", "#7db1ec", "#bcd7f6")
    for i, ((name, bars_of), color) in enumerate(zip(series.items(), colors, strict=False)):
        places = np.arange(len(results)) + (i - (len(series) - 1) / 2) * width
        values, intervals = zip(*bars_of, strict=True)
        bars = axes.bar(places, values, 0.92 * width, label=name, color=color, yerr=None if is_graded else intervals)
        axes.bar_label(bars, fmt="%.1f" if is_graded else "%.3f", fontsize=6.5, color="#444444", padding=1)
    axes.set_xticks(range(len(results)), [f"{r.dataset}\n{r.num_questions} questions" for r in results])
    if is_graded:
        axes.set_ylim(0, 112)
        axes.set_yticks(range(0, 101, 25), [f"{p} %" for p in range(0, 101, 25)])
    draw_horizontal_lines(axes)
    axes.legend(ncols=len(series), loc="upper left", bbox_to_anchor=(0, 1.1), frameon=False, fontsize=8)
    axes.set_title(title, loc="left", fontsize=9, pad=26)
    figure.savefig(path, bbox_inches="tight")


Bars = dict[str, list[tuple[float, float]]]
"""Name of a series -> height and half of the interval of each bar."""


def _accuracies(results: Sequence[Result]) -> Bars:
    series: Bars = {"greedy": [(r.greedy_acc or 0.0, 0.0) for r in results]}
    for k in (1, *PASS_AT):
        if all(k in r.pass_at for r in results):
            series[f"pass@{k}"] = [(r.pass_at[k], 0.0) for r in results]
    return series


def _mean_rewards(results: Sequence[Result]) -> Bars:
    series: Bars = {}
    for name in REWARDS:
        of = [getattr(r, name) for r in results]
        if all(of):
            series[f"mean reward, {name.partition('_')[0]}"] = [(reward.mean, reward.interval) for reward in of]
    return series
