"""Text to typed values, by the type of the field it is meant for.

The type decides, not YAML: `1e-6` is a number for a float field (PyYAML reads it as text) and `20250222` a name for a
text field.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable, Mapping
from typing import Literal, Union, get_args, get_origin

import yaml

from core.config.parsing.yaml_tree import Items, Node, Scalar, Table

_INTEGER = re.compile(r"[+-]?[0-9]+(_[0-9]+)*")
_MAX_INTEGER_LENGTH = 32
"""What is longer is no number of this configuration, and int() refuses thousands of digits."""
_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class CoerceError(ValueError):
    """A value that a field's type cannot take. The message is the rule and the value."""


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
        names = ["null" if a is type(None) else type_name(a) for a in args]
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
