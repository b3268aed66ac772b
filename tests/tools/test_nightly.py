"""The nightly command: what it reports of its parts."""

from __future__ import annotations

import pytest
from rich.console import Console

from tools import nightly
from tools.nightly import PARTS, Outcome, Part, run_part

QUIET = Console(quiet=True)


def test_the_last_line_and_the_exit_code_of_a_part_are_its_result() -> None:
    good = run_part(Part(name="good", arguments=("-c", "print('working'); print('== 3 passed ==\\n')")), QUIET)
    assert (good.result, good.failed) == ("3 passed", False) and good.seconds is not None
    bad = run_part(Part(name="bad", arguments=("-c", "import sys; print('1 failed'); sys.exit(3)")), QUIET)
    assert (bad.result, bad.failed) == ("failed with exit code 3: 1 failed", True)


def test_the_variable_of_a_part_is_set_for_its_command_alone() -> None:
    shows = ("-c", "import os; print(os.environ.get('SLIPSTREAM_TEST_FRESH'))")
    assert run_part(Part(name="fresh", arguments=shows, sets="SLIPSTREAM_TEST_FRESH"), QUIET).result == "1"
    assert run_part(Part(name="other", arguments=shows), QUIET).result == "None"


def test_a_part_without_its_environment_is_left_out_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIPSTREAM_SGLANG_ENV", raising=False)
    (live,) = (part for part in PARTS if part.needs)
    outcome = run_part(live, QUIET)
    assert outcome == Outcome(
        name="sglang", result="left out: SLIPSTREAM_SGLANG_ENV is not set", failed=False, seconds=None
    )


def test_one_failed_part_fails_the_run_and_all_parts_are_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = Part(name="bad", arguments=("-c", "raise SystemExit(1)"))
    good = Part(name="good", arguments=("-c", "print('fine')"))
    monkeypatch.setattr(nightly, "PARTS", (bad, good))
    assert nightly.main([]) == 1
    assert "fine" in capsys.readouterr().out
    assert nightly.main(["--parts", "good"]) == 0


def test_every_part_names_tests_that_exist() -> None:
    files = [word for part in PARTS for word in part.arguments if word.startswith("tests/")]
    assert files and all((nightly.ROOT / file).exists() for file in files)
