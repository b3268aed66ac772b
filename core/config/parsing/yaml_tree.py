"""YAML files and `a.b.c=value` overrides as one tree with the location of each value.

Values stay text here: only the schema determines whether `1e-6` is a number or `20250222` a name
(core/config/load.py decides). Invariant: every node of a tree carries `where`, either file:line or the override it came
from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import yaml

from core.config.parsing.problems import ConfigError, Problem, masked_override

_MAX_NODES = 100_000
"""Values of a file, those behind anchors counted wherever they are used: a few lines can stand for billions."""
_DEEPEST = 100
"""Parts of a dotted path: trees are walked by recursion."""
_OVERRIDE = "override "
"""What the place of a value from an override begins with."""
_STANDARD_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class Scalar:
    """One value as written. Quoted text is never null."""

    text: str
    where: str
    quoted: bool = False

    @property
    def is_null(self) -> bool:
        return not self.quoted and self.text in ("", "~", "null", "Null", "NULL", "None")


@dataclass(frozen=True)
class Items:
    """A list."""

    items: tuple[Node, ...]
    where: str


@dataclass
class Table:
    """A mapping; the only mutable node, because overrides are written into it."""

    where: str
    children: dict[str, Node] = field(default_factory=dict)


Node = Scalar | Items | Table


def read_yaml(path: str | Path) -> Table:
    """Return the tree of a file. Raises ConfigError: not readable, not YAML, not a mapping, keys given twice."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError([Problem(key="--config", message=f"{path}: {reason}")]) from None
    reader = _Reader(str(path))
    root = reader.read(text)
    if isinstance(root, Scalar) and root.is_null:
        root = Table(str(path))
    if not isinstance(root, Table):
        reader.problems.append(Problem(key="", message="must be a mapping of keys to values", where=str(path)))
    if reader.problems:
        raise ConfigError(reader.problems)
    assert isinstance(root, Table), "anything else is a problem"
    return root


def apply_override(tree: Table, override: str, replaced: list[Problem]) -> list[Problem]:
    """Write `a.b.c=value` into the tree; a mapping is merged into what is there. Returns what is wrong with it, and
    adds values of earlier overrides that have no effect because of it to `replaced`."""
    where = f"{_OVERRIDE}{masked_override(override)!r}"
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys) or len(keys) > _DEEPEST:
        return [Problem(key="", message="must look like a.b.c=value", where=where)]
    reader = _Reader(where, with_lines=False)
    value = reader.read(text)
    if reader.problems:
        return reader.problems
    table = tree
    for depth, name in enumerate(keys[:-1], start=1):
        below = table.children.get(name)
        if below is None or (isinstance(below, Scalar) and below.is_null):
            below = table.children[name] = Table(where)
        if not isinstance(below, Table):
            prefix = ".".join(keys[:depth])
            return [Problem(key=prefix, message=f"is a value ({below.where}), not a section", where=where)]
        table = below
    _merge(table, keys[-1], value, ".".join(keys), replaced)
    return []


def _merge(table: Table, name: str, value: Node, path: str, replaced: list[Problem]) -> None:
    there = table.children.get(name)
    if isinstance(there, Table) and isinstance(value, Table):
        for child, node in value.children.items():
            _merge(there, child, node, f"{path}.{child}", replaced)
        return
    if there is not None and there.where.startswith(_OVERRIDE) and there.where != value.where:
        replaced.append(Problem(key=path, message=f"has no effect, {value.where} comes after it", where=there.where))
    table.children[name] = value


def merge(tree: Table, over: Table) -> None:
    """Write the keys of another tree over those of `tree`, sections into sections."""
    for name, node in over.children.items():
        _merge(tree, name, node, name, [])


def find(tree: Node, path: str) -> Node | None:
    """Return the node at a dotted path."""
    node: Node | None = tree
    for name in path.split("."):
        node = node.children.get(name) if isinstance(node, Table) else None
    return node


def remove(tree: Table, path: str) -> Node | None:
    """Take the node at a dotted path out of the tree, and sections that are empty without it; return it."""
    table: Node | None = tree
    above: list[tuple[Table, str]] = []
    for name in path.split("."):
        if not isinstance(table, Table):
            return None
        above.append((table, name))
        table = table.children.get(name)
    table_of, name = above.pop()
    found = table_of.children.pop(name, None)
    while above and not table_of.children:
        table_of, name = above.pop()
        del table_of.children[name]
    return found


def move(tree: Table, old: str, new: str) -> Problem | None:
    """Give the node at `old`, if there is one, the path `new`. A problem if both are given; then it is removed."""
    node = remove(tree, old)
    if node is None:
        return None
    if find(tree, new) is not None:
        message = f"is another name of {new}, which is given too; keep one of them"
        return Problem(key=old, message=message, where=node.where)
    replace(tree, new, node)
    return None


def replace(tree: Table, path: str, node: Node) -> None:
    """Put a node at a dotted path, in sections that are made where there are none."""
    table = tree
    *sections, last = path.split(".")
    for name in sections:
        below = table.children.get(name)
        if not isinstance(below, Table):
            below = table.children[name] = Table(node.where)
        table = below
    table.children[last] = node


