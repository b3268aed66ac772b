"""A configuration key that nobody reads does not exist: every field occurs as an attribute somewhere."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from config_schema.section import Section, fields_by_key, sub_section
from core.config.experiments import EXPERIMENTS

ROOT = Path(__file__).resolve().parents[1]
READERS = ("allocation", "model_specs", "tracing", "rollout", "mcore_adapter", "core", "tools")


def fields(section: type[Section], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, attribute) of everything below a section, sections included."""
    for key, (name, info) in fields_by_key(section).items():
        yield prefix + key, name
        below = sub_section(info)
        if below is not None:
            yield from fields(below, f"{prefix}{key}.")


def attributes_read() -> set[str]:
    """Names that are loaded as `something.name` in any source file; assignments and definitions do not count."""
    return {
        node.attr
        for folder in READERS
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_key_of_an_experiment_is_read(experiment: str) -> None:
    read = attributes_read()
    unread = [key for key, name in fields(EXPERIMENTS[experiment]) if name not in read]
    assert not unread, f"{len(unread)} keys that nobody reads: {unread}"
