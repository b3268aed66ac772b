"""Signals in the first seconds of a command, while it imports its modules and checks its input."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from core import quickstart
from core.processes.signals import NOTHING_STARTED, SIGNALS, end_at_signals, raise_at_signals
from core.processes.supervise import INTERRUPTED

ROOT = Path(__file__).resolve().parents[3]
IMPORTING = """
import os, runpy, sys

class SignalAt:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), int(sys.argv[2]))

sys.meta_path.insert(0, SignalAt())
runpy.run_module("core.quickstart", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM], ids=lambda end: end.name)
def test_a_signal_during_the_imports_is_one_line_and_the_exit_code_of_an_interrupt(end: int) -> None:
    command = [sys.executable, "-c", IMPORTING, "pydantic", str(int(end))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "", f"{NOTHING_STARTED}\n")


def test_ctrl_c_during_the_checks_is_one_line(monkeypatch, capsys) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(quickstart, "load_config", interrupted)
    assert quickstart.main(["ppo-math", "--dry-run"]) == INTERRUPTED
    assert capsys.readouterr().err == f"{NOTHING_STARTED}\n"


def test_after_the_checks_signals_raise_also_in_a_job_of_the_background() -> None:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise_at_signals()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "a caller in Python keeps its handlers"
        end_at_signals()
        raise_at_signals()
        for number in before:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
