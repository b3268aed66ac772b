"""The direction of imports, the owners of heavy libraries and the declared dependencies, read from the source.

Every import counts, also one inside a function or under TYPE_CHECKING.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PACKAGES = {"allocation", "rollout", "mcore_adapter", "core", "tools"}
MAY_IMPORT = {
    "allocation": set(),
    "rollout": {"allocation"},
    "mcore_adapter": {"allocation"},
    "core": {"allocation", "rollout", "mcore_adapter"},
    "tools": {"allocation", "rollout", "mcore_adapter", "core"},
}
OWNER = {
    "megatron": "mcore_adapter/",
    "transformer_engine": "mcore_adapter/",
    "sglang": "rollout/sglang",
    "ray": "core/launch",
}
DEVICE_WORDS = re.compile(r"\b(cuda|nccl|gloo)\b")
MAY_NAME_DEVICES = ("mcore_adapter/device", "core/push", "rollout/sglang")

DISTRIBUTION = {
    "megatron": "megatron-core",
    "transformer_engine": "transformer-engine",
    "yaml": "PyYAML",
    "math_verify": "math-verify",
    "mlflow": "mlflow-skinny",
}
"""Where the name to import and the name to install differ."""

YARDSTICKS = {"trl", "datasets"}
"""Libraries that a benchmark compares with, in an environment of their own."""

# In the repository they are sources too, but nothing imports them.
NOT_SHIPPED = {"tests", "setup"}


def source_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_modules(path: Path) -> Iterator[tuple[str, int]]:
    """(absolute dotted module, line) of every import in the file, importlib.import_module("...") included."""
    here = path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = list(here[: len(here) - node.level]) if node.level else []
            yield ".".join(base + ([node.module] if node.module else [])), node.lineno
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in {"import_module", "__import__", "find_spec"} and isinstance(node.args[0].value, str):
                yield node.args[0].value, node.lineno


def top_imports(path: Path) -> Iterator[tuple[str, int]]:
    for module, line in imported_modules(path):
        yield module.partition(".")[0], line


def docstrings(module: ast.Module) -> set[int]:
    """ids of the constants that are bare string statements: docstrings of modules, classes, functions, fields."""
    return {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT).as_posix()}:{line}"


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_a_package_imports_only_the_packages_below_it(package: str) -> None:
    allowed = MAY_IMPORT[package] | {package}
    wrong = [
        f"{place(path, line)} imports {name}"
        for path in source_files(package)
        for name, line in top_imports(path)
        if name in PACKAGES - allowed
    ]
    assert not wrong, wrong


def test_allocation_needs_nothing_but_the_standard_library() -> None:
    import sys

    wrong = [
        f"{place(path, line)} imports {name}"
        for path in source_files("allocation")
        for name, line in top_imports(path)
        if name not in sys.stdlib_module_names | {"allocation"}
    ]
    assert not wrong, wrong


@pytest.mark.parametrize("library", sorted(OWNER))
def test_a_heavy_library_has_one_owner(library: str) -> None:
    wrong = [
        place(path, line)
        for package in sorted(PACKAGES)
        for path in source_files(package)
        for name, line in top_imports(path)
        if name == library and not path.relative_to(ROOT).as_posix().startswith(OWNER[library])
    ]
    assert not wrong, f"{library} may be imported only in {OWNER[library]}*: {wrong}"


def test_device_words_stay_in_the_device_and_transport_files() -> None:
    wrong = []
    for package in sorted(PACKAGES):
        for path in source_files(package):
            if path.relative_to(ROOT).as_posix().startswith(MAY_NAME_DEVICES):
                continue
            skipped = docstrings(tree(path))
            for node in ast.walk(tree(path)):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
                    found = DEVICE_WORDS.search(node.value)
                elif isinstance(node, ast.Attribute):
                    found = DEVICE_WORDS.fullmatch(node.attr)
                else:
                    continue
                if found:
                    wrong.append(f"{place(path, node.lineno)} says {found.group()}")
    assert not wrong, wrong


def test_nobody_prints_outside_of_tools() -> None:
    wrong = [
        place(path, node.lineno)
        for package in sorted(PACKAGES - {"tools"})
        for path in source_files(package)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not wrong, wrong


def declared(requirements: ast.expr) -> set[str]:
    return {re.split(r"[\[<>=~! ]", ast.literal_eval(item))[0] for item in requirements.elts}  # type: ignore[attr-defined]


def setup_requirements() -> tuple[set[str], dict[str, set[str]]]:
    """(names that every installation gets, names of each extra), read from setup.py."""
    values = {
        node.targets[0].id: node.value
        for node in tree(ROOT / "setup.py").body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    extras = values["EXTRAS"]
    assert isinstance(extras, ast.Dict)
    return declared(values["DEPENDENCIES"]), {
        ast.literal_eval(key): declared(value) for key, value in zip(extras.keys, extras.values, strict=True) if key
    }


def third_party_imports(files: list[Path]) -> dict[str, str]:
    """distribution -> one place that imports it"""
    import sys

    return {
        DISTRIBUTION.get(name, name): place(path, line)
        for path in files
        for name, line in top_imports(path)
        if name not in sys.stdlib_module_names | PACKAGES | NOT_SHIPPED | YARDSTICKS | {"__main__", "conftest"}
    }


def test_every_import_of_the_packages_is_a_declared_dependency() -> None:
    always, extras = setup_requirements()
    optional = set().union(*(names for extra, names in extras.items() if extra != "dev"))
    used = third_party_imports([path for package in PACKAGES for path in source_files(package)])
    missing = {name: where for name, where in used.items() if name not in always | optional}
    assert not missing, f"imported but not in setup.py: {missing}"


def test_every_dependency_has_its_reason_in_the_docs() -> None:
    always, extras = setup_requirements()
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"^\| ([A-Za-z][\w-]+) \|", page, flags=re.MULTILINE)) - {"package"}
    assert explained == always.union(*extras.values())
