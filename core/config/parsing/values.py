"""Text to typed values, by the type of the field it is meant for, and `${a.b.c}` and `${oc.env:VAR,default}` inside
values.

The type decides, not YAML: `1e-6` is a number for a float field (PyYAML reads it as text) and `20250222` a name for a
text field. A reference finds a key of the same tree, or its default in the schema; the result is text again, or, where
the reference is the whole value, whatever stands at the other key.
"""

import dataclasses
import math
import os
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Union, get_args, get_origin

import yaml

from core.config.parsing.yaml_tree import Items, Node, Scalar, Table, find

_INTEGER = re.compile(r"[+-]?[0-9]+(_[0-9]+)*")
_MAX_INTEGER_LENGTH = 32
"""What is longer is no number of this configuration, and int() refuses thousands of digits."""
_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class CoerceError(ValueError):
    """A value that a field's type cannot take, or an interpolation that has no value. The message is the rule and the
    value."""


def coerce(node: Node, annotation: object) -> object:
    """Return the value of `node` as `annotation`: bool, int, float, str, Literal, list, dict, or a union of them.

    Raises CoerceError."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return _coerce_union(node, args)
    if origin is dict:
        return _coerce_dict(node, args[1])
    if origin is list:
        if not isinstance(node, Items):
            raise CoerceError(f"must be a list, got {describe(node)}")
        return [coerce(item, args[0]) for item in node.items]
    if not isinstance(node, Scalar):
        raise CoerceError(f"must be {type_name(annotation)}, got {describe(node)}")
    if node.is_null:
        raise CoerceError(f"must be {type_name(annotation)}, got null")
    if origin is Literal:
        if node.text in args:
            return node.text
        raise CoerceError(f"must be {type_name(annotation)}, got {node.text!r}")
    return _SCALARS[annotation](node.text)


def type_name(annotation: object) -> str:
    """Return a type in the words of an error message."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        names = list(dict.fromkeys("null" if a is type(None) else type_name(a) for a in args))
        return ", ".join(names[:-1]).replace(" or ", ", ") + f" or {names[-1]}"
    if origin is Literal:
        return f"one of {', '.join(args)}" if len(args) > 1 else args[0]
    if origin is dict:
        return "a mapping"
    if origin is list:
        return "a list"
    return _NAMES[annotation]


def describe(node: Node) -> str:
    """Return a node in an error message."""
    if isinstance(node, Table):
        return f"a section ({', '.join(list(node.children)[:4])}{', ...' if len(node.children) > 4 else ''})"
    if isinstance(node, Items):
        return f"a list of {len(node.items)}"
    return "null" if node.is_null else repr(node.text)


def _coerce_union(node: Node, options: tuple[object, ...]) -> object:
    is_null = isinstance(node, Scalar) and node.is_null
    if is_null and type(None) in options:
        return None
    # Text takes everything, so it is tried last; bool before int before float keeps `1` an integer and `true` a bool.
    order = sorted((o for o in options if o is not type(None)), key=lambda o: (o is str, o is float, o is int))
    if isinstance(node, Scalar) and node.quoted and str in options:
        return _text(node.text)
    if len(order) == 1 and get_origin(order[0]) is list and isinstance(node, Items):
        return coerce(node, order[0])  # whose error is that of the entry
    for option in order:
        try:
            return coerce(node, option)
        except CoerceError:
            continue
    raise CoerceError(f"must be {type_name(options[0] if len(options) == 1 else Union[options])}, got {describe(node)}")  # noqa: UP007


def _coerce_dict(node: Node, value_type: object) -> dict[str, object]:
    if isinstance(node, Scalar) and node.is_null:
        return {}
    if not isinstance(node, Table):
        raise CoerceError(f"must be a mapping, got {describe(node)}")
    out: dict[str, object] = {}
    for name, child in node.children.items():
        try:
            out[name] = coerce(child, value_type)
        except CoerceError as error:
            raise CoerceError(f"{name} {error}") from None
    return out


def _bool(text: str) -> bool:
    value = _BOOLS.get(text.lower())
    if value is None:
        raise CoerceError(f"must be true or false, got {text!r}")
    return value


def _int(text: str) -> int:
    if len(text) <= _MAX_INTEGER_LENGTH and _INTEGER.fullmatch(text):
        return int(text)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number.is_integer():
        raise CoerceError(f"must be an integer, got {text!r}")
    return int(number)


