"""A run of the command line that is observed, and whose processes are killed, while it goes on."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from core.monitoring.journal import read_rows
from core.processes.stacks import FOLDER
from core.runs.paths import step_file
from tools.bench.gpu import Scene
from tools.bench.gpu_runs import command
from tools.bench.whole.size import RECIPE

_LOOK_EVERY_SECONDS, _END_SECONDS = 0.1, 120.0
_DECODE = re.compile(r"Decode batch.*?#running-req: (\d+),.*?gen throughput \(token/s\): ([\d.]+)")
_WRITTEN = re.compile(r"Recover checkpoint of step (\d+): ([\d.]+) MiB written")
_PUSHED = re.compile(r"Pushed version \d+: .*")
_RECOVERED = re.compile(r"Recovered from \S+: \d+ steps are done")
_FINISHED = re.compile(r"global step (\d+)\) finishes")


class Running:
    """`python -m core.quickstart` with RECIPE and changes of it; ended, without saving, at the end of the block."""

    def __init__(self, scene: Scene, trial: str, config: Mapping[str, object]) -> None:
        self._scene, self._trial, self._log = scene, trial, scene.folder / "output.log"
        environment = {"SLIPSTREAM_MODEL": str(scene.model), "SLIPSTREAM_DATA": str(scene.folder)}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command(RECIPE, trial, config), env=os.environ | environment, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        for _signal in range(2):  # the second one ends the run at once
            if self._process.poll() is None:
                self._process.terminate()
                time.sleep(1.0)
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()

    @property
    def logs(self) -> Path:
        (folder,) = (self._scene.folder / "runs" / "logs").glob(f"*/bench/{self._trial}")
        return folder

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Metrics of the finished steps."""
        return [row for row in read_rows(self.logs / "metrics.jsonl") if "task_reward" in row]

    def wait_for(self, pattern: str, *, start: int = 0, file: str = "") -> re.Match[str]:
        """Return the first match in the output, from character `start` on, or in a file of the log folder. Raises
        RuntimeError when the run ends before."""
        while True:
            ended = self._process.poll() is not None
            text = self.output if not file else (self.logs / file).read_text(errors="replace")
            if (match := re.compile(pattern).search(text, start)) is not None:
                return match
            if ended:
                raise RuntimeError(f"{self._trial} ended before {pattern!r}:\n{self.output[-6000:]}")
            time.sleep(_LOOK_EVERY_SECONDS)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(rf"global step {step}\) finishes")

    def finish(self) -> None:
        """Wait for the end. Raises RuntimeError with the end of the output where that is a failure."""
        if code := self._process.wait():
            raise RuntimeError(f"{self._trial} ended with {code}:\n{self.output[-6000:]}")

    def process(self, name: str) -> psutil.Process:
        """Return the worker of this name in the attempt that runs now."""
        head = (self.logs / FOLDER / f"{name}.txt").read_text().partition("\n")[0]
        return psutil.Process(json.loads(head)["pid"])

    def server(self, index: int) -> psutil.Process:
        """Return the SGLang server below a generator."""
        return server_below(self.process(f"generator-{index}"))

    @property
    def server_logs(self) -> dict[Path, int]:
        """What each server has written so far, in characters."""
        return {path: len(path.read_text(errors="replace")) for path in self.logs.glob("generator-*.server.log")}

    def mismatch(self, step: int) -> np.ndarray:
        """Return the absolute difference of the log-probabilities of trainer and generator of a saved step, of the
        tokens that the weights of that step sampled: [tokens] nats."""
        with gzip.open(step_file(self.logs / "batches", step), "rt", encoding="utf-8") as file:
            case = json.load(file)
        return differences(case)


def server_below(generator: psutil.Process) -> psutil.Process:
    """Return the SGLang server of this generator: the first of its processes that run hooks.py."""
    children = generator.children(recursive=True)
    return min((p for p in children if "hooks.py" in _command_line(p)), key=lambda p: p.create_time())


def _command_line(process: psutil.Process) -> str:
    """Return an empty one of a process that has ended, such as the server's that compiled kernels."""
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def differences(case: Mapping[str, Any]) -> np.ndarray:
    """Return the same of a case as monitor.save_batches writes it."""
    columns = ("mask", "versions", "logprobs", "rollout_logprobs")
    of_token = [np.concatenate([np.asarray(s[name]) for s in case["sequences"]]) for name in columns]
    mask, versions, ours, theirs = of_token
    return np.asarray(np.abs(ours - theirs)[(mask > 0) & (versions == case["version"])])


def sampled_per_second(server_logs: Iterable[str]) -> float:
    """Return the tokens/s of all servers together by what each has logged; 0 without any line. Lines cover
    about equally many decode steps, so tokens are proportional to running requests."""
    total = 0.0
    for text in server_logs:
        lines = [(float(running), float(rate)) for running, rate in _DECODE.findall(text) if float(rate) > 0]
        if lines:
            total += sum(running for running, _ in lines) / sum(running / rate for running, rate in lines)
    return total


def pushes(output: str) -> tuple[int, int]:
    """Return how many weight updates were sent, and after how many of them all checksums were equal."""
    lines = _PUSHED.findall(output)
    return len(lines), sum("all checksums equal" in line for line in lines)


def checkpoints(output: str) -> list[tuple[int, float]]:
    """Return (step, MiB) of each recover checkpoint that was written, oldest first."""
    return [(int(step), float(mib)) for step, mib in _WRITTEN.findall(output)]


def recovered_steps(output: str) -> tuple[int, int]:
    """Return the first step that the second attempt finished, and the one that follows the last checkpoint of the first
    attempt. Raises RuntimeError where the attempt did not continue from a checkpoint."""
    before, failed, after = output.partition("Attempt 1 failed after step")
    recovered, first = _RECOVERED.search(after), _FINISHED.search(after)
    if not failed or recovered is None or first is None or first.start() < recovered.start():
        raise RuntimeError(f"the run did not recover:\n{after[:2000]}")
    return int(first[1]), checkpoints(before)[-1][0] + 1
