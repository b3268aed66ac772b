"""Attempts in processes of their own: real forks, real kills, in a script that the test starts."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from core import quickstart
from core.monitoring.screen import Screen
from core.processes.signals import SIGNALS
from core.processes.supervise import DONE, EXIT_CODES, FAILED, GAVE_UP, INTERRUPTED, Attempt
from core.runs.paths import RunPaths

ROOT = Path(__file__).resolve().parents[3]
BEFORE = """
import ctypes, logging, os, signal, subprocess, sys, time
from pathlib import Path
from core.processes.supervise import run_attempts
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started the tests in the background
"""


@pytest.fixture(autouse=True)
def _logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_LOGS", str(tmp_path))


def script(body: str, *, retries: int, driver_seconds: float = 60, end_seconds: float = 60) -> list[str]:
    limits = f"retries={retries}, driver_seconds={driver_seconds}, end_seconds={end_seconds}"
    settings = f"{limits}, log_folder=Path(os.environ['TEST_LOGS'])"
    return [sys.executable, "-c", f"{BEFORE}\n{body}\nsys.exit(run_attempts(attempt, {settings}))"]


def run(body: str, *, retries: int, driver_seconds: float = 60) -> tuple[int, str]:
    command = script(body, retries=retries, driver_seconds=driver_seconds)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_attempts_that_make_progress_do_not_count_and_those_that_do_not_end_the_run_with_a_summary() -> None:
    body = """
def attempt(self):
    began = {1: 0, 2: 4, 3: 8}.get(self.number, 8)
    self.report(began=began, step=began)
    self.report(step=began + 5)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    code, said = run(body, retries=2)
    assert code == GAVE_UP
    assert said.count("Restarting from the last recover checkpoint") == 4
    assert "Giving up: 3 consecutive attempts without progress (recover_retries=2)" in said
    table = said.partition("Giving up")[2]
    assert "attempt 1: began with 0 steps done, reached 5, 0." in table
    assert "attempt 5: began with 8 steps done, reached 13, 0." in table
    assert table.count("the driver was killed by SIGKILL") == 5


def test_a_final_failure_and_success_are_not_tried_again() -> None:
    assert run("def attempt(self):\n    self.report(final=True, cause='bad row'); return 1", retries=5)[0] == FAILED
    body = "def attempt(self):\n    if self.number < 3: os._exit(1)\n    return 0"
    code, said = run(body, retries=2)
    assert code == DONE
    assert "attempt 2: began with 0 steps done, reached 0" in said
    assert "the driver exited without a message (exit code 1)" in said


def test_what_a_stopped_driver_reports_when_it_is_woken_for_its_stacks_is_not_the_cause() -> None:
    body = """
def attempt(self):
    if self.number == 2:
        return 0
    os.kill(os.getpid(), signal.SIGSTOP)
    self.report(final=True, cause="a deadline was exceeded")
    return 1
"""
    code, said = run(body, retries=3, driver_seconds=5)
    assert code == DONE, said
    assert "Attempt 1 failed after step 0: the driver (stopped) sent no heartbeat for" in said
    assert "a deadline was exceeded" not in said


def test_a_log_folder_that_cannot_be_written_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TEST_LOGS", str(tmp_path / "file" / "logs"))
    code, said = run("def attempt(self):\n    return 0", retries=5)
    assert code == FAILED
    assert said.count("could not be written") == 1 and "fileroot" in said and "Traceback" not in said
    assert "disk space" not in said


def test_an_attempt_after_the_working_folder_was_removed_works_in_the_log_folder(tmp_path: Path) -> None:
    body = f"""
os.mkdir("{tmp_path}/here")
os.chdir("{tmp_path}/here")
def attempt(self):
    if self.number == 1:
        os.rmdir("{tmp_path}/here")
        return 1
    print("attempt 2 works in", os.getcwd())
    return 0
"""
    code, said = run(body, retries=1)
    assert code == DONE and f"attempt 2 works in {tmp_path}\n" in said and "working folder was removed" in said


@pytest.mark.parametrize("child", ["sleep 2 & echo $!; wait", "sleep 2 & echo $!"], ids=["waits", "is gone"])
def test_nothing_of_a_lost_attempt_is_left_when_the_next_one_begins(tmp_path: Path, child: str) -> None:
    """Not even what a process of the attempt has started, whether that one still waits for it or is gone."""
    body = f"""
import psutil
file = Path({str(tmp_path)!r}) / "pid"

def attempt(self):
    if self.number == 1:
        child = subprocess.Popen(["sh", "-c", {child!r}], start_new_session=True, stdout=subprocess.PIPE)
        file.write_bytes(child.stdout.readline())
        os.kill(os.getpid(), signal.SIGKILL)
    return int(psutil.pid_exists(int(file.read_text())))
"""
    assert run(body, retries=1)[0] == DONE