def copied(node: Node) -> Node:
    """Return the same tree, with tables of its own."""
    if isinstance(node, Table):
        return Table(node.where, {name: copied(child) for name, child in node.children.items()})
    if isinstance(node, Items):
        return Items(tuple(map(copied, node.items)), node.where)
    return node


def size(node: Node) -> int:
    """Return the number of values of a tree, sections and lists counted as one each beside theirs."""
    below = node.children.values() if isinstance(node, Table) else node.items if isinstance(node, Items) else ()
    return 1 + sum(map(size, below))


_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Mark(Protocol):
    """A place in the text; PyYAML has two classes of them."""

    line: int


class _Reader:
    """Makes nodes from the events of PyYAML's parser and collects problems on the way.

    What an anchor stands for is copied wherever it is used, and counted each time."""

    def __init__(self, source: str, *, with_lines: bool = True) -> None:
        self._source = source
        self._with_lines = with_lines
        self._anchors: dict[str, Node | None] = {}
        """None: the node of the anchor is not complete yet."""
        self._num_nodes = 0
        self.problems: list[Problem] = []

    def read(self, text: str) -> Node:
        """Return the tree of a text; `problems` has what is wrong with it."""
        root: Node | None = None
        try:
            events = iter(yaml.parse(text, Loader=_Loader))
            for event in events:
                if isinstance(event, yaml.DocumentStartEvent):
                    if root is not None:
                        self._add("not valid YAML: it has more than one document", event)
                        return Table(self._source)
                    root = self._node(next(events), events)
        except _TooLargeError:
            pass  # a problem tells it
        except yaml.MarkedYAMLError as error:
            where = self._at(error.problem_mark)
            what = ", ".join(part for part in (error.context, error.problem) if part)
            self.problems.append(Problem(key="", message=f"not valid YAML: {what}", where=where))
        except yaml.YAMLError as error:
            message = f"not valid YAML: {' '.join(str(error).split())}"
            self.problems.append(Problem(key="", message=message, where=self._source))
        except UnicodeEncodeError:  # bytes of the command line that are no UTF-8
            self.problems.append(Problem(key="", message="not UTF-8 text", where=self._source))
        except RecursionError:
            self.problems.append(Problem(key="", message="nested too deeply to read", where=self._source))
        return Scalar("", self._source) if root is None else root

    def _at(self, mark: _Mark | None) -> str:
        return f"{self._source}:{mark.line + 1}" if self._with_lines and mark is not None else self._source

    def _add(self, message: str, event: yaml.Event) -> None:
        self.problems.append(Problem(key="", message=message, where=self._at(event.start_mark)))

    def _count(self, event: yaml.Event, number: int = 1) -> None:
        self._num_nodes += number
        if self._num_nodes >= _MAX_NODES:
            self._add(f"more than {_MAX_NODES} values, anchors followed", event)
            raise _TooLargeError

    def _node(self, event: yaml.Event, events: Iterator[yaml.Event]) -> Node:
        self._count(event)
        where = self._at(event.start_mark)
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, where)
        assert isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent), "there is no fourth kind of node"
        if event.tag is not None and not event.tag.removeprefix(_STANDARD_TAG).isalpha():
            self._add(f"tag {event.tag} is not supported", event)
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        node: Node
        if isinstance(event, yaml.ScalarEvent):
            node = Scalar(event.value, where, quoted=event.style not in (None, ""))
        elif isinstance(event, yaml.SequenceStartEvent):
            node = Items(tuple(self._until(yaml.SequenceEndEvent, events)), where)
        else:
            node = self._table(where, events)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _until(self, end: type[yaml.Event], events: Iterator[yaml.Event]) -> Iterator[Node]:
        while not isinstance(event := next(events), end):
            yield self._node(event, events)

    def _alias(self, event: yaml.AliasEvent, where: str) -> Node:
        if event.anchor not in self._anchors:
            self._add(f"there is no anchor {event.anchor!r}", event)
            return Scalar("", where)
        node = self._anchors[event.anchor]
        if node is None:
            self._add("an anchor contains itself", event)
            return Table(where)
        self._count(event, size(node))
        return copied(node)

    def _table(self, where: str, events: Iterator[yaml.Event]) -> Table:
        table, merged = Table(where), dict[str, Node]()
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            is_merge = isinstance(event, yaml.ScalarEvent) and event.value == "<<" and event.style in (None, "")
            key, key_where = self._node(event, events), self._at(event.start_mark)
            value = self._node(next(events), events)
            if is_merge:
                for source in value.items if isinstance(value, Items) else (value,):
                    if isinstance(source, Table):
                        merged = {**source.children, **merged}
                    else:
                        self._add("<< takes a mapping", event)
            elif not isinstance(key, Scalar):
                self._add("a key must be plain text", event)
            else:
                if key.text in table.children:
                    self._add(f"{key.text}: given twice (first at {table.children[key.text].where})", event)
                if isinstance(value, Table):  # a block begins at its first key; users look for the section's name
                    value.where = key_where
                table.children[key.text] = value
        table.children = {**merged, **table.children}
        return table


class _TooLargeError(Exception):
    """The text stands for more values than any configuration has."""
