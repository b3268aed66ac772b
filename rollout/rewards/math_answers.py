"""From a completion to the answer in it, and from there to what math-verify reads: strings only, no mathematics.

Used by math.py on answers and solutions alike. Finding the answer is linear in the text, safe in any process.
Invariant: a rewriting changes how an answer is written, never its meaning; where math-verify reads a form well
(fractions, roots, sets, thousands separators), the form is left alone.
"""

from __future__ import annotations

import re
import unicodedata

_INTEGER = re.compile(r"-?[0-9]{1,15}")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # or an escaped character, which is no brace
_OPENING = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MAX_JOINED_BOXES = 6
_BETWEEN_BOXES = re.compile(r"[\s$,;]*(?:\\text\{\s*)?(?:and|or)?\s*\}?[\s$]*(?:[a-z](?:_\{?\d\}?)?\s*=\s*)?")
_MAX_CHARS_BETWEEN_BOXES = 40
_ANSWER_IS = re.compile(r"(?i)(?:answer|option|choice)\b[\s*]*(?:is\b|:)[\s*:]*")
_AFTER_ANSWER = "I hope it is correct"
_TAIL_CHARS = 1_000
"""Without a mark only this much of the end of a text is searched: regular expressions over a whole chain of thought
find numbers that are no answer, and take their time."""
_PROSE_WORD = re.compile(r"(?<!\\)\b(?!and\b|or\b)[A-Za-z]{2,}")
_MAX_PROSE_WORDS = 3
"""More words than this after "the answer is" are a sentence, to be searched and not to be read as one answer."""


def marked_answer(text: str) -> str | None:
    """Return the answer that `text` marks, None without any.

    It is the last box (or the last boxes, joined by "and", "or" or a comma), else a last line "#### answer", else what
    follows "the answer is" at the end. "" for a box that never closes and for "the answer is not 3".
    """
    boxed = _last_boxes(text)
    if boxed is not None:
        return boxed
    text = text.strip()
    _, marker, last_line = text.rpartition("####")
    if marker and "\n" not in last_line:  # else it is a heading
        return last_line.strip()
    return text if _INTEGER.fullmatch(text) else _said_answer(tail(text).rpartition("\n")[2])


def _said_answer(line: str) -> str | None:
    """Return the text after the last "the answer is" in `line`, unless that is a sentence. "" if it is no answer."""
    ends = [match.end() for match in _ANSWER_IS.finditer(line)]
    if not ends:
        return None
    answer = line[ends[-1] :].strip(" .*").removesuffix(_AFTER_ANSWER).strip(" .*")
    if answer.startswith("$") and answer.endswith("$") and answer.count("$") == 2:
        answer = answer.strip("$")
    if answer.startswith("not "):
        return ""
    num_words = len(_PROSE_WORD.findall(answer))
    is_sentence = num_words > (0 if re.search(r"\d", answer) else _MAX_PROSE_WORDS)  # a number among words is searched
    return None if not answer or is_sentence or "$" in answer or "\\(" in answer or ", not " in answer else answer


def tail(text: str) -> str:
    """Return the part of a text in which an answer without a mark is searched."""
    return text.strip()[-_TAIL_CHARS:]


def extracted_answer(text: str) -> str:
    """Return the text that is judged in a completion, for people to read; "" when nothing is.

    The content of the box or of the "#### " line, or what "the answer is"; without such a mark the last line, up to
    200 characters of it: math-verify looks for a formula or a number there and in the lines before.
    """
    marked = marked_answer(text)
    return " ".join((tail(text).rpartition("\n")[2][-200:] if marked is None else marked).split())


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


