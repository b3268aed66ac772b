"""The measurements of `python -m tools.bench gpu` that are whole runs of the command line."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from core.monitoring.journal import read_rows
from rollout.inference.gpus import device_names, query_gpus
from tools.bench.figure import Figure
from tools.bench.gpu.trainer import Scene
from tools.demo.data import write_jsonl

_RUNNING_PER_TRAINER = 384
"""Requests that run at once for each GPU of the trainer: the server samples as much as that one trains."""
_PROMPTS, _ANSWERS = 60, 8
"""Prompts of a step, and answers to each."""


def asynchronous(scene: Scene) -> Iterator[Figure]:
    """Yield runs with staleness 4, half of the GPUs generators, against staleness 0 with generators and trainer on all
    GPUs in turns; output lengths have a long tail. The former starts with an empty buffer and fills it in the first
    steps, which do not count."""
    rates: dict[int, float] = {}
    for staleness, warm_up, steps in ((4, 8, 10), (0, 3, 3)):
        config = {**_config(scene, staleness), "exp_ctrl.benchmark_steps": warm_up + steps}
        with busy_share() as shares:
            rows = run(scene, f"staleness-{staleness}", config)[warm_up:]
        rates[staleness] = _tokens_per_second(rows)
        if staleness and shares:
            busy = float(np.mean(np.concatenate([shares[gpu] for gpu in range(_num_generators())])))
            yield Figure(
                name="async.generators_busy", value=busy, unit="%", baseline=None, target=">= 95, or the trainer"
            )
        for name, value, unit in _facts(rows, staleness):
            yield Figure(name=name, value=value, unit=unit, baseline=None, target="")
        running = float(config["generator.max_running"])
        name = f"async.staleness_{staleness}_max_running"
        yield Figure(name=name, value=running, unit="requests", baseline=None, target="")
    if query_gpus():
        yield Figure(name="async.generator_gpus", value=_num_generators(), unit="GPUs", baseline=None, target="")
    yield Figure(
        name=f"async.{scene.shape}_trained_tokens_per_second",
        value=rates[4],
        unit="tokens/s",
        baseline=rates[0],
        target=">= 1.8x",
    )


def _facts(rows: list[dict[str, float]], staleness: int) -> Iterator[tuple[str, float, str]]:
    """Yield (name, value, unit): medians of the pushes, the trainer's share of computation, and means of a step's
    parts, so that these add up to it."""
    steps, updates = (sum(row[name] for row in rows) for name in ("time/step", "time/update"))
    yield f"async.staleness_{staleness}_trainer_computes", 100 * updates / steps, "%"
    for name in ("push/seconds", "push/pause_seconds", "push/gather_seconds", "push/send_seconds"):
        label = name.partition("/")[2].removesuffix("_seconds").replace("seconds", "whole")
        median = float(np.median([row[name] for row in rows]))
        yield f"push.run_staleness_{staleness}_{label}", 1e3 * median, "ms"
    for label, name, unit in (
        ("step", "time/step", "s"),
        ("wait_for_rollout", "time/wait_for_rollout", "s"),
        ("update", "time/update", "s"),
        ("push", "time/push", "s"),
        ("tokens", "n_valid_tokens", "tokens"),
        ("wait_for_oldest", "rollout/wait_for_oldest_seconds", "s"),
        ("prompts_in_flight", "rollout/num_in_flight", "prompts"),
    ):
        yield f"async.staleness_{staleness}_{label}_mean", float(np.mean([row[name] for row in rows])), unit
    for label, row in (("first", rows[0]), ("last", rows[-1])):
        yield f"async.staleness_{staleness}_prompts_ready_{label}", row["rollout/num_ready"], "prompts"


def _num_generators() -> int:
    return max(1, len(query_gpus()) // 2)


def _config(scene: Scene, staleness: int) -> dict[str, Any]:
    """Return a configuration with 60 prompts x 8 answers a step. With staleness, generators are on the first half of
    the GPUs and the trainer on the others; without, all are on every GPU and sample a whole step at once."""
    num_gpus, num_generators = max(2, len(query_gpus())), _num_generators()
    num_trainers, small = num_gpus - num_generators, not query_gpus()
    config = {
        **common_config(scene),
        "n_gpus_per_node": num_gpus,
        "staleness.max_staleness": staleness,
        "actor.optimizer.lr": 1e-6,
        "dataset.train_bs_n_seqs": 4 if small else _PROMPTS,
        "group_size": _ANSWERS,
        "group_adv_norm": True,
        "ppo.gen.max_new_tokens": 64 if small else 4096,
        "ppo.disable_value": True,
        "workflow.type": "tools.bench.workflow:LognormalLengths",
    }
    if staleness:
        return config | {
            "allocation_mode": f"sglang.d{num_generators}m1p1+d{num_trainers}m1p1",
            "generator.max_running": 32 if small else _RUNNING_PER_TRAINER * num_trainers // num_generators,
            "generator.interrupt": "in_place",
        }
    return config | {
        "allocation_mode": f"sglang.d{num_gpus}m1p1",
        "generator.max_running": -(-int(config["dataset.train_bs_n_seqs"]) * _ANSWERS // num_gpus),
    }


def common_config(scene: Scene) -> dict[str, Any]:
    """Return what whole runs with SGLang servers share: additions as prompts, one update a step of a model with random
    weights."""
    path = scene.folder / "prompts.jsonl"
    sums = [(a, b) for a in range(10, 100) for b in range(10, 55)]
    write_jsonl(path, [{"prompt": f"{a}+{b}=", "solutions": [f"\\boxed{{{a + b}}}"]} for a, b in sums])
    config: dict[str, Any] = {
        "experiment_name": "bench",
        "external_configs.cluster_config.fileroot": scene.folder / "runs",
        "actor.path": scene.model,
        "actor.init_from_scratch": True,
        "actor_train.mb_spec.max_tokens_per_mb": 16384,
        "dataset.path": path,
        "dataset.max_prompt_len": 32,
        "ppo.ppo_n_minibatches": 1,
        "ppo.kl_ctl": 0.0,
        "reward.function": "tools.bench.reward:coin_reward",
        "push.bucket_mib": 1024,
        "monitor.tensorboard": False,
        "launch.startup_timeout_seconds": 400,
    }
    if not query_gpus():
        config |= {"actor.sglang": "{device: cpu, max_total_tokens: 8192, sleep_on_idle: true}"}
        config |= {"generator.sglang_python": scene.sglang_python}
    return config


def _tokens_per_second(rows: list[dict[str, float]]) -> float:
    """Return the trained tokens/s of these steps."""
    return sum(row["n_valid_tokens"] for row in rows) / sum(row["time/step"] for row in rows)


def run(scene: Scene, trial: str, config: Mapping[str, object]) -> list[dict[str, float]]:
    """Run the real command; return the metrics of its steps. Raises RuntimeError with the end of its output."""
    base = scene.folder / "empty.yaml"
    base.write_text("{}\n")
    log = scene.folder / f"{trial}.log"
    with log.open("w") as file:
        code = subprocess.run(command(base, trial, config), stdout=file, stderr=subprocess.STDOUT).returncode
    if code:
        raise RuntimeError(f"{trial} ended with {code}:\n{log.read_text()[-6000:]}")
    (path,) = Path(str(config["external_configs.cluster_config.fileroot"])).glob(f"logs/*/bench/{trial}/metrics.jsonl")
    return [row for row in read_rows(path) if "task_reward" in row]


def command(base: Path, trial: str, config: Mapping[str, object]) -> list[str]:
    """Return the words of a run: a configuration file, and keys over it."""
    words = [f"{key}={value}" for key, value in {**config, "trial_name": trial}.items()]
    return [sys.executable, "-m", "core.quickstart", "ppo-math", "--config", str(base), *words]


@contextmanager
def busy_share(*, skipped: float = 0.5) -> Iterator[dict[int, list[float]]]:
    """Yield GPU -> per cent of the time in which a kernel ran, five samples a second, without the first `skipped` of
    the block, in which the run starts."""
    samples: dict[int, list[float]] = {gpu.index: [] for gpu in query_gpus()}
    stop = threading.Event()

    def sample() -> None:
        query = ["nvidia-smi", "--query-gpu=index,utilization.gpu", "--format=csv,noheader,nounits"]
        numbers = {name: index for index, name in enumerate(device_names(sorted(samples)).split(","))}
        while not stop.wait(0.2):
            for text in subprocess.run(query, capture_output=True, text=True).stdout.splitlines():
                index, share = text.split(", ")
                if index in numbers:
                    samples[numbers[index]].append(float(share))

    thread = threading.Thread(target=sample, daemon=True)
    if samples:
        thread.start()
    try:
        yield samples
    finally:
        stop.set()
        if samples:
            thread.join()
    for share in samples.values():
        # To the last moment at which a kernel ran: the end is shut-down.
        del share[: int(len(share) * skipped)]
        while share and share[-1] == 0:
            share.pop()
