"""The conformance lab without peers: golden numbers, gradients, and what counts as equal to a peer."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from core.algorithms import PRESETS
from tools.conformance import compare
from tools.conformance.__main__ import main
from tools.conformance.batches import make_batch
from tools.conformance.checks import Call, Check, Deviation, Result, ours
from tools.conformance.golden import GOLDEN
from tools.conformance.gradients import CASES, gradients
from tools.conformance.report import matrix
from tools.conformance.rows import ROWS


@pytest.mark.parametrize("family", GOLDEN)
def test_the_code_gives_the_golden_numbers(family: str) -> None:
    numbers = list(GOLDEN[family]())
    assert len(numbers) > 20
    assert [number for number in numbers if not number.holds] == []


def test_gradients_of_every_preset_and_of_preferences_are_checked() -> None:
    assert CASES.keys() == PRESETS.keys() | {"dpo", "ipo"}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    (found,) = gradients([name], num_directions=2)
    assert found.holds, found


# ---- peers


def row(deviation: Deviation | None = None) -> Check:
    """A check that one peer has."""
    call = Call(operation="loss", options={"scale": 1.0}, deviation=deviation)
    return Check(name="clip", quantity="loss", algorithm="rloo", settings={"correction": "none"}, peers={"trl": call})


def answers(check: Check, scale: float) -> list[tuple[Mapping[str, Any], dict[str, Any]]]:
    """What a peer returns whose loss and gradients are `scale` times those of this project."""
    batches = [make_batch(check.kind, seed) for seed in compare.SEEDS]
    return [(b, {name: (scale * value).tolist() for name, value in ours(check, b).items()}) for b in batches]


def scaled(scale: float) -> Deviation:
    def formula(batch: Mapping[str, Any]) -> Result:
        return {name: scale * value for name, value in ours(row(), batch).items()}

    return Deviation(text="scaled", formula=formula)


@pytest.mark.parametrize(
    ("scale", "deviation", "verdict"),
    [
        (1.0, None, "equal"),
        (1.0 + 1e-4, None, "problem: differs by"),
        (2.0, scaled(2.0), "deviates"),
        (2.0, scaled(3.0), "problem: the formula differs by"),
        (1.0, scaled(1.0), "problem: the deviation is not reproduced"),
        (float("nan"), None, "problem: differs by inf"),
    ],
)
def test_a_deviation_counts_only_where_its_formula_gives_the_numbers_of_the_peer(
    scale: float, deviation: Deviation | None, verdict: str
) -> None:
    check = row(deviation)
    outcome = compare.judge(check, check.peers["trl"], "trl", answers(check, scale))
    assert outcome.verdict.startswith(verdict)


def test_an_error_of_a_peer_is_a_problem() -> None:
    check = row()
    found = [(batch, {"error": "Traceback\nValueError: no"}) for batch, _ in answers(check, 1.0)]
    assert compare.judge(check, check.peers["trl"], "trl", found).verdict == "problem: Traceback ValueError: no"


def test_the_matrix_numbers_deviations_and_shows_their_cases() -> None:
    check = row(scaled(2.0))
    outcome = compare.judge(check, check.peers["trl"], "trl", answers(check, 2.0))
    text = matrix([check, *ROWS[:1]], [outcome], {"trl": "1.16.0"})
    assert "| check | trl 1.16.0 |" in text and "| clip | ≠ 1 |" in text
    assert "\n1. clip, trl: scaled. r = " in text and ROWS[0].name not in text


def test_differences_outside_of_trained_tokens_do_not_count() -> None:
    batch = make_batch("usual", 1)
    mask = torch.tensor(batch["mask"])
    zero = {"grads": torch.zeros_like(mask)}
    assert compare.difference({"grads": 1.0 - mask}, zero, batch) == 0.0
    assert compare.difference({"grads": mask}, zero, batch) == 1.0


def test_an_adapter_that_fails_is_an_error_with_its_messages(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such library >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(RuntimeError, match="ended with 3:\nno such library"):
        compare.run_peer("trl", broken, [row()])


def test_rows_are_unique_and_name_known_peers_and_operations() -> None:
    assert len({check.name for check in ROWS}) == len(ROWS)
    folder = compare.SERVE.parent
    for check in ROWS:
        for peer, call in check.peers.items():
            operations = (folder / f"{peer}.py").read_text().rpartition("OPERATIONS")[2]
            assert f'"{call.operation}": ' in operations, (check.name, peer)
            json.dumps(call.options)


def test_the_command_requires_an_interpreter_for_each_peer(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--peer", "trl"])
    assert "--peer and --python belong together" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--peer", "trl", "--python", sys.executable, "--peer", "trl", "--python", sys.executable])
