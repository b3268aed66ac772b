r"""One spelling for an answer: Unicode, plain text and the many commands of LaTeX for one thing become the same LaTeX.

A rewriting changes how an answer is written, never its meaning: words end in \text{...}, and none is lost. What a
number counts or measures is read here too. A unit that one answer leaves out is not required, and two that differ are
different answers. Words that can turn a statement around ("7 is wrong", "7 or more") are no unit.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

_TABLE = """
mm millimeter millimetre 毫米; cm centimeter centimetre 厘米; m meter metre 米; km kilometer kilometre 千米 公里;
in inch inche; ft foot feet; yd yard; mi mile; mg milligram; g gram gm 克; kg kilogram 千克 公斤; lb pound £; oz ounce;
s sec second 秒; min minute 分钟; h hr hour 小时; day 天; week; month; yr year 年; ml milliliter millilitre 毫升;
l liter litre 升; gal gallon; dollar $ usd; cent ¢; euro € eur; rupee ₹ rs inr; yuan 元 cny ¥ yen; won ₩; degree deg 度;
rad radian; unit; N newton north; S south; E east; W watt west; J joule; V volt; A amp ampere; Pa pascal; Hz hertz;
K kelvin; C celsius; F fahrenheit; mol mole; ohm Ω; % percent percentage pct
"""
UNITS = {name: names.split()[0] for names in _TABLE.split(";") for name in names.split()}
"""What a unit may be called: what it is called here."""
_IN_SMALLER_UNITS = """
mm 1/1000 m; cm 1/100 m; km 1000 m; mg 1/1000 g; kg 1000 g; ml 1/1000 l; cent 1/100 dollar; min 60 s; h 3600 s;
day 86400 s; week 604800 s; ft 12 in; yd 36 in; mi 63360 in; lb 16 oz; yr 12 month
"""
_MULTIPLES = {unit: (base, Fraction(size)) for unit, size, base in map(str.split, _IN_SMALLER_UNITS.split(";"))}
_DENYING = (
    r"\b(?:not?|never|none|neither|nor|cannot|(?:false|wrong|incorrect)(?! (?:statement|option|one))|impossible|except"
    r"|unless|without|if|whether|suppose|assum(?:e|ing)"
    r"|(?:contradict|fail|reject|exclu|discard|refut|disprov|invalid|inadmiss|unsuit|otherwise)\w*)\b|n't\b"
    r"|[不没错]|最多|至少|如果"
)
DENYING = re.compile(f"(?i){_DENYING}")
"""Words that make the number beside them no answer."""
TURNING = re.compile(
    rf"(?i){_DENYING}|\b(?:but|is|are|was|be|or|and|more|most|less|least|fewer|greater|larger|smaller|than|at|up|above"
    r"|below|over|under|minimum|maximum|plus|minus|times|half|twice|double|triple|third|quarter|hundred|thousand|million"
    r"|billion|dozen|factorial|squared|cubed|mod|modulo|base|tens|to|from|between|through|until|before|after|too|high|low"
    r"|higher|lower|short|off|ago|reversed|negative|binary|hex|fold|onwards?|extraneous|unlikely|bogus|untrue|error"
    r"|mistaken?|absurd|ruled|out|thirds|quarters|halves"
    r"|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand)ths?)\b"
)
"""Words that turn around what they stand beside."""
FILLING = r"\b(?:in (?:all|total)|an?|the|of|total|all|about|approx(?:imately)?|around|exactly|roughly|only)\b"
_UNIT_SPELLINGS = (
    (r"\\text\s*\{([^{}]*)\}", r" \1 "),
    (r"\^?\s*\{?\s*\\circ\s*\}?", " degree "),
    (r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2"),
    (r"\\(?:cdot|times)(?![a-z])|[*.,()~-](?!\d)", " "),
    (r"\\mu\s*", "μ"),
    (r"\\Omega(?![a-z])", "Ω"),
    (r"\\([%$])", r"\1"),
    (r"\bper cent\b", "%"),
    (r"\bmph\b", "mi/h"),
    (r"\bkm?ph\b", "km/h"),
    (rf"{FILLING}|\b(?:in|each)\s(?=\s*\w)", " "),
    (r"\bper\b", "/"),
    (r"(?:\b(?:square|sq)\s|平方)\s*(\S+)|(\S+)\s+squared\b", r"\1\2^2"),
    (r"(?:\b(?:cubic|cu)\s|立方)\s*(\S+)|(\S+)\s+cubed\b", r"\1\2^3"),
)
_FACTOR = r"\s*(?:(/)|([A-Za-zΩμ']+|[$€£₹¥₩%¢]|[\u4e00-\u9fff]+)(?:\s*\^\s*\{?\s*(-?\d+)\s*\}?)?)\s*"
_HIGH, _LOW = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿº˚", "₀₁₂₃₄₅₆₇₈₉"
_SCRIPTS = str.maketrans(_HIGH + _LOW, "0123456789+-noo" + "0123456789")
_CHARACTERS = r"""
− - – - — - π \pi ∞ \infty ° ^\circ × \times · \cdot ⋅ \cdot ∙ \cdot ÷ \div ≤ \le ≥ \ge ≦ \le ≧ \ge ⩽ \le ⩾ \ge ≠ \ne
≈ \approx ≡ \equiv ± \pm ∪ \cup ∩ \cap ∖ \setminus ∈ \in ∅ \emptyset ∣ | ∶ : ⁄ / ∕ / ⟨ \langle ⟩ \rangle 〈 \langle
〉 \rangle 或 \text{or} 和 \text{and} 且 \text{and} ∑ \sum ∏ \prod ∫ \int 、 , 。 . θ \theta α \alpha β \beta γ \gamma
δ \delta λ \lambda φ \phi σ \sigma ω \omega μ \mu Ω \Omega Σ \sum Π \prod → \to ∨ \lor ∧ \land ’ ' ′ ' √ \sqrt 〜 ~
∛ \sqrt[3] ; , ∴ \therefore
"""
_Rewriting = tuple[str, str | Callable[[re.Match[str]], str]]
_ALIASES = r"""
\varnothing \emptyset \lbrace \{ \rbrace \} \leqslant \le \geqslant \ge \leq \le \geq \ge \leqq \le \geqq \ge \neq \ne
\lt < \gt > \dfrac \frac \tfrac \frac \cfrac \frac \dbinom \binom \tbinom \binom \colon : \dots \ldots \cdots \ldots
\dotsc \ldots \dotsb \ldots \vert | \lvert | \rvert | \mid | \land \text{and} \wedge \text{and} \lor \text{or}
\vee \text{or} \R \mathbb{R} \backslash \setminus \bmod \mod \degree ^\circ \ast \cdot \rightarrow \to
"""


def _pairs(table: str) -> dict[str, str]:
    names = table.split()
    return {name: plain + " " * ("\\" in plain) for name, plain in zip(names[::2], names[1::2], strict=True)}


_CHARACTER = str.maketrans(_pairs(_CHARACTERS))
_ALIAS = _pairs(_ALIASES)
_FUNCTIONS = """
arcsin arccos arctan sinh cosh tanh sin cos tan cot sec csc ln log lg exp sqrt gcd lcm max min lim
pi theta alpha beta lambda infty sum prod int
"""
_NAMED = {name: f"\\{name} " for name in _FUNCTIONS.split()} | {"i": "i", "e": "e", "d": "d", "inf": r"\infty "}
_NAMED["infinity"] = _NAMED["inf"]
_GLUED = re.compile(r"(sin|cos|tan|ln|log|sqrt)([a-z])")
_SHORT_WORDS = re.compile(
    r"(?i)and|or|to|is|are|be|it|not?|at|of|the|by|per|mod|odd|yes|all|any|red|[ap]m|sq|cu|rs|usd|eur|inr|cny|st|nd|rd|th"
)
_FONTS = "text mbox hbox mathrm textrm textbf textit textnormal operatorname emph underline"
_BOLD = "mathbf mathit bm boldsymbol"
_FONT = rf"\\({'|'.join((_FONTS + ' ' + _BOLD).split())})\*?\s*\{{((?:[^{{}}]|\{{[^{{}}]*\}})*)\}}"
_RUN = r"\\(?:text|begin|end|mathbb|mathcal)\s*\{[^{}]*\}|\\[a-zA-Z]+|[A-Za-z]+(?:'[a-z]+)?|[\u4e00-\u9fff]+"
_CONJUNCTION = re.compile(r"(\b(?:and|or|to)\b|,)(?! more| less| fewer| greater| higher| above| below)")
_TEXT_OPENING = r"(?:\\(?:text\w*|mathrm|mbox)\s*\{)?"
_DEGREES = r"\^ *\{? *\\circ *\}?|\\text\{degrees?\}"
_INNER = r"((?:[^(){}]|\([^()]*\))*)"
_UP_TO_90 = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen
nineteen twenty thirty forty fifty sixty seventy eighty ninety
"""
_COUNTS = dict(zip(_UP_TO_90.split(), [*range(20), *range(20, 100, 10)], strict=True))
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_PARTS = {"half": 2, "halve": 2, "third": 3, "quarter": 4}
_STEMS = ("four", "fif", "six", "seven", "eigh", "nin", "ten")
_PARTS |= {f"{stem}th": number for number, stem in enumerate(_STEMS, start=4)}
_COUNT = rf"(?:{'|'.join(_COUNTS | _SCALES)})\b"
_COUNTED = rf"(?:an? )?{_COUNT}(?:[ -](?:(?:(?<=hundred )|(?<=thousand )|(?<=illion ))and )?{_COUNT})*"
_PHRASES = {
    "at least|no less than|no fewer than|not less than": r"\ge ",
    "at most|no more than|not more than": r"\le ",
    "more than|greater than|larger than|over|above": "> ",
    "less than|fewer than|smaller than|under|below": "< ",
    "|equal to|equals": "=",
    "out of": "/",
}
_REWRITINGS: list[_Rewriting] = [
    (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])\.?|\\!\s*|\\(?:text)?color\{\w+\}", ""),
    (r"\\(?:displaystyle|textstyle|limits|therefore|boxed|fbox|checkmark|square|hspace\s*\{\w*\})(?![a-zA-Z])", ""),
    (r"(?:US|U\.S\.|NT|HK|[ACS])\s*\\?\$", r"\\$"),
    (r"(\d)(?:\\[,; ]|~)\s*([mgLshNJWV])(?![a-zA-Z])", r"\1\\text{\2}"),
    (r"(?<=[\w)])\*\*(?=[\w(-])", "^"),
    (r"(?<!\\)\$|\*\*|`|\\[()]|(?<!\\)\\[\[\]]", ""),
    (
        rf"(?i)^\s*({_TEXT_OPENING})\s*(?:({_COUNTED}|\d+)[ -]and[ -])?(?:({_COUNTED}|an?)[ -]|(?=half\b))"
        rf"({'|'.join(_PARTS)})(s?)\b",
        lambda m: _parts(m),
    ),
    (
        rf"(?i)^\s*({_TEXT_OPENING})\s*((?>{_COUNTED}))(?![\w-]| point\b)",
        lambda m: f"{_count(m[2])} {m[1]}" if _count(m[2]) else m[0],
    ),
    (r"^\s*=", ""),
    (r"\\not\s*=|(?<![\d)])\s*!=", r"\\ne "),
    (r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}"),
    (r"<=|=<", r"\\le "),
    (r">=|=>", r"\\ge "),
    (r"\\(?:quad|qquad|thinspace|enspace)(?![a-zA-Z])|(?<!\\)\\(?:[ ,;:>]|$)|~|\\\\(?![\s\S]*\\end)", " "),
    (r"\{\s*([^{}\\]+?)\s*\\choose(?![a-zA-Z])\s*([^{}\\]+?)\s*\}", r"\\binom{\1}{\2}"),
    (r"\{\s*([^{}]+?)\s*\\over(?![a-zA-Z])\s*([^{}]+?)\s*\}", r"\\frac{\1}{\2}"),
    (r"\\(?:hat|vec)\s*\{?\s*\\?([ijk])(?:math)?(?![a-z])\s*\}?", r"\1"),
    (r"\^\s*\{?o\}?(?![a-z])", r"^\\circ "),
    (r"\{\\(?:rm|bf|it)\s+([^{}]*)\}", r"\\text{\1}"),
    (r"\{:\}", ":"),
    (r"\\begin\{cases\}([^&]*)\\end\{cases\}", lambda m: m[1].replace(r"\\", ", ")),
    (r"(?<=\d) an? (?=[a-z]{2})", " "),
    (r"\\(?:SI|qty)\s*\{([^{}]*)\}\s*\{\\?([^{}]*)\}", r"\1\\text{\2}"),
    (r"\\[a-zA-Z]+", lambda m: _ALIAS.get(m[0], m[0])),
    *[(_FONT, lambda m: _as_text(m))] * 2,  # one inside another
    (r"^(-?0),(?=\d{3,}$)|(?<!\d)(0)\{,\}(?=\d)", r"\1\2."),
    (r"(\d)\{,\}(?=\d{3}(?!\d))", r"\1,"),
    (r"(\d)\{,\}(?=\d)", r"\1."),
    (r"(\d)\s*[xX]\s*(?=\\?\$?\d)", r"\1 \\times "),
    (r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)", r"\1 \\times 10^{\2}"),
    (r"(?<![\d.,])(\d+) (\d+)/(\d+)", r"\1\\frac{\2}{\3}"),
    (r"\^\s*(-?\d{2,}|-\d)", r"^{\1}"),
    (r"\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?", r"\\overline{\1\2\3}"),
    (r"\\(?:dot|bar)\s*\{?(\d+)\}?", r"\\overline{\1}"),
    (r"(\.\d*)\((\d+)\)", r"\1\\overline{\2}"),
    (r"\.\.\.", r"\\ldots "),
    (r"(\.\d*?)(?:(\d)\2{2,}|(\d{2,}?)\3+)\s*\\ldots", lambda m: rf"{m[1]}\overline{{{m[2] or m[3]}}}"),
    (r"(?<!\d)(\d{0,9})\.(\d{0,9})\\overline\s*\{(\d{1,9})\}", lambda m: _repeating_fraction(*m.groups())),
    (r"\^\s*\{?\s*(?:\\text\{\s*)?(st|nd|rd|th)(?![a-z])\s*\}{0,2}", r"\\text{\1}"),
    (_RUN, lambda m: _as_word(m)),
    (r"(?:\\text\s*\{[^{}]*\}\.?\s*)+", lambda m: _joined(m)),
    (r"\s*\(?\\text\{\s*(?:in )?base\s*(?:\}\s*\{?(\d+)\}?|(\w+)\})\s*\)?$", r"_{\1\2}"),
    (
        r"(\d\s*)\\text\{\s*(\w+)\s*\}\s*(?=\d[\d.]*\s*\\text)",
        lambda m: f"{m[0]}, " if _name_of(m[2]) in _MULTIPLES else m[0],
    ),
    (r"(?<=[\d} ])((?:\\text\{\w+\}|[a-zA-Z]{1,3})\s*/\s*[a-zA-Z]{1,3})(?=\^\{?\d\}?$|$)", lambda m: _as_rate(m[1])),
    (rf"\\sqrt\s*(\[[^\]]*\])?\s*(?:\({_INNER}\)|(\d+(?:\.\d+)?))", lambda m: rf"\sqrt{m[1] or ''}{{{m[2] or m[3]}}}"),
    (
        rf"(\d)\s*\\text\{{\s*({'|'.join(_SCALES)})s?\b\s*([^{{}}]*)\}}",
        lambda m: rf"{m[1]} \times {_SCALES[m[2]]}\text{{{m[3]}}}",
    ),
    (r"\\text\{\s*\}", ""),
    (rf"(\\(?:sin|cos|tan|cot|sec|csc)) *(\()? *(\d+(?:\.\d+)?) *(?:{_DEGREES})(?(2) *\))", r"\1(\\frac{\3\\pi}{180})"),
    (r"\\lg(?![a-z])", r"\\log_{10}"),
    (r"\\mathbb\{R\}\s*-\s*(?=\\\{)", r"\\mathbb{R} \\setminus "),
    (r"^\s*<([^<>=]*,[^<>=]*)>\s*$", r"\\langle \1\\rangle "),
    (r"^\s*[(\[]([^()\[\]]*,[^()\[\]]*)[)\]]\s*\^\{?(?:T|\\top)\}?\s*$", r"\\langle \1\\rangle "),
    (r"\](\s*[^\s\[\](),][^\[\](),]*,[^\[\](),]+)(?=[\[\]])", r"(\1"),
    (r"([(\[][^\[\](),]+,[^\[\](),]+)\[", r"\1)"),
    (r"_\s*([a-zA-Z0-9])", r"_{\1}"),
    (r"\(\s*\\text\{mod\}\s*([^()]*?)\s*\)", r"\\pmod{\1}"),
    (r"\\p?mod\s*\{?\s*(\d+|[a-z])\s*\}?", r"\\pmod{\1}"),
    (r"(?i)^\\text\{(?:(?:all|any|the) )?real(?:s| numbers?)\}\s*$", r"\\mathbb{R}"),
    (
        r"(?i)^\\text\{(?:(?:there (?:is|are) )?no (?:real )?solutions?|(?:the )?empty set|无解|空集)\}\s*$",
        r"\\emptyset",
    ),
    *(
        (rf"(?<!\()\\text\{{\s*(?:(?:is|are|be)\b\s*)?(?:{words})\s*\}}", sign.replace("\\", r"\\"))
        for words, sign in _PHRASES.items()
    ),
]


