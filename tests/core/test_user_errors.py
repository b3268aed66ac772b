"""An error in a user's file is one line on the terminal: the message, the place in that file, and the log."""

import asyncio
import json
import sys
import traceback
from pathlib import Path
from types import ModuleType

import pytest
from ray.exceptions import RayTaskError
from rich.console import Console

from core import quickstart
from core.checks.rules import load_config
from core.errors import what_user_code_raised
from core.launch.remote import as_driver_sees
from core.monitoring.screen import Screen
from core.processes.supervise import FAILED, Attempt
from core.runs.paths import RunPaths
from helpers.config_inputs import SMALLEST_PPO, write_run
from rollout.plugins import user_frame

LOG = Path("logs/master_worker.log")
CODE = """import json


def loss(kind):
    raise kind("sizes 5 and 648")


def read(text):
    return json.loads(text)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of a user."""
    (tmp_path / "my_loss.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_loss", raising=False)
    import my_loss  # type: ignore[import-not-found]

    return my_loss


def in_worker(error: Exception) -> Exception:
    """The error as the driver has it: another process raised it, and its traceback is a text."""
    text = "".join(traceback.format_exception(error))
    return as_driver_sees(RayTaskError("train_step", text, error.with_traceback(None)), worker="trainer-rank0")


def raised(call: object, *args: object) -> Exception:
    with pytest.raises(Exception) as found:  # noqa: PT011 (any)
        call(*args)  # type: ignore[operator]
    # What this file has called, without its own frames.
    return found.value.with_traceback(found.tb.tb_next)


@pytest.mark.parametrize(
    ("kind", "message"),
    [(RuntimeError, "sizes 5 and 648"), (ValueError, "sizes 5 and 648"), (KeyError, "KeyError: 'sizes 5 and 648'")],
)
def test_the_place_in_the_users_file_is_shown_with_the_log(mine, kind, message) -> None:
    expected = f"{message} (my_loss.py, line 5, in loss; traceback: {LOG})"
    assert what_user_code_raised(raised(mine.loss, kind), LOG) == expected
    assert what_user_code_raised(in_worker(raised(mine.loss, kind)), LOG) == expected


def test_it_is_the_call_into_a_library_that_is_shown_not_the_library(mine: ModuleType) -> None:
    error = in_worker(raised(mine.read, "no json"))
    assert isinstance(error, json.JSONDecodeError)
    assert "(my_loss.py, line 9, in read; " in what_user_code_raised(error, LOG)


def test_of_a_group_of_errors_the_one_inside_is_shown(mine: ModuleType) -> None:
    async def run() -> None:
        async def sample() -> None:
            mine.loss(ValueError)

        async with asyncio.TaskGroup() as group:
            group.create_task(sample())

    message = what_user_code_raised(raised(asyncio.run, run()), LOG)
    assert message == f"sizes 5 and 648 (my_loss.py, line 5, in loss; traceback: {LOG})"


def test_an_error_of_slipstream_itself_has_no_place() -> None:
    root = Path(quickstart.__file__).resolve().parents[1]
    frames = [f'  File "{root}/core/trainer.py", line 7, in run', '  File "<string>", line 1, in <module>']
    frames.append('  File "/home/me/env/lib/python3.11/site-packages/torch/nn.py", line 3, in forward')
    assert user_frame("\n".join(frames)) == ""
    assert what_user_code_raised(ValueError("bad row"), LOG) == ""


@pytest.mark.parametrize("kind", [RuntimeError, TypeError])
def test_the_run_ends_with_that_line_and_the_log_has_the_traceback(tmp_path, mine, monkeypatch, caplog, kind) -> None:
    config = load_config("ppo-math", write_run(tmp_path, SMALLEST_PPO), []).config
    paths = RunPaths.for_trial(str(tmp_path / "out"), "small", "one")
    error = in_worker(raised(mine.loss, kind))

    def run(*args: object) -> None:
        raise error

    monkeypatch.setattr(quickstart, "_run", run)
    screen = Screen(Console(), compact=False)
    assert quickstart._attempt(config, paths, screen, Attempt(), []) == FAILED
    [record] = caplog.records
    place = f"(my_loss.py, line 5, in loss; traceback: {paths.logs / 'master_worker.log'})"
    assert record.getMessage().endswith(f"sizes 5 and 648 {place}")
    assert record.exc_info is not None and record.exc_info[1] is error
