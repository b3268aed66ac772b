"""The shipped reward: is the final answer of a completion equal to one of the prompt's solutions? Runs in a worker.

Which part of the text is the answer is decided here: the last \\boxed{...}; without a box a last line "#### answer";
without either the last characters of the text, where math-verify looks for it. What is equal is decided by math-verify.
Invariant: the short cut for integers says "right" only where math-verify, given the same answer and solution, says so
too; a test compares them.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from rollout.types import Prompt

RIGHT = 1.0
WRONG = -1.0
"""Also the score of whatever could not be scored. Right and wrong are +1 and -1, as in the tutorial's task_reward."""

_INTEGER = re.compile(r"-?[0-9]{1,15}")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # or an escaped character, which is no brace
_BOXED_INTEGER = re.compile(r"\\boxed\{\s*(-?[0-9]{1,15})\s*\}")
_UNANCHORED_TAIL_CHARS = 1_000
"""Without a box or "####" only this much of the end of a text is searched: regular expressions over a whole chain of
thought find numbers that are no answer, and take their time."""


class UnparsableAnswerError(ValueError):
    """A reward function's way to say that a completion holds nothing to score: wrong, and counted apart."""


def math_reward(prompt: Prompt, text: str) -> float:
    """RIGHT when the answer in `text` equals any of `prompt.solutions`, else WRONG.

    Raises UnparsableAnswerError when no answer is found in `text`.
    """
    quick = quick_math_reward(prompt, text)
    if quick is not None:
        return quick
    answer = final_answer(text)
    parsed = _parse(answer) if answer else []
    if not parsed:
        raise UnparsableAnswerError(f"no answer in {text[-80:]!r}")
    return RIGHT if any(_verify(_parsed_solution(solution), parsed) for solution in prompt.solutions) else WRONG


def quick_math_reward(prompt: Prompt, text: str) -> float | None:
    """The same verdict where answer and solutions are integers, else None. Linear in `text`, safe in any process."""
    answer = _boxed_integer(final_answer(text))
    if answer is None:
        return None
    solutions = [_boxed_integer(_boxed_solution(solution)) for solution in prompt.solutions]
    if answer in solutions:
        return RIGHT
    return None if None in solutions else WRONG


def final_answer(text: str) -> str:
    """The part of a completion that is judged, as math-verify reads it best: a box where the text marks the answer."""
    start = text.rfind("\\boxed{")
    if start >= 0:
        end = _closing_brace(text, start + len("\\boxed{"))
        return text[start : end + 1]
    text = text.strip()
    _, marker, last_line = text.rpartition("####")
    if marker and "\n" not in last_line:  # else it is a heading
        return f"\\boxed{{{last_line.strip()}}}"
    return f"\\boxed{{{text}}}" if _INTEGER.fullmatch(text) else text[-_UNANCHORED_TAIL_CHARS:]


def _closing_brace(text: str, start: int) -> int:
    """Index of the brace that closes the group opened just before `start`; the end of the text if none does."""
    depth = 1
    for match in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return match.start()
    return len(text)


def _boxed_solution(solution: str) -> str:
    """The answer of a solution: its last box, or all of it."""
    return final_answer(solution) if "\\boxed{" in solution else f"\\boxed{{{solution}}}"


def _boxed_integer(answer: str) -> int | None:
    match = _BOXED_INTEGER.fullmatch(answer)
    return int(match[1]) if match else None


@lru_cache(maxsize=512)
def _parsed_solution(solution: str) -> list[Any]:
    return _parse(_boxed_solution(solution))


def _parse(text: str) -> list[Any]:
    from math_verify import parse  # half a second of sympy, needed in the workers only

    return parse(text, parsing_timeout=None)


def _verify(solution: list[Any], answer: list[Any]) -> bool:
    from math_verify import verify

    return verify(solution, answer, timeout_seconds=None)
