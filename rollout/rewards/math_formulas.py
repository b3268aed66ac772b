r"""Whether two formulas have the same value, whatever their variables are. The parser is math-verify's.

Formulas are compared by numbers, relative to their size: constants by their value, formulas with variables at a few
points. A decimal is equal to what rounds to it at 6 places, as in math-verify.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import sympy
from math_verify.parser import LatexExtractionConfig, latex2sympy, normalize_latex
from sympy import Float, I, Rational, floor

_PLACES = 6
"""Decimals are equal when they agree to this many places, counted from the first digit of a small number."""
_DIGITS = 100
_TOLERANCE_DIGITS = 90
"""Other numbers are computed to so many digits and equal when they agree to so many."""
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)")
_POINTS = (("7/19", "11/13", "29/17"), ("-13/23", "5/7", "-3/11"), ("31/11", "-17/5", "2/29"), ("41/3", "19/2", "53/7"))
"""What the variables are set to, in alphabetical order."""


def is_same_formula(gold: str, answer: str) -> bool:
    """Return whether two formulas have the same value; False where one cannot be parsed."""
    if gold == answer:
        return True
    left, right = value_of(gold), value_of(answer)
    if left is None or right is None:
        return False
    return is_same_value(left, right, has_decimals="." in gold + answer)


@lru_cache(maxsize=1024)
def value_of(formula: str) -> Any:
    """Return a formula as a sympy expression with exact numbers; None where it cannot be parsed."""
    if _NUMBER.fullmatch(formula):
        return Rational(formula)
    try:
        value = _parser()(_with_imaginary_unit(formula))
        value = value.xreplace({number: Rational(str(number)) for number in value.atoms(Float)})
        lazy = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative, sympy.UnevaluatedExpr)
        value = value.doit() if value.has(*lazy) else value
        return value if isinstance(value, sympy.Expr) else None
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


def is_same_value(gold: Any, answer: Any, *, has_decimals: bool) -> bool:
    """Return whether two sympy expressions are equal wherever both are defined."""
    if gold == answer:
        return True
    pairs = values_at_points(gold, answer)
    if any(0 in pair and max(map(abs, pair)) < 10**-_TOLERANCE_DIGITS for pair in pairs):  # rounding, or a tiny number
        return bool((gold - answer).equals(0))
    return bool(pairs) and all(_is_close(*pair, has_decimals=has_decimals) for pair in pairs)


def values_at_points(*expressions: Any) -> list[tuple[Any, ...]]:
    """Return the values of the expressions at every point at which all are defined."""
    names = sorted(set().union(*(expression.free_symbols for expression in expressions)), key=str)
    points = [{name: Rational(point[i % 3]) + i // 3 for i, name in enumerate(names)} for point in _POINTS]
    rows = [
        tuple(_number(expression, point) for expression in expressions)
        for point in points[: len(points) if names else 1]
    ]
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
    if not has_decimals:
        return False
    zeros = max(0, -1 - floor(sympy.log(abs(gold), 10))) if 0 < abs(gold) < 1 else 0
    scale = 10 ** (_PLACES + zeros)
    return all(
        floor(part(gold) * scale + Rational(1, 2)) == floor(part(answer) * scale + Rational(1, 2))
        for part in (sympy.re, sympy.im)
    )
