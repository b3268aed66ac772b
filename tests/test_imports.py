"""The direction of imports and the order of folders, read from the source.

Every import counts, also one inside a function or under TYPE_CHECKING.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

from helpers.source import (
    PACKAGES,
    ROOT,
    imported_by_call,
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
        "inference.gpus inference.changes inference.versions",
        "inference.backend",
        "inference.router",
        "inference.sglang inference.embedded inference.mock",
        "inference.registry",
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
    "core.planning": ("scene", "memory", "rates", "search simulation calibrate"),
    "core.checks": ("rules host resumption", "recipe"),
    "slipstream": ("api cli",),
    "tools": (
        "arguments",
        "scratch_model setup_cluster loss demo fetch timeline",
        "check_template curves convert migrate runs",
        "plan",
        "experience",
        "eval watch samples",
        "mutants conformance",
        "chaos bench studio",
    ),
    "tools.studio": ("table guard", "folders", "series sampled processes configure", "answers", "server", "__main__"),
    "tools.bench": ("workload trl_script trl_learning", "cpu datapath", "agents gpu", "__main__"),
    "tools.bench.gpu": ("trainer", "runs servers", "plan push", "compare"),
}
"""Folders and modules of a package or folder from the bottom to the top: each imports what stands in earlier lines."""
MOST_FILES = 14
"""Python files of one folder, at most."""

LATE_IMPORTS: dict[str, dict[str, str]] = {
    "an optional library": {
        "rollout.data.data_juicer": "data_juicer",
        "rollout.experience.stores.postgres": "psycopg",
        "tools.chaos.postgres": "psycopg",
    },
    "torch and transformers load for seconds: --help, dry runs and errors in the input do not wait": {
        "core.checks.recipe": "core.data.datasets core.train.periodic rollout.data.task_sets rollout.experience "
        "rollout.experience.episode",
        "core.data.datasets": "rollout.data.tokenizer",
        "core.explore.servers": "rollout.data.tokenizer",
        "core.explore.data": "rollout.data.tokenizer",
        "core.monitoring.monitor": "torch",
        "rollout.data.prompts": "rollout.data.tokenizer",
        "rollout.inference.embedded": "rollout.inference.embedded.generator",
        "rollout.inference.sglang": "rollout.inference.sglang.generator",
        "slipstream.cli": "core.config.presets",
        "tools.chaos.run": "torch transformers",
        "tools.convert": "mcore_adapter.checkpoint.streaming mcore_adapter.device mcore_adapter.hf.safetensors_folder "
        "mcore_adapter.parallel",
        "tools.curves": "torch transformers",
        "tools.demo.data": "tokenizers torch transformers",
        "tools.demo.__main__": "rollout.inference.embedded.generator torch transformers",
        "tools.eval.__main__": "tools.eval.run tools.eval.settings",
        "tools.loss.__main__": "tools.loss.compute",
        "tools.fetch": "numpy safetensors tokenizers torch",
        "tools.samples": "rollout.data.tokenizer",
        "tools.scratch_model": "tokenizers torch transformers",
    },
    "numpy loads for 0.1 s: not in a dry run, which checks names of workflows and backends": {
        "core.stages": "core.monitoring.metrics",
        "rollout.inference.mock": "numpy",
        "rollout.data.prompts": "numpy",
        "rollout.trajectories": "numpy",
    },
    "the driver imports the module of an actor, and does not need what the actor runs": {
        "core.launch.trainer_rank": "core.weight_sync.buckets mcore_adapter.engine mcore_adapter.parallel"
    },
    "megatron and torch load for seconds: only in processes that train": {
        "mcore_adapter.device": "mcore_adapter.cpu.device mcore_adapter.cuda.device",
        "mcore_adapter": "torch",
    },
    "torch loads for seconds: not in a generator without a model": {"core.launch.generator_actor": "torch"},
    "transformers.generation loads for seconds: what would import it is replaced meanwhile": {
        "rollout.data.tokenizer": "transformers"
    },
    "the library of the hub loads for 0.3 s: only for ids": {"model_specs.hub": "huggingface_hub"},
    "pyarrow and datasets load for seconds: only for their formats": {
        "rollout.data.files": "datasets huggingface_hub pyarrow"
    },
    "triton and TransformerEngine: only where there is a GPU": {
        "mcore_adapter.cuda.device": "mcore_adapter.cuda.elementwise",
        "mcore_adapter.models.forward": "mcore_adapter.cuda.lm_head",
        "mcore_adapter.models.experts": "mcore_adapter.cuda.experts",
        "mcore_adapter.optimizer.training": "mcore_adapter.cuda.elementwise",
        "mcore_adapter.models.router": "mcore_adapter.cuda.experts",
    },
    "sglang: hooks are installed before its modules load": {
        "rollout.inference.sglang.arguments": "sglang",
        "rollout.inference.sglang.receivers": "sglang",
        "rollout.inference.sglang.hooks.compile_ahead": "torch",
        "rollout.inference.sglang.hooks.in_flight": "sglang",
        "rollout.inference.sglang.hooks.main": "rollout.inference.sglang.arguments rollout.inference.sglang.hooks "
        "rollout.inference.sglang.hooks.in_flight rollout.inference.sglang.hooks.scheduler sglang",
        "rollout.inference.sglang.hooks.models": "sglang",
        "rollout.inference.sglang.hooks.sampling": "sglang",
        "rollout.inference.sglang.hooks.scheduler": "sglang",
        "rollout.inference.sglang.hooks.table": "sglang",
    },
    "math_verify loads sympy: only in the reward workers": {
        "rollout.rewards.math": "rollout.rewards.math_equality",
        "rollout.rewards.worker": "rollout.rewards.math_equality",
    },
    "aiohttp loads for 0.3 s: only for its environments": {
        "rollout.environments.protocol": "rollout.environments.openenv"
    },
    "an optional extra": {
        "core.monitoring.trackers": "mlflow wandb",
        "rollout.sandbox.pool": "pydantic_monty",
        "tools.studio.__main__": "tools.studio.server",
    },
    "matplotlib loads for a second: only where a picture is drawn": {
        "slipstream.api": "matplotlib",
        "tools.demo.plot": "matplotlib",
        "tools.experience.savings": "matplotlib",
        "tools.plan": "core.planning.calibrate core.planning.simulation matplotlib tools.timeline",
        "tools.timeline": "matplotlib",
        "tools.eval.report": "matplotlib",
    },
    "a plan needs neither torch nor numpy, unless it measures or simulates": {"core.planning.calibrate": "torch"},
    "the planner is needed for allocation_mode=search alone": {"core.checks.rules": "core.planning.search"},
    "a benchmark loads what its row measures": {
        "tools.bench.cpu": "mcore_adapter.engine mcore_adapter.parallel mcore_adapter.hf.weights transformers",
        "tools.bench.gpu.compare": "aiconfigurator_core",
    },
}
"""Imports inside functions: reason -> module -> what it imports there, modules of this repository or libraries."""


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


def late_imports(path: Path) -> set[str]:
    """Modules of this repository and libraries that functions of the file import, import_module("...") included."""
    found = set()
    functions = [n for n in ast.walk(tree(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in (inner for function in functions for inner in ast.walk(function)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Call) and (name := imported_by_call(node)):
            found.add(name)
    return {name if name.partition(".")[0] in PACKAGES else name.partition(".")[0] for name in found}


def test_an_import_inside_a_function_has_its_reason_in_the_table() -> None:
    modules = {module_of(path): path for package in PACKAGES for path in source_files(package)}
    found = {(module, name) for module, path in modules.items() for name in late_imports(path)}
    rows = [
        (module, name) for rows in LATE_IMPORTS.values() for module, names in rows.items() for name in names.split()
    ]
    assert len(rows) == len(set(rows)), "one reason each"
    assert found - set(rows) == set(), "move these to the top of their modules, or add them with a reason"
    assert set(rows) - found == set(), "remove these rows"


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
