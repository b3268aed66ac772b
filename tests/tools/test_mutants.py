"""The catalogue of promises and the command that breaks them. `make mutants` tries every entry."""

import os
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from tools.mutants import (
    CatalogueError,
    Mutant,
    Verdict,
    changed_files,
    copy_tree,
    load,
    mirror_of,
    mutate,
    report,
    run_tests,
    try_mutant,
)

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "def half(n):\n    return n // 2\n"


def mutant(**changes: Any) -> Mutant:
    values: dict[str, Any] = {
        "id": "halves", "promise": "halves", "file": "core/half.py", "find": "n // 2", "replace": "n // 3",
        "tests": ("tests/core/test_half.py",),
    }  # fmt: skip
    return Mutant(**values | changes)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small repository with one function and its test."""
    root = tmp_path / "tree"
    for name, text in {
        "core/__init__.py": "",
        "core/half.py": SOURCE,
        "tests/core/test_half.py": "from core.half import half\n\n\ndef test_half():\n    assert half(4) == 2\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for arguments in (
        ["init", "-qb", "main"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"],
    ):
        subprocess.run(["git", *arguments], cwd=root, check=True)
    return root


def test_the_catalogue_is_well_formed_and_one_page_to_read() -> None:
    """Entries that a change has left behind are no error here: `make mutants` reports them."""
    assert 80 <= len(load(ROOT)) <= 120


def write_test(tree: Path, body: str) -> None:
    text = f"from core.half import half\n\n\ndef test_half():\n    {body}\n"
    (tree / "tests/core/test_half.py").write_text(text)


@pytest.mark.parametrize(
    ("test", "changes", "outcome"),
    [
        ("assert half(4) == 2", {}, "killed"),
        ("assert half(0) == 0", {}, "survived"),
        ("assert half(4) == 2", {"replace": "m // 3"}, "error"),
        ("assert half(4) == 2", {"tests": ("tests/core/test_half.py", "-k", "third")}, "error"),
        ("assert half(4) == 2", {"find": "n // 4"}, "gone"),
        ("assert half(4) == 2", {"find": "n"}, "gone"),
        ("assert half(4) == 2", {"file": "core/third.py"}, "gone"),
        ("assert half(4) == 2", {"tests": ("tests/core/test_third.py",)}, "gone"),
    ],
)
def test_only_a_test_that_notices_the_bug_kills_it(test, changes, outcome, tree) -> None:
    write_test(tree, test)
    assert try_mutant(mutant(**changes), tree, limit_seconds=60.0).outcome == outcome
    assert (tree / "core/half.py").read_text() == SOURCE


@pytest.mark.nightly
def test_what_a_test_leaves_running_at_the_limit_is_killed(tree: Path, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    write_test(tree, f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    assert run_tests(["tests/core/test_half.py"], tree, 10.0).code is None
    assert not psutil.pid_exists(int(pid.read_text()))


@pytest.mark.parametrize(
    ("outcomes", "code", "last"),
    [
        (["killed"] * 19 + ["gone"], 0, "19 of 20 bugs killed (95.0%)"),
        (["killed"] * 18 + ["gone"] * 2, 1, "18 of 20 bugs killed (90.0%)"),
        (["killed"] * 99 + ["survived"], 1, "99 of 100 bugs killed (99.0%)"),
        (["killed"] * 99 + ["error"], 1, "99 of 100 bugs killed (99.0%)"),
    ],
)
def test_survivors_and_a_low_score_fail(outcomes: list[Any], code: int, last: str, capsys) -> None:
    assert report([Verdict(mutant=mutant(), outcome=outcome) for outcome in outcomes]) == code
    assert capsys.readouterr().out.splitlines()[-1] == last


def test_the_tests_of_a_changed_file_mirror_it(tree: Path) -> None:
    (tree / "core/half.py").write_text(SOURCE + "\n\ndef third(n):\n    return n // 3\n")
    (tree / "tests/core/test_half.py").write_text("\n")
    assert changed_files(tree, "main") == ["core/half.py"]
    assert mirror_of("core/half.py", tree) == "tests/core/test_half.py"
    assert mirror_of("core/deeper/third.py", tree) == "tests/core"
    assert mirror_of("core/half/third.py", tree) == "tests/core/test_half.py"
    with pytest.raises(CatalogueError, match="no-such-branch.*name a branch"):
        changed_files(tree, "no-such-branch")


@pytest.mark.nightly
def test_cosmic_ray_mutates_the_changed_lines_alone(tree: Path, tmp_path: Path) -> None:
    pytest.importorskip("cosmic_ray")
    (tree / "core/half.py").write_text(SOURCE + "\n\ndef is_zero(n):\n    return not n\n")
    copy = copy_tree(tree, tmp_path / "copy")
    tried, survivors = mutate("core/half.py", tree, copy, branch="main", limit_seconds=60.0)
    assert tried == len(survivors) > 0
    assert all("not n" in difference for difference in survivors)
    assert (copy / "core/half.py").read_text() == (tree / "core/half.py").read_text()
    assert not os.path.exists(copy / ".git")
