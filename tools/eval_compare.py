"""Two evaluations side by side: `python -m tools.eval compare A B`.

Every difference comes with a 95 % bootstrap interval over questions: both folders answer the same questions, so those
are drawn together (paired), and what the questions' difficulty adds to both cancels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rollout.evaluation import Answer, read_answers
from tools.eval_report import PASS_AT, by_question, pass_at_k, text_table

_RESAMPLES = 10_000
_COLUMNS = ("dataset", "measure", "A", "B", "B - A", "95 % interval", "questions")


class CompareError(ValueError):
    """The folders cannot be compared; the message says why."""


@dataclass(frozen=True)
class Difference:
    """One measure of one dataset, in percent (points for the difference) or tokens."""

    dataset: str
    measure: str
    a: float
    b: float
    low: float
    high: float
    num_questions: int

    def cells(self) -> tuple[object, ...]:
        interval = f"[{self.low:+.1f}, {self.high:+.1f}]"
        return (self.dataset, self.measure, self.a, self.b, f"{self.b - self.a:+.1f}", interval, self.num_questions)


@dataclass(frozen=True)
class Flip:
    """A question whose greedy answer is right in one evaluation only."""

    dataset: str
    query_id: str
    now_right: bool
    answer_a: str
    answer_b: str


def compare(a: Path, b: Path, *, seed: int = 0) -> tuple[list[Difference], list[Flip]]:
    """Every dataset that both folders answered. Raises CompareError where there is none, or no question in common."""
    names = sorted({p.stem for p in a.glob("*.jsonl")} & {p.stem for p in b.glob("*.jsonl")})
    if not names:
        raise CompareError(
            f"{a} and {b} have no dataset in common (DATASET.jsonl in both); evaluate both models on one"
        )
    differences: list[Difference] = []
    flips: list[Flip] = []
    for name in names:
        left, right = (read_answers(folder / f"{name}.jsonl") for folder in (a, b))
        differences += _differences(name, left, right, np.random.default_rng(seed))
        flips += _flips(name, left, right)
    return differences, flips


def report(differences: Sequence[Difference], flips: Sequence[Flip]) -> str:
    """For the terminal."""
    lines = [text_table(_COLUMNS, [d.cells() for d in differences])]
    for now_right, title in ((True, "right in B only"), (False, "right in A only")):
        found = [f for f in flips if f.now_right == now_right]
        lines.append(f"\n{len(found)} questions answered {title} (greedy):")
        lines += [f"  {f.dataset} {f.query_id}: A {_short(f.answer_a)} | B {_short(f.answer_b)}" for f in found]
    return "\n".join(lines)


def _differences(dataset: str, a: Sequence[Answer], b: Sequence[Answer], rng: np.random.Generator) -> list[Difference]:
    found = []
    for measure, of_question in _measures(a, b).items():
        values_a, values_b = of_question(a), of_question(b)
        shared = sorted(values_a.keys() & values_b.keys())
        if not shared:
            raise CompareError(f"{dataset}: the two folders have no question in common; were they asked the same file?")
        pairs = np.array([(values_a[q], values_b[q]) for q in shared])
        apart = pairs[:, 1] - pairs[:, 0]
        draws = rng.integers(0, len(apart), (_RESAMPLES, len(apart)))
        low, high = np.percentile(apart[draws].mean(1), (2.5, 97.5))
        mean_a, mean_b = pairs.mean(0)
        found.append(Difference(dataset, measure, mean_a, mean_b, low, high, len(shared)))
    return found


def _measures(a: Sequence[Answer], b: Sequence[Answer]) -> dict[str, Callable[[Sequence[Answer]], dict[str, float]]]:
    """Measure -> its value by question. pass@k where every question of both has k samples."""
    measures: dict[str, Callable[[Sequence[Answer]], dict[str, float]]] = {
        "greedy_acc": lambda answers: {q: 100 * s[0].score for q, s in by_question(answers, "greedy").items()},
        "greedy_length": lambda answers: {q: float(s[0].tokens) for q, s in by_question(answers, "greedy").items()},
    }
    counts = [len(s) for answers in (a, b) for s in by_question(answers, "sample").values()]
    for k in (1, *PASS_AT):
        if counts and k <= min(counts):
            measures["sample_pass@1" if k == 1 else f"pass@{k}"] = lambda answers, k=k: {  # type: ignore[misc]
                q: 100 * pass_at_k(len(s), sum(x.score > 0 for x in s), k)
                for q, s in by_question(answers, "sample").items()
            }
    return measures


def _flips(dataset: str, a: Sequence[Answer], b: Sequence[Answer]) -> list[Flip]:
    left, right = by_question(a, "greedy"), by_question(b, "greedy")
    return [
        Flip(dataset, q, right[q][0].score > 0, left[q][0].answer, right[q][0].answer)
        for q in sorted(left.keys() & right.keys())
        if left[q][0].score != right[q][0].score
    ]


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 40 else f"…{text[-39:]}"