_CHARACTERS = str.maketrans(
    {
        "−": "-", "–": "-", "π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ", "×": r"\times ", "·": r"\cdot ",
        "÷": r"\div ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ",
        "∈": r"\in ", "∅": r"\emptyset ", "²": "^{2}", "³": "^{3}", "€": "", "£": "", "¥": "", "\u00a0": " ",
    }
)  # fmt: skip
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|(\d+|[a-z]))")
_VULGAR_FRACTION = re.compile("[¼-¾⅐-⅞]")
_MARKUP = re.compile(
    r"\\(?:left|right|middle|[bB]igg?[lrm]?|displaystyle|textstyle|limits)(?![a-zA-Z])|\\!\s*|(?<!\\)\$|\*\*"
)
_SAME = {
    r"\varnothing": r"\emptyset",
    r"\lbrace": r"\{",
    r"\rbrace": r"\}",
    r"\leqslant": r"\le",
    r"\geqslant": r"\ge",
    r"\mathrm{i}": "i",
    r"\mathrm{e}": "e",
    "{:}": ":",
    r"\colon": ":",
}
_SAME_PATTERN = re.compile("|".join(re.escape(name) + ("(?![a-zA-Z])" if name[-1].isalpha() else "") for name in _SAME))
_FONT = r"\\(?:text|mbox|mathrm|textrm|textbf|mathbf|textit|mathit|textnormal|operatorname|bf|rm)"
_WHOLLY_WRAPPED = re.compile(rf"{_FONT}\s*\{{([^{{}}]*)\}}")
_LEADING_WORDS = re.compile(rf"^{_FONT}\s*\{{[^{{}}]*[a-z]{{2}}[^{{}}]*\}}\s*(?=-?\d)")
_SPACED_THOUSANDS = re.compile(r"\d{1,3}(?:(?:\\[,; ]|~| )\s*\d{3})+")
_SPACE_IN_NUMBER = re.compile(r"\\[,; ]|~|\s")
_MIXED_NUMBER = re.compile(r"(-?\d+) (\d+)/(\d+)")
_EXPONENT = re.compile(r"(-?\d+(?:\.\d+)?)[eE]([+-]?\d+)")
_SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(rf"^((?:\\\$)?-?[\d.,]*\d)(?:\s|\\[,; ]|~|\\text\s*\{{\s*)+({'|'.join(_SCALES)})\b\s*\}}?")
_PLUS_MINUS = re.compile(r"\\pm(?![a-zA-Z])")
_REPEATING = re.compile(r"(?<!\d)(\d{0,9})\.(\d{0,9})\\overline\s*\{(\d{1,9})\}")
_MEMBER_OF = re.compile(r"[a-zA-Z]\s*\\in(?![a-zA-Z])\s*")
_NAMED_POINT = re.compile(r"[A-Z]\s*=?\s*(?=\([^()]*,[^()]*\)$)")
_WORDS = re.compile(r"[A-Za-z]{2,}(?:[ '-][A-Za-z]+)*|[Aa] [A-Za-z]+")
_ARTICLE = re.compile(r"(?:a|an|the) ")
_CHOICE = re.compile(r"\(?([A-J])\)?[.:]?")
_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+|\n")
_SEVERAL_CHOICES = re.compile(r"[A-J]\s*(?:,|and\b|or\b|&|\\text\s*\{\s*(?:and|or)\s*\})\s*(?:and\b|or\b)?\s*[A-J]\b")
_LETTER_IN_PARENTHESES = re.compile(r"\(([A-J])\)")


def plain(content: str) -> str:
    """Return `content` of a box as math-verify reads it: LaTeX for Unicode, no markup, one way to write a number."""
    content = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2]}}}", content)
    content = _VULGAR_FRACTION.sub(_latex_fraction, content).translate(_CHARACTERS)
    content = _SAME_PATTERN.sub(lambda match: _SAME[match.group()], _MARKUP.sub("", content))
    content = " ".join(content.split()).strip().rstrip(".").rstrip()
    if (wrapped := _WHOLLY_WRAPPED.fullmatch(content)) and not re.search("[A-Za-z]", wrapped[1]):
        content = wrapped[1].strip()
    content = _LEADING_WORDS.sub("", content, count=1)
    if _SPACED_THOUSANDS.fullmatch(content):
        content = _SPACE_IN_NUMBER.sub("", content)
    if match := _MIXED_NUMBER.fullmatch(content):
        content = rf"{match[1]}\frac{{{match[2]}}}{{{match[3]}}}"
    elif match := _EXPONENT.fullmatch(content):
        content = rf"{match[1]} \times 10^{{{match[2]}}}"
    content = _SCALE.sub(lambda match: rf"{match[1]} \times 10^{{{_SCALES[match[2]]}}}", content)
    if content.count("\\pm") == 1 and "," not in content:  # math-verify reads it at the top level only
        content = f"{_PLUS_MINUS.sub('+', content)}, {_PLUS_MINUS.sub('-', content)}"
    content = _REPEATING.sub(_repeating_fraction, content)
    if match := _MEMBER_OF.match(content):
        content = content[match.end() :]
    return _NAMED_POINT.sub("", content)


def _latex_fraction(match: re.Match[str]) -> str:
    numerator, _, denominator = unicodedata.normalize("NFKC", match.group()).partition("\u2044")
    return rf"\frac{{{numerator}}}{{{denominator}}}"