@pytest.mark.parametrize(("where", "end"), [("end_orphans", signal.SIGTERM), ("logger.error", signal.SIGINT)])
def test_a_signal_between_two_attempts_ends_the_run(where: str, end: int) -> None:
    body = f"""
from core.processes import supervise
original = supervise.{where}
def interrupted(*args):
    os.kill(os.getpid(), {int(end)})
    return original(*args)
supervise.{where} = interrupted
def attempt(self):
    if self.number > 1:
        time.sleep(600)
    return 1
"""
    assert run(body, retries=1)[0] == INTERRUPTED


@pytest.mark.parametrize(
    ("before", "end", "in_background"),
    [
        ("os.fork", signal.SIGINT, False),
        ("signal.pthread_sigmask", signal.SIGTERM, True),
    ],
)
def test_a_signal_that_comes_before_there_is_an_attempt_ends_it(before: str, end: int, in_background: bool) -> None:
    body = f"""
if {in_background}:  # a shell without job control starts it so
    signal.signal(signal.SIGINT, signal.SIG_IGN)
call, came = {before}, []

def interrupted(*args):
    if not came:
        came.append(True)
        os.kill(os.getpid(), {int(end)})
    return call(*args)

{before} = interrupted

def attempt(self):
    time.sleep(60)
    print("came to its end")
    return 0
"""
    code, said = run(body, retries=2)
    assert code == INTERRUPTED and "came to its end" not in said
    assert "Traceback" not in said


@pytest.mark.parametrize("end", SIGNALS)
def test_a_signal_reaches_the_attempt_which_ends_in_its_own_order(end: int) -> None:
    body = """
from core.processes.signals import SIGNALS
def attempt(self):
    def stop(*_): raise KeyboardInterrupt
    for number in SIGNALS: signal.signal(number, stop)
    try:
        print("ready", flush=True)
        time.sleep(30)
    except KeyboardInterrupt:
        print("cleaned up", flush=True)
        return 130
"""
    process = subprocess.Popen(script(body, retries=3), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(end)
    said, _ = process.communicate()
    assert process.returncode == INTERRUPTED and said == "cleaned up\n"


def is_alive(pid: int) -> bool:
    """Return whether the process runs. Where the first process of a container reaps no orphans, zombies stay."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_driver_that_does_not_end_after_a_signal_is_killed_with_its_stacks(tmp_path: Path) -> None:
    """Its heartbeats come from another thread than the one that hangs. Also with a single attempt."""
    body = """
def attempt(self):
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    print("ready", flush=True)
    while True:
        time.sleep(1)
"""
    process = subprocess.Popen(script(body, retries=0, end_seconds=1), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate()
    assert process.returncode == INTERRUPTED
    assert "the driver (running) had not ended 1 s after a signal, in phase 'starting'" in said
    assert "in attempt" in (tmp_path / "stacks" / "driver.txt").read_text()


@pytest.mark.parametrize(
    ("end", "code"), [("return 0", DONE), ("return 1", FAILED), ("os.kill(os.getpid(), signal.SIGKILL)", FAILED)]
)
def test_without_retries_there_is_one_attempt_with_its_exit_code_and_cause(end: str, code: int) -> None:
    found, said = run(f"def attempt(self):\n    print('an attempt', flush=True)\n    {end}", retries=0)
    assert found == code and said.count("an attempt") == 1
    assert ("The run failed after step 0: the driver was killed by SIGKILL" in said) == ("kill" in end)


@pytest.mark.parametrize("is_command", [True, False])
def test_a_second_signal_changes_no_exit_code_of_a_command_and_a_caller_in_python_keeps_its_handlers(
    is_command: bool,
) -> None:
    body = """
from core.processes.signals import end_at_signals, raise_at_signals

def attempt(self):
    raise KeyboardInterrupt

def called(attempt, **settings):
    code = started(attempt, **settings)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.05)
    return code

started, run_attempts = run_attempts, called
"""
    code, said = run(body + ("end_at_signals(); raise_at_signals()\n" if is_command else ""), retries=0)
    assert (code == INTERRUPTED and "Traceback" not in said) == is_command, said


def test_what_follows_in_the_callers_script_is_not_for_the_driver() -> None:
    body = """
def attempt(self):
    return 0

def called(attempt, **settings):
    code = started(attempt, **settings)
    print("the script goes on")
    return code

started, run_attempts = run_attempts, called
"""
    code, said = run(body, retries=0)
    assert code == DONE and said.count("the script goes on") == 1


def test_processes_that_the_callers_script_started_are_not_ended() -> None:
    body = """
earlier = subprocess.Popen(["sleep", "60"])

def attempt(self):
    return 0

def called(attempt, **settings):
    from core.processes import supervise
    supervise.END_SECONDS = 0
    code = started(attempt, **settings)
    print("it ended with", earlier.poll())
    earlier.kill()
    return code

started, run_attempts = run_attempts, called
"""
    code, said = run(body, retries=0)
    assert code == DONE and "it ended with None" in said and "Killing" not in said


def test_a_signal_that_comes_when_training_is_complete_does_not_interrupt_it() -> None:
    body = """
def attempt(self):
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(0.3)
    return 0
