"""The shipped reward: is the final answer of a completion equal to one of the prompt's solutions? Runs in a worker.

Which part of the text is the answer is decided here: the last \\boxed{...}; without a box what follows the last "####";
without either the last characters of the text, where math-verify looks for it. What is equal is decided by math-verify.
Invariant: the short cut (two integers, or the same text) says "right" only where math-verify, given the same answer and
solution, says so too; a test compares them.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from rollout.types import Prompt

RIGHT = 1.0
WRONG = 0.0

_INTEGER = re.compile(r"-?[0-9]{1,15}")
_UNANCHORED_TAIL_CHARS = 1_000
"""Without a box or "####" only this much of the end of a text is searched: regular expressions over a whole chain of
thought find numbers that are no answer, and take their time."""


class UnparsableAnswerError(ValueError):
    """A reward function's way to say that a completion holds nothing to score: wrong, and counted apart."""


def math_reward(prompt: Prompt, text: str) -> float:
    """RIGHT when the answer in `text` equals any of `prompt.solutions`, else WRONG.

    Raises UnparsableAnswerError when no answer is found in `text`.
    """
    answer = final_answer(text)
    if not answer:
        raise UnparsableAnswerError("empty completion")
    content = _box_content(answer)
    hard = []
    for solution in prompt.solutions:
        verdict = _quick_verdict(content, solution)
        if verdict:
            return RIGHT
        if verdict is None:
            hard.append(solution)
    if not hard:
        return WRONG
    parsed = _parse(answer)
    if not parsed:
        raise UnparsableAnswerError(f"no answer in {answer[-80:]!r}")
    return RIGHT if any(_verify(_parsed_solution(solution), parsed) for solution in hard) else WRONG


def final_answer(text: str) -> str:
    """The part of a completion that is judged, as math-verify reads it best: a box where the text marks the answer."""
    start = text.rfind("\\boxed{")
    if start >= 0:
        end = _closing_brace(text, start + len("\\boxed{"))
        return text[start : end + 1]
    _, marker, final = text.rpartition("####")
    if marker:
        line = final.strip().partition("\n")[0].strip()
        return f"\\boxed{{{line}}}" if line else ""
    text = text.strip()
    return f"\\boxed{{{text}}}" if _INTEGER.fullmatch(text) else text[-_UNANCHORED_TAIL_CHARS:]


def _closing_brace(text: str, start: int) -> int:
    """Index of the brace that closes the group opened just before `start`; the end of the text if none does."""
    depth = 1
    for match in re.compile(r"\\?[{}]").finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return match.start()
    return len(text)


def _box_content(answer: str) -> str | None:
    """What is inside `answer` when all of it is one box, else None."""
    if not answer.startswith("\\boxed{") or _closing_brace(answer, len("\\boxed{")) != len(answer) - 1:
        return None
    return answer[len("\\boxed{") : -1].strip()


def _quick_verdict(answer: str | None, solution: str) -> bool | None:
    """Equal, different, or None where math-verify has to say. `answer` is the inside of a box."""
    content = _box_content(solution)
    if not answer or not content:
        return None
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(content):
        return int(answer) == int(content)
    return True if answer == content and _parsed_solution(solution) else None


@lru_cache(maxsize=512)
def _parsed_solution(solution: str) -> list[Any]:
    return _parse(solution if "\\boxed" in solution else f"\\boxed{{{solution}}}")


def _parse(text: str) -> list[Any]:
    from math_verify import parse  # half a second of sympy, needed in the workers only

    return parse(text, parsing_timeout=None)


def _verify(solution: list[Any], answer: list[Any]) -> bool:
    from math_verify import verify

    return verify(solution, answer, timeout_seconds=None)
