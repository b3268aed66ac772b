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

PACKAGES = {"allocation", "model_specs", "rollout", "mcore_adapter", "core", "tools", "slipstream"}
MAY_IMPORT = {
    "allocation": set(),
    "model_specs": set(),
    "rollout": {"allocation", "model_specs"},
    "mcore_adapter": {"allocation", "model_specs"},
    "core": {"allocation", "model_specs", "rollout", "mcore_adapter"},
    "tools": {"allocation", "model_specs", "rollout", "mcore_adapter", "core"},
    "slipstream": {"allocation", "model_specs", "rollout", "mcore_adapter", "core", "tools"},
}
ORDER = {
    "model_specs": (
        "values",
        "moe rope",
        "config",
        "server_parts fits",
        "family",
        "families",
        "hf_config",
        "model_folder",
    ),
    "rollout": (
        "types plugins errors",
        "answer_file",
        "trajectory_checks data rewards experience ledger",
        "inference.errors inference.gpus inference.bucket inference.router",
        "inference.backend",
        "inference.sglang inference.embedded inference.mock",
        "inference.registry",
        "workflows",
        "producer evaluation",
    ),
    "mcore_adapter": (
        "quick_import settings lr_schedule layer_specs data",
        "cpu cuda",
        "device logprobs optimizer_state",
        "parallel optimizer",
        "models forward out_of_memory",
        "hf bare_loop",
        "checkpoint",
        "engine",
        "tools",
    ),
    "core": (
        "errors paths masking",
        "earlier_runs",
        "processes",
        "monitoring data",
        "algorithms",
        "config",
        "schedule rollout_settings step_batch meeting run_record",
        "weight_sync recovery rollout_service",
        "periodic launch",
        "trainer",
        "experiments",
        "quickstart",
    ),
    "slipstream": ("api", "cli"),
    "tools": (
        "arguments",
        "scratch_model demo_plot setup_cluster loss_case",
        "demo loss_pairs",
        "curves eval loss samples sweep",
        "convert chaos_run mutants conformance learning atlas",
        "chaos bench nightly",
    ),
}
"""Folders and modules of a package from the bottom to the top: each imports what stands in earlier lines."""
MOST_FILES = 20
"""Python files of one folder, at most."""
OWNER = {
    "megatron": "mcore_adapter/",
    "transformer_engine": "mcore_adapter/",
    "sglang": "rollout/inference/sglang/",
    "ray": "core/launch/",
}
DEVICE_WORDS = re.compile(r"\b(cuda|nccl|gloo)\b")
MAY_NAME_DEVICES = (
    "allocation/device.py",
    "mcore_adapter/device.py",
    "mcore_adapter/cpu/",
    "mcore_adapter/cuda/",
    "core/weight_sync/",
    "core/config/push.py",
    "rollout/inference/backend.py",
    "rollout/inference/sglang/",
)

LATE_IMPORTS: dict[str, dict[str, str]] = {
    "torch and transformers load for seconds: --help, dry runs and errors in the input do not wait": {
        "core.monitoring.monitor": "torch",
        "rollout.inference.embedded.backend": "rollout.inference.embedded.generator",
        "rollout.inference.sglang.backend": "rollout.inference.sglang.generator rollout.inference.sglang.server",
        "tools.chaos_run": "torch transformers",
        "tools.convert": "mcore_adapter.checkpoint.streaming mcore_adapter.device mcore_adapter.hf.safetensors_folder "
        "mcore_adapter.parallel",
        "tools.curves": "torch transformers",
        "tools.demo.__main__": "transformers",
        "tools.demo.data": "tokenizers torch transformers",
        "tools.demo.run": "rollout.inference.embedded.generator torch transformers",
        "tools.eval.__main__": "tools.eval.run tools.eval.settings",
        "tools.scratch_model": "tokenizers torch transformers",
    },
    "the driver imports the module of an actor, and does not need what the actor runs": {
        "core.launch.rollout_actor": "core.rollout_service",
        "core.launch.trainer_rank": "mcore_adapter.engine mcore_adapter.parallel",
    },
    "megatron and torch load for seconds: only in processes that train": {
        "mcore_adapter.device": "mcore_adapter.cpu.device mcore_adapter.cuda.device",
        "mcore_adapter.quick_import": "torch",
    },
    "torch loads for seconds: not in a generator without a model": {
        "core.data.wire": "torch",
        "core.launch.generator_actor": "torch",
    },
    "transformers.generation loads for seconds: what would import it is replaced meanwhile": {
        "rollout.data.tokenizer": "transformers",
    },
    "pyarrow and datasets load for seconds: only for their formats": {
        "rollout.data.files": "pyarrow",
        "rollout.data.readers": "datasets",
    },
    "triton: only where there is a GPU": {
        "mcore_adapter.logprobs": "mcore_adapter.cuda.lm_head",
        "mcore_adapter.models.expert_products": "mcore_adapter.cuda.experts",
    },
    "sglang: hooks are installed before its modules load": {"rollout.inference.sglang.hooks": "sglang"},
    "math_verify loads sympy: only in the reward workers": {"rollout.rewards.math": "math_verify"},
    "an optional extra": {
        "core.monitoring.tracked_runs": "mlflow wandb",
        "tools.demo_plot": "matplotlib",
        "tools.eval.report": "matplotlib",
        "tools.sweep.figures": "matplotlib",
    },
    "a benchmark loads what its row measures": {
        "tools.bench.convert": "mcore_adapter.hf.weights",
        "tools.bench.cpu": "mcore_adapter.engine mcore_adapter.parallel transformers",
        "tools.bench.gpu": "core.experiments.workers core.launch.trainer_group mcore_adapter.bare_loop "
        "mcore_adapter.data.packing mcore_adapter.engine mcore_adapter.parallel",
        "tools.bench.gpu_mismatch": "transformers",
        "tools.bench.gpu_models": "transformers",
        "tools.bench.gpu_ranks": "mcore_adapter.engine mcore_adapter.parallel",
        "tools.bench.gpu_servers": "transformers",
    },
}
"""Imports inside functions: reason -> module -> what it imports there, modules of this repository or libraries."""

