"""Exploring and training as two processes of one host, which share a SQLite file and a folder of weights."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from core.weight_sync.folder import VersionFolder
from helpers.apart import BATCH_SIZE, GROUP_SIZE, MAX_STALENESS, NUM_STEPS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Halves:
    """Starts the two programs in a folder, and ends what is left of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, half: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{half}-{len(self._started)}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "helpers.apart", half, str(self.folder)], stdout=log, stderr=log,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            )  # fmt: skip
        self._started.append(process)
        return process

    def trained(self) -> list[dict]:
        rows = self.folder / "trained.jsonl"
        return [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []

    def wait_trained(self, count: int) -> None:
        while len(self.trained()) < count:
            failed = [p for p in self._started if p.poll() not in (None, 0, -signal.SIGKILL)]
            assert not failed, self.logs()
            time.sleep(0.1)

    def logs(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()


@pytest.fixture
def halves(assets, tmp_path: Path):
    shutil.copytree(assets.model, tmp_path / "model")
    shutil.copy(assets.prompts, tmp_path / "prompts.jsonl")
    made = Halves(tmp_path)
    yield made
    made.end()


def test_the_halves_of_a_run_start_end_and_are_killed_apart_and_every_prompt_is_trained_once(halves: Halves) -> None:
    train, explore = halves.start("train"), halves.start("explore")
    halves.wait_trained(2)
    explore.kill()
    second = halves.start("train")
    assert second.wait() != 0
    assert f"'train' cannot lease: 'train' (process {train.pid})" in halves.logs()
    halves._started.remove(second)
    explore = halves.start("explore")
    halves.wait_trained(4)
    train.kill()
    train = halves.start("train")
    halves.wait_trained(NUM_STEPS)
    assert (train.wait(), explore.wait()) == (0, 0), halves.logs()
    rows = halves.trained()
    episodes = [id for row in rows for id in row["episodes"]]
    assert len(set(episodes)) == len(episodes) == NUM_STEPS * BATCH_SIZE
    assert all(id.startswith("apart/prompts/") and id.endswith("/0") for id in episodes)
    ages = [age for row in rows for age in row["ages"]]
    assert len(ages) == len(episodes) * GROUP_SIZE and max(ages) <= MAX_STALENESS
    assert VersionFolder(halves.folder / "weights").latest().version == NUM_STEPS
