"""The direction of imports and the order of folders, read from the source.

Every import counts, also one inside a function or under TYPE_CHECKING.
"""

import ast
from functools import cache

import pytest

from helpers.source import (
    PACKAGES,
    ROOT,
    imported_names,
    module_of,
    place,
    source_files,
    top_imports,
    tree,
)

FLOOR = {"allocation", "config_schema", "model_specs", "tracing"}
MAY_IMPORT = {
    **dict.fromkeys(FLOOR, set()),
    "allocation": {"config_schema"},
    "rollout": FLOOR,
    "mcore_adapter": FLOOR,
    "core": FLOOR | {"rollout", "mcore_adapter"},
    "tools": FLOOR | {"rollout", "mcore_adapter", "core"},
    "slipstream": FLOOR | {"rollout", "mcore_adapter", "core", "tools"},
    "evaluation": {"tools"},
    "examples": {"slipstream", "core", "rollout", "mcore_adapter"},
}
BESIDE = {
    "allocation": {"config_schema"},
    "config_schema": {"pydantic"},
    "model_specs": {"huggingface_hub", "tokenizers"},
}
"""What a package of FLOOR imports besides the standard library."""
ORDER = {
    "model_specs": ("untrusted hub", "config", "tensors", "family", "families", "weight_files", "model_folder"),
    "rollout": (
        "bucket",
        "types plugins errors processes time_limit",
        "programs sandbox",
        "trajectories",
        "data rewards experience workflow_calls",
        "journal",
        "inference.gpus inference.changes",
        "inference.backend",
        "inference.router",
        "inference.sglang inference.embedded inference.mock",
        "inference.receiver inference.registry",
        "sessions environments tools",
        "workflows",
        "producer evaluation",
    ),
    "mcore_adapter": (
        "autograd",
        "settings data",
        "cpu cuda",
        "device",
        "parallel optimizer",
        "memory",
        "models",
        "hf",
        "checkpoint",
        "engine",
        "tools",
    ),
    "core": (
        "errors config",
        "runs",
        "processes",
        "monitoring",
        "data",
        "algorithms placement",
        "planning",
        "weight_sync",
        "train",
        "explore",
        "checks",
        "launch stages",
        "trainer",
        "experiments",
        "quickstart",
    ),
    "core.config": (
        "parsing presets ppo",
        "migrate",
        "algorithm areal_v02 runtime",
        "common",
        "ppo_experiment",
        "experiments",
        "load reference",
    ),
    "core.config.parsing": ("problems", "yaml_tree", "values"),
    "config_schema": ("needs", "section"),
    "core.planning": (
        "scene",
        "server_memory",
        "host_memory",
        "memory",
        "advice",
        "rates",
        "simulation server_rates",
        "calibrate search",
    ),
    "core.checks": ("rules host resumption", "recipe"),
    "slipstream": ("api cli",),
    "tools": (
        "arguments",
        "scratch_model setup_cluster loss demo fetch timeline",
        "check_template curves convert migrate runs",
        "plan",
        "experience",
        "eval watch samples",
        "mutants",
        "chaos bench studio",
    ),
    "tools.studio": ("table guard", "folders", "series sampled processes configure", "answers", "server", "__main__"),
    "tools.bench": ("workload trl_script", "cpu datapath", "agents gpu", "__main__"),
    "tools.bench.gpu": ("trainer planner_picture", "runs servers", "plan push"),
}
"""Folders and modules of a package or folder from the bottom to the top: each imports what stands in earlier lines."""
MOST_FILES = 14
"""Python files of one folder, at most."""


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_a_package_imports_only_the_packages_below_it(package: str) -> None:
    allowed = MAY_IMPORT[package] | {package}
    wrong = [
        f"{place(path, line)} imports {name}"
        for path in source_files(package)
        for name, line in top_imports(path)
        if name in PACKAGES - allowed
    ]
    assert not wrong, wrong


@pytest.mark.parametrize("package", sorted(FLOOR))
def test_what_every_package_shares_needs_nothing_but_the_standard_library(package: str) -> None:
    import sys

    wrong = [
        f"{place(path, line)} imports {name}"
        for path in source_files(package)
        for name, line in top_imports(path)
        if name not in sys.stdlib_module_names | {package} | BESIDE.get(package, set())
    ]
    assert not wrong, wrong


@cache
def arrows() -> dict[str, dict[str, str]]:
    """module -> {module of this repository that it imports: one place}."""
    modules = {module_of(path): path for package in PACKAGES for path in source_files(package)}
    found: dict[str, dict[str, str]] = {module: {} for module in modules}
    for module, path in modules.items():
        for name, line in imported_names(path):
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules and target != module:
                found[module][target] = place(path, line)
    return found


def test_no_module_imports_itself_by_way_of_others() -> None:
    below: dict[str, set[str]] = {}

    def reach(module: str, path: tuple[str, ...]) -> set[str]:
        assert module not in path, f"an import cycle: {' -> '.join([*path[path.index(module) :], module])}"
        if module not in below:
            below[module] = set().union(*({n} | reach(n, (*path, module)) for n in arrows()[module]))
        return below[module]

    for module in arrows():
        reach(module, ())


def room_of(module: str, package: str) -> str:
    """The entry of ORDER[package] that a module belongs to: rollout.inference.sglang.client -> inference.sglang."""
    parts = module.removeprefix(f"{package}.").split(".")
    return ".".join(parts[:2]) if parts[:1] == ["inference"] else ".".join(parts[:1])


@pytest.mark.parametrize("package", sorted(ORDER))
def test_folders_of_a_package_import_only_what_stands_below_them(package: str) -> None:
    level = {room: i for i, line in enumerate(ORDER[package]) for room in line.split()}
    modules = [module for module in arrows() if module.startswith(f"{package}.")]
    assert {room_of(module, package) for module in modules} - {"inference"} == level.keys()
    wrong = [
        f"{where} imports {target}"
        for module in modules
        for target, where in arrows()[module].items()
        if target.startswith(f"{package}.")
        and room_of(target, package) != room_of(module, package)
        and level.get(room_of(target, package), -1) >= level.get(room_of(module, package), -1)
    ]
    assert not wrong, wrong


def test_no_folder_is_too_full_to_read() -> None:
    folders = {path.parent for package in MAY_IMPORT for path in source_files(package)}
    full = {
        str(folder.relative_to(ROOT)): n for folder in folders if (n := len(list(folder.glob("*.py")))) > MOST_FILES
    }
    assert not full, full


def test_every_folder_says_what_it_offers() -> None:
    folders = {path.parent for package in PACKAGES - {"tools"} for path in source_files(package)}
    silent = [str(f.relative_to(ROOT)) for f in folders if not ast.get_docstring(tree(f / "__init__.py"))]
    assert not silent, silent
