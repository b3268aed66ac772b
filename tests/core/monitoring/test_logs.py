"""Log lines on a terminal and in a file."""

import io
import logging
import os
import re
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from core.monitoring.logs import kept_records, log_to_file, log_to_terminal, worker_environment

STAMP = r"\d{8}-\d\d:\d\d:\d\d\.\d{3} "


@pytest.fixture
def root_logger():
    """The levels as pytest had them, afterwards."""
    yield
    for package in ("core", "rollout", "mcore_adapter"):
        logging.getLogger(package).setLevel(logging.NOTSET)


def test_a_long_line_stays_one_line_on_a_narrow_terminal_above_a_progress_bar(root_logger, tmp_path: Path) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=40, color_system=None)
    log_to_terminal(tmp_path / "log", level="info", console=console)
    text = "RPC name actor_train returns {" + ", ".join(f"'metric_{i}': [0.{i}]" for i in range(20)) + "} of a:100:b"
    with Progress(console=console) as progress:
        progress.add_task("step", total=2)
        logging.getLogger("core.monitoring.monitor").info(text)
    line = STAMP + re.escape(f"master worker INFO: {text}") + "$"
    assert re.search(line, screen.getvalue(), re.MULTILINE)
    assert re.search(line, (tmp_path / "log").read_text(), re.MULTILINE)


def emit() -> None:
    for level in ("debug", "info", "error"):
        getattr(logging.getLogger("rollout.inference.router"), level)("ours %s", level)
        getattr(logging.getLogger("urllib3"), level)("library %s", level)


def shown(text: str) -> list[str]:
    return re.findall(r": ((?:ours|library) \w+)$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("level", "terminal", "file"),
    [
        ("error", ["ours error", "library error"], ["ours info", "library info", "ours error", "library error"]),
        ("debug", *[["ours debug", "ours info", "library info", "ours error", "library error"]] * 2),
    ],
)
def test_the_level_is_that_of_the_terminal_and_the_file_has_at_least_info(
    root_logger, tmp_path: Path, level: str, terminal: list[str], file: list[str]
) -> None:
    screen = io.StringIO()
    log_to_terminal(tmp_path / "log", level=level, console=Console(file=screen, width=200))
    emit()
    assert shown(screen.getvalue()) == terminal and shown((tmp_path / "log").read_text()) == file


@pytest.mark.parametrize("level", ["info", "debug"])
def test_a_worker_process_writes_debug_records_if_the_driver_does(root_logger, tmp_path: Path, level: str) -> None:
    log_to_terminal(None, level=level, console=Console(file=io.StringIO()))
    environment, log = worker_environment(), tmp_path / "worker.log"
    child = os.fork()
    if child == 0:
        os.environ |= environment
        log_to_file("worker", str(log))
        emit()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert ("ours debug" in shown(log.read_text())) == (level == "debug")
    assert "library debug" not in shown(log.read_text()) and "ours info" in shown(log.read_text())


def test_kept_records_are_written_once_by_the_handlers_that_come_later(root_logger, tmp_path: Path) -> None:
    before = tmp_path / "before"
    log_to_terminal(before, level="info", console=Console(file=io.StringIO()))
    logger = logging.getLogger("rollout.data")
    with kept_records(logger.name) as records:
        logging.getLogger("rollout.data.prompts").info("ours kept")
    assert shown(before.read_text()) == []
    log_to_terminal(tmp_path / "log", level="info", console=Console(file=io.StringIO()))
    for record in records:
        logging.getLogger(record.name).handle(record)
    assert shown((tmp_path / "log").read_text()) == ["ours kept"]