@dataclass(frozen=True)
class Unit:
    """`known`: exponents of the units in the table, of kilometers as of meters; `size`: meters in a kilometer;
    `others`: the remaining words, such as "apple"."""

    known: frozenset[tuple[str, int]] = frozenset()
    others: frozenset[str] = frozenset()
    size: Fraction = Fraction(1)

    def ratio(self, other: Unit) -> Fraction | None:
        """Return how many of `other` one of this is: 1 where a unit names nothing, None where they differ."""
        degree = ("degree", 1)  # of an angle, of latitude, or Celsius
        mine, theirs = self.known - {degree}, other.known - {degree}
        if not mine | self.others or not theirs | other.others:
            return Fraction(1) if Unit() in (self, other) or degree in self.known & other.known else None
        is_same = mine == theirs and (self.others <= other.others or other.others <= self.others)
        return self.size / other.size if is_same else None


def spelled(content: str) -> str:
    """Return `content` of a box in the one spelling."""
    content = re.sub(f"[{_HIGH}]+", lambda match: f"^{{{match[0].translate(_SCRIPTS)}}}", content)
    content = re.sub(f"[{_LOW}]+", lambda match: f"_{{{match[0].translate(_SCRIPTS)}}}", content)
    content = re.sub("[¼-¾⅐-⅞]", _latex_fraction, content)
    content = re.sub("[ℝℤℕℚℂ]", lambda match: rf"\mathbb{{{unicodedata.normalize('NFKC', match[0])}}}", content)
    content = unicodedata.normalize("NFKC", content).translate(_CHARACTER)
    for pattern, replacement in _REWRITINGS:
        content = re.sub(pattern, replacement, content)
    return " ".join(content.split()).rstrip(". ")


