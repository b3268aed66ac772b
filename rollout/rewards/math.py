"""The shipped reward: is the final answer of a completion equal to one of the prompt's solutions? Runs in a worker.

Which part of the text is the answer, and how it is written for math-verify, is decided in math_answers.py. Here the
solution's own form (multiple choice, words, percent, units, anything else) decides what math-verify receives; what is
equal is decided by math-verify. Its rule for decimals: equal when the same after rounding to six places. Invariant: the
short cut for integers returns RIGHT only where math-verify, given the same answer and solution, does so too; a test
compares them.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from rollout.rewards.math_answers import (
    choice,
    choice_text,
    extracted_answer,
    is_curve,
    leading_zeros,
    marked_answer,
    paired_forms,
    plain,
    tail,
    without_percent,
    without_unit,
    without_units_in_formulas,
    words,
)
from rollout.types import Prompt

__all__ = ["RIGHT", "WRONG", "UnparsableAnswerError", "extracted_answer", "math_reward", "quick_math_reward"]

RIGHT = 1.0
WRONG = -1.0
"""Also the score of whatever could not be scored. Right and wrong are +1 and -1, as in the tutorial's task_reward."""

_BOXED_INTEGER = re.compile(r"\s*(-?[0-9]{1,15})\s*")
_PLACES, _DIGITS = 6, 15
"""Decimals are equal when they agree to this many places, expressions to this many digits: math-verify's own rule. Both
are counted from the first digit of a small solution, or 6.6 \\times 10^{-34} would equal 0."""
_MAX_LETTERS_OF_A_PRODUCT = 3
"""Without \\text, "xy" is x times y and not a word; "yes" against "no" is settled either way."""
_NUMBER = re.compile(r"-?\d{1,15}(\.\d{1,15})?")


class UnparsableAnswerError(ValueError):
    """Raised by a reward function if a completion contains nothing to score: wrong, and counted apart."""


def math_reward(prompt: Prompt, text: str) -> float:
    """Return RIGHT when the answer in `text` equals any of `prompt.solutions`, else WRONG.

    Raises UnparsableAnswerError when no answer is found in `text`.
    """
    quick = quick_math_reward(prompt, text)
    if quick is not None:
        return quick
    marked = marked_answer(text)
    searched = tail(text) if marked is None else plain(marked)
    verdicts = [_is_equal(_solution(solution), searched, is_marked=marked is not None) for solution in prompt.solutions]
    if any(verdicts):
        return RIGHT
    if None in verdicts:
        raise UnparsableAnswerError(f"no answer in {text[-80:]!r}")
    return WRONG


def quick_math_reward(prompt: Prompt, text: str) -> float | None:
    """Return the same verdict where answer and solutions are integers, else None. Linear in `text`, safe in any
    process."""
    answer = _integer(marked_answer(text))
    if answer is None:
        return None
    solutions = [_integer(_marked_solution(solution)) for solution in prompt.solutions]
    if answer in solutions:
        return RIGHT
    return None if None in solutions else WRONG


def _integer(content: str | None) -> int | None:
    match = _BOXED_INTEGER.fullmatch(content or "")
    return int(match[1]) if match else None


def _marked_solution(solution: str) -> str:
    """Return the answer of a solution: its last box, or all of it."""
    return (marked_answer(solution) or solution) if "\\boxed" in solution else solution


@lru_cache(maxsize=512)
def _solution(solution: str) -> str:
    return plain(_marked_solution(solution))


def _is_equal(solution: str, answer: str, *, is_marked: bool) -> bool | None:
    """Return whether a plain `answer`, or the end of a text that marks none, gives `solution`. None: it gives no
    answer."""
    if not answer:
        return None
    if is_marked and answer == solution:
        return True
    letter = choice(solution)
    if letter is not None:
        found = _parse_choice(choice_text(answer, is_marked=is_marked))
        return _verify([letter.lower()], found) if found else _is_equal_mathematics(solution, answer, is_marked)
    solution_words = words(solution)
    if solution_words is not None and is_marked and (answer_words := words(answer)) is not None:
        is_product = len(solution) <= _MAX_LETTERS_OF_A_PRODUCT and len(answer) <= _MAX_LETTERS_OF_A_PRODUCT
        if not is_product:
            return _verify([solution_words], [answer_words])
    return _is_equal_mathematics(solution, answer, is_marked)


def _is_equal_mathematics(solution: str, answer: str, is_marked: bool) -> bool | None:
    if is_marked and "=" not in solution and is_curve(answer):
        return False  # math-verify compares the right side
    if is_marked:
        solution, answer = paired_forms(solution, answer)
    solution, is_solution_percent = without_percent(solution)
    solution, solution_unit = without_unit(solution)
    is_answer_percent = False
    if is_marked:
        answer, is_answer_percent = without_percent(answer)
        answer, answer_unit = without_unit(answer)
        if solution_unit and answer_unit and solution_unit != answer_unit:
            return False
    found = _parsed_answer(answer) if is_marked else _parse(without_units_in_formulas(answer))
    if not found:
        return None
    solutions = _parsed_solution(solution)
    if is_solution_percent != is_answer_percent:  # 50 % answers "what percent" as 50 does and "what part" as 1/2 does
        if is_solution_percent:
            solutions = solutions + _parsed_solution(rf"\frac{{{solution}}}{{100}}")
        else:
            found = found + _parsed_answer(rf"\frac{{{answer}}}{{100}}")
    return _verify(solutions, found, leading_zeros=leading_zeros(solution))


@lru_cache(maxsize=512)
def _parsed_solution(solution: str) -> list[Any]:
    return _parsed_answer(solution)


def _parsed_answer(answer: str) -> list[Any]:
    """Return a plain answer as math-verify reads it. A number in digits needs no LaTeX parser, which is the slow
    part."""
    if _NUMBER.fullmatch(answer):
        return _parse(answer, numbers_only=True)
    return _parse(f"\\boxed{{{answer}}}")


@cache
def _configs() -> tuple[Any, Any]:
    """Return math-verify's configurations for LaTeX, without its removal of units (which takes the t of 3t for tonnes),
    and for plain numbers."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig

    normalization = replace(LatexExtractionConfig().normalization_config, units=False)
    return LatexExtractionConfig(normalization_config=normalization), ExprExtractionConfig()


def _parse(text: str, *, numbers_only: bool = False) -> list[Any]:
    from math_verify import parse  # half a second of sympy, needed in the workers only

    return parse(text, list(_configs()[1:] if numbers_only else _configs()), parsing_timeout=None)


def _parse_choice(text: str) -> list[Any]:
    from math_verify import StringExtractionConfig, parse

    return parse(text, [StringExtractionConfig(strings=tuple("ABCDEFGHIJ"))], parsing_timeout=None)[:1]


def _verify(solution: list[Any], answer: list[Any], *, leading_zeros: int = 0) -> bool:
    from math_verify import verify

    return verify(
        solution,
        answer,
        float_rounding=_PLACES + leading_zeros,
        numeric_precision=_DIGITS + leading_zeros,
        allow_set_relation_comp=True,
        timeout_seconds=None,
    )
