"""From `reward.function` to one function (Prompt, text) -> Score: of several with weights, and of three signatures.

    (prompt, text)                                                 own rewards
    (completions, **columns) -> list                               TRL's
    (data_source, solution_str, ground_truth, extra_info)          verl's

Rows of some tasks may have functions of their own: "math; game=package.module:name".

A result is a number, a bool, or a mapping with "score" and further numbers, which become metrics. Invariant: a spec is
one text, "0.5*package.module:name + math", so that a run, its record and an evaluation name rewards in the same way.
"""

import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from rollout.plugins import PluginError, load_plugin, unknown_name
from rollout.rewards.math import WRONG, UnparsableAnswerError, math_reward, quick_math_reward
from rollout.types import Prompt, Reward, Score

REWARDS: dict[str, Reward] = {"math": math_reward}

QUICK_REWARDS: dict[str, Callable[[Prompt, str], float | None]] = {"math": quick_math_reward}
"""Scores that are safe and fast enough to compute in the pool's own process; None: send the answer to a worker."""


_TERM = re.compile(r"\s*(?:(-?[\d.]+(?:e-?\d+)?)\s*\*)?\s*([^\s*]+)\s*", re.IGNORECASE)
_SCORE = "score"
"""Key of the reward in a result with several figures."""
_ANSWERS = ("answer", "solution", "ground_truth")
"""Columns that TRL's functions ask for, where the data set's own answer column is meant."""


def join_spec(functions: Sequence[str], weights: Sequence[float] | None) -> str:
    """Return the spec of reward functions; of one function without a weight its name."""
    weights = weights or [1.0] * len(functions)
    terms = zip(functions, weights, strict=False)  # lists that differ in length are refused by the configuration
    return " + ".join(name if weight == 1.0 else f"{_number(weight)}*{name}" for name, weight in terms)


def _number(weight: float) -> str:
    """Return a weight exactly, without the + that parts the terms."""
    return f"{weight:.15g}".replace("e+", "e")


def add_tasks(spec: str, by_task: Mapping[str, str]) -> str:
    """Return a spec with the specs of some tasks."""
    return "; ".join([spec, *(f"{task}={own}" for task, own in by_task.items())])


def specs_by_task(spec: str) -> dict[str, str]:
    """Return the spec of each task, and under "" that of all others."""
    default, *others = spec.split(";")
    return {"": default, **{task.strip(): own for task, _, own in (other.partition("=") for other in others)}}


def split_spec(spec: str) -> list[tuple[float, str]]:
    """Return (weight, name) of each function of a spec, those of single tasks left out. Raises PluginError."""
    spec = specs_by_task(spec)[""]
    found = [_TERM.fullmatch(term) for term in spec.split("+")]
    if not all(found):
        raise PluginError(f"reward {spec!r}: write names as package.module:name, several as 0.5*first + second")
    return [(float(match[1] or 1.0), match[2]) for match in found if match]


def check_names(spec: str) -> None:
    """Check the names of a spec without importing anything. Raises PluginError."""
    for _, name in _all_terms(spec):
        if name not in REWARDS and ":" not in name:
            raise PluginError(unknown_name(name, kind="reward", known=sorted(REWARDS), own="function"))


def check_reward(spec: str) -> None:
    """Find every function of a spec and check its signature. Raises PluginError."""
    for _, name in _all_terms(spec):
        _load(name)


def missing_columns(spec: str, workflows: Iterable[str], columns: Mapping[str, Set[str]]) -> str:
    """Return which columns a function of TRL asks for that no row of a task has, which there are, and what to do;
    empty: all find theirs. `workflows`: of the rows; one that is not math may add columns. `columns`: see
    columns_by_task(). Raises PluginError."""
    if ":" not in spec or {*workflows} != {"math"}:
        return ""
    specs = specs_by_task(spec)
    for task, given in columns.items():
        answers = _ANSWERS if "solutions" in given else ()
        known = [*sorted({*given, *answers} - {"solutions"}), "prompts", "completions"]
        for _, name in split_spec(specs.get(task, specs[""])):
            function = _load(name)
            if isinstance(function, _OfLists) and (missing := _missing(function.parameters, known)):
                return f"{name}: {missing}; name the column so, or give the argument a default"
    return ""


def uses_math(spec: str) -> bool:
    """Return whether a function of a spec is one of REWARDS. Raises PluginError."""
    return any(name in REWARDS for _, name in _all_terms(spec))


def judged_by_math(spec: str) -> bool:
    """Return whether math judges rows, those of single tasks left out: they need solutions, and a prompt asks for a
    box. False for a spec that check_reward() refuses."""
    try:
        return "math" in [name for _, name in split_spec(spec)]
    except PluginError:
        return False


