"""A studio that serves a folder of runs, and a browser."""

import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.forks import programs
from rollout.plugins import python_path

Start = Callable[..., str]
"""(folders and options of the command) -> the address that it shows."""


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start the command; it ends with the module."""
    pytest.importorskip("uplot", reason="slipstream[studio] is not installed")
    running: list[programs.Program] = []
    cache = tmp_path_factory.mktemp("cache")

    def begin(*words: object, folder: Path | None = None) -> str:
        """Return the address of a studio that has started; another program may take its port before it does."""
        lines = (attempt(*words, folder=folder) for _ in range(5))
        line = next((line for line in lines if line), "")
        assert line.startswith("studio: "), line
        return line.split()[1]

    def attempt(*words: object, folder: Path | None) -> str:
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        command = ["-m", "tools.studio", *map(str, words), "--port", str(port)]
        env = {**os.environ, "PYTHONPATH": python_path(), "XDG_CACHE_HOME": str(cache)}
        said = cache / f"{port}.log"
        with said.open("w") as output:
            process = programs.start(command, output=output, errors=sys.__stderr__, cwd=folder or Path.cwd(), env=env)
        running.append(process)
        while "\n" not in said.read_text() and process.poll() is None:
            time.sleep(0.02)
        return said.read_text().partition("\n")[0]

    yield begin
    for process in running:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium of the distribution. Its event loop runs in this thread, so it ends with the module."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("chromium is not installed (apt-get install chromium)")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that fails the test at an error of a script or of the content policy."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    opened = context.new_page()
    opened.set_default_timeout(240_000)
    wrong: list[str] = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    yield opened
    context.close()
    assert not wrong, wrong