"""
    assert run(body, retries=1)[0] == DONE


def test_an_attempt_ends_with_the_process_that_the_user_started() -> None:
    body = "def attempt(self):\n    print(os.getpid(), flush=True)\n    time.sleep(60)"
    process = subprocess.Popen(script(body, retries=1), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    driver = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    while is_alive(driver):  # a test that hangs is ended by its time limit
        time.sleep(0.05)


HANGS = """
def attempt(self):
    if self.number > 1:
        print("went on", flush=True)
        return 0
    self.report(began=3, step=5)
    self.report(phase="update")
    hangs_here()

def hangs_here():
    print(os.getpid(), flush=True)
    {how}
"""


@pytest.mark.parametrize(
    ("how", "state"),
    [
        ("time.sleep(600)", "stopped"),  # by the test
        # A library that keeps the interpreter's lock; the signal for the stacks interrupts it.
        ("while True: ctypes.PyDLL(None).sleep(600)", "running"),
    ],
)
def test_a_driver_that_is_stopped_or_hangs_is_killed_with_its_stacks_and_the_next_attempt_goes_on(
    tmp_path: Path, how: str, state: str
) -> None:
    command = script(HANGS.format(how=how), retries=1, driver_seconds=5)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    driver = int(process.stdout.readline())
    if state == "stopped":
        os.kill(driver, signal.SIGSTOP)
    said, _ = process.communicate()
    assert process.returncode == DONE and "went on" in said
    assert re.search(
        rf"Attempt 1 failed after step 5: the driver \({state}\) sent no heartbeat for \d+ s in phase 'update' "
        rf"\(deadlines\.driver_seconds=5\) and was killed; its stacks are in {tmp_path}/stacks\. Restarting",
        said,
    )
    assert not psutil.pid_exists(driver)
    (stacks,) = (tmp_path / "stacks" / "earlier").glob("driver.*.txt")
    assert "in hangs_here" in stacks.read_text() and f"driver ({state}): no heartbeat" in stacks.read_text()


@pytest.mark.nightly  # its seconds are short, for a host with other work
def test_a_driver_is_not_blamed_for_the_time_in_which_nothing_ran_at_all() -> None:
    """As when the machine, or its container, is suspended: afterwards the driver has the whole time anew."""
    body = """
def attempt(self):
    print(os.getpid(), flush=True)
    sys.stdin.readline()
    return 0
"""
    process = subprocess.Popen(
        script(body, retries=1, driver_seconds=3), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    driver = int(process.stdout.readline())
    for pid in (driver, process.pid):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(5)
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.7)  # it looks at the driver before that one can say anything
    os.kill(driver, signal.SIGCONT)
    said, _ = process.communicate("go on\n")
    assert process.returncode == DONE and "failed after step" not in said


@pytest.mark.parametrize(
    ("error", "final", "said"),
    [
        (OSError(28, "No space left on device"), True, "No space left on device"),
        (ValueError("bad row"), True, "bad row"),
        (ConnectionResetError("the reward's process is gone"), False, "the reward's process is gone"),
        (TimeoutError("no answer"), False, "no answer"),
        (MemoryError(), False, "MemoryError"),
    ],
)
def test_what_a_lost_process_says_is_not_final_and_every_error_says_something(
    error: Exception, final: bool, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(quickstart, "_run", fail)
    attempt = Attempt()
    screen = Screen(Console(), compact=False)
    assert quickstart._attempt(None, RunPaths.for_trial("runs", "sums", "first"), screen, attempt, []) == FAILED  # type: ignore[arg-type]
    assert attempt.final is final
    assert said in attempt.cause and said in caplog.messages[-1]


def test_exit_codes_are_documented_and_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    for code in EXIT_CODES:
        assert f"| {code} |" in page
    assert quickstart.main(["sft", "--help"]) == 0
    said = capsys.readouterr().out
    assert "Exit codes:" in said and all(f"  {code:<4} {meaning}" in said for code, meaning in EXIT_CODES.items())


AT_EXIT = """
class Late:
    '''Interrupted when the interpreter of the process `pid` has put the handlers of signals back already.'''

    def __init__(self, pid, to):
        self.pid, self.to = pid, to

    def __del__(self, getpid=os.getpid, kill=os.kill, sleep=time.sleep, number=signal.SIGINT):
        if getpid() == self.pid:
            kill(self.to, number)
            sleep(1)
"""


def test_a_complete_attempt_that_crashes_on_its_way_out_is_not_repeated() -> None:
    body = f"""{AT_EXIT}
def attempt(self):
    sys.late = Late(os.getpid(), os.getpid())
    return 0
"""
    code, said = run(body, retries=1)
    assert code == DONE and said.strip() == "After the end of training, the driver was killed by SIGINT."


@pytest.mark.parametrize("exit_", ["sys.exit(0)", "os._exit(0)"])
def test_an_exit_before_training_is_complete_is_a_failure_whatever_its_code(exit_: str) -> None:
    code, said = run(f"def attempt(self):\n    {exit_}", retries=1)
    assert code == GAVE_UP and said.count("the driver exited with code 0 before training was complete") >= 2
    code, said = run(f"def attempt(self):\n    {exit_}", retries=0)
    assert code == FAILED and "The run failed after step 0: the driver exited with code 0 before training" in said
