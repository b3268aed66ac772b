"""The benchmark runner: measurements without a GPU yield the rows that it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def rows_of(folder: Path, *words: str) -> dict[str, dict]:
    """Run `python -m tools.bench` and return the rows of its file by name."""
    command = [sys.executable, "-m", "tools.bench", *words, "--output", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (file,) = folder.glob("*.json")
    return {row["name"]: row for row in json.loads(file.read_text())}


@pytest.mark.slow
def test_a_row_has_its_command_and_versions_and_replaces_the_one_before(tmp_path: Path) -> None:
    for _ in range(2):
        rows = rows_of(tmp_path, "cpu", "--only", "allocation")
        (row,) = rows.values()
    assert row["name"] == "allocation.parse_10000_gpus" and row["value"] > 0
    assert row["command"] == "python -m tools.bench cpu --only allocation" and row["versions"]["torch"]


@pytest.mark.nightly
def test_measurements_of_gpus_can_be_tried_without_one(tmp_path: Path) -> None:
    words = ("gpu", "--trial", "--shape", "tiny", "--only", "experts", "long", "checkpoint")
    rows = rows_of(tmp_path, *words)
    for name in ("update.experts_64", "update.experts_64_auto", "long.4B_64"):
        assert rows[f"{name}_tokens_per_second"]["baseline"] > 0
    assert rows["checkpoint.tiny_size"]["value"] > 0
