"""Finds the answer in a completion: strings only, linear in the text, safe in any process.

Invariant: what stands inside a thought is no answer, whether the thought was closed or cut off.
"""

from __future__ import annotations

import re

_THOUGHT_BEGIN = re.compile(
    r"<(?:think|thinking|thought|reasoning)>|<\|begin_of_thought\|>|◁think▷|\[think\]", re.IGNORECASE
)
_THOUGHT_END = re.compile(r"(?i)</(?:think|thinking|thought|reasoning)>|<\|end_of_thought\|>|◁/think▷|\[/THINK\]")
_TAG_BEGIN = re.compile(r"(?i)<answer>")
_TAG_END = re.compile(r"(?i)</answer>")
_INTEGER = re.compile(r"-?[0-9]{1,15}")
_QUOTED = re.compile(r"```\w*\n(?P<block>[^`]*)```|`(?P<line>[^`\n]*)`\.?")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # or an escaped character, which is no brace
_OPENING = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MAX_JOINED_BOXES = 6
_BETWEEN_BOXES = re.compile(r"[\s$,;]*(?:\\text\{\s*)?(?:and|or)?\s*\}?[\s$]*(?:[a-z](?:_\{?\d\}?)?\s*=\s*)?")
_MAX_CHARS_BETWEEN_BOXES = 40
_ANSWER_IS = re.compile(r"(?i)(?:\b(?:answer|option|choice)\b[\s*]*(?:is\b|[:：])|答案?\s*(?:是|为|[:：]))[\s*:：}]*")
_AFTER_ANSWER = "I hope it is correct"
_UNPAIRED = re.compile(r"(?:\\[\])]|[\s.*。])+$")
"""Closes a formula that began before "the answer is"."""
_TAIL_CHARS = 1_000
"""Without a mark only this much of the end of a text is searched: regular expressions over a whole chain of thought
find numbers that are no answer, and take their time."""
_PROSE_WORD = re.compile(r"(?<!\\)\b(?!and\b|or\b)[A-Za-z]{2,}")
_MAX_PROSE_WORDS = 3
"""More words than this after "the answer is" are a sentence, to be searched and not to be read as one answer."""


def marked_answer(text: str, *, prompt: str = "") -> str | None:
    """Return the answer that `text` marks, None without any. `prompt` may end in the beginning of a thought.

    It is what <answer> encloses, the last box (or the last boxes, joined by "and", "or" or a comma), a last line
    "#### answer", or what follows "the answer is" at the end. "" for a box that never closes and for "the answer is
    not 3".
    """
    text = outside_thoughts(text, prompt=prompt)
    if tags := list(_TAG_BEGIN.finditer(text)):
        text = _TAG_END.split(text[tags[-1].end() :], maxsplit=1)[0].strip()
        inner = _marked(text)
        return text if inner is None else inner
    return _marked(text)


def outside_thoughts(text: str, *, prompt: str = "") -> str:
    """Return the part of `text` after its last closed thought and before one that stays open."""
    if opened := re.search(rf"(?i)(?:{_THOUGHT_BEGIN.pattern})\s*$", prompt[-50:]):
        text = opened.group() + text
    text = text[max((match.end() for match in _THOUGHT_END.finditer(text)), default=0) :]
    return _THOUGHT_BEGIN.split(text, maxsplit=1)[0]


def _marked(text: str) -> str | None:
    boxed = _last_boxes(text)
    if boxed is not None:
        return boxed
    text = text.strip()
    _, marker, last_line = text.rpartition("####")
    if marker and "\n" not in last_line:  # else it is a heading
        return last_line.strip()
    if quoted := _QUOTED.fullmatch(text):
        return (quoted["block"] or quoted["line"] or "").strip()
    return text if _INTEGER.fullmatch(text) else _said_answer(_last_line(text))


