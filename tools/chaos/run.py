"""The run that tools/chaos/ kills: a tiny PPO run whose batches and losses are the same every time; and whether a
killed one did the same as one left alone.

What makes it repeatable: prompts are trained in order, tokens are made up by the mock generator from the seed, and the
rewards are a function of the text. Real are the driver, Ray, the Megatron rank, the rollout side and every file.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import yaml

from core.config.runtime import Method
from core.monitoring.metrics import read_rows
from core.processes.watchdog import shared_inodes, unused_shared_memory
from tools.chaos.agent import effects_of, num_executions
from tools.demo.data import save_model, write_jsonl

if TYPE_CHECKING:
    from torch import Tensor


ROOT = Path(__file__).resolve().parents[2]
DATABASE = "database"
"""The server that has the stores of all runs; it is started again at once."""
ENVIRONMENT = "environment"
"""The one target from whose end a run continues without a checkpoint."""
TARGETS = {
    "trainer rank": ("ray::TrainerRank",),
    "generator": ("ray::GeneratorActor",),
    "producer": ("ray::RolloutActor", "ray::BatchActor"),
    "raylet": ("raylet",),
    ENVIRONMENT: ("rollout.environments.worker",),
}
"""Processes that can be killed, apart from the command and its driver: name, and what the command line begins with.
BatchActor: in a train job."""
_OF_FILES = ("sft", "dpo")
"""Experiments without generators."""
_MARK = "SLIPSTREAM_CHAOS"
"""Environment variable of every process of a run: the folder of its trials."""
_LOOK_EVERY_SECONDS = 1.0


@dataclass(kw_only=True)
class Trial:
    """One run of `steps` steps under `folder`, as often started as it takes."""

    folder: Path
    name: str
    steps: int
    may_end: bool = False
    """Whether the command itself was killed since it was last started."""
    algorithm: str | None = None
    """A preset (ppo: with a critic), sft or dpo; None: PPO without a critic."""
    mode: str = "both"
    """Of the job; train: an explore job fills its store."""
    postgres: str = ""
    """Address of the store of two jobs on a server. Empty: it is a SQLite file."""
    method: Method = "folder"
    """How weights come from one of two jobs to the other."""
    agent: bool = False
    """Whether its workflow has turns, and an environment and a tool with effects."""

    def explorer(self) -> Trial:
        """Return the explore job of a train job."""
        return replace(self, name=f"{self.name}-explore", mode="explore")

    @property
    def experiment(self) -> str:
        return self.algorithm if self.algorithm in _OF_FILES else "ppo-math"

    @property
    def engines(self) -> tuple[str, ...]:
        """Return the folders of the trained models in a checkpoint."""
        if self.algorithm in _OF_FILES:
            return ("default",)
        return ("actor", "critic") if self.with_critic else ("actor",)

    @property
    def with_critic(self) -> bool:
        return self.algorithm == "ppo"

    @property
    def logs(self) -> Path:
        return _only(self.folder / "runs" / "logs", self.name)

    @property
    def recover(self) -> Path:
        return _only(self.folder / "runs" / "recover", self.name)

    @property
    def log(self) -> Path:
        """The file with the output of the command."""
        return self.folder / f"{self.name}.log"

    def start(self) -> subprocess.Popen[bytes]:
        """Start the command of a user, also again after it has ended."""
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                [sys.executable, *self.words()],
                cwd=ROOT,
                env=self.environment(),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def words(self) -> list[str]:
        """Write the configuration; return what follows `python` on the command line."""
        path = self.folder / f"{self.name}.yaml"
        path.write_text(yaml.safe_dump(_config(self)))
        return ["-m", "core.quickstart", self.experiment, "--config", str(path), "monitor.style=areal"]

    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        return kept | {"OMP_NUM_THREADS": "1", _MARK: str(self.folder)}

    def rows(self, name: str) -> list[dict]:
        """Return what the run has written to a .jsonl file of its logs."""
        try:
            return read_rows(self.logs / name)
        except FileNotFoundError:
            return []

    @property
    def finished_steps(self) -> int:
        """Steps of which a row is written."""
        rows = self.rows("metrics.jsonl" if self.algorithm in _OF_FILES else "consumed.jsonl")
        return rows[-1]["step"] if rows else 0

    def is_writing(self) -> bool:
        """Return whether a recover checkpoint is being written."""
        try:
            return any(True for _ in self.recover.glob(".writing-*"))
        except FileNotFoundError:
            return False

    @property
    def effects(self) -> Path:
        """The folder of the effects of the tool, outside of the run."""
        return self.folder / "effects" / self.name.removesuffix("-explore")

    @property
    def recoveries(self) -> int:
        """How many attempts continued from a recover checkpoint."""
        return self.log.read_text(errors="replace").count("Recovered from ")

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


def make_assets(folder: Path) -> None:
    """Write a model of a few thousand parameters and forty prompts."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    save_model(folder / "model", seed=0, hidden_size=32, intermediate_size=64, num_hidden_layers=1, **heads)
    sums = [(a, b) for a in range(8) for b in range(5)]
    write_jsonl(
        folder / "prompts.jsonl", [{"prompt": f"{a}+{b}=", "solutions": [f"\\boxed{{{a + b}}}"]} for a, b in sums]
    )
    answers = [{"answer": str(a + b), "chosen": str(a + b), "rejected": str(a + b + 1)} for a, b in sums]
    write_jsonl(
        folder / "pairs.jsonl", [{"prompt": f"{a}+{b}=", **row} for (a, b), row in zip(sums, answers, strict=True)]
    )