def _repeating_fraction(match: re.Match[str]) -> str:
    whole, once, again = match.groups()
    difference = int(whole + once + again) - int(whole + once or "0")
    return rf"\frac{{{difference}}}{{{'9' * len(again)}{'0' * len(once)}}}"


def words(content: str) -> str | None:
    """Return a plain answer in words ("even", "no solution") in one spelling; None for anything else."""
    bare = _WHOLLY_WRAPPED.sub(r"\1", content).strip().rstrip(".")
    if not _WORDS.fullmatch(bare):
        return None
    return _ARTICLE.sub("", " ".join(bare.lower().split()), count=1).removesuffix("s")


def choice(content: str) -> str | None:
    """Return the letter of a plain answer that is one letter of a multiple choice, else None."""
    match = _CHOICE.fullmatch(_WHOLLY_WRAPPED.sub(r"\1", content).strip())
    return match[1] if match else None


def choice_text(answer: str, *, is_marked: bool) -> str:
    """Return a plain answer or the end of a text, made such that math-verify's search for a letter finds the one meant.

    It takes a letter at the start first, right for "B. 25" but not for a sentence, so a sentence gets another start; of
    a text only the last sentence is left. "" when several letters are answered.
    """
    bare = _LETTER_IN_PARENTHESES.sub(r" \1 ", _WHOLLY_WRAPPED.sub(r"\1", answer).replace("\\ ", " ")).strip()
    if not is_marked:
        return "so " + _SENTENCE_END.split(bare.rstrip(" .*"))[-1]
    if _SEVERAL_CHOICES.match(bare):
        return ""
    return bare.upper() if len(bare) == 1 else bare


_PERCENT = re.compile(r"\s*(?:\\?%|\\text\s*\{\s*(?:percent|\\?%)\s*\}|\bpercent\b)\s*$")
_TEXT_UNIT = re.compile(
    rf"(?<=[\d}})a-z])(?:\\[,; ]|~|\s)*{_FONT}\s*\{{(?P<unit>[^{{}}]*)\}}(?:\^\{{?\d\}}?)?$"
    r"|\s*\^\s*\{?\s*\\circ\s*\}?\s*$"
)
_TEXT_UNIT_IN_FORMULA = re.compile(
    rf"(?<=[\d}}])(?:\\[,; ]|~|\s)*{_FONT}\s*\{{[^{{}}$]*\}}(?:\^\{{?\d\}}?)?\s*(?=\$|\\[)\]])"
)
_WORD_UNIT = re.compile(r"(?<=\d)\s*(?P<unit>[A-Za-z][A-Za-z./ ]*)(?:\^\{?\d\}?)?$")
_UNITS = {
    name: names.split()[0]
    for names in (
        "mm millimeter millimeters millimetre millimetres",
        "cm centimeter centimeters centimetre centimetres",
        "m meter meters metre metres",
        "km kilometer kilometers kilometre kilometres",
        "in inch inches",
        "ft foot feet",
        "yd yard yards",
        "mi mile miles",
        "mg milligram milligrams",
        "g gram grams",
        "kg kilogram kilograms",
        "lb lbs pound pounds",
        "s sec second seconds",
        "min minute minutes",
        "h hr hour hours",
        "day days",
        "ml milliliter milliliters",
        "l liter liters litre litres",
        "mph",
        "km/h kmh",
        "dollar dollars",
        "cent cents",
        "degree degrees",
        "unit units",
        "sq square",
    )
    for name in names.split()
}
"""What a unit may be called: what it is called here. Different names of the same number are different answers."""


def without_percent(content: str) -> tuple[str, bool]:
    """Return a plain answer without its percent sign or word, and whether it had one."""
    number = _PERCENT.sub("", content)
    return (number, number != content) if number else (content, False)


def without_unit(content: str) -> tuple[str, str | None]:
    r"""Return a plain answer without the unit at its end, and the unit where it is a known one.

    A single letter counts as a unit in \text{...} only: in "3t" it is a variable.
    """
    if match := _TEXT_UNIT.search(content):
        return content[: match.start()], _UNITS.get((match["unit"] or "").strip().strip(".").lower())
    match = _WORD_UNIT.search(content)
    if match and len(match["unit"]) > 1:
        last = match["unit"].lower().split()[-1] if match["unit"].split() else ""
        known = _UNITS.get(match["unit"].lower())
        if known or last in _UNITS or (len(last) > 3 and match.group()[0].isspace()):
            return content[: match.start()], known
    return content, None