DISTRIBUTION = {
    "megatron": "megatron-core",
    "transformer_engine": "transformer-engine",
    "yaml": "PyYAML",
    "math_verify": "math-verify",
    "mlflow": "mlflow-skinny",
}
"""Where the name to import and the name to install differ."""

YARDSTICKS = {"trl", "verl", "trinity", "openrlhf"}
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


@pytest.mark.parametrize("package", ["allocation", "model_specs"])
def test_what_every_package_shares_needs_nothing_but_the_standard_library(package: str) -> None:
    import sys

    wrong = [
        f"{place(path, line)} imports {name}"
        for path in source_files(package)
        for name, line in top_imports(path)
        if name not in sys.stdlib_module_names | {package}
    ]
    assert not wrong, wrong


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


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


def imported_names(path: Path) -> Iterator[tuple[str, int]]:
    """As imported_modules(), and `from package import name` as package.name."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
    yield from imported_modules(path)


def test_no_module_imports_itself_by_way_of_others() -> None:
    below: dict[str, set[str]] = {}

    def reach(module: str, path: tuple[str, ...]) -> set[str]:
        assert module not in path, f"an import cycle: {' -> '.join([*path[path.index(module) :], module])}"
        if module not in below:
            below[module] = set().union(*({n} | reach(n, (*path, module)) for n in arrows()[module]))
        return below[module]

    for module in arrows():
        reach(module, ())


def room_of(module: str) -> str:
    """The entry of ORDER that a module belongs to: rollout.inference.sglang.client -> inference.sglang."""
    parts = module.split(".")[1:]
    return ".".join(parts[:2]) if parts[:1] == ["inference"] else ".".join(parts[:1])


@pytest.mark.parametrize("package", sorted(ORDER))
def test_folders_of_a_package_import_only_what_stands_below_them(package: str) -> None:
    level = {room: i for i, line in enumerate(ORDER[package]) for room in line.split()}
    modules = [module for module in arrows() if module.startswith(f"{package}.")]
    assert {room_of(module) for module in modules} - {"inference"} == level.keys()
    wrong = [
        f"{where} imports {target}"
        for module in modules
        for target, where in arrows()[module].items()
        if target.startswith(f"{package}.")
        and room_of(target) != room_of(module)
        and level.get(room_of(target), -1) >= level.get(room_of(module), -1)
    ]
    assert not wrong, wrong


def late_imports(path: Path) -> set[str]:
    """Modules of this repository and libraries that functions of the file import."""
    found = set()
    functions = [n for n in ast.walk(tree(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in (inner for function in functions for inner in ast.walk(function)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
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
    folders = {path.parent for package in PACKAGES for path in source_files(package)}
    full = {
        str(folder.relative_to(ROOT)): n for folder in folders if (n := len(list(folder.glob("*.py")))) > MOST_FILES
    }
    assert not full, full


def test_every_folder_says_what_it_offers() -> None:
    folders = {path.parent for package in PACKAGES - {"tools"} for path in source_files(package)}
    silent = [str(f.relative_to(ROOT)) for f in folders if not ast.get_docstring(tree(f / "__init__.py"))]
    assert not silent, silent


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
        for package in sorted(PACKAGES - {"tools", "slipstream"})
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


ALIASES = {
    "core/config/experiments.py": ("actor.sglang.", "generator.sglang_python"),
    "core/config/models.py": ("actor.sglang.*", "sglang: dict[str, FlagValue]"),
    "core/config/runtime.py": ("added to actor.sglang",),
    "core/config/rules.py": ("config.actor.sglang",),
    "core/config/unused.py": ("actor.sglang", "critic.sglang", "{name}.sglang"),
    "core/experiments/workers.py": ("config.actor.sglang",),
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