def targets_of(algorithm: str | None, *, agent: bool = False) -> list[str]:
    """Return what can be killed in a run of an algorithm."""
    if algorithm in _OF_FILES:
        return ["command", "driver", "trainer rank", "raylet"]
    return ["command", "driver", *(name for name in TARGETS if agent or name != ENVIRONMENT)]


def targets_of_jobs(*, agent: bool = False) -> list[str]:
    """Return the same for a train job, whose `producer` leases and cuts batches, and for its explore job."""
    both = ("command", "driver", "producer", "raylet")
    explore = (*both, "generator", *([ENVIRONMENT] if agent else []))
    return [f"train {name}" for name in (*both, "trainer rank")] + [f"explore {name}" for name in explore]


def _config(trial: Trial) -> dict:
    if trial.algorithm in _OF_FILES:
        return {
            **_common(trial),
            "allocation_mode": "d1m1p1",
            "model": _model(trial),
            "dataset": {"train_path": str(trial.folder / "pairs.jsonl"), "train_bs_n_seqs": 4, "max_seqlen": 16},
        }
    rest = {} if trial.algorithm is None else {"algorithm": {"name": trial.algorithm}, "group_adv_norm": False}
    if trial.algorithm in ("mix", "chord"):
        rest["demonstrations"] = {"path": str(trial.folder / "pairs.jsonl")}
    if trial.with_critic:
        rest["critic"] = {**_model(trial), "init_critic_from_actor": True}
    return {**_common(trial), **_sampling(trial), **rest, **_job(trial), **_workflow(trial)}


def _workflow(trial: Trial) -> dict:
    if not trial.agent:
        return {}
    trial.effects.mkdir(parents=True, exist_ok=True)
    return {"workflow": {"type": "tools.chaos.agent:Agent", "options": {"effects": str(trial.effects)}}}


def _job(trial: Trial) -> dict:
    batch = {"train_batch_size": 8}
    if trial.mode == "both":
        return {"experience": batch}
    run = trial.name.removesuffix("-explore")
    shared = trial.folder / "shared" / run
    store = {"store": "sqlite", "path": str(shared / "experience.db")}
    if trial.postgres:
        store = {"store": "postgres", "path": trial.postgres}
    return {
        "mode": trial.mode,
        "experience": {**batch, **store},
        "synchronizer": {"folder": str(shared / "weights"), "method": trial.method},
    }


def _model(trial: Trial) -> dict:
    return {"path": str(trial.folder / "model"), "optimizer": {"lr": 1e-3, "lr_scheduler_type": "cosine"}}


