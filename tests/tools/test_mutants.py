"""The catalogue of bugs and the command that tries them: every entry applies, and a sample of them is noticed."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from helpers.source import PACKAGES
from tools.mutants import __main__ as command
from tools.mutants.catalogue import CatalogueError, Mutant, check, load, sample, select
from tools.mutants.copies import copy_tree
from tools.mutants.report import problems, score, show
from tools.mutants.trial import TestRun, Tree, Verdict, judge, try_mutant

ROOT = Path(__file__).resolve().parents[2]
CATALOGUE = load(ROOT)
SAMPLE = sample([mutant for mutant in CATALOGUE if mutant.quick], 20, seed=7)
SOURCE = "def half(n):\n    return n // 2  # rounds down\n"


def mutant(**changes: Any) -> Mutant:
    values: dict[str, Any] = {
        "id": "m", "file": "half.py", "find": "n // 2", "replace": "n // 3", "promise": "halves",
        "tests": ("tests/test_half.py",),
    }  # fmt: skip
    return Mutant(**values | changes)


def test_every_entry_of_the_catalogue_applies_and_names_tests_that_exist() -> None:
    assert check(CATALOGUE, ROOT) == []
    assert len(CATALOGUE) >= 200 and len(SAMPLE) == 20
    packages = {entry.file.partition("/")[0] for entry in CATALOGUE}
    assert packages == PACKAGES


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tree]:
    with Tree(copy_tree(ROOT, tmp_path_factory.mktemp("mutants") / "tree")) as tree:
        yield tree


@pytest.mark.parametrize("entry", SAMPLE, ids=lambda entry: entry.id)
def test_the_tests_of_a_bug_fail_with_it(entry: Mutant, tree: Tree) -> None:
    """A sample; `make mutants` tries them all. Without the bug these tests pass: they are part of this suite."""
    verdict = try_mutant(entry, tree, baseline_seconds=0.0, limit_seconds=120.0)
    assert verdict.outcome == "killed", f"{entry.promise} {verdict.detail}"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"find": "n // 4"}, "m: find='n // 4' must occur exactly once in half.py; found 0"),
        ({"find": "n"}, "must occur exactly once in half.py; found 5"),
        ({"find": "n", "nth": 6}, "must occur at least 6 times in half.py; found 5"),
        ({"replace": "n // 2"}, "m: replace must differ"),
        ({"replace": "n //"}, "m: half.py does not compile with the bug"),
        ({"find": "rounds down", "replace": "rounds up"}, "m: only comments or layout of half.py change"),
        ({"file": "third.py"}, "m: there is no file third.py"),
        ({"tests": ("tests/test_third.py",)}, "m: there is no test file tests/test_third.py"),
        ({"tests": ("-k", "half")}, "must name a file in tests/"),
    ],
)
def test_an_entry_that_does_not_apply_is_named(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_half.py").touch()
    (tmp_path / "half.py").write_text(SOURCE)
    assert check([mutant()], tmp_path) == []
    (problem,) = check([mutant(**changes)], tmp_path)
    assert said in problem


def test_the_occurrence_that_nth_names_is_replaced() -> None:
    assert mutant(find="half", replace="third").apply("half = 1") == "third = 1"
    assert mutant(find="x", nth=2, replace="y").apply("x = x + x") == "x = y + x"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('id = "a"\nflie = "x"', r"a: unknown keys \['flie'\]"),
        ('id = "a"', "a: missing keys"),
        ('id = "a"\nfile = "f"\nfind = "x"\nreplace = "y"\npromise = ""\ntests = ["t"]', "promise must not be empty"),
        ('file = "f"', "an entry without id"),
    ],
)
def test_a_malformed_entry_is_named(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/mutants.toml").write_text(f"[[mutant]]\n{text}\n")
    with pytest.raises(CatalogueError, match=said):
        load(tmp_path)


@pytest.mark.parametrize(
    ("code", "output", "changes", "outcome"),
    [
        (1, "E   assert 1 == 2\n1 failed", {}, "killed"),
        (0, "3 passed", {}, "survived"),
        (None, "", {}, "killed by timeout"),
        (2, "E   ValueError: no\nInterrupted: 1 error during collection", {}, "error"),
        (4, "ERROR: file or directory not found", {}, "error"),
        (5, "no tests ran", {}, "error"),
        (-9, "", {}, "error"),
        (1, "E       NameError: name 'x' is not defined\n1 failed", {}, "error"),
        (2, "E   ImportError: cannot import name 'x'", {}, "error"),
        (2, "E   ImportError: cannot import name 'x'", {"imports_fail": True}, "killed"),
    ],
)
def test_only_a_test_that_fails_kills(code: int | None, output: str, changes: dict[str, Any], outcome: str) -> None:
    run = TestRun(code=code, seconds=1.0, output=output)
    assert judge(mutant(**changes), run, baseline_seconds=1.0, limit_seconds=10.0).outcome == outcome


def test_a_timeout_kills_only_where_the_tests_without_the_bug_are_far_from_the_limit() -> None:
    run = TestRun(code=None, seconds=10.0, output="")
    verdict = judge(mutant(), run, baseline_seconds=5.0, limit_seconds=10.0)
    assert verdict.outcome == "error" and "give --timeout 20 or more" in verdict.detail


def test_tests_that_were_all_skipped_have_not_passed() -> None:
    assert TestRun(code=0, seconds=1.0, output="2 passed, 1 skipped").passed
    assert not TestRun(code=0, seconds=1.0, output="3 skipped").passed
    assert not TestRun(code=1, seconds=1.0, output="1 failed, 2 passed").passed


def write_half(tree: Tree, test: str) -> None:
    (tree.folder / "half.py").write_text(SOURCE)
    (tree.folder / "tests/test_half.py").write_text(f"from half import half\n\n\ndef test_half():\n    {test}\n")


@pytest.mark.parametrize(
    ("test", "outcome"),
    [
        ("assert half(4) == 2", "killed"),
        ("assert half(0) == 0", "survived"),
        ("while half(4) != 2: pass", "killed by timeout"),
    ],
)
def test_a_bug_is_tried_in_the_copy_and_taken_out_again(test: str, outcome: str, tree: Tree) -> None:
    write_half(tree, test)
    entry = mutant()
    assert tree.run(entry.tests, 60.0).passed
    limit = 5.0 if outcome == "killed by timeout" else 60.0
    assert try_mutant(entry, tree, baseline_seconds=0.0, limit_seconds=limit).outcome == outcome
    assert (tree.folder / "half.py").read_text() == SOURCE
    assert tree.run(entry.tests, 60.0).passed, "compiled from the source as it is now"
    assert not (ROOT / "half.py").exists()


def test_what_a_test_leaves_running_is_ended(tree: Tree) -> None:
    write_half(
        tree, "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid); assert 0"
    )
    run = tree.run(("tests/test_half.py",), 60.0)
    assert run.code == 1
    pid = int(run.output.partition("Captured stdout call")[2].split("\n")[1])
    assert not psutil.pid_exists(pid)


def test_a_copy_holds_the_files_that_git_lists_or_else_the_sources(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in ("core/a.py", "core/__pycache__/a.pyc", "runs/big.bin", ".venv/bin/python", ".ci/run"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    plain = copy_tree(root, tmp_path / "plain")
    assert (plain / "core/a.py").exists() and (plain / ".venv").is_symlink()
    assert not (plain / "runs").exists() and not (plain / "core/__pycache__").exists()
    (root / ".gitignore").write_text("/runs/\n/.venv\n__pycache__/\n")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    listed = copy_tree(root, tmp_path / "listed")
    assert (listed / ".ci/run").exists() and not (listed / "runs").exists()


def verdict(outcome: Any, **changes: Any) -> Verdict:
    return Verdict(mutant=mutant(**changes), outcome=outcome, seconds=1.0, detail="why")


def test_a_survivor_needs_a_reason_and_a_reason_a_survivor() -> None:
    killed = [verdict("killed")] * 98
    assert problems([*killed, verdict("killed by timeout"), verdict("survived", survives="equal")]) == []
    assert "write the test" in problems([*killed, verdict("survived")])[0]
    assert "remove the key" in problems([*killed, verdict("killed", survives="equal")])[0]
    assert problems([*killed, verdict("error")]) == ["m: why"]


def test_a_score_below_95_percent_fails_whatever_the_reasons() -> None:
    verdicts = [verdict("killed")] * 18 + [verdict("survived", survives="equal")] * 2
    assert score(verdicts) == 0.9
    assert problems(verdicts) == ["score 90.0% is below 95%"]


def test_the_last_line_is_the_score_of_all() -> None:
    output = io.StringIO()
    show([verdict("killed"), verdict("killed by timeout"), verdict("survived")], Console(file=output))
    assert output.getvalue().splitlines()[-1] == "2 of 3 bugs killed (66.7%)"


def test_entries_are_chosen_by_id_by_file_and_by_seed() -> None:
    entries = [mutant(id=f"m{i}", file=f"{'core' if i % 3 else 'rollout'}/f{i}.py") for i in range(9)]
    assert [m.id for m in select(entries, ids=["m[12]"])] == ["m1", "m2"]
    assert {m.file for m in select(entries, areas=["rollout/"])} == {"rollout/f0.py", "rollout/f3.py", "rollout/f6.py"}
    first = sample(entries, 4, seed=1)
    assert first == sample(entries, 4, seed=1) != sample(entries, 4, seed=2)
    assert sorted(m.area for m in first) == ["core", "core", "rollout", "rollout"], "every area in turn"


def test_a_choice_without_entries_is_one_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--ids", "no-such-bug"]) == 2
    assert capsys.readouterr().err == "no entry matches --ids, --area and --quick\n"
