"""`${a.b.c}` and `${oc.env:VAR,default}` inside values.

A reference finds a key of the same tree, or its default in the schema; the result is text again, or, where the
reference is the whole value, whatever stands at the other key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence

from core.config.parsing.yaml_tree import Items, Node, Scalar, Table, find

_ENV = "oc.env:"
_MAX_LENGTH = 100_000
"""Characters of a text with all its interpolations: a few lines can stand for billions."""
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")


class InterpolationError(ValueError):
    """An interpolation that has no value. The message contains the interpolation and the reason."""


class Interpolator:
    """Resolves interpolations against trees, the first one that has the key.

    `default_of(key)` gives the schema's default of a key that the tree leaves out; it raises InterpolationError for a
    key that does not exist or has no default."""

    def __init__(
        self, trees: Sequence[Node], default_of: Callable[[str], Node], environment: Mapping[str, str] | None = None
    ) -> None:
        self._trees = trees
        self._default_of = default_of
        self._environment = os.environ if environment is None else environment
        self._resolving: list[str] = []
        self._resolved: dict[str, Node] = {}

    def resolve(self, scalar: Scalar) -> Node:
        """Return the value that a scalar stands for. Raises InterpolationError."""
        text = scalar.text
        if "${" not in text:
            return scalar
        end = _closing_brace(text, 2) if text.startswith("${") else -1
        if end == len(text) - 1:
            node = self._evaluate(text[2:-1])
            return _moved(node, scalar.where)
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
                raise InterpolationError(f"{text[start:]} has no closing brace")
            node = self._evaluate(text[start + 2 : end])
            if not isinstance(node, Scalar):
                raise InterpolationError(f"{text[start : end + 1]} is not a single value and cannot be part of a text")
            out.append(text[at:start] + ("" if node.is_null else node.text))
            length += len(out[-1])
            if length > _MAX_LENGTH:
                raise InterpolationError(f"stands for more than {_MAX_LENGTH} characters")
            at = end + 1
        return "".join(out) + text[at:]

    def _evaluate(self, expression: str) -> Node:
        expression = expression.strip()
        if expression.startswith(_ENV):
            return self._environment_variable(expression[len(_ENV) :])
        if not _KEY.fullmatch(expression):
            raise InterpolationError(
                f"${{{expression}}} is not understood; write ${{a.b.c}} for another key or ${{oc.env:VAR,default}}"
            )
        if expression in self._resolving:
            raise InterpolationError(f"refers to itself: {' -> '.join([*self._resolving, expression])}")
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
        value = self._environment.get(name.strip())
        if value is not None:
            return Scalar(value, "", quoted=not value)
        if not comma:
            name = name.strip()
            raise InterpolationError(
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


def _moved(node: Node, where: str) -> Node:
    """Return a node as if written at `where`."""
    if isinstance(node, Scalar):
        return Scalar(node.text, where, node.quoted)
    if isinstance(node, Items):
        return Items(node.items, where)
    return Table(where, dict(node.children))