def _count(words: str | None) -> str:
    """Return the digits of a number in words or digits; "" for an article, and for words that are no number."""
    counted = re.findall(_COUNT, (words or "").lower())
    if "zero" in counted and len(counted) > 1:
        return ""
    total = group = 0
    for word in counted:
        if word in _SCALES:
            group = (group or 1) * _SCALES[word]
            if group >= 1000:
                total, group = total + group, 0
        elif group % 100 and (_COUNTS[word] not in range(1, 10) or group % 100 < 20 or group % 10):  # four five
            return ""
        else:
            group += _COUNTS[word]
    return str(total + group) if counted else re.sub(r"\D", "", words or "")


def _parts(match: re.Match[str]) -> str:
    """Return "two and three fourths" in LaTeX; as it is where it is no fraction, as "twenty-fifth"."""
    opening, whole, number, part, plural = match.groups()
    is_one = number is None or number.lower() in ("a", "an", "one")
    above = "1" if is_one else _count(number)
    if is_one == bool(plural) or not above or (whole and not _count(whole)):
        return match[0]
    return rf"{_count(whole)}\frac{{{above}}}{{{_PARTS[part.lower()]}}} {opening}"


def _as_text(match: re.Match[str]) -> str:
    """Return the content of a font command: as it is without words, else as text, of which numbers are no part."""
    font, content = match.groups()
    if not re.search("[A-Za-z\u4e00-\u9fff]", content) or (font in _BOLD and len(content.strip()) == 1):
        return content
    if content in _NAMED:
        return _NAMED[content]
    content = re.sub(r"\\(?:cdot|times)(?![a-z])", " ", content)
    if "\\" in content:
        return content
    content = content.replace("{", "").replace("}", "")
    if re.search(r"[\d:]", content):
        return re.sub(r"(?!\b[A-J][.:)])[A-Za-z]+(?:[.'][A-Za-z]+)*", r"\\text{\g<0>}", content)
    return rf"\text{{{content}}}"


