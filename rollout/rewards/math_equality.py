r"""Whether two answers that were read are the same answer. The parser of formulas is math-verify's.

Structures of different kinds are equal only by a rule written here. An answer may leave out what the question settles:
a unit, a base, the half of the day, the name of a value. Formulas are compared by numbers: constants by their value,
formulas with variables at a few points, and a decimal is equal to what rounds to it at 6 places.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache, lru_cache
from operator import and_, or_, sub
from typing import Any

import sympy
from math_verify.parser import LatexExtractionConfig, latex2sympy, normalize_latex
from sympy import Float, I, Rational, floor
from sympy.logic.boolalg import Boolean

from rollout.rewards.math_reading import Answer
from rollout.rewards.math_spelling import Unit, unit_of

_PLACES = 6
"""Decimals are equal when they agree to this many places, counted from the first digit of a small number."""
_DIGITS = 100
_TOLERANCE_DIGITS = 90
"""Other numbers are computed to so many digits and equal when they agree to so many."""
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)")
_POINTS = (("7/19", "11/13", "29/17"), ("-13/23", "5/7", "-3/11"), ("31/11", "-17/5", "2/29"), ("41/3", "19/2", "53/7"))
"""What the variables are set to, in alphabetical order."""
_PERCENT = ("%", 1)
_LETTERS = re.compile(r"(.*?[\d})])\s*((?:[b-zA-Z](?:\^\{?-?\d\}?)?\s*)+)")
_ORDERED = ({"()"}, {"<>"}, {"[]"}, {"[)"}, {"(]"}, {"()", "<>"}, {"()", ""}, {"<>", ""})
_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}


def is_same(gold: Answer, answer: Answer) -> bool:
    """Return whether `answer` gives the solution `gold`."""
    if gold == answer:
        return True
    match gold.kind, answer.kind:
        case ("unread", _) | (_, "unread"):
            return gold.kind == answer.kind and "".join(gold.parts).split() == "".join(answer.parts).split()
        case ("choice", _):
            return _is_option(gold, answer)
        case (_, "choice") | ("quantity", "words"):
            return is_same(answer, gold)
        case ("named", "named"):
            return _is_same_named(gold, answer)
        case ("named", "relation") | ("relation", "named") | ("relation", "relation"):
            return _is_same_relation(_as_relation(gold), _as_relation(answer))
        case ("named", _):
            return _is_unnamed(gold, answer)
        case (_, "named"):
            return _is_unnamed(answer, gold)
        case (_, "relation") if _is_equation(answer):
            return not _is_condition(answer) and _gives(answer, gold)
        case ("relation", _) if _is_equation(gold):
            return _is_constant(gold.parts[0][0]) and _gives(gold, answer)
        case ("relation" | "sets", _) | (_, "relation" | "sets"):
            return _is_same_set(gold, answer)
        case ("quantity", "quantity"):
            return _is_same_quantity(gold, answer)
        case ("group", "group"):
            return _is_same_group(gold, answer)
        case ("group", "quantity") | ("quantity", "group"):
            left, right = _sum(gold), _sum(answer)
            return left.kind == right.kind and _is_same_quantity(left, right)
        case ("clock", "clock") | ("based", "based") | ("congruence", "congruence"):
            return all(None in pair or pair[0] == pair[1] for pair in zip(gold.parts, answer.parts, strict=True))
        case ("ratio" | "clock", "ratio" | "clock" | "quantity") | ("quantity", "ratio" | "clock"):
            return _is_same_ratio(gold, answer)
        case ("based" | "congruence" | "words", "quantity") | ("quantity", "congruence"):
            return bool(gold.parts[0].lower() == answer.parts[0].lower())
    return False


def _are_same(gold: Sequence[Answer], answer: Sequence[Answer]) -> bool:
    return len(gold) == len(answer) and all(map(is_same, gold, answer))


def _are_same_in_any_order(gold: Sequence[Answer], answer: Sequence[Answer]) -> bool:
    left = list(answer)
    for item in gold:
        same = next((other for other in left if is_same(item, other)), None)
        if same is None:
            return False
        left.remove(same)
    return not left


def _is_same_quantity(gold: Answer, answer: Answer) -> bool:
    formula, unit, beside = _measured(gold, answer)
    other, other_unit, other_beside = _measured(answer, gold)
    ratio = unit.ratio(other_unit)
    if beside != other_beside or ratio is None:
        return False
    if ratio != 1:
        formula = rf"({formula}) \cdot \frac{{{ratio.numerator}}}{{{ratio.denominator}}}"
    # 50 % answers "what percent" as 50 does and "what part" as 1/2 does
    parts = (
        rf"\frac{{{text}}}{{100}}" if is_part else text
        for text, is_part in ((formula, _PERCENT in unit.known), (other, _PERCENT in other_unit.known))
    )
    return is_same_formula(formula, other) or is_same_formula(*parts)


def _measured(quantity: Answer, other: Answer) -> tuple[str, Unit, str]:
    """Return the parts of a quantity; of 5 m, where the other has a unit, with the letters as one."""
    formula, unit, beside = quantity.parts
    letters = _LETTERS.fullmatch(formula) if other.parts[1].known and unit == Unit() else None
    found = unit_of(letters[2]) if letters else None
    return (letters[1], found, beside) if letters and found and found.known else (formula, unit, beside)


def _sum(answer: Answer) -> Answer:
    """Return 2 hours and 30 minutes as one quantity, any other answer as it is."""
    items = answer.parts[1] if answer.kind == "group" and answer.parts[0] == "" else ()
    units = [item.parts[1] for item in items if item.kind == "quantity"]
    sizes = [unit.size for unit in units]
    if not items or len(units) < len(items) or len({unit.known for unit in units} - {Unit().known}) != 1:
        return answer
    if sorted({*sizes}, reverse=True) != sizes:
        return answer
    terms = [
        rf"({item.parts[0]}) \cdot \frac{{{size.numerator}}}{{{size.denominator}}}"
        for item, size in zip(items, sizes, strict=True)
    ]
    return Answer("quantity", ("+".join(terms), replace(units[0], size=Fraction(1)), ""))


def _is_option(choice: Answer, other: Answer) -> bool:
    letters, value = choice.parts
    if other.kind == "choice":
        is_bare = None in (value, other.parts[1])
        return bool(letters == other.parts[0]) and (is_bare or is_same(value, other.parts[1]))
    if value is not None and is_same(value, other):
        return True
    is_bare = other.kind == "words" or (other.kind == "quantity" and other.parts[1] == Unit())
    return is_bare and "".join(sorted(other.parts[0].upper())) == letters


def _is_same_named(gold: Answer, answer: Answer) -> bool:
    values, other = dict(zip(*gold.parts, strict=True)), dict(zip(*answer.parts, strict=True))
    if values.keys() == other.keys() and all(is_same(values[name], other[name]) for name in values):
        return True
    return len(values) == len(other) == 1 and _is_same_relation(_as_relation(gold), _as_relation(answer))


def _is_unnamed(named: Answer, other: Answer) -> bool:
    """Return whether values with names are those of a bare answer; x, y, z and a, b, c stand for their order."""
    names, values = named.parts
    if len(values) == 1:
        return is_same(values[0], other)
    run = "".join(sorted(names))
    if run in "abcdefghijklmnopqrstuvwxyz" or run in "ABCDEFGHIJKLMNOPQRSTUVWXYZ":
        values = tuple(value for _, value in sorted(zip(names, values, strict=True), key=lambda pair: pair[0]))
    brackets = "" if all(name.startswith("x_") for name in names) else "()"  # the roots x_1 and x_2 have no order
    return other.kind == "group" and _is_same_group(other, Answer("group", (brackets, values)))


def _is_same_group(gold: Answer, answer: Answer) -> bool:
    (brackets, items), (other_brackets, other) = gold.parts, answer.parts
    if brackets == other_brackets == "M":
        return _are_same(items, other)
    if "M" in (brackets, other_brackets):
        items, other = _vector(gold), _vector(answer)
        return {brackets, other_brackets} & {"()", "<>"} != set() and _are_same(items, other)
    if {brackets, other_brackets} <= {"", "{}"}:
        return _are_same_in_any_order(items, other)
    if {brackets, other_brackets} in _ORDERED or ({brackets, other_brackets} == {"()", "[]"} and len(items) > 2):
        return _are_same(items, other)
    return False


def _vector(answer: Answer) -> Sequence[Answer]:
    """Return the entries of a tuple, or of a matrix of one row or column."""
    brackets, items = answer.parts
    if brackets != "M":
        return tuple(items)
    rows = [row.parts[1] for row in items]
    return [cell for row in rows for cell in row] if 1 in {len(rows), *map(len, rows)} else []


def _is_same_ratio(gold: Answer, answer: Answer) -> bool:
    left, right = _formulas_of_ratio(gold), _formulas_of_ratio(answer)
    return len(left) == len(right) > 1 and all(
        is_same_formula(rf"({a}) \cdot ({right[0]})", rf"({b}) \cdot ({left[0]})")
        for a, b in zip(left, right, strict=True)
    )


def _formulas_of_ratio(answer: Answer) -> list[str]:
    """Return the terms of a ratio; of 3:30 too, and of a number that is one."""
    if answer.kind == "ratio":
        return [term.parts[0] for term in answer.parts]
    if answer.kind == "quantity":
        return [answer.parts[0], "1"]
    return [] if answer.parts[2] or ":0" in answer.text else [str(term) for term in answer.parts[:2]]


def _as_relation(answer: Answer) -> Answer:
    """Return x = 5, which names a value, as the equation that it is too."""
    if answer.kind == "relation" or len(answer.parts[0]) > 1 or answer.parts[1][0].kind != "quantity":
        return answer
    (name,), (value,) = answer.parts
    return Answer("relation", ((name, value.parts[0]), ("=",), value))


def _is_equation(answer: Answer) -> bool:
    return answer.kind == "relation" and {*answer.parts[1]} == {"="}


def _is_constant(formula: str) -> bool:
    value = value_of(formula)
    return value is not None and not value.free_symbols


def _gives(equation: Answer, other: Answer) -> bool:
    """Return whether the right side is `other`, and what is computed on the way to it is right."""
    sides, _, value = equation.parts
    computed = [side for side in sides[:-1] if _is_constant(side)] if value.kind == "quantity" else []
    return is_same(other, value) and all(
        is_same_formula(value.parts[0], side) or _is_same_quantity(Answer("quantity", (side, Unit(), "")), value)
        for side in computed
    )


def _is_condition(equation: Answer) -> bool:
    """Return whether an equation is to be solved, as 2x = 6, or is one of a curve, as x^2/2 - y^2/2 = 1; x + y = 5
    names the value that was asked for."""
    left, is_number = value_of(equation.parts[0][0]), equation.parts[2].kind == "quantity"
    is_curve = {"x", "y"} <= _names(equation.parts[0]) and "^" in equation.text
    return is_curve or (is_number and left is not None and len(left.free_symbols) == 1 and left.is_polynomial())


def _is_same_relation(gold: Answer, answer: Answer) -> bool:
    if not gold.kind == answer.kind == "relation" or _is_equation(gold) != _is_equation(answer):
        return False
    (sides, signs, _), (other_sides, other_signs, _) = gold.parts, answer.parts
    if not _is_equation(gold) and all(len(_names(each.parts[0])) < 2 for each in (gold, answer)):
        return _is_same_set(gold, answer)
    differences: list[Any] = [value_of("-".join(f"({side})" for side in each)) for each in (sides, other_sides)]
    if None in differences or not len(sides) == len(other_sides) == 2:
        return False
    if _is_equation(gold):  # x y = 2 is y = 2/x
        differences = [sympy.together(difference).as_numer_denom()[0] for difference in differences]
    ratios = [left / right for left, right in values_at_points(*differences) if right != 0]
    if 0 in ratios or not ratios or any(abs(ratio - ratios[0]) > abs(ratios[0]) / 10**9 for ratio in ratios):
        return False
    expected = signs[0] if ratios[0].is_positive else _FLIPPED.get(signs[0], signs[0])
    return bool(other_signs[0] == expected)


def _names(formulas: Sequence[str]) -> set[str]:
    values = [value_of(formula) for formula in formulas if formula]
    return {str(name) for value in values if value is not None for name in value.free_symbols}


def _as_set(answer: Answer) -> Any | None:
    """Return an answer as a set of sympy, None where it is none."""
    if answer.kind == "sets" and answer.parts[1]:
        sets = [*map(_as_set, answer.parts[0])]
        return None if None in sets else _joined(sets, answer.parts[1])
    if answer.kind in {"unread", "choice", "words"} or re.search(r"\[\s*-\\infty|\\infty\s*\]", answer.text):
        return None
    value = _parsed(f"x{answer.text}" if re.match(r"[<>]|\\[lgn]e(?![a-z])", answer.text) else answer.text)
    if value is None:
        return None
    value = value.doit()
    value = value.as_set() if isinstance(value, Boolean) else value
    return value if isinstance(value, sympy.Set) else sympy.FiniteSet(value)


def _joined(sets: list[Any], signs: Sequence[str]) -> Any:
    joined = sets[0]
    for operand, sign in zip(sets[1:], signs, strict=True):
        join = {"or": or_, r"\cup": or_, r"\setminus": sub}.get(sign, and_)
        is_or = sign == "," and (joined & operand).is_empty  # x < 1, x > 3
        joined = joined | operand if is_or else join(joined, operand)
    return joined


def _is_same_set(gold: Answer, answer: Answer) -> bool:
    if len(_variables(gold) | _variables(answer)) > 1:
        return False
    try:
        left, right = _as_set(gold), _as_set(answer)
        return left is not None and right is not None and (left == right or bool((left ^ right).is_empty))
    except (TypeError, ValueError, NotImplementedError, AttributeError):  # not real, not solved, not of numbers
        return False


def _variables(answer: Answer) -> set[str]:
    """Return what a condition is about: x of "x = 1 or x > 3"."""
    if answer.kind == "sets" and answer.parts[1]:
        return set[str]().union(*map(_variables, answer.parts[0]))
    return _names(answer.parts[0]) if answer.kind in {"named", "relation"} else set()


def is_same_formula(gold: str, answer: str) -> bool:
    """Return whether two formulas have the same value; False where one cannot be parsed."""
    if gold == answer:
        return True
    left, right = value_of(gold), value_of(answer)
    if left is None or right is None or left == right:
        return left is not None and bool(left == right)
    pairs = values_at_points(left, right)
    if any(0 in pair and max(map(abs, pair)) < 10**-_TOLERANCE_DIGITS for pair in pairs):  # rounding, or a tiny number
        return bool((left - right).equals(0))
    has_decimals = "." in gold + answer
    return bool(pairs) and all(_is_close(*pair, has_decimals=has_decimals) for pair in pairs)


def value_of(formula: str) -> Any:
    """Return a formula as a sympy expression with exact numbers; None where it cannot be parsed."""
    value = Rational(formula) if _NUMBER.fullmatch(formula) else _parsed(formula)
    return value if isinstance(value, sympy.Expr) else None


@lru_cache(maxsize=1024)
def _parsed(text: str) -> Any:
    try:
        value = _parser()(_with_imaginary_unit(text))
        value = value.xreplace({number: Rational(str(number)) for number in value.atoms(Float)})
        lazy = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative, sympy.UnevaluatedExpr)
        return value.doit() if value.has(*lazy) else value
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - the parser and sympy raise anything for what they cannot read
        return None


@cache
def _parser() -> Callable[[str], Any]:
    config = replace(LatexExtractionConfig().normalization_config, units=False, boxed="none")
    return lambda formula: latex2sympy(normalize_latex(formula, config=config), is_real=True, normalization_config=None)


def _with_imaginary_unit(formula: str) -> str:
    """Return a formula in which i, where it is no index, is the parser's imaginary unit."""
    is_index = re.search(r"_\s*\{?\s*i(?![a-zA-Z])", formula)
    name = next(letter for letter in "kjmnpqrstuvw" if letter not in formula) if is_index else "{I}"
    return re.sub(r"\\[a-zA-Z]+|[a-zA-Z]+", lambda m: m[0] if m[0][0] == "\\" else m[0].replace("i", name), formula)


