"""A configuration key that nobody reads does not exist: every field occurs as an attribute outside of the schema."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
READERS = ("allocation", "rollout", "mcore_adapter", "core", "tools")


def schema_files() -> list[Path]:
    return sorted((ROOT / "core").glob("config*.py"))


def fields_of(path: Path) -> dict[str, int]:
    """name -> line of every annotated field of every class in the file; private names and ClassVars are not fields."""
    classes = (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ClassDef))
    return {
        item.target.id: item.lineno
        for node in classes
        for item in node.body
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and not item.target.id.startswith("_")
        and "ClassVar" not in ast.unparse(item.annotation)
        and "ignored" not in ast.unparse(item).lower()
    }


def attributes_read() -> set[str]:
    schema = set(schema_files())
    return {
        node.attr
        for folder in READERS
        for path in (ROOT / folder).rglob("*.py")
        if path not in schema
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


@pytest.mark.skipif(not schema_files(), reason="no schema in core/ yet")
def test_every_config_field_is_read_outside_of_the_schema() -> None:
    read = attributes_read()
    unread = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in schema_files()
        for name, line in fields_of(path).items()
        if name not in read
    ]
    assert not unread, f"{len(unread)} keys that nobody reads: {unread}"
