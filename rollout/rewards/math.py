"""The shipped reward: is the final answer of a completion equal to one of the prompt's solutions? Runs in a worker.

math_answers.py finds the answer in the text, math_reading.py reads it into a structure, math_equality.py compares two
structures. Invariant: what is not understood as a whole is not right; the short cut for integers gives the verdict of
the whole way, and a test compares them.
"""

from __future__ import annotations

import re

from rollout.rewards.math_answers import extracted_answer, marked_answer, unmarked_answer
from rollout.rewards.math_reading import read
from rollout.types import Prompt

__all__ = ["RIGHT", "WRONG", "UnparsableAnswerError", "extracted_answer", "math_reward", "quick_math_reward"]

RIGHT = 1.0
WRONG = -1.0
"""Also the score of whatever could not be scored. Right and wrong are +1 and -1, as in the tutorial's task_reward."""

_INTEGER = re.compile(r"\s*(-?[0-9]{1,15})\s*")


class UnparsableAnswerError(ValueError):
    """Raised by a reward function if a completion contains nothing to score: wrong, and counted apart."""


def math_reward(prompt: Prompt, text: str) -> float:
    """Return RIGHT when the answer in `text` equals any of `prompt.solutions`, else WRONG.

    Raises UnparsableAnswerError when no answer is found in `text`, or none that is understood.
    """
    quick = quick_math_reward(prompt, text)
    if quick is not None:
        return quick
    from rollout.rewards.math_equality import is_same  # loads sympy

    marked = marked_answer(text, prompt=prompt.text)
    solutions = [read(_marked_solution(solution)) for solution in prompt.solutions]
    if marked is None:
        is_choice = any(solution.kind == "choice" for solution in solutions)
        marked = unmarked_answer(text, prompt=prompt.text, is_choice=is_choice)
    if not marked:
        raise UnparsableAnswerError(f"no answer in {text[-80:]!r}")
    answer = read(marked)
    if any(is_same(solution, answer) for solution in solutions):
        return RIGHT
    if answer.kind == "unread":
        raise UnparsableAnswerError(f"no answer in {text[-80:]!r}")
    return WRONG


def quick_math_reward(prompt: Prompt, text: str) -> float | None:
    """Return the same verdict where answer and solutions are integers, else None. Linear in `text`, safe in any
    process."""
    answer = _integer(marked_answer(text, prompt=prompt.text))
    if answer is None:
        return None
    solutions = [_integer(_marked_solution(solution)) for solution in prompt.solutions]
    if answer in solutions:
        return RIGHT
    return None if None in solutions else WRONG


def _integer(content: str | None) -> int | None:
    match = _INTEGER.fullmatch(content or "")
    return int(match[1]) if match else None


def _marked_solution(solution: str) -> str:
    """Return the answer of a solution: its last box, or all of it."""
    return (marked_answer(solution) or solution) if "\\boxed" in solution else solution
