"""The chaos command itself, in a size that a test suite can afford."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(600)
def test_twelve_kills_lose_nothing_and_change_nothing() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    result = subprocess.run(
        [sys.executable, "-m", "tools.chaos", "--kills", "12", "--seed", "31"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    output = result.stdout + result.stderr
    assert result.returncode == 0, output[-6000:]
    assert output.splitlines()[-1] == "12 kills: 0 lost, 0 duplicated, losses bit-equal: yes"
    assert len(re.findall(r" killed\d+: killed ", output)) == 12
