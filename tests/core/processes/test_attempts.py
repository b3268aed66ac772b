"""Whole runs whose processes are killed or stopped: the run goes on by itself, and nothing is left when it is over."""

import os
import re
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from core.processes.watchdog import unused_shared_memory
from helpers.runs import WITHOUT_GOODBYE, lost, metrics_of, ppo, process_of


def driver_of(command) -> psutil.Process:
    """The attempt: the child of the command that is its fork."""
    children = psutil.Process(command.process.pid).children()
    (driver,) = [p for p in children if "core.quickstart" in p.cmdline()]
    return driver


@pytest.fixture
def nothing_left() -> Callable[..., None]:
    """Call it with a command that is over: neither a process nor a file in /dev/shm is left of it."""
    before = set(os.listdir("/dev/shm"))

    def check(command) -> None:
        assert command.survivors() == []
        # What other tests use at the same time does not count.
        assert {path.name for path in unused_shared_memory()} - before == set()

    return check


@pytest.mark.nightly
def test_a_run_outlives_its_driver_a_stopped_driver_a_stopped_rank_and_its_ray(
    assets, run_command, nothing_left
) -> None:
    config = ppo(
        assets,
        allocation_mode="mock.d1m1p1+d2m1p1",
        n_gpus_per_node=3,
        recover_mode="auto",
        recover_retries=4,  # a process may be lost before its attempt has written a checkpoint
        deadlines={"call_seconds": 5.0, "driver_seconds": 15.0},
        exp_ctrl={"total_train_epochs": 1000, "total_train_steps": 500, "ckpt_freq_steps": 1},
    )
    command = run_command("ppo-math", config)
    command.wait_for("global step 3)")
    driver_of(command).kill()
    assert lost(command, 1) == "the driver was killed by SIGKILL"
    assert WITHOUT_GOODBYE in command.output()

    driver_of(command).send_signal(signal.SIGSTOP)
    cause = lost(command, 2)
    assert re.match(r"the driver \(stopped\) sent no heartbeat for \d+ s in phase '.+' \(deadlines\.driver", cause)
    stacks = "".join(path.read_text() for path in (command.logs / "stacks" / "earlier").glob("driver.*.txt"))
    assert "driver (stopped): no heartbeat" in stacks and "core/experiments/ppo.py" in stacks

    process_of(command, "trainer-rank1").send_signal(signal.SIGSTOP)
    cause = lost(command, 3)
    assert "no answer within deadlines.call_seconds=5 from" in cause and "trainer-rank1 (stopped)" in cause
    for name in ("trainer-rank0", "trainer-rank1", "rollout", "generator-0", "driver"):
        assert (command.logs / "stacks" / f"{name}.txt").is_file()

    raylet = next(p for p in driver_of(command).children() if p.name() == "raylet")
    process_of(command, "generator-0").kill()  # a driver that waits for its successor would wait for ever
    time.sleep(0.3)
    raylet.kill()
    lost(command, 4)
    command.process.send_signal(signal.SIGTERM)
    assert command.finish() == 130
    steps = [m["step"] for m in metrics_of(command) if "task_reward" in m]
    assert steps == list(range(1, len(steps) + 1)), "each step once, over five attempts"
    nothing_left(command)


@pytest.mark.nightly  # two starts by new interpreters
def test_temporary_files_of_an_attempt_are_private_and_removed_with_it_however_it_ends(
    assets, run_command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of Ray and of wandb, which Megatron imports; a command that is killed cannot remove them itself."""
    monkeypatch.setenv("TMPDIR", tempfile.mkdtemp(prefix="s"))
    temporary = Path(os.environ["TMPDIR"])
    config = {
        "allocation_mode": "d1m1p1",
        "exp_ctrl": {"total_train_epochs": 10000, "ckpt_freq_steps": 1},
        "recover_mode": "auto",
        "model": {"path": str(assets.model)},
        "dataset": {"train_path": str(assets.pairs), "max_seqlen": 16, "train_bs_n_seqs": 8},
    }
    try:
        command = run_command("sft", config, fresh=True)  # a fork would remember the folder of its server
        command.wait_for("global step 1)")
        (folder,) = temporary.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and list(folder.glob("r/session_2*"))
        command.remember_family()
        driver_of(command).kill()
        assert lost(command, 1) == "the driver was killed by SIGKILL"
        (second,) = temporary.iterdir()
        assert second != folder
        command.remember_family()
        command.process.kill()
        assert command.survivors() == []
        assert list(temporary.iterdir()) == []
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
