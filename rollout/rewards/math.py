r"""The shipped reward: is the final answer of a completion equal to one of the prompt's solutions?

This module finds the answer in the text, with strings only and in linear time, so that it is safe in any process.
math_spelling.py gives the answer one spelling, math_reading.py reads it into a structure, and math_equality.py compares
two structures. What stands inside a thought is no answer, and what is not understood as a whole is not right. Integers
take a short cut that gives the verdict of the whole way.
"""

from __future__ import annotations

import re

from rollout.rewards.math_reading import read
from rollout.rewards.math_spelling import DENYING, TURNING
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
_SAYS = re.compile(
    r"(?i)^(?:[a-z ]+,)?|(?:\b(?:is|are|was|were|be|equals?|gets?|got|gives?|has|have|had|costs?|takes?|took|earns?"
    r"|earned|makes?|made|keeps?|needs?|pays?|paid|spends?|spent|leaves?|left with|bought|sold|ran|ate|used|read|drove"
    r"|scored|walked|finds?|concludes?|produces?|total of|up with|equal to|(?:it|that|there|he|she|they)['’](?:s|re)"
    r"|so|thus|hence|therefore|then|that|answer|option|choice|(?:up|down) by)\b(?: at\b)?"
    r"|等于|[是为有得]|(?<=[^\W\d])\**[:：])[\s*:：}]*(?:(?:an?|the) (?=[a-z]{2}))?"
)
"""Without a mark the answer is what the last sentence has behind one of these; all of it where it has none."""
_TAIL_CHARS = 1_000
_SENTENCE_END = re.compile(r"(?<=[.!?。])\s+(?![a-z\d])|\n")
_CLAUSE = re.compile(r"(?i)[,.;:!?](?=\s)|\b(?:so|and|but|thus|hence|therefore|because|since)\b")
_IS_RIGHT = re.compile(r"(?i) is (?:correct|right|the (?:right |correct )?(?:answer|option|choice))[\s.*]*$")
_REASON = re.compile(r"(?i),?\s+(?:since|because)\b.*")
_COURTESY = re.compile(
    r"(?i)(?:(?<=[.!?])\s+|\n\s*)"
    r"(?:(?:I )?hope (?:this|that|it)|(?:please )?(?:let me know|feel free)|great|well done)\b"
    r"(?!.*\b(?:not?|wait|wrong|incorrect|mistaken?)\b)[^\d\\$\n]*$"
)
"""What is said after an answer, and about none."""
_COMPUTATION = re.compile(r"\d.*[-+*/×÷x–−%(]")
_TURNED = re.compile(
    r"(?i)\?|\b(?:(?:is|are|was|were)(?: not|n't)|too|wrong|impossible|fails|thousand|[mb]illion|dozen)\b"
)
"""What makes the result in front of it another value, or none."""
_ARITHMETIC_END = re.compile(r"[-+*/×÷().,$%\d\s]*$")
_VARIABLE = re.compile(r"(?<![\w'’])(?!x\s*\\?\$?[\d(])[b-zB-HJ-Z](?!\w)|\d[a-zA-Z](?!\w)|\\[a-z]|[_^]")
"""A letter of an equation that is still to be solved, or a formula."""
_PLACE = r"(?:in|at|for|on|from|to|of|with|during|every|each|who|away)"
_BESIDE = re.compile(rf"(?i)(?<=[\w$%])\s+{_PLACE}\s(?!all\b|total\b|least\b|most\b)[^\d=]*$")
"""Where, when or for whom, behind a value that is said."""
_NUMBER = re.compile(r"(?<![\w.)^/:-])(?:\\?\$)?-?\d[\d,]*(?:\.\d+)?(?:/\d+)?(?![\w^:/\\]|[.,]\d)%?(?: [a-zA-Z]+)?")
_BOUND = re.compile(
    r"(?i)\b(?:least|most|than|over|under|below|above|about|nearly|almost|beyond|until|before|after|step|minus|negative"
    r"|guess|twice|half)\W*$"
)
"""Words before a number that make it no answer."""
_NO_UNIT = re.compile(
    rf"(?i){_PLACE}|and|so|is|are|was|were|more|less|fewer|than|before|after|by|left|total|old|have|had|can"
)
_OTHER_NUMBER = re.compile(
    r"(?i)\b(?:power|addition|top|removed|two|three|four|five|six|seven|eight|nine|ten|to one)\b"
)
_WITHOUT_TURN = re.compile(rf"(?i)\b(?:{_PLACE}|out of the|up|and|is|are|was|be)\b")


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
    found = _unmarked_answer(outside_thoughts(text, prompt=prompt.text)) if marked is None else marked
    if not found:
        raise UnparsableAnswerError(f"no answer in {text[-80:]!r}")
    answer = read(found)
    if any(is_same(read(_marked_solution(solution)), answer) for solution in prompt.solutions):
        return RIGHT
    if answer.kind == "unread" or (marked is None and answer.kind == "words"):
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

    The content of the box or of the "#### " line, or what "the answer is"; without such a mark what the last
    sentence answers.
    """
    marked = marked_answer(text)
    found = _unmarked_answer(outside_thoughts(text)) if marked is None else marked
    return " ".join((found or "").split())


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
    return text if _INTEGER.fullmatch(text) else _said(_last_sentence(text), _ANSWER_IS)


def _last_sentence(text: str) -> str:
    sentences = _SENTENCE_END.split(_COURTESY.sub("", text.strip()[-_TAIL_CHARS:]))
    return next((sentence for sentence in reversed(sentences) if re.search(r"\w", sentence)), "")


def _said(sentence: str, pattern: re.Pattern[str]) -> str | None:
    """Return what a sentence has behind the last match of `pattern`: None without one, "" if it denies."""
    sentence = _REASON.sub("", _IS_RIGHT.sub("", sentence))
    *_, match = [None, *pattern.finditer(sentence)]
    if match is None:
        return None
    clause = _CLAUSE.split(sentence[: match.end()])[-1]
    return "" if DENYING.search(clause) else sentence[match.end() :].rstrip(" .*。$`").lstrip(" *$`")


def _unmarked_answer(text: str) -> str:
    """Return what the last sentence states: the result of a computation in it, a value without where, when or for whom,
    or the only number in it."""
    sentence = _last_sentence(text)
    if computed := _computed(sentence):
        return computed
    said = _said(sentence, _SAYS) or ""
    beside = _BESIDE.search(said)
    said = said[: beside.start()] if beside and not _turns(beside.group()) else said
    return said if read(said).kind not in ("unread", "words") else _only_number(sentence) or said


def _computed(sentence: str) -> str:
    """Return the number behind the last sign of equality of a sentence, if one is computed before it."""
    before, _, rest = sentence.rpartition("=")
    clause = _CLAUSE.split(before)[-1]
    left, value = clause.rpartition("=")[2], _NUMBER.match(rest.strip())
    if value is None or not _COMPUTATION.search(left) or _VARIABLE.search(left) or DENYING.search(clause):
        return ""
    if _BOUND.search(re.split(r"[-(]?\\?\$?\d", left)[0]) or _BOUND.search(_ARITHMETIC_END.sub("", left)):
        return ""
    return "" if _TURNED.search(rest) else _with_unit(value.group())


def _only_number(sentence: str) -> str:
    """Return the only number of a sentence, "" where it has others, denies or bounds it."""
    numbers = [*_NUMBER.finditer(sentence)]
    if len(numbers) != 1 or "?" in sentence or DENYING.search(sentence):
        return ""
    before, behind = sentence[: numbers[0].start()], sentence[numbers[0].end() :]
    return "" if _BOUND.search(before) or _turns(behind) else _with_unit(numbers[0].group())


def _with_unit(value: str) -> str:
    """Return a number and the word behind it, if that is a unit; "" if it turns the number around."""
    number, _, word = value.partition(" ")
    return number if _NO_UNIT.fullmatch(word) else "" if TURNING.search(word) else value


def _turns(words: str) -> bool:
    return bool(TURNING.search(_WITHOUT_TURN.sub("", words)) or _OTHER_NUMBER.search(words))


def _last_boxes(text: str) -> str | None:
    """Return the content of the last box; several contents joined by commas where only "and", "or" or a comma is
    between them. "" where a box is empty or never closes."""
    boxes: list[tuple[int, int, str]] = []
    end = 0
    for opening in _OPENING.finditer(text):
        if opening.start() < end:  # inside another
            continue
        end = _closing_brace(text, opening.end())
        if end == len(text):
            return ""
        boxes.append((opening.start(), end, text[opening.end() : end].strip()))
    joined = boxes[-1:]
    for box in reversed(boxes[-_MAX_JOINED_BOXES:-1]):
        between = text[box[1] + 1 : joined[0][0]]
        if len(between) > _MAX_CHARS_BETWEEN_BOXES or not _BETWEEN_BOXES.fullmatch(between):
            break
        joined.insert(0, box)
    contents = dict.fromkeys(content for _, _, content in joined)
    return (", ".join(contents) if all(contents) else "") if boxes else None


def _closing_brace(text: str, start: int) -> int:
    """Return the index of the brace that closes the group opened just before `start`; the end of the text if none
    does."""
    depth = 1
    for match in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return match.start()
    return len(text)
