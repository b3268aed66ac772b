"""YAML files and `a.b.c=value` overrides as one tree with the location of each value.

Values stay text here: only the schema determines whether `1e-6` is a number or `20250222` a name
(core/config/load.py decides). Invariant: every node of a tree carries `where`, either file:line or the override it came
from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import yaml

from core.config.parsing.problems import ConfigError, Problem, masked_override

_MAX_NODES = 100_000
"""Values of a file, those behind anchors counted wherever they are used: a few lines can stand for billions."""
_DEEPEST = 100
"""Parts of a dotted path: trees are walked by recursion."""
_STANDARD_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_STANDARD_TAG}merge"


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


def apply_override(tree: Table, override: str) -> list[Problem]:
    """Write `a.b.c=value` into the tree; a mapping is merged into what is there. Returns what is wrong with it."""
    where = f"override {masked_override(override)!r}"
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
    merge(table, Table(where, {keys[-1]: value}))
    return []


def merge(tree: Table, over: Table) -> None:
    """Write the keys of another tree over those of `tree`, sections into sections."""
    for name, node in over.children.items():
        there = tree.children.get(name)
        if isinstance(there, Table) and isinstance(node, Table):
            merge(there, node)
        else:
            tree.children[name] = node


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


_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Reader:
    """Makes nodes from those of PyYAML and collects problems on the way. What an anchor stands for is read wherever it
    is used."""

    def __init__(self, source: str, *, with_lines: bool = True) -> None:
        self._source = source
        self._with_lines = with_lines
        self._num_nodes = 0
        self.problems: list[Problem] = []

    def read(self, text: str) -> Node:
        """Return the tree of a text; `problems` has what is wrong with it."""
        try:
            root = yaml.compose(text, Loader=_Loader)
            return Scalar("", self._source) if root is None else self._node(root)
        except yaml.MarkedYAMLError as error:
            what = ", ".join(part for part in (error.context, error.problem) if part)
            self._add(f"not valid YAML: {what}", error.problem_mark)
        except yaml.YAMLError as error:
            self._add(f"not valid YAML: {' '.join(str(error).split())}", None)
        except UnicodeEncodeError:  # bytes of the command line that are no UTF-8
            self._add("not UTF-8 text; in a shell, export LC_ALL=C.UTF-8", None)
        except RecursionError:
            self._add("nested too deeply to read", None)
        return Scalar("", self._source)

    def _at(self, mark: yaml.Mark | None) -> str:
        return f"{self._source}:{mark.line + 1}" if self._with_lines and mark is not None else self._source

    def _add(self, message: str, mark: yaml.Mark | None) -> None:
        self.problems.append(Problem(key="", message=message, where=self._at(mark)))

    def _node(self, node: yaml.Node) -> Node:
        self._num_nodes += 1
        if self._num_nodes > _MAX_NODES:
            why = f"more than {_MAX_NODES} values, anchors followed"
            raise yaml.MarkedYAMLError(problem=why, problem_mark=node.start_mark)
        where = self._at(node.start_mark)
        if not node.tag.removeprefix(_STANDARD_TAG).isalpha():
            self._add(f"tag {node.tag} is not supported", node.start_mark)
        if isinstance(node, yaml.SequenceNode):
            return Items(tuple(map(self._node, node.value)), where)
        if isinstance(node, yaml.MappingNode):
            return self._table(where, node)
        assert isinstance(node, yaml.ScalarNode), "there is no fourth kind of node"
        return Scalar(node.value, where, quoted=node.style not in (None, ""))

    def _table(self, where: str, node: yaml.MappingNode) -> Table:
        table, merged = Table(where), dict[str, Node]()
        for key, below in node.value:
            value = self._node(below)
            if key.tag == _MERGE:
                for source in value.items if isinstance(value, Items) else (value,):
                    if isinstance(source, Table):
                        merged = {**source.children, **merged}
                    else:
                        self._add("<< takes a mapping", key.start_mark)
            elif not isinstance(key, yaml.ScalarNode):
                self._add("a key must be plain text", key.start_mark)
            else:
                if key.value in table.children:
                    first = table.children[key.value].where
                    self._add(f"{key.value}: given twice (first at {first})", key.start_mark)
                if isinstance(value, Table):  # a block begins at its first key; users look for the section's name
                    value.where = self._at(key.start_mark)
                table.children[key.value] = value
        table.children = {**merged, **table.children}
        return table
