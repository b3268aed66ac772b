"""The source files of the packages and what each of them imports."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = {
    "allocation",
    "config_schema",
    "model_specs",
    "tracing",
    "rollout",
    "mcore_adapter",
    "core",
    "tools",
    "slipstream",
}


def source_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_by_call(node: ast.Call, *functions: str) -> str:
    """The module in import_module("..."), or in a call of `functions`; empty for all other calls."""
    called = getattr(node.func, "attr", getattr(node.func, "id", ""))
    first = node.args[0] if node.args else None
    named = called in (functions or ("import_module", "__import__")) and isinstance(first, ast.Constant)
    return first.value if named and isinstance(first.value, str) else ""


@cache
def imported_modules(path: Path) -> list[tuple[str, int]]:
    """(absolute dotted module, line) of every import in the file, importlib.import_module("...") included."""
    return list(_imported_modules(path))


def _imported_modules(path: Path) -> Iterator[tuple[str, int]]:
    here = path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = list(here[: len(here) - node.level]) if node.level else []
            yield ".".join(base + ([node.module] if node.module else [])), node.lineno
        elif isinstance(node, ast.Call) and (name := imported_by_call(node) or imported_by_call(node, "find_spec")):
            yield name, node.lineno


def top_imports(path: Path) -> Iterator[tuple[str, int]]:
    for module, line in imported_modules(path):
        yield module.partition(".")[0], line


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT).as_posix()}:{line}"


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(path: Path) -> Iterator[tuple[str, int]]:
    """As imported_modules(), and `from package import name` as package.name."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
    yield from imported_modules(path)