def without_units_in_formulas(text: str) -> str:
    """Return the end of a text, without the units at the end of its formulas."""
    return _TEXT_UNIT_IN_FORMULA.sub("", text)


_POWER_OF_X_OR_Y = re.compile(r"(?<![a-zA-Z])[xy]\s*\^|\([^()]*[xy][^()]*\)\s*\^")
_SUM = re.compile(r"\S\s*[-+]")


def is_curve(content: str) -> bool:
    """Return whether a plain answer is the equation of a curve, as x^2/2 - y^2/2 = 1: no way to write its right side.

    x + y = 5 and x^2 + 1/x^2 = 7 are: they name the value that was asked for."""
    sides = content.split("=")
    if len(sides) != 2 or not all(side.strip() for side in sides):
        return False
    bare = _COMMAND.sub(" ", content)
    has_both = all(re.search(rf"(?<![a-zA-Z]){name}(?![a-zA-Z])", bare) for name in "xy")
    return has_both and any(_SUM.search(side) and _POWER_OF_X_OR_Y.search(side) for side in sides)


_BASE = re.compile(r"\(?(\d+)\)?_\{?\s*(\d{1,2})\s*\}?")
_CLOCK = re.compile(r"(\d{1,2}):([0-5]\d)(?:\s*(?:\\text\s*\{)?\s*([ap])\.?\s?m\.?\s*\}?)?", re.IGNORECASE)


_COMMAND = re.compile(r"\\[a-zA-Z]+")
_IMAGINARY_UNIT = re.compile(r"(?<![a-zA-Z\\_])i(?![a-zA-Z])")
_OR = re.compile(r"\\text\s*\{\s*or\s*\}|\bor\b|\\lor(?![a-z])|\\vee(?![a-z])")
_BOUND = re.compile(r"[a-z]\s*(<|>|\\leq?(?![a-z])|\\geq?(?![a-z]))([^<>=]+)")
_RAYS = {"<": r"(-\infty, %s)", ">": r"(%s, \infty)", r"\le": r"(-\infty, %s]", r"\ge": r"[%s, \infty)"}


def paired_forms(solution: str, answer: str) -> tuple[str, str]:
    """Return both with what math-verify takes for something else put in its terms: a base, a time, i, and "x < 1 or x >
    6".

    It drops a base and divides 3:30, so these become tuples. A base or "p.m." that the answer leaves out is not
    required; a base that only the answer has is no plain number.
    """
    based_solution, based_answer = _BASE.fullmatch(solution), _BASE.fullmatch(answer)
    if based_answer:
        digits, base = based_solution.groups() if based_solution else (solution, "0")
        return f"({digits}, {base})", f"({based_answer[1]}, {based_answer[2]})"
    clock_solution, clock_answer = _CLOCK.fullmatch(solution), _CLOCK.fullmatch(answer)
    if clock_solution and clock_answer:
        halves = [(clock[3] or "").lower() for clock in (clock_solution, clock_answer)]
        first, second = (
            f"({int(clock[1])}, {int(clock[2])}, {int(all(halves) and half == 'p')})"
            for clock, half in zip((clock_solution, clock_answer), halves, strict=True)
        )
        return first, second
    solution, answer = _union(solution), _union(answer)
    if set(re.findall("[a-zA-Z]", _COMMAND.sub("", solution))) <= {"i", "e"}:
        return _IMAGINARY_UNIT.sub("{I}", solution), _IMAGINARY_UNIT.sub("{I}", answer)  # bare, I^2 would be I
    return solution, answer


def _union(content: str) -> str:
    """Return bounds on one variable joined by "or" as a union of rays; anything else unchanged."""
    bounds = [_BOUND.fullmatch(part.strip(" ,")) for part in _OR.split(content)]
    if len(bounds) < 2 or not all(bounds):
        return content
    return r" \cup ".join(_RAYS[bound[1].removesuffix("q")] % bound[2].strip() for bound in bounds if bound)


_TENTHS = re.compile(r"(?<!\d)0?\.(0+)|10\s*\^\s*\{?\s*-\s*(\d{1,3})")


def leading_zeros(content: str) -> int:
    """Return the number of places after the decimal point at which a small number begins: 4 for 0.0000672, 23 for 6.02
    \times 10^{-23}."""
    return max((len(match[1] or "") + int(match[2] or 0) for match in _TENTHS.finditer(content)), default=0)