def load_reward(spec: str) -> Callable[[Prompt, str], Score]:
    """Return the weighted sum of the functions of a spec, by the task of a prompt where it has one; the values of
    several, and the further figures of each, are its parts. Raises PluginError."""
    judges = {task: _load_sum(own) for task, own in specs_by_task(spec).items()}
    default = judges.pop("")
    return (lambda prompt, text: judges.get(prompt.task, default)(prompt, text)) if judges else default


def _all_terms(spec: str) -> list[tuple[float, str]]:
    return [term for own in specs_by_task(spec).values() for term in split_spec(own)]


def _load_sum(spec: str) -> Callable[[Prompt, str], Score]:
    terms = [(weight, _short(name), _load(name)) for weight, name in split_spec(spec)]

    def judge(prompt: Prompt, text: str) -> Score:
        total, is_scored = 0.0, False
        parts: dict[str, float] = {}
        for weight, name, function in terms:
            try:
                value, figures = _result(function(prompt, text))
            except UnparsableAnswerError:
                if len(terms) == 1:
                    raise
                value, figures = WRONG, {}
            parts |= figures
            if value is None:
                continue
            is_scored = True
            total += weight * value
            if len(terms) > 1:
                parts[name] = value
        if not is_scored:
            raise ValueError("returned None; a reward is a number")
        return Score(total, parts)

    return judge


def _load(name: str) -> Callable[[Prompt, str], object]:
    """Return one function as (prompt, text)."""
    if name in REWARDS:
        return REWARDS[name]
    check_names(name)
    found = load_plugin(name, kind="reward function", arguments=None)
    try:
        parameters = inspect.signature(found).parameters if callable(found) else {}
    except ValueError:  # a builtin: the call itself will show it
        return found
    if "completions" in parameters:
        return _OfLists(found, parameters)
    if "solution_str" in parameters:
        return _from_verl(found, parameters)
    return load_plugin(name, kind="reward function", arguments=("prompt", "text"))


@dataclass(frozen=True)
class _OfLists:
    """A function of TRL, over lists, as one over a single completion."""

    function: Callable[..., Sequence[object]]
    parameters: Mapping[str, inspect.Parameter]

    def __call__(self, prompt: Prompt, text: str) -> object:
        """Return the result. A conversation gets its completion as messages."""
        messages = prompt.meta.get("messages")
        answers = dict.fromkeys(_ANSWERS, prompt.answers[0]) if prompt.answers else {}
        row: dict[str, object] = {
            **answers,
            **prompt.meta,
            "prompts": prompt.text if messages is None else messages,
            "completions": text if messages is None else [{"role": "assistant", "content": text}],
        }
        accepted = _accepted(self.parameters, row)
        return self.function(**{name: [value] for name, value in accepted.items()})[0]


def _from_verl(function: Callable[..., object], parameters: Mapping[str, inspect.Parameter]) -> Callable[..., object]:
    def judge(prompt: Prompt, text: str) -> object:
        row: dict[str, object] = {
            "data_source": prompt.meta.get("data_source", prompt.task),
            "solution_str": text,
            "ground_truth": prompt.answers[0] if prompt.answers else None,
            "extra_info": prompt.meta.get("extra_info", dict(prompt.meta)),
        }
        return function(**_accepted(parameters, row))

    return judge


def _accepted(parameters: Mapping[str, inspect.Parameter], row: Mapping[str, object]) -> dict[str, object]:
    """Return the columns that a function takes. Raises ValueError for one that the data set does not have."""
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        given = dict(row)
    else:
        given = {name: value for name, value in row.items() if name in parameters}
    if missing := _missing(parameters, row):
        raise ValueError(missing)
    return given


def _missing(parameters: Mapping[str, inspect.Parameter], columns: Collection[str]) -> str:
    """Return which columns a function asks for that are not there; empty: none."""
    asked = (
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    )
    missing = [name for name in asked if name not in columns]
    return f"the reward asks for {', '.join(missing)}; the data set has {', '.join(columns)}" if missing else ""


def _result(result: object) -> tuple[float | None, dict[str, float]]:
    """Return the reward of a result, None where the function does not apply, and its further figures."""
    if not isinstance(result, Mapping):
        return None if result is None else float(result), {}  # type: ignore[arg-type]
    if _SCORE not in result:
        raise ValueError(f"returned a mapping without {_SCORE!r}, which is the reward: {', '.join(map(str, result))}")
    numbers = {str(name): float(value) for name, value in result.items() if isinstance(value, int | float)}
    return numbers.pop(_SCORE, None), {name: value for name, value in numbers.items() if math.isfinite(value)}


def _short(name: str) -> str:
    """Return the name of a part in metrics: that of the function."""
    name = name.rpartition(":")[2]
    return name or "reward"
