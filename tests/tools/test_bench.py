"""The benchmark runner: its rows, the folder that it keeps, and how a measurement that is ended from outside ends."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import date
from pathlib import Path

import pytest

from tools.bench import Figure, datapath
from tools.bench.__main__ import end_on_sigterm, kept_or_temporary, main
from tools.bench.gpu.push import drive


@pytest.fixture
def restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def rows_of(monkeypatch: pytest.MonkeyPatch, restored: None) -> Callable[..., dict[str, dict]]:
    """(folder, words) -> the rows that `python -m tools.bench` writes there, by name."""

    def run(folder: Path, *words: str) -> dict[str, dict]:
        monkeypatch.setattr(sys, "argv", ["bench", *words, "--output", str(folder)])
        main()
        (file,) = folder.glob("*.json")
        return {row["name"]: row for row in json.loads(file.read_text())}

    return run


def test_a_row_has_its_command_and_versions_and_replaces_the_one_before(tmp_path, rows_of) -> None:
    rows_before = [{"name": "other", "value": 1.0}, {"name": "config.dry_run", "value": 0.0}]
    (tmp_path / f"cpu-{os.cpu_count()}core-{date.today().isoformat()}.json").write_text(json.dumps(rows_before))
    rows = rows_of(tmp_path, "cpu", "--only", "config")
    assert list(rows) == ["other", "config.dry_run"]
    row = rows["config.dry_run"]
    assert row["value"] > 0
    assert row["command"] == "python -m tools.bench cpu --only config" and row["versions"]["torch"]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_rank_fetches_its_pieces_once_a_step_and_the_driver_no_tokens() -> None:
    """Through Ray. A batch of 4 million tokens takes 0.1 GiB or more in each process that holds it."""
    small = datapath.measure(datapath.Size(prompts=16, answers=4, tokens=512, passes=True))
    large = datapath.measure(datapath.Size(prompts=16, answers=4, tokens=65536))
    assert small["bytes_copied_per_byte_trained"] <= 1.1 and large["bytes_copied_per_byte_trained"] <= 1.1
    assert large["peak_memory_rollout"] > small["peak_memory_rollout"] + 0.1
    assert large["peak_memory_driver"] < small["peak_memory_driver"] + 0.02


@pytest.mark.nightly
def test_measurements_of_gpus_can_be_tried_without_one(tmp_path, rows_of, monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")  # which the measurements set
    words = ("gpu", "--trial", "--shape", "tiny", "--only", "experts", "long", "checkpoint")
    rows = rows_of(tmp_path, *words)
    for name in ("update.experts_64", "update.experts_64_megatron", "long.4B_64"):
        assert rows[f"{name}_tokens_per_second"]["baseline"] > 0
    assert rows["checkpoint.tiny_size"]["value"] > 0


def test_sigterm_ends_the_servers_of_a_measurement(restored: None) -> None:
    ended = []

    async def measured() -> AsyncIterator[Figure]:
        try:
            asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
            yield Figure("never", 0.0, "")
        finally:
            await asyncio.sleep(0)  # as the end of a server takes time
            ended.append(True)

    end_on_sigterm()
    with pytest.raises(SystemExit) as exit_code:
        list(drive(measured()))
    assert ended == [True] and exit_code.value.code == 143


def test_what_a_measurement_writes_is_kept_in_the_folder_that_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for named in (None, Path("a") / "kept"):
        with kept_or_temporary(named) as folder:
            (folder / "log").write_text("")
        assert (folder / "log").exists() == (named is not None)
    assert folder == tmp_path / "a" / "kept", "runs have another working directory"
