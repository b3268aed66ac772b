"""`device_mapping: list(range(0,8))`: the slots of a role, written as an expression.

Reads lists, `range` (with steps), `list(...)` and `+` between them from Python's syntax tree; nothing is evaluated by
Python. Invariant: the outcome is a list of at most `limit` numbers, or an AllocationError.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence

from allocation.errors import AllocationError

_TOKENS = re.compile(r"(?:list\b|range\b|[0-9]{1,9}\b|[\[\](),+\-*]|[ \t\r\n])*")
_PLAIN_LIST = re.compile(r"\s*\[(?:\s*(?:0|[1-9][0-9]*)\s*,)*\s*(?:0|[1-9][0-9]*)\s*\]\s*")
_EXAMPLE = "list(range(0,8))"


def parse_devices(mapping: str | Sequence[int], *, limit: int) -> list[int]:
    """Return the slot of each rank, in rank order: 'list(range(0,4)) + [6, 7]' -> [0, 1, 2, 3, 6, 7].

    `limit` is the number of slots in the cluster: a longer list cannot be meant. Raises AllocationError without key.
    """
    if not isinstance(mapping, str):
        return _check_numbers(mapping, limit)
    accepted = _TOKENS.match(mapping)
    end = accepted.end() if accepted else 0
    if end != len(mapping):
        raise _wrong(f"only numbers, lists, range and list are read here, got {mapping[end : end + 20]!r}")
    if _PLAIN_LIST.fullmatch(mapping):
        # Thousands of slots in full: a fraction of the time that a syntax tree of them takes.
        return _check_numbers(json.loads(mapping), limit)
    try:
        return _read(ast.parse(mapping.strip(), mode="eval").body, limit)
    except SyntaxError as error:
        raise _wrong(f"not a list: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise _wrong("nested too deeply to read") from None


def _read(tree: ast.expr, limit: int) -> list[int]:
    devices: list[int] = []
    # `a + b + c` nests to the left, as deep as it is long: walk it with a stack.
    pending: list[ast.expr] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            pending += (node.right, node.left)
            continue
        devices += _sequence(node, limit)
        if len(devices) > limit:
            raise _too_many(len(devices), limit)
    return devices


def _sequence(node: ast.expr, limit: int) -> Sequence[int]:
    """Return a list display, range(...) or list(...)."""
    if isinstance(node, ast.List | ast.Tuple):
        items: list[int] = []
        for element in node.elts:
            items += _sequence(element.value, limit) if isinstance(element, ast.Starred) else [_number(element)]
            if len(items) > limit:
                raise _too_many(len(items), limit)
        return items
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id == "range" and 1 <= len(node.args) <= 3:
            arguments = [_number(argument) for argument in node.args]
            if len(arguments) == 3 and arguments[2] == 0:
                raise _wrong("the step of range must not be 0")
            numbers = range(*arguments)
            if len(numbers) > limit:
                raise _too_many(len(numbers), limit)
            return numbers
        if node.func.id == "list" and len(node.args) == 1 and not isinstance(node.args[0], ast.Starred):
            return _sequence(node.args[0], limit)
    raise _wrong(f"expected a list, range(start, stop, step) or a sum of these, got {ast.unparse(node)[:40]!r}")


def _number(node: ast.expr) -> int:
    sign = 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        sign, node = -1, node.operand
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return sign * node.value
    raise _wrong(f"expected a whole number, got {ast.unparse(node)[:40]!r}")


def _check_numbers(mapping: Sequence[int], limit: int) -> list[int]:
    if not isinstance(mapping, Sequence):
        raise _wrong(f"expected a list of slots or its text, got {type(mapping).__name__}")
    if len(mapping) > limit:
        raise _too_many(len(mapping), limit)
    for item in mapping:
        if type(item) is not int:
            raise _wrong(f"expected a whole number, got {item!r}")
    return list(mapping)


def _too_many(count: int, limit: int) -> AllocationError:
    return AllocationError(
        f"names {count} slots or more, and n_nodes x n_gpus_per_node = {limit}", f"list(range(0,{limit}))"
    )


def _wrong(rule: str) -> AllocationError:
    return AllocationError(rule, _EXAMPLE)
