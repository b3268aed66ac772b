"""The measurements of `python -m tools.bench gpu` that are whole runs of the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollout.inference.gpus import device_names, query_gpus
from tools.bench import TRL_SCRIPT, Figure
from tools.bench.cpu import metrics_of, run_ppo
from tools.bench.gpu.trainer import Scene
from tools.bench.workload import additions

END_SECONDS = 10.0
"""A process that is ended while it uses a GPU can stay for minutes; it is not waited for longer."""


def output_of(command: list[str], limit: float) -> str:
    """Return what a command prints; after `limit` seconds end it and what it has started. Its standard error is ours.

    Raises subprocess.CalledProcessError, subprocess.TimeoutExpired.
    """
    # With LOCAL_RANK, which benchmarks on a GPU set for their engine, accelerate expects a distributed run.
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=limit)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return output


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
    """Yield (name, value, unit): the trainer's share of computation, and medians of the pushes."""
    steps, updates = (sum(row[name] for row in rows) for name in ("time/step", "time/update"))
    yield f"async.staleness_{staleness}_trainer_computes", 100 * updates / steps, "%"
    for name in ("push/seconds", "push/pause_seconds", "push/gather_seconds", "push/send_seconds"):
        label = name.partition("/")[2].removesuffix("_seconds").replace("seconds", "whole")
        median = float(np.median([row[name] for row in rows]))
        yield f"push.run_staleness_{staleness}_{label}", 1e3 * median, "ms"


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
        "workflow.type": "tools.bench.workload:LognormalLengths",
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
    config: dict[str, Any] = {
        "experiment_name": "bench",
        "external_configs.cluster_config.fileroot": scene.folder / "runs",
        "actor.path": scene.model,
        "actor.init_from_scratch": True,
        "actor_train.mb_spec.max_tokens_per_mb": 16384,
        "dataset.path": additions(scene.folder),
        "dataset.max_prompt_len": 32,
        "ppo.ppo_n_minibatches": 1,
        "ppo.kl_ctl": 0.0,
        "reward.function": "tools.bench.workload:coin_reward",
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
    run_ppo(scene.folder, trial, config)
    return [row for row in metrics_of(scene.folder, trial) if "task_reward" in row]


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


WARM_UP_STEPS = 2
GENERATION = {"generate": [], "continuous_batching": ["--continuous-batching"]}
"""Ways in which TRL generates, and the arguments of its script."""
WARM_UP_TOKENS, PEER_SECONDS = 16, 240.0
"""The warm-up and the time limit of TRL: a warm-up with whole completions takes as long as what is measured."""
SECOND_LIMIT_RATIO = 1.5
"""How many times as long as the first way to generate the second one may take."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Samples of a step, and measured steps of either side; a step of TRL takes long."""

    prompts: int = 32
    answers: int = 8
    new_tokens: int = 1024
    steps: int = 2
    peer_steps: int = 1
    micro_batch: int = 16


def load() -> Load:
    """Return the load of this host; a small one where there is no GPU."""
    return Load() if query_gpus() else Load(prompts=4, answers=2, new_tokens=8, steps=2, micro_batch=4)


def against_trl(scene: Scene) -> Iterator[Figure]:
    """Yield samples/s of this project, and of TRL where an environment with it was given."""
    size = load()
    config = configuration(scene, size)
    prompts = config["dataset.path"]
    rows = run(scene, "against-trl", config)[WARM_UP_STEPS:]
    rate = sum(row["n_seqs"] for row in rows) / sum(row["time/step"] for row in rows)
    print(f"{rate:.2f} samples/s", flush=True)  # also where TRL does not end
    peers: dict[str, float] = {}
    limit = PEER_SECONDS
    for name, flags in GENERATION.items() if scene.trl_python is not None else ():
        start = time.perf_counter()
        try:
            peers[name] = trl_samples_per_second(scene, prompts, size, flags, limit)
        except subprocess.CalledProcessError as error:
            print(f"TRL with {name} ended with {error.returncode}; see above", flush=True)
            continue
        except subprocess.TimeoutExpired:
            print(f"TRL with {name} took longer than {limit:.0f} s and was ended", flush=True)
            continue
        limit = min(limit, SECOND_LIMIT_RATIO * (time.perf_counter() - start))
        yield figure(scene, size, f"trl_{name}", peers[name])
    yield figure(scene, size, "samples", rate, baseline=max(peers.values(), default=None), target=">= 2x")
    for part in ("wait_for_rollout", "update"):
        seconds = sum(row[f"time/{part}"] for row in rows) / len(rows)
        yield Figure(name=f"trl.{scene.shape}_{part}_seconds", value=seconds, unit="s", baseline=None, target="")


def figure(
    scene: Scene, size: Load, name: str, value: float, *, baseline: float | None = None, target: str = ""
) -> Figure:
    """Make a row of samples/s."""
    return Figure(
        name=f"trl.{scene.shape}_{size.new_tokens}_{name}_per_second",
        value=value,
        unit="samples/s",
        baseline=baseline,
        target=target,
    )


def configuration(scene: Scene, size: Load) -> dict[str, Any]:
    """Return the run of this project: server and trainer share the GPU."""
    return {
        **common_config(scene),
        "allocation_mode": "sglang.d1m1p1",
        "n_gpus_per_node": 1,
        "actor.optimizer.lr": 1e-5,
        "algorithm.name": "grpo",
        "algorithm.correction": "bypass",
        "dataset.train_bs_n_seqs": size.prompts,
        "group_size": size.answers,
        "ppo.gen.max_new_tokens": size.new_tokens,
        "ppo.gen.min_new_tokens": size.new_tokens,
        "generator.max_running": size.prompts * size.answers,
        "exp_ctrl.benchmark_steps": WARM_UP_STEPS + size.steps,
    }


def trl_samples_per_second(scene: Scene, prompts: Path, size: Load, flags: list[str], limit: float) -> float:
    """Run TRL's loop, in its own environment, for at most `limit` seconds; its log goes to standard error.

    Raises subprocess.CalledProcessError, subprocess.TimeoutExpired.
    """
    model = model_with_weights(scene)
    command = [
        str(scene.trl_python),
        str(TRL_SCRIPT),
        "--model",
        str(model),
        "--prompts",
        str(prompts),
        "--num-prompts",
        str(size.prompts),
        "--group-size",
        str(size.answers),
        "--new-tokens",
        str(size.new_tokens),
        "--warm-up-steps",
        "1",
        "--steps",
        str(size.peer_steps),
        "--micro-batch",
        str(size.micro_batch),
        "--warm-up-tokens",
        str(min(WARM_UP_TOKENS, size.new_tokens)),
        *flags,
    ]
    if query_gpus():
        command.append("--gpu")
    found = json.loads(output_of(command, limit).splitlines()[-1])
    print(f"TRL {' '.join(flags)}: {json.dumps(found)}", flush=True)
    return float(found["samples_per_second"])


def model_with_weights(scene: Scene) -> Path:
    """Return a folder of the shape with random weights, which transformers reads."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    path = scene.folder / f"{scene.shape}-with-weights"
    if not path.exists():
        with torch.device(torch.accelerator.current_accelerator() or "cpu"):
            model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(scene.model), dtype=torch.bfloat16)
        model.save_pretrained(path)
        AutoTokenizer.from_pretrained(scene.model).save_pretrained(path)
        del model
        if query_gpus():
            torch.accelerator.empty_cache()
    return path