def values_at_points(*expressions: Any) -> list[tuple[Any, ...]]:
    """Return the values of the expressions at every point at which all are defined."""
    names = sorted(set().union(*(expression.free_symbols for expression in expressions)), key=str)
    points = [{name: Rational(point[i % 3]) + i // 3 for i, name in enumerate(names)} for point in _POINTS]
    points = points if names else points[:1]
    rows = [tuple(_number(expression, point) for expression in expressions) for point in points]
    return [row for row in rows if None not in row]


def _number(expression: Any, point: dict[Any, Any]) -> Any | None:
    """Return the value at a point, exactly where it is rational; None where it is undefined."""
    try:
        value = expression.subs(point) if point else expression
        parts = (value if isinstance(value, Rational) else value.evalf(_DIGITS)).as_real_imag()
    except (ArithmeticError, AttributeError, NotImplementedError, TypeError, ValueError):
        return None
    is_number = all(isinstance(part, Rational | Float) and part.is_finite for part in parts)
    return parts[0] + I * parts[1] if is_number else None


def _is_close(gold: Any, answer: Any, *, has_decimals: bool) -> bool:
    size = max(abs(gold), abs(answer))
    if abs(gold - answer) <= size * Rational(1, 10**_TOLERANCE_DIGITS):
        return True
    if not has_decimals or gold == 0:  # a small number is not 0
        return False
    zeros = max(0, -1 - floor(sympy.log(abs(gold), 10))) if abs(gold) < 1 else 0
    scale = 10 ** (_PLACES + zeros)
    return all(
        floor(part(gold) * scale + Rational(1, 2)) == floor(part(answer) * scale + Rational(1, 2))
        for part in (sympy.re, sympy.im)
    )
