"""The scripts of examples/ run as their first lines say, on the CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, folder: Path, *options: str) -> str:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(ROOT / "examples" / script), "--output", str(folder / "out"), *options]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("script", ["custom_algorithm.py", "custom_reward.py", "multi_turn_tools.py"])
def test_a_script_with_code_of_its_own_raises_the_reward(script: str, tmp_path: Path) -> None:
    first, last = map(
        float, re.findall(r"mean reward of .*: (\d\.\d+); of the last 3: (\d\.\d+)", run(script, tmp_path))[0]
    )
    assert last > first + 0.2


@pytest.mark.nightly
def test_a_program_that_uses_the_openai_package_raises_the_reward(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    test_a_script_with_code_of_its_own_raises_the_reward("openai_agent.py", tmp_path)


@pytest.mark.nightly
def test_a_model_learns_to_call_the_calculator_where_it_cannot_add(tmp_path: Path) -> None:
    """Minutes: with the tool it is right, and without the tool it is mostly not (docs/agents.md)."""
    for options, holds in (([], lambda share: share >= 0.95), (["--without-tool"], lambda share: share < 0.6)):
        output = run("calculator.py", tmp_path / "".join(["with", *options]), *options)
        last = re.findall(r"^\d+ \{'eval/reward': ([\d.]+)\}", output, re.MULTILINE)[-1]
        assert holds(float(last)), output[-2000:]


@pytest.mark.nightly
@pytest.mark.parametrize(("script", "least"), [("self_play.py", 0.9), ("textarena_game.py", 0.4)])
def test_a_model_learns_to_play(script: str, least: float, tmp_path: Path) -> None:
    """Minutes: against its frozen start, and above the warm-up (docs/agents.md)."""
    if script == "textarena_game.py":
        pytest.importorskip("textarena")
    shares = [float(share) for share in re.findall(r"^step \d+: ([\d.]+)", run(script, tmp_path), re.MULTILINE)]
    assert shares[-1] > max(least, shares[0])


@pytest.mark.nightly
def test_training_from_python_ends_with_a_model_that_answers(tmp_path: Path) -> None:
    output = run("train_from_python.py", tmp_path)
    before, after = map(float, re.findall(r"loss of the warm-up: ([\d.]+) -> ([\d.]+)", output)[0])
    assert after < before / 2
    assert re.search(r"^12\+34=", output, re.MULTILINE)
