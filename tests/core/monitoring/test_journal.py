"""Rows of a run that was killed: none twice, none torn."""

import errno
import re
from pathlib import Path

import pytest

from core.errors import could_not_write
from core.monitoring.metrics import Journal, read_rows


def steps(path: Path) -> list[int]:
    return [row["step"] for row in read_rows(path)]


def test_rows_after_the_checkpoint_go_and_a_torn_one_too(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "metrics.jsonl"
    first = Journal(path, continue_after=None)
    for step in (0, 1, 2, 3):
        first.write(step, {"loss": 0.1 + step})
    with open(path, "a") as f:
        f.write('{"step": 4, "lo')
    assert steps(path) == [0, 1, 2, 3], "a row that is being written is not read"
    second = Journal(path, continue_after=2)
    second.write(3, {"loss": 1.0})
    assert steps(path) == [0, 1, 2, 3]
    assert read_rows(path)[1]["loss"] == 1.1, "full precision"
    assert all(line.endswith("}\n") for line in path.read_text().splitlines(keepends=True))
    assert [p.name for p in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_run_that_begins_anew_starts_an_empty_file_and_one_without_recovery_appends(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    Journal(path, continue_after=None).write(1, {})
    Journal(path, continue_after=None).write(1, {})
    assert steps(path) == [1, 1]
    Journal(path, continue_after=-1).write(1, {})
    assert steps(path) == [1]


def test_a_full_disk_is_one_clear_error_and_closing_afterwards_is_none() -> None:
    journal = Journal(Path("/dev/full"), continue_after=None)
    with pytest.raises(
        OSError, match=r"the row of step 7 could not be written to /dev/full \([\d.]+ MiB left .*free disk space"
    ):
        journal.write(7, {"prompts": [1]})
    journal.close()


def test_an_error_of_writing_names_a_way_out_that_fits(tmp_path: Path) -> None:
    for folder, error, way_out in (
        (tmp_path, OSError(errno.ENOSPC, "No space left on device"), r"MiB left on its disk.*free disk space"),
        (tmp_path, RuntimeError("of a library"), r"MiB left on its disk.*free disk space"),
        (tmp_path, PermissionError("denied"), "set external_configs.cluster_config.fileroot to a folder that you may"),
        (tmp_path / "gone", FileNotFoundError("gone"), f"{tmp_path}/gone does not exist any more: start the run again"),
    ):
        message = str(could_not_write("the row", folder / "file", error))
        assert re.search(way_out, message) and ("disk space" in message) == ("MiB" in message)
