r"""The shipped reward: is the final answer of a completion equal to one of the prompt's solutions?

This module finds the answer in the text, with strings only and in linear time, so that it is safe in any process.
math_spelling.py gives the answer one spelling, math_reading.py reads it into a structure, and math_equality.py compares
two structures. What stands inside a thought is no answer, and what is not understood as a whole is not right. Integers
take a short cut that gives the verdict of the whole way.
"""

from __future__ import annotations

import re

from rollout.rewards.math_reading import read
from rollout.rewards.math_spelling import TURNING, spelled, unit_of
from rollout.types import Prompt

__all__ = ["RIGHT", "WRONG", "UnparsableAnswerError", "extracted_answer", "math_reward", "quick_math_reward"]

RIGHT = 1.0
WRONG = -1.0
"""Also the score of whatever could not be scored. Right and wrong are +1 and -1, as in the tutorial's task_reward."""

_INTEGER = re.compile(r"\s*(-?[0-9]{1,15})\s*")
_THOUGHT = r"(?:\w+:)?(?:think|thinking|thought|reason|reasoning|reflection|scratchpad|analysis)"
_THOUGHT_BEGIN = re.compile(
    rf"(?i)<{_THOUGHT}(?:\s[^<>]*)?>|<[|｜]begin[_▁]of[_▁]{_THOUGHT}[|｜]>|<\|channel\|>analysis|◁think▷|\[think\]"
)
_THOUGHT_END = re.compile(
    rf"(?i)</{_THOUGHT}\s*>|<[|｜]end[_▁]of[_▁]{_THOUGHT}[|｜]>|<\|channel\|>final<\|message\|>|◁/think▷|\[/think\]"
)
_TAG = re.compile(r"(?is).*<answer>(.*?)(?:</answer>|$)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # or an escaped character, which is no brace
_OPENING = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MAX_JOINED_BOXES = 6
_BETWEEN_BOXES = re.compile(r"[\s$,;]*(?:\\text\{\s*)?(?:and|or)?\s*\}?[\s$]*(?:[a-z](?:_\{?\d\}?)?\s*=\s*)?")
_MAX_CHARS_BETWEEN_BOXES = 40
_ANSWER_IS = re.compile(r"(?i)(?:\b(?:answer|option|choice)\b[\s*]*(?:is\b|[:：])|答案?\s*(?:是|为|[:：]))[\s*:：}]*")
_TAIL_CHARS = 1_000
"""Without a mark only this much of the end of a text is searched: regular expressions over a whole chain of thought
find numbers that are no answer, and take their time."""
_PROSE_WORD = re.compile(r"(?<!\\)\b(?!and\b|or\b)[A-Za-z]{2,}")
_MAX_PROSE_WORDS = 5
"""More words than this after "the answer is" are a sentence, to be searched and not to be read as one answer."""
_FORMULA = r"\$\$.+?\$\$|(?<!\\)\$(?!\s)[^$]+?(?<!\\)\$|\\\(.+?\\\)|\\\[.+?\\\]|`+[^`]+`+"
_NUMBER = r"(?:\\?\$|[€£¥])?(?<![\w.])[-+]?\.?\d[\d.,]*(?<![.,])"
_TERM = rf"(?:{_NUMBER}|√\(?\d+\)?|π)"
_PLAIN = rf"(?>-?(?:(?<!\w)\()?{_TERM}\)?(?:\s*[-+*/^×·÷]?\s*\(?{_TERM}\)?)*)"
_CANDIDATE = re.compile(
    rf"(?s)(?:{_FORMULA})(?:(?:,|\s|\band\b|\bor\b)*(?:{_FORMULA}))*"
    rf"|(?<!\w)\({_TERM}(?:,\s+{_TERM})+\)"
    rf"|{_PLAIN}(?:(?:,\s+{_PLAIN})*,?\s+(?:and|or|to)\s+{_PLAIN})?(?:\s*\\?%)?"
)
_OTHERWISE = re.compile(
    r"(?i)(?:\b(?:least|most|than|above|below|over|under|except|minus|negative|twice|times|half|root|log|ln|sqrt|sin|cos|tan)"
    r"(?: about| of)?|[<>]=|[<>≠≤≥+/^×÷·±∓]|!=|\\(?:(?:ne|[lg]e)q?|[lg]t|pm))[\s*$]*$"
)
"""What makes the number behind it another answer, or part of a formula."""
_DENIED = re.compile(
    r"(?i)[\s*$]*(?:\?|(?:is|was|does|did|can|could|would|will|should|must)(?: not| never|n't)\b"
    r"|(?:cannot|can't|won't|fails)\b|or (?:more|less|fewer)\b|(?:squared|cubed|hundred|thousand|[mb]illion)\b)"
)
"""What stands behind a number that is no answer, or not all of it."""
_JUDGED = re.compile(r"(?i)[\s*$,]*(?:which )?(?:is|was|must be|should be) (?:an? |\w+ly )?(\w+)")
_CLAUSE = re.compile(r"(?i)[,.;:!?](?=\s)|\n|\b(?:so|and|but|thus|hence|therefore|because|since)\b")
_NEGATION = re.compile(r"(?i)\b(?:not|cannot|never|no way)\b|n't\b")
_CALLED_WRONG = re.compile(r"(?i)\b(?:is|was) (?:\w+ly )?(?:wrong|incorrect|false|impossible)\b")
_FORMULA_LINE = re.compile(r"(?=.*[=!])[-+*/^()=!\d.,\s×÷·]*")
_UNIT = re.compile(
    r" ?(?!in\b)((?:(?:square|cubic|sq|cu) )?[a-zA-Z]+(?:(?: ?/ ?| per )[a-zA-Z]+)?(?:\^?\{?[23]\}?|[²³])?)(?![\w^{])"
)
_LETTER = re.compile(r"(?<![\w'\\])\(?([B-HJ]|A(?!\s+(?!or\b|and\b|is\b)[a-z]))\)?(?![\w'])")


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
        marked = _unmarked_answer(outside_thoughts(text, prompt=prompt.text), is_choice=is_choice)
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


def marked_answer(text: str, *, prompt: str = "") -> str | None:
    """Return the answer that `text` marks, None without any. `prompt` may end in the beginning of a thought.

    It is what <answer> encloses, the last box (or the last boxes, joined by "and", "or" or a comma), a last line
    "#### answer", or what follows "the answer is" at the end. "" for a box that never closes and for "the answer is
    not 3".
    """
    text = outside_thoughts(text, prompt=prompt)
    if tag := _TAG.match(text):
        inner = _marked(tag[1])
        return tag[1].strip() if inner is None else inner
    return _marked(text)


def outside_thoughts(text: str, *, prompt: str = "") -> str:
    """Return the part of `text` after its last closed thought and before one that stays open."""
    _, *thoughts = _THOUGHT_BEGIN.split(prompt[-50:].rstrip())
    if thoughts and not thoughts[-1]:
        text = "<think>" + text
    return _THOUGHT_BEGIN.split(_THOUGHT_END.split(text)[-1], maxsplit=1)[0]


def extracted_answer(text: str) -> str:
    """Return the text that is judged in a completion, for people to read; "" when nothing is.

    The content of the box or of the "#### " line, or what "the answer is"; without such a mark the last line, up to
    200 characters of it: there a formula or a number is searched.
    """
    marked = marked_answer(text)
    return " ".join((_last_line(outside_thoughts(text))[-200:] if marked is None else marked).split())


def _integer(content: str | None) -> int | None:
    match = _INTEGER.fullmatch(content or "")
    return int(match[1]) if match else None


def _marked_solution(solution: str) -> str:
    """Return the answer of a solution: what it marks, a line "#### answer" above others, or all of it."""
    found = marked_answer(solution)
    if found is None and (lines := re.findall(r"####[ \t]*(.+)", solution)):
        return str(lines[-1])
    return found or solution


def _marked(text: str) -> str | None:
    boxed = _last_boxes(text)
    if boxed is not None:
        return boxed
    text = text.strip()
    _, marker, last_line = text.rpartition("####")
    if marker and "\n" not in last_line:  # else it is a heading
        return last_line.strip()
    return text if _INTEGER.fullmatch(text) else _said_answer(_last_line(text))


def _said_answer(line: str) -> str | None:
    """Return the text after the last "the answer is" in `line`, unless that is a sentence. "" if it is no answer."""
    _, *said = _ANSWER_IS.split(line)
    if not said:
        return None
    answer = said[-1].strip(" .*。").removesuffix("I hope it is correct").strip(" .*。").strip("$`")
    if answer.startswith("not "):
        return ""
    num_words = len(_PROSE_WORD.findall(answer))
    is_sentence = num_words > (0 if re.search(r"\d", answer) else _MAX_PROSE_WORDS)  # a number among words is searched
    has_several = "$" in answer or answer.count("\\(") > 1 or ", not " in answer
    return None if not answer or is_sentence or has_several else answer


def _last_line(text: str) -> str:
    """Return the last line with a letter or a digit."""
    return next((line for line in reversed(text.strip()[-_TAIL_CHARS:].splitlines()) if re.search(r"\w", line)), "")


def _last_boxes(text: str) -> str | None:
    """Return the content of the last box; several contents joined by commas where only "and", "or" or a comma is
    between them."""
    contents: list[str] = []
    before = len(text)
    for opening in reversed(list(_OPENING.finditer(text))):
        end = _closing_brace(text[:before], opening.end())
        if end == before:  # never closed, or around the boxes after it
            return ", ".join(contents)
        between = text[end + 1 : before]
        if contents and (len(between) > _MAX_CHARS_BETWEEN_BOXES or not _BETWEEN_BOXES.fullmatch(between)):
            break
        contents.insert(0, text[opening.end() : end].strip())
        before = opening.start()
        if len(contents) == _MAX_JOINED_BOXES:
            break
    return ", ".join(dict.fromkeys(contents)) if contents else None


def _closing_brace(text: str, start: int) -> int:
    """Return the index of the brace that closes the group opened just before `start`; the end of the text if none
    does."""
    depth = 1
    for match in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return match.start()
    return len(text)


def _unmarked_answer(text: str, *, is_choice: bool) -> str:
    """Return the last formula or number in a text without a mark, or the only letter in its last sentence; "" without
    any."""
    text = text.strip()[-_TAIL_CHARS:]
    if is_choice:
        sentence = re.split(r"(?<=[.!?:])\s+|\n", text.rstrip(" .*"))[-1]
        letters = set(_LETTER.findall(sentence))
        is_denied = _NEGATION.search(sentence) or _CALLED_WRONG.search(sentence)
        return letters.pop() if len(letters) == 1 and not is_denied else ""
    line = _last_line(text)
    if _FORMULA_LINE.fullmatch(line) or _is_quantity(line):
        return line
    found = list(_CANDIDATE.finditer(text))
    if not found:
        return ""
    before, after = text[: found[-1].start()], text[found[-1].end() :]
    is_denied = _OTHERWISE.search(before) or _NEGATION.search(_CLAUSE.split(before)[-1]) or _DENIED.match(after)
    judged = _JUDGED.match(after)
    if is_denied or (judged and TURNING.match(judged[1])):
        return ""
    answer, words = found[-1].group().strip(), _UNIT.match(after)
    unit = unit_of(spelled(words[1])) if words and answer[-1].isdigit() else None
    return rf"{answer}\text{{{words[1]}}}" if words and unit and unit.known and not unit.others else answer


def _is_quantity(line: str) -> bool:
    """Return whether all of a line is one number with its unit, as in "2 dozen" and "sin 30 degrees"."""
    answer = read(line)
    if answer.kind != "quantity" or re.search(r"[$,(]", line):
        return False
    formula, _, beside = answer.parts
    return not beside and not _PROSE_WORD.search(formula)