def _float(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise CoerceError(f"must be a number, got {text!r}")
    return number


def _text(text: str) -> str:
    if "\0" in text:
        raise CoerceError("must not hold a NUL character; remove it")
    return text


_SCALARS: Mapping[object, Callable[[str], object]] = {bool: _bool, int: _int, float: _float, str: _text}
_NAMES: Mapping[object, str] = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


def to_node(value: object) -> Node:
    """Return a default of the schema as a node, for `${...}` references to keys that are not given."""
    if isinstance(value, dict):
        return Table("", {name: to_node(item) for name, item in value.items()})
    if isinstance(value, (list, tuple)):
        return Items(tuple(to_node(item) for item in value), "")
    if isinstance(value, str):
        return Scalar(value, "", quoted=True)
    return Scalar(yaml.safe_dump(value).removesuffix("...\n").strip(), "")


_ENV = "oc.env:"
_MAX_LENGTH = 100_000
"""Characters of a text with all its interpolations: a few lines can stand for billions."""
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")


class Interpolator:
    """Resolves interpolations against trees, the first one that has the key.

    `default_of(key)` gives the schema's default of a key that the tree leaves out; it raises CoerceError for a
    key that does not exist or has no default."""

    def __init__(self, trees: Sequence[Node], default_of: Callable[[str], Node]) -> None:
        self._trees = trees
        self._default_of = default_of
        self._resolving: list[str] = []
        self._resolved: dict[str, Node] = {}

    def resolve(self, scalar: Scalar) -> Node:
        """Return the value that a scalar stands for. Raises CoerceError."""
        text = scalar.text
        if "${" not in text:
            return scalar
        end = _closing_brace(text, 2) if text.startswith("${") else -1
        if end == len(text) - 1:
            return dataclasses.replace(self._evaluate(text[2:-1]), where=scalar.where)
        return Scalar(self._in_text(text), scalar.where, quoted=True)

    def _in_text(self, text: str) -> str:
        """Replace every interpolation in `text`; `\\${` is a literal `${`."""
        out, at, length = list[str](), 0, 0
        while (start := text.find("${", at)) >= 0:
            if start > 0 and text[start - 1] == "\\":
                out.append(text[at : start - 1] + "${")
                at = start + 2
                continue
            end = _closing_brace(text, start + 2)
            if end < 0:
                raise CoerceError(f"{text[start:]} has no closing brace")
            node = self._evaluate(text[start + 2 : end])
            if not isinstance(node, Scalar):
                raise CoerceError(f"{text[start : end + 1]} is not a single value and cannot be part of a text")
            out.append(text[at:start] + ("" if node.is_null else node.text))
            length += len(out[-1])
            if length > _MAX_LENGTH:
                raise CoerceError(f"stands for more than {_MAX_LENGTH} characters")
            at = end + 1
        return "".join(out) + text[at:]

    def _evaluate(self, expression: str) -> Node:
        expression = expression.strip()
        if expression.startswith(_ENV):
            return self._environment_variable(expression[len(_ENV) :])
        if not _KEY.fullmatch(expression):
            raise CoerceError(
                f"${{{expression}}} is not understood; write ${{a.b.c}} for another key or ${{oc.env:VAR,default}}"
            )
        if expression in self._resolving:
            raise CoerceError(f"refers to itself: {' -> '.join([*self._resolving, expression])}")
        if expression not in self._resolved:
            self._resolving.append(expression)
            try:
                node = self._found(expression) or self._default_of(expression)
                self._resolved[expression] = self.resolve(node) if isinstance(node, Scalar) else node
            finally:
                self._resolving.pop()
        return self._resolved[expression]

    def _found(self, key: str) -> Node | None:
        return next((node for tree in self._trees if (node := find(tree, key)) is not None), None)

    def _environment_variable(self, expression: str) -> Scalar:
        name, comma, default = expression.partition(",")
        value = os.environ.get(name.strip())
        if value is not None:
            return Scalar(value, "", quoted=not value)
        if not comma:
            name = name.strip()
            raise CoerceError(
                f"the environment variable {name} is not set; set it, or give a default: ${{oc.env:{name},...}}"
            )
        default = default.strip()
        if len(default) >= 2 and default[0] == default[-1] and default[0] in "'\"":
            return Scalar(default[1:-1], "", quoted=True)
        return Scalar(self._in_text(default), "")


def _closing_brace(text: str, start: int) -> int:
    """Return the index of the brace that closes the interpolation whose inside begins at `start`; -1 if none does."""
    depth = 1
    for i in range(start, len(text)):
        if text.startswith("${", i):
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if depth == 0:
                return i
    return -1
