"""What the chaos command plans, compares and finds; `make nightly` runs it."""

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tools.chaos.__main__ import Report, RunFailed, plan, run_killed
from tools.chaos.run import Leftovers, Trial, Verdict, compare, targets_of
from tools.demo.data import write_jsonl

ROOT = Path(__file__).resolve().parents[2]


def test_effects_of_tools_are_compared_by_the_ids_of_their_calls(tmp_path: Path) -> None:
    trials = [finished(tmp_path, name, critic_loss=0.25, critic_weight=2.0) for name in ("one", "two")]
    for trial in trials:
        trial.agent = True
        trial.effects.mkdir(parents=True)
        (trial.effects / "a").write_text("asked\n7")
        (trial.effects / "executions").write_text("a\na\n")
    verdict = Verdict(problems=[])
    compare(*trials, verdict)
    assert verdict.holds
    assert "; 1 effects of tools and environments, each once: yes; 1 calls made again" in verdict.summary
    (trials[1].effects / "b").write_text("asked\n8")
    compare(*trials, verdict)
    assert verdict.problems == ["two: other effects: 0 missing, 1 more, 0 with another content"]
    assert "each once: no" in verdict.summary


def test_a_run_that_never_continued_from_a_checkpoint_is_a_failure(tmp_path, monkeypatch) -> None:
    trial = Trial(folder=tmp_path, name="killed0", steps=1)
    monkeypatch.setattr(Trial, "start", lambda self: subprocess.Popen(["true"]))
    monkeypatch.setattr("tools.chaos.__main__._kill", lambda jobs, kill, stop, server: None)
    kills = plan(1, random.Random(1), targets_of(None))
    trial.log.write_text("training starts from the beginning")
    with pytest.raises(RunFailed, match="killed0: no attempt continued from a checkpoint"):
        run_killed(trial, kills, Report(1), threading.Event())
    trial.log.write_text("Recovered from globalstep3: 3 steps are done.")
    run_killed(trial, kills, Report(1), threading.Event())


def finished(folder: Path, name: str, *, critic_loss: float | None, critic_weight: float) -> Trial:
    """Write what a run of one step with a critic leaves."""
    trial = Trial(folder=folder, name=name, steps=1, algorithm="ppo")
    logs, checkpoint = (folder / "runs" / kind / "user" / "chaos" / name for kind in ("logs", "recover"))
    logs.mkdir(parents=True)
    write_jsonl(logs / "consumed.jsonl", [{"step": 1, "prompts": [0]}])
    of_critic = {} if critic_loss is None else {"critic_loss": critic_loss}
    write_jsonl(logs / "metrics.jsonl", [{"step": 1, "loss": 0.5, **of_critic}])
    for engine, weight in (("actor", 1.0), ("critic", critic_weight)):
        writer = dcp.FileSystemWriter(checkpoint / "globalstep1" / engine)
        dcp.save({"weight": torch.tensor([weight])}, storage_writer=writer, no_dist=True)
    return trial


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("critic_loss", "critic_weight", "problem"),
    [
        (0.25, 2.0, None),
        (0.5, 2.0, "killed0: other losses: "),
        (0.25, 3.0, "killed0: critic/weight of the last checkpoint differs"),
    ],
)
def test_losses_and_weights_of_the_critic_are_compared(tmp_path, critic_loss, critic_weight, problem) -> None:
    expected = finished(tmp_path, "undisturbed", critic_loss=0.25, critic_weight=2.0)
    found = finished(tmp_path, "killed0", critic_loss=critic_loss, critic_weight=critic_weight)
    verdict = Verdict(problems=[])
    compare(expected, found, verdict)
    assert len(verdict.problems) == (problem is not None), verdict.problems
    assert problem is None or verdict.problems[0].startswith(problem)
    assert verdict.summary == f"0 lost, 0 duplicated, losses bit-equal: {'yes' if critic_loss == 0.25 else 'no'}"


def test_what_a_run_leaves_behind_is_found_and_what_others_leave_is_not(tmp_path: Path) -> None:
    def start(folder: Path) -> subprocess.Popen[str]:
        """A process of a run in `folder` that names its segment in /dev/shm, and dies when it is told to."""
        script = (
            "import mmap, os, sys, tempfile; file = tempfile.NamedTemporaryFile(dir='/dev/shm', delete=False)\n"
            "file.truncate(64); memory = mmap.mmap(file.fileno(), 64)\n"
            "print(file.name, flush=True); sys.stdin.readline(); os._exit(1)\n"
        )
        environment = os.environ | {"SLIPSTREAM_CHAOS": str(folder)}
        command = [sys.executable, "-c", script]
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    processes = [start(tmp_path), start(tmp_path), start(ROOT)]
    killed, living, of_others = processes
    segments = [Path(process.stdout.readline().strip()) for process in processes]
    try:
        leftovers = Leftovers(tmp_path)
        leftovers.look()
        for process in (killed, of_others):
            process.communicate("die\n")
        process_line, segment_line = leftovers.found()
        assert process_line.startswith(f"process {living.pid} was left running: ")
        assert segment_line == f"{segments[0]} was left behind"
    finally:
        living.communicate("die\n")
        for segment in segments:
            segment.unlink()


def test_a_run_with_a_critic_has_its_loss(tmp_path: Path) -> None:
    expected, found = (finished(tmp_path, name, critic_loss=None, critic_weight=2.0) for name in ("one", "other"))
    verdict = Verdict(problems=[])
    compare(expected, found, verdict)
    assert verdict.problems == ["one: the metrics have no critic_loss"]
