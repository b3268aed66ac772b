"""A configuration key that nobody reads does not exist: every field occurs as an attribute somewhere."""

import ast
from collections.abc import Iterator
from functools import cache

import pytest

from config_schema.section import Section, fields_by_key, sub_section
from core.config.experiments import EXPERIMENTS
from tests.helpers.source import source_files, tree

READERS = ("allocation", "model_specs", "tracing", "rollout", "mcore_adapter", "core", "tools")


def fields(section: type[Section], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, attribute) of everything below a section, sections included."""
    for key, (name, info) in fields_by_key(section).items():
        yield prefix + key, name
        below = sub_section(info)
        if below is not None:
            yield from fields(below, f"{prefix}{key}.")


@cache
def attributes_read() -> set[str]:
    """Names that are loaded as `something.name` in any source file; assignments and definitions do not count."""
    return {
        node.attr
        for package in READERS
        for path in source_files(package)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_key_of_an_experiment_is_read(experiment: str) -> None:
    read = attributes_read()
    unread = [key for key, name in fields(EXPERIMENTS[experiment]) if name not in read]
    assert not unread, f"{len(unread)} keys that nobody reads: {unread}"
