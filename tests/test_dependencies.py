"""Owners of heavy libraries, words of devices and backends, and declared dependencies, read from the source."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from helpers.source import PACKAGES, ROOT, place, source_files, top_imports, tree

OWNER = {
    "megatron": "mcore_adapter/",
    "transformer_engine": "mcore_adapter/",
    "transformer_engine_torch": "mcore_adapter/",
    "sglang": "rollout/inference/sglang/",
    "ray": "core/launch/",
}
DEVICE_WORDS = re.compile(r"\b(cuda|nccl|gloo)\b")
MAY_NAME_DEVICES = (
    "allocation/layout.py",
    "mcore_adapter/device.py",
    "mcore_adapter/cpu/",
    "mcore_adapter/cuda/",
    "core/weight_sync/",
    "core/config/runtime.py",
    "rollout/inference/registry.py",
    "rollout/inference/backend.py",
    "rollout/inference/sglang/",
)

DISTRIBUTION = {
    "megatron": "megatron-core",
    "transformer_engine": "transformer-engine",
    "transformer_engine_torch": "transformer-engine",
    "yaml": "PyYAML",
    "math_verify": "math-verify",
    "mlflow": "mlflow-skinny",
    "pydantic_monty": "pydantic-monty",
    "uplot": "uplot-python",
    "ruamel": "ruamel-yaml",
    "data_juicer": "py-data-juicer",
    "markdown_it": "markdown-it-py",
    "deep_gemm": "sglang",  # which requires sgl-deep-gemm
}
"""Where the name to import and the name to install differ."""

YARDSTICKS = {"trl", "playwright", "aiconfigurator_core"}
"""Libraries that benchmarks alone load: one to compare with, in an environment of its own, and a browser to measure."""

# In the repository they are sources too, but nothing imports them.
NOT_SHIPPED = {"tests", "setup"}


def docstrings(module: ast.Module) -> set[int]:
    """ids of the constants that are bare string statements: docstrings of modules, classes, functions, fields."""
    return {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}


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


def declared(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=~! ]", item)[0] for item in requirements}


def requirements() -> tuple[set[str], dict[str, set[str]]]:
    """(names that every installation gets, names of each extra), read from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].items()
    return declared(project["dependencies"]), {name: declared(items) for name, items in extras}


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
    always, extras = requirements()
    optional = set().union(*(names for extra, names in extras.items() if extra != "dev"))
    used = third_party_imports([path for package in PACKAGES for path in source_files(package)])
    missing = {name: where for name, where in used.items() if name not in always | optional}
    assert not missing, f"imported but not in pyproject.toml: {missing}"


def test_every_file_that_a_package_holds_is_installed_with_it() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    listed = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [Path(line) for line in listed.splitlines() if not line.endswith(".py")]
    installed = {path for folder, names in patterns.items() for name in names
                 for path in (ROOT / folder.replace(".", "/")).glob(name)}  # fmt: skip
    assert len(files) > 3 and [str(file) for file in files if ROOT / file not in installed] == []


def test_every_dependency_has_its_reason_in_the_docs() -> None:
    always, extras = requirements()
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"^\| ([A-Za-z][\w-]+) \|", page, flags=re.MULTILINE)) - {"package"}
    assert explained == always.union(*extras.values())


ALIASES = {
    "core/config/areal_v02.py": ("sglang",),
    "core/config/common.py": ("sglang: dict[str, FlagValue]",),
    "core/config/ppo_experiment.py": ("self.actor.sglang",),
}
"""Keys of the configuration that have the name of a backend: file of core -> what its lines may hold."""


def test_core_knows_a_backend_by_its_capabilities_and_not_by_its_name() -> None:
    wrong = [
        place(path, number)
        for path in source_files("core")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if "sglang" in line.lower()
        and not any(alias in line for alias in ALIASES.get(path.relative_to(ROOT).as_posix(), ()))
    ]
    assert not wrong, wrong