def _as_word(match: re.Match[str]) -> str:
    """Return a run of letters as a function, as text, or as it is where it is a product of variables."""
    run = match.group()
    if run.startswith("\\"):
        return run
    if run in _NAMED:
        return _NAMED[run]
    if glued := _GLUED.fullmatch(run):
        return rf"\{glued[1]} {glued[2]}"
    before = match.string[max(0, match.start() - 20) : match.start()]
    is_behind_number = re.search(r"(?:[\d}).]|\\[a-z]+)\s*\(?$", before)
    is_unit = is_behind_number and len(run) > 1 and (run in UNITS or run.lower() in UNITS)
    is_word = len(run) > 3 or not run.isascii() or _SHORT_WORDS.fullmatch(run)
    return rf"\text{{{run}}}" if is_unit or is_word else run


def _as_rate(quotient: str) -> str:
    """Return m/s as text, and x/y as it is."""
    names = re.sub(r"\\text\{(\w+)\}|\s", r"\1", quotient)
    return rf"\text{{{names}}}" if all(name in UNITS for name in names.split("/")) else quotient


def _joined(match: re.Match[str]) -> str:
    words = " ".join(re.findall(r"\{([^{}]*)\}", match.group()))
    parts = [" ".join(part.split()) for part in _CONJUNCTION.split(words)]
    return "".join(part if part == "," else rf"\text{{{part}}} " for part in parts if part)


