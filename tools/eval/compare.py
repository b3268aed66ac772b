"""Two evaluations side by side: `python -m tools.eval compare A B`.

Three kinds of settings: those that change what a measure means or measures, which must be the same; those that change
rounding or the end of a completion, which are reported; and the seed, which only selects among equally likely samples.
Every difference comes with a 95 % bootstrap interval over questions: both folders answer the same questions, so those
are drawn together (paired), and what the questions' difficulty adds to both cancels.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from rollout.evaluation import Answer, Mode, read_answers
from tools.eval.model import DEFAULT_DTYPES, SETTINGS, read_json
from tools.eval.report import PASS_AT, REWARDS, by_question, pass_at_k, text_table

_ALL_COMPLETIONS = {
    "reward": "--reward",
    "right_at": "--right_at",
    "workflow": "--workflow",
    "prompt_format.template": "--prompt_template",
    "prompt_format.system": "--system",
    "prompt_format.instruction": "--instruction",
    "prompt_format.chat_template": "--config",
    "prompt_format.chat_options": "--config",
    "max_gen_tokens": "--max_gen_tokens",
}
"""Settings that must be the same -> the option of tools.eval that sets each."""
_SAMPLED_COMPLETIONS = {"temperature": "--temperature", "top_p": "--top_p"}
"""The same, only where sampled completions are compared: greedy ones do not depend on these."""
_REPORTED = ("generator", "dtype", "sglang", "stop_token_ids")
"""Settings that leave the measures comparable."""


@dataclass(frozen=True)
class SettingDifferences:
    """How the settings of two evaluations differ."""

    refused: Mapping[str, str]
    """Difference, with both values -> the option that sets it: the measures are not comparable."""
    reported: tuple[str, ...]
    """Differences, with both values, and settings that cannot be checked: the measures are comparable."""


def setting_differences(a: Mapping[str, object], b: Mapping[str, object], *, sampled: bool) -> SettingDifferences:
    """Compare the contents of two settings.json; sampled: also what changes only sampled completions."""
    must_agree = _ALL_COMPLETIONS | (_SAMPLED_COMPLETIONS if sampled else {})
    left, right = (dict(_flat(settings)) for settings in (a, b))
    refused, reported = {}, []
    for key in (*must_agree, *_REPORTED):
        if key in left and key in right and left[key] != right[key]:
            difference = f"{key}={left[key]!r} in A and {right[key]!r} in B"
            if key in must_agree:
                refused[difference] = must_agree[key]
            else:
                reported.append(difference)
    for side, known in (("A", left), ("B", right)):
        unknown = [key for key in must_agree if key not in known]
        if unknown:
            reported.append(f"settings.json of {side} lacks {', '.join(unknown)}, which cannot be checked")
    return SettingDifferences(refused, tuple(reported))


def _flat(settings: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the settings with the parts of the prompt format as settings of their own, the default data type as its
    value, and a file of a chat template as the hash of its content where that is known."""
    for key, value in settings.items():
        if key == "prompt_format" and isinstance(value, Mapping):
            yield from ((f"{key}.{part}", of_part) for part, of_part in value.items())
        elif key == "chat_template_hash":
            if value is not None:
                yield "prompt_format.chat_template", f"hash {value}"
        elif key == "dtype":
            yield key, value or DEFAULT_DTYPES.get(str(settings.get("generator")))
        else:
            yield key, value


_RESAMPLES = 10_000
_MOST_DRAWN = 1 << 22
"""Questions drawn at once: the resamples of a large dataset are drawn in blocks."""
_SAMPLED = "sample_pass@1"
"""The measure that exists wherever sampled completions are compared."""
_COLUMNS = ("dataset", "measure", "A", "B", "B - A", "95 % interval", "questions")


class CompareError(ValueError):
    """The folders cannot be compared; the message contains the reason."""


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
        places = 3 if self.measure in REWARDS else 1
        a, b = (f"{value:.{places}f}" for value in (self.a, self.b))
        interval = f"[{self.low:+.{places}f}, {self.high:+.{places}f}]"
        return (self.dataset, self.measure, a, b, f"{self.b - self.a:+.{places}f}", interval, self.num_questions)


