"""Log lines on a terminal and in a file."""

import io
import logging
import re
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from core.monitoring.logs import log_to_terminal

STAMP = r"\d{8}-\d\d:\d\d:\d\d\.\d{3} "


@pytest.fixture
def root_logger():
    """The root logger as pytest had it, afterwards."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


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
