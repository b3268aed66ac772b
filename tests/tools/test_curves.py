"""Recordings of training curves: what a comparison finds, and the command on one small case."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.curves import Curve, read_recording, table_row

ROOT = Path(__file__).resolve().parents[2]
LOSS = 0.1


def curve(*losses: float) -> Curve:
    return [{"loss": loss.hex(), "grad_norm": (2.0).hex()} for loss in losses]


def test_a_difference_of_one_ulp_is_found_with_its_step_and_both_values() -> None:
    next_up = math.nextafter(LOSS, 1.0)
    assert table_row(curve(1.0, LOSS, 3.0), curve(1.0, LOSS, 3.0)) == ("3 of 3",)
    row = table_row(curve(1.0, LOSS, 3.0), curve(1.0, next_up, 4.0))
    assert row == ("1 of 3", "step 2", "loss", "0.1", "0.10000000000000002")
    other = curve(1.0, LOSS)
    other[1]["grad_norm"] = (2.5).hex()
    assert table_row(curve(1.0, LOSS), other) == ("1 of 2", "step 2", "grad_norm", "2.0", "2.5")
    assert table_row(curve(1.0, LOSS), None) == ("0 of 2", "", "the run failed")


@pytest.mark.parametrize("content", ["[]", "{}", '{"curves": {}, "steps": 1, "environment": {}}', "3", "null"])
def test_json_that_is_no_recording_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(content)
    with pytest.raises(ValueError, match="it holds no curves"):
        read_recording(tmp_path / "file.json")


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "tools.curves", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_recording_equals_a_second_run_and_a_changed_number_in_it_does_not(tmp_path: Path) -> None:
    file = tmp_path / "curves.json"
    recorded = run("record", file, "--steps", 2, "--cases", "sft-dp2")
    assert recorded.returncode == 0, recorded.stdout + recorded.stderr
    recording = json.loads(file.read_text())
    (steps,) = recording["curves"].values()
    assert [sorted(step) for step in steps] == [["grad_norm", "loss"]] * 2
    assert all(math.isfinite(float.fromhex(value)) for step in steps for value in step.values())

    # One run shows both: grad_norm of step 2 is one ulp off, everything before it must be equal.
    right = float.fromhex(steps[1]["grad_norm"])
    steps[1]["grad_norm"] = math.nextafter(right, math.inf).hex()
    recording["environment"]["torch"] = "1.0"
    file.write_text(json.dumps(recording))
    compared = run("compare", file)
    assert compared.returncode == 1, compared.stdout + compared.stderr
    assert "1 of 2" in compared.stdout and "step 2" in compared.stdout and repr(right) in compared.stdout
    assert "Equality is not promised, torch differs: 1.0 -> " in compared.stdout