def _said_answer(line: str) -> str | None:
    """Return the text after the last "the answer is" in `line`, unless that is a sentence. "" if it is no answer."""
    ends = [match.end() for match in _ANSWER_IS.finditer(line)]
    if not ends:
        return None
    answer = line[ends[-1] :].strip(" .*。").removesuffix(_AFTER_ANSWER).strip(" .*。")
    for opening, closing in (("$", "$"), ("`", "`"), ("\\(", "\\)"), ("\\[", "\\]")):
        if answer.startswith(opening) and answer.find(closing, 1) == len(answer) - len(closing):
            answer = answer.removeprefix(opening).removesuffix(closing)
    if "\\(" not in answer and "\\[" not in answer:
        answer = _UNPAIRED.sub("", answer)
    if answer.startswith("not "):
        return ""
    num_words = len(_PROSE_WORD.findall(answer))
    is_sentence = num_words > (0 if re.search(r"\d", answer) else _MAX_PROSE_WORDS)  # a number among words is searched
    return None if not answer or is_sentence or "$" in answer or "\\(" in answer or ", not " in answer else answer


def tail(text: str) -> str:
    """Return the part of a text in which an answer without a mark is searched."""
    return text.strip()[-_TAIL_CHARS:]


def _last_line(text: str) -> str:
    """Return the last line with a letter or a digit."""
    return next((line for line in reversed(tail(text).splitlines()) if re.search(r"\w", line)), "")


def extracted_answer(text: str) -> str:
    """Return the text that is judged in a completion, for people to read; "" when nothing is.

    The content of the box or of the "#### " line, or what "the answer is"; without such a mark the last line, up to
    200 characters of it: there a formula or a number is searched.
    """
    marked = marked_answer(text)
    return " ".join((_last_line(outside_thoughts(text))[-200:] if marked is None else marked).split())


def _last_boxes(text: str) -> str | None:
    """Return the content of the last box; several contents joined by commas where only "and", "or" or a comma is
    between them."""
    contents: list[str] = []
    before = len(text)
    for opening in reversed(list(_OPENING.finditer(text))):
        end = _closing_brace(text[:before], opening.end())
        if end == before:  # never closed, or around the boxes after it
            return ", ".join(contents) if contents else ""
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


_FORMULA = r"\$\$.+?\$\$|(?<!\\)\$(?!\s)[^$]+?(?<!\\)\$|\\\(.+?\\\)|\\\[.+?\\\]"
_NUMBER = r"(?:\\?\$|[€£¥])?(?<![\w.])-?\.?\d[\d.,]*(?<![.,])"
_TERM = rf"(?:{_NUMBER}|√\(?\d+\)?|π)"
_PLAIN = rf"-?\(?{_TERM}(?:\s*[-+*/^×·÷]?\s*\(?{_TERM}\)?)*"
_CANDIDATE = re.compile(
    rf"(?s)(?P<formula>(?:{_FORMULA})(?:(?:,|\s|\band\b|\bor\b)*(?:{_FORMULA}))*)|(?P<plain>{_PLAIN})(?P<percent>\s*\\?%)?"
)
_NOT_SO = re.compile(r"(?i)(?:\b(?:not|least|most|than|above|below|over|under|except|isn't|≠|≥|≤)|[<>≠≤≥])\s*[\s*$]*$")
_NEGATION = re.compile(r"(?i)\b(?:not|cannot|never)\b|n't\b")
_LETTER = re.compile(r"(?<![\w'\\])\(?([B-HJ]|A(?!\s+(?!or\b|and\b|is\b)[a-z]))\)?(?![\w'])")
_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+|\n")


def unmarked_answer(text: str, *, prompt: str = "", is_choice: bool = False) -> str:
    """Return the last formula or number in a text without a mark, or the only letter in its last sentence; "" without
    any."""
    text = tail(outside_thoughts(text, prompt=prompt))
    if is_choice:
        sentence = _SENTENCE_END.split(text.rstrip(" .*"))[-1]
        letters = set(_LETTER.findall(sentence))
        return letters.pop() if len(letters) == 1 and not _NEGATION.search(sentence) else ""
    found = list(_CANDIDATE.finditer(text))
    if not found or _NOT_SO.search(text[: found[-1].start()]):
        return ""
    return found[-1].group().strip()
