"""One run of a trial at a time."""

import os
import time
from pathlib import Path

import pytest

from core.runs.paths import RunningError, RunPaths, sole_run


def test_a_trial_runs_once_at_a_time(tmp_path: Path) -> None:
    logs = tmp_path / "logs" / "mine"
    says = f"trial_name=mine: it is already running .process {os.getpid()} on .*choose another trial_name"
    with sole_run(logs), pytest.raises(RunningError, match=says), sole_run(logs, patience_seconds=0.0):
        pass
    with sole_run(logs, patience_seconds=0.0), sole_run(tmp_path / "logs" / "other", patience_seconds=0.0):
        pass


def test_a_run_that_was_just_killed_is_waited_for(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        with sole_run(tmp_path):
            (tmp_path / "held").touch()
            time.sleep(0.5)
            os._exit(0)
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    with sole_run(tmp_path):
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("me", "me"),
        ("j.doe-2@lab", "j.doe-2@lab"),
        ("../../../x", None),
        ("..", None),
        ("a/b", None),
        ("a\x1b[31m", None),
    ],
)
def test_a_user_name_that_cannot_be_a_folder_is_replaced_by_the_number(monkeypatch, tmp_path, name, folder) -> None:
    monkeypatch.setenv("LOGNAME", name)
    logs = RunPaths.for_trial(str(tmp_path), "e", "t").logs
    assert logs == tmp_path / "logs" / (folder or f"uid{os.getuid()}") / "e" / "t"
