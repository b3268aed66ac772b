"""Every experiment describes itself by the same properties, so that callers never look at its class."""

import ast
from pathlib import Path

import pytest

from core.config.experiments import EXPERIMENTS
from helpers.source import PACKAGES, source_files

ROOT = Path(__file__).resolve().parents[3]
CLASSES = {model.__name__ for model in EXPERIMENTS.values()}


def names_in(node: ast.AST) -> set[str]:
    return {getattr(n, "id", getattr(n, "attr", "")) for n in ast.walk(node)}


def test_no_code_branches_on_the_class_of_a_configuration() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for package in PACKAGES
        for path in source_files(package)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") in ("isinstance", "issubclass", "type")
        and names_in(node) & CLASSES
    ]
    assert not wrong, wrong


def test_experiments_have_the_same_properties_and_their_own_names() -> None:
    shared = {name for name in dir(EXPERIMENTS["sft"]) if name not in EXPERIMENTS["sft"].model_fields}
    for name, model in EXPERIMENTS.items():
        assert name == model.NAME
        missing = shared - set(dir(model)) - set(model.model_fields)
        assert not missing, f"{name}: {missing}"


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_function_that_runs_an_experiment_exists(experiment: str) -> None:
    module, _, function = EXPERIMENTS[experiment].RUN.partition(":")
    source = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8"))
    assert function in {node.name for node in source.body if isinstance(node, ast.FunctionDef)}
