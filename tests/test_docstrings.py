"""The form of docstrings: functions begin with an imperative verb, and programs are not described as persons."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.source import PACKAGES, tree

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (*sorted(PACKAGES), "examples")
Function = ast.FunctionDef | ast.AsyncFunctionDef

FRAGMENTS = frozenset(
    re.findall(
        r"\w+",
        """
        the a an of for as what who whose where when whether how why which that those these this it its one every all
        each both most half in on by to from into after before around like without while once there nothing another
        everything none never is only because
        """,
    )
)
"""First words of noun phrases, clauses and descriptions of states."""
ENDS_WITH_S = frozenset({"pass", "process", "compress", "express", "address", "focus", "preprocess"})
"""Verbs in the imperative that end with s; other words that do are plurals or third-person verbs."""
PERSONS = re.compile(
    r"\b(nobody|somebody|whoever|himself|tells|told|says|said|knows|wants|hears|heard|speaks|dies|died|alive|goodbye)\b",
    re.IGNORECASE,
)


def source_files() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def functions(module: ast.Module) -> Iterator[Function]:
    """Functions and methods with a docstring; properties (noun phrases) and __init__ (arguments) are left out."""
    for node in ast.walk(module):
        if isinstance(node, Function) and node.name != "__init__" and ast.get_docstring(node):
            decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
            if not any("property" in decorator for decorator in decorators):
                yield node


def is_imperative(docstring: str) -> bool:
    word = docstring.split()[0].rstrip(".,:;")
    if not re.fullmatch(r"[A-Z][a-z]+", word) or word.lower() in FRAGMENTS:
        return False
    return not word.endswith("s") or word.lower() in ENDS_WITH_S


def test_the_docstring_of_a_function_begins_with_an_imperative_verb() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {(ast.get_docstring(node) or '').splitlines()[0]}"
        for path in source_files()
        for node in functions(tree(path))
        if not is_imperative(ast.get_docstring(node) or "")
    ]
    assert not wrong, "\n".join(wrong)


def test_docstrings_and_messages_do_not_describe_programs_as_persons() -> None:
    wrong = []
    for path in source_files():
        nodes = list(ast.walk(tree(path)))
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        names |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                found = [m[0] for m in PERSONS.finditer(node.value) if m[0] not in names]
                wrong += [f"{path.relative_to(ROOT)}:{node.lineno}: {word!r}" for word in found]
    assert not wrong, "\n".join(wrong)


ELSEWHERE = frozenset({"actor.py", "opmd_policy_loss.py", "curve_reward.py"})
"""Files of other projects, as sources of formulas, and one that a tool writes."""


def test_docstrings_and_comments_name_files_that_exist() -> None:
    paths = source_files()
    names = {path.name for path in (*paths, *(ROOT / "tests").rglob("*.py"), *ROOT.glob("*.py"))} | ELSEWHERE
    named = re.compile(r"(?<![\w.*{}-])(?:\w+/)*(\w+\.py)\b")
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        for match in named.finditer(line)
        if match[1] not in names
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_pages_do_not_describe_programs_as_persons(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert [match[0] for match in PERSONS.finditer(text)] == []