@dataclass(frozen=True)
class Flip:
    """A question whose greedy answer is right in one evaluation only."""

    dataset: str
    query_id: str
    now_right: bool
    answer_a: str
    answer_b: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two evaluations side by side."""

    differences: list[Difference]
    flips: list[Flip]
    left_out: dict[str, str]
    """Dataset -> why it is not compared."""
    warnings: list[str]
    """Differences other than those of the models, each with both values."""


def compare(a: Path, b: Path, *, allow_different: bool = False, seed: int = 0) -> Comparison:
    """Compare every dataset that both folders answered. Raises CompareError where there is none, where two files have
    one name, and where settings differ that change what the measures mean, unless allow_different is set."""
    for folder in (a, b):
        if not folder.is_dir():
            raise CompareError(f"{folder}: no such folder; give the --output_path of an evaluation")
    differences: list[Difference] = []
    flips: list[Flip] = []
    left_out: dict[str, str] = {}
    counts: list[str] = []
    for name in sorted({p.stem for folder in (a, b) for p in folder.glob("*.jsonl")}):
        paths = [folder / f"{name}.jsonl" for folder in (a, b)]
        left, right = (read_answers(path) if path.exists() else [] for path in paths)
        empty = [side for side, answers in (("A", left), ("B", right)) if not answers]
        if empty:
            left_out[name] = f"no answers in {' and '.join(empty)}"
            continue
        if _other_questions(name, a, b):
            raise CompareError(f"{name}: {a} and {b} used different files with that name: {_how(left, right)}")
        found = _differences(name, left, right, np.random.default_rng(seed))
        if not found:
            left_out[name] = "no question in common; the data files differ"
        else:
            counts += _other_counts(name, left, right)
        differences += found
        flips += _flips(name, left, right)
    if not differences:
        why = "".join(f"; {name}: {reason}" for name, reason in left_out.items())
        raise CompareError(
            f"{a} and {b} have no dataset in common (DATASET.jsonl in both); evaluate both models on one{why}"
        )
    sampled = any(d.measure == _SAMPLED for d in differences)
    warnings = [*_other_settings(a, b, sampled=sampled, allow_different=allow_different), *counts]
    return Comparison(differences=differences, flips=flips, left_out=left_out, warnings=warnings)


def report(found: Comparison) -> str:
    """Return the report for the terminal."""
    lines = [f"warning: {warning}" for warning in found.warnings]
    lines.append(text_table(_COLUMNS, [d.cells() for d in found.differences]))
    lines += [f"{name} is left out: {reason}" for name, reason in found.left_out.items()]
    titles = ((True, "right in B only"), (False, "right in A only"))
    for now_right, title in titles if any(d.measure == "greedy_acc" for d in found.differences) else ():
        flips = [f for f in found.flips if f.now_right == now_right]
        lines.append(f"\n{len(flips)} questions answered {title} (greedy):")
        lines += [f"  {f.dataset} {f.query_id}: A {_short(f.answer_a)} | B {_short(f.answer_b)}" for f in flips]
    return "\n".join(lines)


def _other_settings(a: Path, b: Path, *, sampled: bool, allow_different: bool) -> list[str]:
    """Return the warnings about settings that differ. Raises CompareError for those that make results incomparable,
    unless they are allowed."""
    differ = setting_differences(read_json(a / SETTINGS), read_json(b / SETTINGS), sampled=sampled)
    if differ.refused and not allow_different:
        options = ", ".join(dict.fromkeys(differ.refused.values()))
        raise CompareError(
            f"A={a} and B={b} were evaluated with different settings, which make their results incomparable: "
            f"{'; '.join(differ.refused)}. Evaluate one of the models again with the settings of the other ({options}; "
            "--config takes workflow, reward and prompt from the config.yaml of a run) and another --output_path, or "
            "add --allow_different to compare them anyway"
        )
    return [f"the results are not comparable: {difference}" for difference in differ.refused] + list(differ.reported)


def _other_counts(dataset: str, a: Sequence[Answer], b: Sequence[Answer]) -> list[str]:
    """Return the warnings about numbers of questions and of samples that differ. Both leave results comparable:
    questions are paired, and pass@k has no bias for any number of samples."""
    warnings = []
    left, right = ({answer.query_id for answer in answers} for answers in (a, b))
    if left != right:
        shared = f"the {len(left & right)} in both are compared"
        warnings.append(f"{dataset}: {len(left)} questions in A and {len(right)} in B; {shared}")
    samples_a, samples_b = (_range([len(s) for s in by_question(x, "sample").values()]) for x in (a, b))
    if samples_a != samples_b:
        warnings.append(f"{dataset}: {samples_a} samples per question in A and {samples_b} in B")
    return warnings


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts, default=0), max(counts, default=0)
    return str(low) if low == high else f"{low} to {high}"


def _differences(dataset: str, a: Sequence[Answer], b: Sequence[Answer], rng: np.random.Generator) -> list[Difference]:
    """Return the differences of every measure that a question has on both sides."""
    found = []
    for measure, of_question in _measures(a, b).items():
        values_a, values_b = of_question(a), of_question(b)
        shared = sorted(values_a.keys() & values_b.keys())
        if not shared:
            continue
        pairs = np.array([(values_a[q], values_b[q]) for q in shared])
        apart = pairs[:, 1] - pairs[:, 0]
        low, high = np.percentile(_resampled_means(apart, rng), (2.5, 97.5))
        mean_a, mean_b = pairs.mean(0)
        found.append(Difference(dataset, measure, mean_a, mean_b, low, high, len(shared)))
    return found


def _resampled_means(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the means of as many values drawn with repetition, [_RESAMPLES]; the same however many are drawn at
    once."""
    rows = max(1, _MOST_DRAWN // len(values))
    sizes = [min(rows, _RESAMPLES - done) for done in range(0, _RESAMPLES, rows)]
    return np.concatenate([values[rng.integers(0, len(values), (n, len(values)))].mean(1) for n in sizes])


def _other_questions(name: str, a: Path, b: Path) -> bool:
    """Return whether both folders wrote down their questions, and these differ."""
    left, right = (read_json(folder / SETTINGS).get("questions", {}).get(name) for folder in (a, b))
    return left is not None and right is not None and left != right


def _how(a: Sequence[Answer], b: Sequence[Answer]) -> str:
    """Return how two sets of questions differ, as far as the answers show it."""
    left, right = ({answer.query_id: answer.prompt for answer in answers} for answers in (a, b))
    for query_id in sorted(left.keys() & right.keys()):
        if left[query_id] != right[query_id]:
            return f"{query_id} is {_short(left[query_id])!r} in A and {_short(right[query_id])!r} in B"
    if left.keys() != right.keys():
        return f"A has {len(left)} questions, B {len(right)}, and {len(left.keys() & right.keys())} ids are in both"
    return "the questions are the same, but their solutions or other rows differ"


def _pass_rates(k: int, answers: Sequence[Answer]) -> dict[str, float]:
    """Return pass@k in per cent by question."""
    return {
        q: 100 * pass_at_k(len(s), sum(bool(x.score) for x in s), k) for q, s in by_question(answers, "sample").items()
    }


def _measures(a: Sequence[Answer], b: Sequence[Answer]) -> dict[str, Callable[[Sequence[Answer]], dict[str, float]]]:
    """Measure -> its value by question. pass@k where every question of both has k samples."""
    is_graded = all(answer.score is not None for answer in (*a, *b))
    measures: dict[str, Callable[[Sequence[Answer]], dict[str, float]]] = {
        REWARDS[0]: partial(_rewards, "greedy"),
        REWARDS[1]: partial(_rewards, "sample"),
        "greedy_acc": lambda answers: {q: 100 * bool(s[0].score) for q, s in by_question(answers, "greedy").items()},
        "greedy_length": lambda answers: {q: float(s[0].tokens) for q, s in by_question(answers, "greedy").items()},
    }
    counts = [len(s) for answers in (a, b) for s in by_question(answers, "sample").values()]
    for k in (1, *PASS_AT):
        if is_graded and counts and k <= min(counts):
            measures[_SAMPLED if k == 1 else f"pass@{k}"] = partial(_pass_rates, k)
    if not is_graded:
        del measures["greedy_acc"]
    return measures


def _rewards(mode: Mode, answers: Sequence[Answer]) -> dict[str, float]:
    """Return the mean reward of the answers of one mode by question."""
    return {
        q: float(np.mean([a.reward for a in s if a.reward is not None]))
        for q, s in by_question(answers, mode).items()
        if all(a.reward is not None for a in s)
    }


def _flips(dataset: str, a: Sequence[Answer], b: Sequence[Answer]) -> list[Flip]:
    left, right = by_question(a, "greedy"), by_question(b, "greedy")
    return [
        Flip(dataset, q, bool(right[q][0].score), left[q][0].answer, right[q][0].answer)
        for q in sorted(left.keys() & right.keys())
        if left[q][0].score != right[q][0].score
    ]


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 40 else f"…{text[-39:]}"
