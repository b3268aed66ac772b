r"""The words behind a number: what it counts or measures.

Invariant: a unit that one answer leaves out is not required, two that differ are different answers, and words that can
turn a statement around ("7 is wrong", "7 or more") are no unit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TABLE = """
mm millimeter millimetre 毫米; cm centimeter centimetre 厘米; m meter metre 米; km kilometer kilometre 千米 公里;
in inch inche; ft foot feet; yd yard; mi mile; mg milligram; g gram gm 克; kg kilogram 千克 公斤; lb pound £; oz ounce;
s sec second 秒; min minute 分钟; h hr hour 小时; day 天; week; month; yr year 年; ml milliliter millilitre 毫升;
l liter litre 升; gal gallon; dollar $ usd; cent; euro € eur; rupee ₹ rs inr; yuan 元 cny ¥ yen; won ₩; degree deg 度;
rad radian; unit; N newton north; S south; E east; W watt west; J joule; V volt; A amp ampere; Pa pascal; Hz hertz;
K kelvin; C celsius; F fahrenheit; mol mole; ohm Ω; % percent percentage pct
"""
UNITS = {name: names.split()[0] for names in _TABLE.split(";") for name in names.split()}
"""What a unit may be called: what it is called here."""
_POWERS = {"square": 2, "sq": 2, "平方": 2, "cubic": 3, "cu": 3, "立方": 3, "squared": 2, "cubed": 3}
_TURNING = re.compile(
    r"(?i)\b(?:not?|never|none|neither|nor|isn't|cannot|false|wrong|incorrect|impossible|excluded|except|but|is|are|was|be|or"
    r"|and|if|unless|without|more|most|less|least|fewer|greater|larger|smaller|than|at|up|above|below|over|under|minimum"
    r"|maximum|plus|minus|times|half|twice|double|triple|third|quarter|hundred|thousand|million|billion|dozen|factorial"
    r"|mod|modulo|base|to|from|between|through|until|before|after)\b"
)
FILLING = r"\b(?:an?|the|of|total|all|about|approx(?:imately)?|around|exactly|roughly|only)\b"
_SPELLINGS = (
    (r"\\text\s*\{([^{}]*)\}", r" \1 "),
    (r"\^?\s*\{?\s*\\circ\s*\}?", " degree "),
    (r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2"),
    (r"\\(?:cdot|times)(?![a-z])|[*.,()~-](?!\d)", " "),
    (r"\\mu\s*", "μ"),
    (r"\\Omega(?![a-z])", "Ω"),
    (r"\\([%$])", r"\1"),
    (r"\bmph\b", "mi/h"),
    (r"\bkm?ph\b|\bkmh\b", "km/h"),
    (rf"{FILLING}|\b(?:in|each)\s(?=\s*\w)", " "),
    (r"\bper\b", "/"),
)
_TOKEN = re.compile(r"\s*(?:(平方|立方|[A-Za-zΩμ']+|[$€£₹¥₩%]|[\u4e00-\u9fff]+)|\^\s*\{?\s*(-?\d+)\s*\}?|/)\s*")
_DEGREE = ("degree", 1)


@dataclass(frozen=True)
class Unit:
    """`known`: exponents of the units in the table; `others`: the remaining words, such as "apple"."""

    known: frozenset[tuple[str, int]] = frozenset()
    others: frozenset[str] = frozenset()

    def agrees(self, other: Unit) -> bool:
        """Return whether both name the same, as far as both name anything."""
        mine, theirs = self.known - {_DEGREE}, other.known - {_DEGREE}  # of an angle, of latitude, or Celsius
        if not mine | self.others or not theirs | other.others:
            return Unit() in (self, other) or _DEGREE in self.known & other.known
        return mine == theirs and (self.others <= other.others or other.others <= self.others)


def unit_of(text: str) -> Unit | None:
    r"""Return the unit in a spelled text such as "\text{m/s}^{2}", None where it is none."""
    for pattern, plain in _SPELLINGS:
        text = re.sub(pattern, plain, text)
    if _TURNING.search(text):
        return None
    exponents: dict[str, int] = {}
    last, pending, sign, at = "", 1, 1, 0
    text = text.strip()
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            return None
        at = token.end()
        word, exponent = token.groups()
        power = int(exponent) if exponent else _POWERS.get((word or "").lower())
        if word is None and exponent is None:
            sign = -1
        elif power and (exponent or word.endswith("ed")):
            if not last:
                return None
            exponents[last] *= power
        elif power:
            pending = power
        else:
            last = _name_of(word)
            exponents[last] = exponents.get(last, 0) + sign * pending
            pending = 1
    names = set(UNITS.values())
    known = frozenset((name, power) for name, power in exponents.items() if name in names)
    return Unit(known, frozenset(name for name in exponents if name not in names))


def _name_of(word: str) -> str:
    """Return the name of a unit in the table, or another word in the singular and in small letters."""
    singular = word.lower().removesuffix("s") if len(word) > 2 else word
    return UNITS.get(word) or UNITS.get(word.lower()) or UNITS.get(singular) or singular