def _common(trial: Trial) -> dict:
    return {
        "experiment_name": "chaos",
        "trial_name": trial.name,
        "external_configs": {"cluster_config": {"fileroot": str(trial.folder / "runs")}},
        "launch": {"threads_per_process": 1},
        "monitor": {"tensorboard": False},
        "recover_mode": "auto",
        "recover_retries": 1000,
        "exp_ctrl": {
            "total_train_epochs": -(-trial.steps // 10),
            "total_train_steps": trial.steps,
            "ckpt_freq_steps": 1,
        },
    }


def _sampling(trial: Trial) -> dict:
    return {
        "allocation_mode": "mock.d1m1p1+d1m1p1",
        "n_gpus_per_node": 2,
        "actor": _model(trial),
        "dataset": {"path": str(trial.folder / "prompts.jsonl"), "train_bs_n_seqs": 6, "max_prompt_len": 8},
        "group_size": 2,
        "group_adv_norm": True,
        "ppo": {
            "gen": {"max_new_tokens": 12 if trial.agent else 24},
            "ppo_n_minibatches": 2,
            "kl_ctl": 0.0,
            "disable_value": not trial.with_critic,
        },
        "staleness": {"max_staleness": 2, "in_order": True},
        "generator": {"mock_seconds_per_token": 0.002},
        "reward": {"function": "tools.bench.workload:coin_reward", "num_workers": 1},
    }


def find_target(command: subprocess.Popen[bytes], target: str) -> psutil.Process | None:
    """Return a running process of the run: "command" is what was started, "driver" the process below it that drives
    this attempt. None: it does not exist now."""
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(command.pid)
        if target == "command":
            return started if command.poll() is None else None
        if target == "driver":
            return next((child for child in started.children() if child.cmdline() == started.cmdline()), None)
        for process in family(started):
            words = process.cmdline()
            if any(Path(word).name.startswith(TARGETS[target]) for word in words[:4]):  # python -P -m MODULE
                return process
    return None


def family(process: psutil.Process) -> list[psutil.Process]:
    """Return all descendants of a process."""
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def wait_gone(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Return the processes that still run after the timeout."""
    return psutil.wait_procs(processes, timeout=seconds)[1]


class Leftovers:
    """What the trials in a folder leave: processes, and files in /dev/shm that their processes had open or mapped, as
    a thread sees. Files of other programs that end meanwhile are not theirs."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._family: set[psutil.Process] = set()
        self._inodes: set[int] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look_often, daemon=True)

    def __enter__(self) -> Leftovers:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()

    def found(self) -> list[str]:
        """Return a line for each."""
        lines = []
        for process in self._processes():
            with contextlib.suppress(psutil.Error):  # it ends just now
                lines.append(f"process {process.pid} was left running: {' '.join(process.cmdline())[:80]}")
        for path in unused_shared_memory():
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino in self._inodes:
                    lines.append(f"{path} was left behind")
        return lines

    def look(self) -> None:
        """Take note of the processes, and of what they have in /dev/shm now."""
        for process in self._processes():
            # Ray's agents write their titles over their environment.
            self._family |= {process, *family(process)}
        for process in self._family:
            with contextlib.suppress(OSError):
                self._inodes.update(shared_inodes(Path(f"/proc/{process.pid}")))

    def _look_often(self) -> None:
        while not self._stop.wait(_LOOK_EVERY_SECONDS):
            self.look()

    def _processes(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                known = process in self._family or process.environ().get(_MARK) == self._folder
                if known and process.status() != psutil.STATUS_ZOMBIE:
                    yield process


def wait_until(
    condition: Callable[[], bool], seconds: float, stop: threading.Event, *, every_seconds: float = 0.005
) -> bool:
    """Return whether it became true in time. Raises Stopped when `stop` is set meanwhile."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        if stop.wait(every_seconds):
            raise Stopped
    return True


class Stopped(Exception):
    """Ctrl-C was pressed, or another run failed."""


def _only(kind: Path, trial: str) -> Path:
    """Return `kind`/<user>/chaos/<trial>. Raises FileNotFoundError while it does not exist."""
    for path in kind.glob(f"*/chaos/{trial}"):
        return path
    raise FileNotFoundError(kind)


_COMPARED = (
    "step",
    "loss",
    "actor_loss",
    "grad_norm",
    "lr",
    "task_reward",
    "ppo_approx_kl",
    "n_tokens",
    "n_valid_tokens",
    "critic_loss",
    "critic_grad_norm",
    "critic_lr",
    "critic_values",
    "margin",
    "demonstration_nll",
    "demonstration_weight",
)


@dataclass(kw_only=True)
class Verdict:
    """The result of the comparisons so far."""

    compared: int = 0
    """Runs that were killed and compared with the undisturbed one."""
    lost: int = 0
    duplicated: int = 0
    losses_equal: bool = True
    problems: list[str]
    effects: int = 0
    """Of tools and environments, in all runs that were killed."""
    effects_equal: bool = True
    repeated: int = 0
    """Executions of a tool whose effect was there already."""

    @property
    def holds(self) -> bool:
        return not self.problems

    @property
    def summary(self) -> str:
        """What was found, in one line."""
        if not self.compared:
            return "nothing was compared, as a run failed"
        found = f"{self.lost} lost, {self.duplicated} duplicated, losses bit-equal: {_yes(self.losses_equal)}"
        if not self.effects:
            return found
        once = f"{self.effects} effects of tools and environments, each once: {_yes(self.effects_equal)}"
        return f"{found}; {once}; {self.repeated} calls made again"


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def compare(expected: Trial, found: Trial, verdict: Verdict) -> None:
    """Compare prompts in their order, losses, and the tensors of the last checkpoint."""
    verdict.compared += 1
    wanted = [(row["step"], row["prompts"]) for row in expected.rows("consumed.jsonl")]
    got = [(row["step"], row["prompts"]) for row in found.rows("consumed.jsonl")]
    wanted_counts = Counter(p for _, prompts in wanted for p in prompts)
    got_counts = Counter(p for _, prompts in got for p in prompts)
    verdict.lost += (wanted_counts - got_counts).total()
    verdict.duplicated += (got_counts - wanted_counts).total()
    if wanted != got:
        verdict.problems.append(f"{found.name}: other prompts, or another order: {first_difference(wanted, got)}")
    figures = [
        [{k: row[k] for k in _COMPARED if k in row} for row in t.rows("metrics.jsonl")] for t in (expected, found)
    ]
    if expected.with_critic and not any("critic_loss" in row for row in figures[0]):
        verdict.problems.append(f"{expected.name}: the metrics have no critic_loss")
    if figures[0] != figures[1]:
        verdict.losses_equal = False
        verdict.problems.append(f"{found.name}: other losses: {first_difference(*figures)}")
    if expected.agent:
        _compare_effects(expected, found, verdict)
    last = f"globalstep{expected.steps}"
    if not (found.recover / last).exists():
        verdict.problems.append(f"{found.name}: there is no checkpoint of its last step")
        return
    for engine in expected.engines:
        for (name, one), (_, other) in zip(
            optimizer_state(expected.recover / last, engine), optimizer_state(found.recover / last, engine), strict=True
        ):
            if one.numpy().tobytes() != other.numpy().tobytes():
                verdict.problems.append(f"{found.name}: {engine}/{name} of the last checkpoint differs")


def _compare_effects(expected: Trial, found: Trial, verdict: Verdict) -> None:
    """Compare what the tools of two runs did, as it is seen outside of them."""
    wanted, got = effects_of(expected.effects), effects_of(found.effects)
    verdict.effects += len(got)
    verdict.repeated += num_executions(found.effects) - len(got)
    if wanted != got:
        verdict.effects_equal = False
        missing, more = len(wanted.keys() - got.keys()), len(got.keys() - wanted.keys())
        other = sum(wanted[name] != got[name] for name in wanted.keys() & got.keys())
        problem = f"{found.name}: other effects: {missing} missing, {more} more, {other} with another content"
        verdict.problems.append(problem)


def first_difference(wanted: list, got: list) -> str:
    for one, other in zip(wanted, got, strict=False):
        if one != other:
            return f"{other} instead of {one}"
    return f"{len(got)} steps instead of {len(wanted)}"


def optimizer_state(checkpoint: Path, engine: str) -> Iterator[tuple[str, Tensor]]:
    """Return (name, tensor) of everything of one engine in a recover checkpoint: weights, masters, moments."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(checkpoint / engine)
    known = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in known.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():  # that this is one process
        warnings.simplefilter("ignore")
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    yield from sorted(tensors.items())
