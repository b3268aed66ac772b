r"""Reads an answer into a structure: a quantity with its unit, a relation, a tuple, a choice, a ratio and so on.

An answer is read as a whole or is "unread", and then equals nothing but the same text. Each reader takes the whole text
or declines, the special ones first, and reads the parts of it in the same way. Commands in a formula must be known
ones, so that none is passed over. What a formula means is left to math_equality.py.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from rollout.rewards.math_spelling import DENYING, FILLING, spelled, unit_of


@dataclass(frozen=True)
class Answer:
    r"""`parts` by `kind`; None for what an answer leaves out:

    unread, words: text. quantity: formula, Unit, words before it. choice: letters, Answer or None.
    relation: formulas (the first is "" in "> 7"), signs between them, Answer of the last or None. ratio: Answers.
    group: brackets such as "(]" ("" for none, "M" for a matrix of rows), Answers. named: names, Answers.
    sets: Answers, signs between them (\cup, "or", "and", ","). clock: hour, minute, half of the day.
    congruence: residue, modulus, name. based: digits, base. date: month, day and year.
    """

    kind: str
    parts: tuple[Any, ...]
    text: str = field(default="", compare=False)


_MAX_CHARS = 2_000
_OPENING = r"\\\{|\\langle(?![a-z])|\\begin(?![a-z])|[(\[{]"
_CLOSING = r"\\\}|\\rangle(?![a-z])|\\end(?![a-z])|[)\]}]"
_ITEM_SIGN = r"\\text\{\s*(?:and|or)\s*\}|,"
_LIST_SIGN = rf"{_ITEM_SIGN}(?!\d{{3}}(?!\d))"
_SET_SIGN = r"\\(?:cup|cap|setminus)(?![a-z])"
_RELATION_SIGN = r"[=<>]|\\(?:le|ge|ne|approx|in)(?![a-z])"
_RATIO_SIGN = r":|\\text\{\s*to\s*\}"
_NAME = re.compile(
    r"(?:[a-zA-Z]|\\(?:theta|alpha|beta|gamma|lambda|phi|mu|sigma|omega|angle|triangle|Delta)(?:\s*[A-Z]+)?)(?:_\{\w+\})?'?(?:\^\{-1\})?"
    r"(?:\s*\([^()]*\))?|\\frac\s*\{d\w*\}\{d\w+\}|\\(?:vec|overline|hat|bar|overrightarrow)\s*\{[^{}]*\}"
    r"|(?:\\text\{[^{}]*\}\s*)+(?:[A-Z]{1,4})?|[A-Z]{2,3}|\|[a-zA-Z]+\|"
)
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_POINT = re.compile(r"[A-Z]\s*(?=\([^()]*,[^()]*\)$)")
_BUILDER = re.compile(r"\\?\{\s*([a-z])\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\||:)\s*(.+?)\\?\}")
_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9"}
_BASED = re.compile(rf"\(?(\d[\dA-F]*)\)?_\s*\{{?\s*\(?(\d{{1,2}}|{'|'.join(_BASES)})\)?\s*\}}?")
_MATRIX = re.compile(
    r"[(\[]?\s*\\begin\{((?:[pbB]|small)?matrix|array)\}(?:\{[clr|]+\})?(.*)\\end\{\1\}\s*[)\]]?(?:\^\{?(T|\\top)\}?)?"
)
_CHOICE = re.compile(
    r"(?:[Oo]ption |[Cc]hoice )?\(?([A-J]|(?<=\()[a-j](?=\)))(?:\)?[.:]?|(?:\)[.:]?\s*|[.:]\s+)([^\s,;:.)].*))"
)
_MONTHS = (
    *("january", "february", "march", "april", "may", "june"),
    *("july", "august", "september", "october", "november", "december"),
)
_BESIDE_DATES = ("of", "the", "st", "nd", "rd", "th", "text")
_CLOCK = re.compile(r"(\d{1,2})(?::([0-5]\d)|(?=\s*[AaPp]))\s*(?:([AaPp])\s*\.?\s*[Mm]\b\.?)?")
_LEAD = re.compile(r"(-?)\s*(?:(\\\$|[€£¥₹₩])|((?:\\text\{[^{}]*\}\s*)+[.:]?))\s*(?=[-+.\d\\(a-zA-Z])(.+)")
_UNIT = (
    r"(?:\\text\{[^{}]*\}|\^\s*\{?\s*\\circ\s*\}?(?:\s*[CFKNSEW](?![a-zA-Z]))?|\\Omega(?![a-z])|\\?[%$]|[€£¥₹₩¢]"
    r"|\\mu\s*(?:[a-zA-Z](?![a-zA-Z])|\\text\{[^{}]*\}))(?:\s*\^\s*\{?-?\d\}?)?"
)
_TAIL = re.compile(
    rf"(?P<formula>.*?[^\s/*])\s*(?P<unit>\(?{_UNIT}(?:\s*(?:/|\\cdot|\\times|\*)?\s*{_UNIT})*\s*\)?)"
    r"|(?P<per>.*[\d})])\s*(?P<ratio>\\frac\s*\{\s*\\text[^\d]*\})"
)
_NEUTRAL = re.compile(
    rf"(?i){FILLING}|\b(?:final|correct|answer|option|value|result|solution|so|thus|hence|therefore|we|get|it|is|are|clearly)\b|[:\s]"
)
_KNOWN = re.compile(
    r"(?:\\(?:frac|sqrt|pi|infty|times|cdot|div|binom|sum|prod|int|lim|to|gcd|lcm|max|min|circ|lfloor|rfloor|lceil|rceil"
    r"|(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|ln|log|lg|exp|alpha|beta|gamma|delta|epsilon|varepsilon|theta|lambda|mu|nu|pm"
    r"|xi|rho|sigma|tau|phi|varphi|chi|psi|omega|Delta|Omega|vec|hat|mathbb\{[A-Z]\}|[|]|mp|ell|zeta|eta|kappa)(?![a-zA-Z])"
    r"|[0-9A-Za-z+\-*/^_{}()|!\[\], ]|\.(?=\d)|(?<=\d)\.|=(?=[^{}]*\}))+"
)
_YEAR, _DAY = r"(?:1[5-9]|20)\d\d", r"(?:0?[1-9]|[12]\d|3[01])"
_ADJACENT = re.compile(
    r"\d\s+\d|[|)]\s*\d|\d\s*_|\d/\d+/\d|\d-0\d"
    rf"|(?<!\d)(?:{_YEAR}-{_DAY}-{_DAY}|{_DAY}-{_DAY}-{_YEAR})(?!\d)"
)
"""Two numbers without a sign between them, or a date."""


@lru_cache(maxsize=1024)
def read(content: str) -> Answer:
    """Return the structure of the content of a box, in any spelling."""
    if len(content) <= _MAX_CHARS:
        with contextlib.suppress(RecursionError):
            return _read(spelled(content))
    return Answer("unread", (content,))


def _read(text: str) -> Answer:
    text = _POINT.sub("", text.strip())
    for reader in _READERS:
        answer = reader(text)
        if answer is not None:
            return replace(answer, text=answer.text or text)
    return Answer("unread", (text,))


def split(text: str, sign: str) -> tuple[list[str], list[str]]:
    """Return the parts of `text` between the signs outside of all brackets, and these signs; no parts where a bracket
    closes that did not open."""
    parts: list[str] = []
    signs: list[str] = []
    start = depth = 0
    for match in re.finditer(f"(?P<sign>{sign})|(?P<opening>{_OPENING})|(?P<closing>{_CLOSING})|\\\\.", text):
        if match["sign"] and depth == 0:
            parts.append(text[start : match.start()].strip())
            signs.append(match["sign"])
            start = match.end()
        depth += (match["opening"] is not None) - (match["closing"] is not None)
        if depth < 0:
            return [], []
    return [*parts, text[start:].strip()], signs


def _choice(text: str) -> Answer | None:
    match = _CHOICE.fullmatch(_flat(text))
    return match and Answer("choice", (match[1].upper(), read(match[2]) if match[2] else None))


def _date(text: str) -> Answer | None:
    words = [word for word in re.findall(r"\d+|[a-z]+", _flat(text).lower()) if word not in _BESIDE_DATES]
    months = [i for i, name in enumerate(_MONTHS) for word in words if len(word) > 2 and name.startswith(word)]
    numbers = [int(word) for word in words if word.isdigit()]
    return Answer("date", (*months, *sorted(numbers))) if len(months) == 1 < len(words) == len(numbers) + 1 else None


def _clock(text: str) -> Answer | None:
    match = _CLOCK.fullmatch(_flat(text))
    if match is None:
        return None
    hour, half = int(match[1]), (match[3] or "").lower()
    half = "p" if hour > 12 else half or None
    return Answer("clock", (hour % 12 or 12 if half else hour, int(match[2] or 0), half))


def _congruence(text: str) -> Answer | None:
    match = re.fullmatch(r"(?:([^=<>]*?)\s*(?:\\equiv|=))?\s*(.*?),?\s*\\pmod\{([^{}]+)\}", text)
    if match is None:
        return None
    name, residue, modulus = match.groups()
    if re.fullmatch(r"-?\d{1,15}", residue) and re.fullmatch(r"[1-9]\d{0,14}", modulus):
        residue = str(int(residue) % int(modulus))
    return Answer("congruence", (residue, modulus, name or None))


def _matrix(text: str) -> Answer | None:
    match = _MATRIX.fullmatch(text)
    if match is None:
        return None
    rows = [[_read(cell) for cell in row.split("&")] for row in re.split(r"\\\\(?:\[\w+\])?", match[2]) if row.strip()]
    if match[3]:
        rows = [list(column) for column in zip(*rows, strict=True)] if len({*map(len, rows)}) == 1 else []
    return Answer("group", ("M", tuple(Answer("group", ("", tuple(row))) for row in rows)))


def _builder(text: str) -> Answer | None:
    r"""Read the condition of \{x \mid x > 3\}."""
    match = _BUILDER.fullmatch(text)
    condition = _read(match[2]) if match else None
    return condition if condition and condition.kind in {"relation", "sets", "named", "group"} else None


def _listed(text: str) -> Answer | None:
    parts, signs = split(text, _LIST_SIGN)
    said = [sign for sign in ("or", "and") if any(sign in each for each in signs)]
    return _combined("", parts, said[0] if said else ",") if signs else None


def _combined(brackets: str, parts: list[str], sign: str) -> Answer:
    """Return the structure of several parts in or without brackets."""
    texts = [part for part in parts if part]
    items = [_read(part) for part in texts]
    kinds = {item.kind for item in items}
    if not items:
        return Answer("unread", (brackets,))
    if len(items) == 1 and brackets in {"", "()", "[]", "{}"}:
        return items[0]
    if kinds == {"choice"} and not any(item.parts[1] for item in items):
        return Answer("choice", ("".join(sorted(item.parts[0] for item in items)), None))
    if kinds == {"named"}:
        names = tuple(name for item in items for name in item.parts[0])
        values = tuple(value for item in items for value in item.parts[1])
        if len({*names}) == len(names):
            return Answer("named", (names, values))
        items = [
            item.parts[1][0] if len(item.parts[1]) == 1 else Answer("group", ("()", item.parts[1])) for item in items
        ]
    elif items[0].kind == "named" and len(items[0].parts[0]) == 1 and kinds == {"named", "quantity"}:
        items[0] = items[0].parts[1][0]  # x = 1, 2
    elif "relation" in kinds and not brackets:
        return Answer("sets", (tuple(items), (sign,) * (len(items) - 1)))
    if brackets in {"", "{}"}:  # of 2 \pm 1, both
        items = [part for item in items for part in _items(item)]
    return Answer("group", ("{}" if sign == "or" else brackets, tuple(items)))


def _items(answer: Answer) -> tuple[Answer, ...]:
    return answer.parts[1] if answer.kind == "group" and answer.parts[0] == "" else (answer,)


def _relation(text: str) -> Answer | None:
    sides, signs = split(text, _RELATION_SIGN)
    if not signs:
        return None
    if r"\approx" in signs:
        exact, rounded = text.split(r"\approx", maxsplit=1)
        return _read(rounded if not exact.strip() or _NAME.fullmatch(exact.strip()) else exact)
    if signs == [r"\in"] and sides[0]:
        return _read(sides[1])
    if {*signs} != {"="}:
        formulas = tuple(_as_formula(side) if side else "" for side in sides)
        return None if None in formulas or "" in formulas[1:] else Answer("relation", (formulas, tuple(signs), None))
    if re.fullmatch(r"[a-zA-Z\d\\ ]+(?::[a-zA-Z\d\\ ]+)+", sides[0]):  # of a ratio
        return _read(sides[-1]) if len(sides) == 2 else None
    if len(sides) == 2 and _NAME.fullmatch(sides[1]) and not _NAME.fullmatch(sides[0]):
        sides.reverse()
    value = _read(sides[-1])
    names = split(sides[0].strip("()"), ",")[0] if re.fullmatch(r"\(.*\)", sides[0]) else [sides[0]]
    if all(_NAME.fullmatch(name) and not DENYING.search(name) for name in names):
        if len(sides) > 2:
            value = _equation(sides[1:], signs[1:], value)
        if len(names) == 1:
            return Answer("named", ((re.sub(r"^[a-z]\s*\(x\)$", "y", names[0]),), (value,)))
        if value.kind == "group" and value.parts[0] == "()" and len(value.parts[1]) == len(names):
            return Answer("named", (tuple(names), value.parts[1]))
        return value
    return _equation(sides, signs, value)


def _equation(sides: list[str], signs: list[str], value: Answer) -> Answer:
    known = [_as_formula(side) for side in sides[:-1]]
    if None in known or value.kind == "unread":
        return Answer("unread", ("=".join(sides),))
    return Answer("relation", ((*known, _as_formula(sides[-1]) or sides[-1]), tuple(signs), value))


def _bracketed(text: str) -> Answer | None:
    opening, closing = re.match(_OPENING, text), re.search(rf"(?:{_CLOSING})$", text)
    if not opening or not closing:
        return None
    content = text[opening.end() : closing.start()]
    brackets = (opening[0] + closing[0]).replace(r"\langle", "<").replace(r"\rangle", ">").replace("\\", "")
    parts, _ = split(content, _ITEM_SIGN)
    if not parts:  # (1, 2) \\cup (3, 4) begins and ends with brackets that are no pair
        return None
    if brackets == "{}" and len(parts) == 1 and "\\" not in opening[0]:
        return _read(content)
    if brackets == "{}" and r"\emptyset" in parts:  # a set with the empty set in it, which is not empty
        return Answer("unread", (text,))
    return _combined(brackets, parts, "and") if content.strip() else Answer("sets", ((r"\emptyset",), ()))


def _sets(text: str) -> Answer | None:
    if re.fullmatch(r"\\mathbb\{[RZNQC]\}|\\emptyset", text):
        return Answer("sets", ((text,), ()))
    parts, signs = split(text, _SET_SIGN)
    return Answer("sets", (tuple(map(_read, parts)), tuple(signs))) if signs else None


def _ratio(text: str) -> Answer | None:
    texts, signs = split(text, _RATIO_SIGN)
    parts = [_read(part) for part in texts] if signs and all(texts) else []
    return Answer("ratio", tuple(parts)) if {part.kind for part in parts} == {"quantity"} else None


def _based(text: str) -> Answer | None:
    """Read a number in a base, 1011_2 or 4310_{\\text{five}}."""
    match = _BASED.fullmatch(_flat(text))
    return match and Answer("based", (match[1], _BASES.get(match[2], match[2])))


def _words(text: str) -> Answer | None:
    flat = _flat(text)
    if _TEXT.sub("", text).strip(" .-'") or not re.fullmatch(r"[^\W\d_][^\d\\={}^_+*/]*", flat):
        return None
    words = [word for word in re.sub(r"[^\w' -]", " ", flat.lower()).split() if word not in {"a", "an", "the"}]
    return Answer("words", (" ".join(words).removesuffix("s"),))


def _quantity(text: str) -> Answer | None:
    beside = unit = ""
    if lead := _LEAD.fullmatch(text):
        minus, currency, words, text = lead.groups()
        text = minus + text
        said = _flat(words or currency).replace("\\", "")
        found = unit_of(re.sub(r"(?:\bis|\bare|:)$", "", said))
        if found is None:
            return None
        if found.known and not found.others:
            unit = rf"\text{{{said}}}"
        elif not re.search(r"(?:\bis|\bare|:)$", said):  # else it names the quantity
            beside = _NEUTRAL.sub("", said.lower())
    if tail := _TAIL.fullmatch(text):
        text, unit = tail["formula"] or tail["per"], unit + (tail["unit"] or tail["ratio"])
    found, formula = unit_of(unit), _formula(text)
    if found is None or formula is None:
        return None
    if r"\pm" not in formula:
        return Answer("quantity", (formula, found, beside))
    both = tuple(Answer("quantity", (formula.replace(r"\pm", sign), found, beside)) for sign in "+-")
    return Answer("group", ("", both)) if formula.count(r"\pm") == 1 else None


def _formula(text: str) -> str | None:
    """Return a formula in which a number has one spelling; None where not all of it is known."""
    if re.fullmatch(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?", text):
        text = text.replace(" ", "")
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"([\d)])\s*\((?=\s*-?\d+\s*\))", r"\1\\cdot (", text)
    return text if _KNOWN.fullmatch(text) and not _ADJACENT.search(text) else None


def _as_formula(text: str) -> str | None:
    """Return the formula of a side of a relation, with the unit that it may have."""
    answer = _read(text)
    if answer.kind != "quantity" or answer.parts[2]:
        return None
    return text if answer.parts[1].known or answer.parts[1].others else answer.parts[0]


def _flat(text: str) -> str:
    return re.sub(r"(?<=\() | (?=[):.])", "", " ".join(_TEXT.sub(r" \1 ", text).split()))


_READERS: tuple[Callable[[str], Answer | None], ...] = (
    *(_choice, _date, _clock, _congruence, _matrix, _builder, _based),
    *(_listed, _relation, _bracketed, _sets, _ratio, _words, _quantity),
)