def _latex_fraction(match: re.Match[str]) -> str:
    numerator, _, denominator = unicodedata.normalize("NFKC", match.group()).partition("\u2044")
    return rf"\frac{{{numerator}}}{{{denominator}}}"


def _repeating_fraction(whole: str, once: str, again: str) -> str:
    difference = int(whole + once + again) - int(whole + once or "0")
    return rf"\frac{{{difference}}}{{{'9' * len(again)}{'0' * len(once)}}}"


def unit_of(text: str) -> Unit | None:
    r"""Return the unit in a spelled text such as "\text{m/s}^{2}", None where it is none."""
    for pattern, plain in _UNIT_SPELLINGS:
        text = re.sub(pattern, plain, text)
    if TURNING.search(text) or re.sub(_FACTOR, "", text).strip():
        return None
    exponents: dict[str, int] = {}
    size, sign = Fraction(1), 1
    for slash, word, power in re.findall(_FACTOR, text):
        if slash:
            sign = -1
        else:
            exponent = sign * int(power or 1)
            name, multiple = _MULTIPLES.get(_name_of(word), (_name_of(word), 1))
            exponents[name] = exponents.get(name, 0) + exponent
            size *= Fraction(multiple) ** exponent
    names = set(UNITS.values())
    known = frozenset((name, power) for name, power in exponents.items() if name in names)
    return Unit(known, frozenset(name for name in exponents if name not in names), size)


def _name_of(word: str) -> str:
    """Return the name of a unit in the table, or another word in the singular and in small letters."""
    singular = word.lower().removesuffix("s") if len(word) > 2 else word
    return UNITS.get(word) or UNITS.get(word.lower()) or UNITS.get(singular) or singular
