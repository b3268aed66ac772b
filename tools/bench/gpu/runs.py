"""The measurements of `python -m tools.bench gpu` that are whole runs of the command line."""

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rollout.inference.gpus import query_gpus
from tools.bench import Figure, Scene
from tools.bench.cpu import metrics_of, run_ppo, trl_samples_per_second
from tools.bench.gpu.trainer import model_of
from tools.bench.workload import additions

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
        config = {**async_config(scene, staleness), "exp_ctrl.benchmark_steps": warm_up + steps}
        rows = run(scene, f"staleness-{staleness}", config)[warm_up:]
        seconds = sum(row["time/step"] for row in rows)
        rates[staleness] = sum(row["n_valid_tokens"] for row in rows) / seconds
        updates = 100 * sum(row["time/update"] for row in rows) / seconds
        yield Figure(f"async.staleness_{staleness}_trainer_computes", updates, "%")
        for part in ("seconds", "pause_seconds", "gather_seconds", "send_seconds"):
            median = float(np.median([row[f"push/{part}"] for row in rows]))
            label = part.removesuffix("_seconds").replace("seconds", "whole")
            yield Figure(f"push.run_staleness_{staleness}_{label}", 1e3 * median, "ms")
        if staleness:
            busy = 100 * float(np.mean([row["rollout/generators_busy"] for row in rows]))
            yield Figure("async.generator_slots_used", busy, "%")
    name = f"async.{scene.shape}_trained_tokens_per_second"
    yield Figure(name, rates[4], "tokens/s", rates[0], ">= 1.8x")


def async_config(scene: Scene, staleness: int, *, num_gpus: int | None = None) -> dict[str, object]:
    """Return a configuration with 60 prompts x 8 answers a step. With staleness, generators are on the first half of
    the GPUs and the trainer on the others; without, all are on every GPU and sample a whole step at once."""
    small, num_gpus = not query_gpus(), num_gpus or max(2, len(query_gpus()))
    num_generators = num_gpus // 2
    num_trainers, num_prompts = num_gpus - num_generators, 4 if small else _PROMPTS
    config = {
        **_common_config(scene),
        "n_gpus_per_node": num_gpus,
        "staleness.max_staleness": staleness,
        "actor.optimizer.lr": 1e-6,
        "dataset.train_bs_n_seqs": num_prompts,
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
        "generator.max_running": -(-num_prompts * _ANSWERS // num_gpus),
    }


def _common_config(scene: Scene) -> dict[str, object]:
    """Return what whole runs with SGLang servers share: additions as prompts, one update a step of a model with random
    weights."""
    config: dict[str, object] = {
        "experiment_name": "bench",
        "external_configs.cluster_config.fileroot": scene.folder / "runs",
        "actor.path": model_of(scene),
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


def run(scene: Scene, trial: str, config: Mapping[str, object]) -> list[dict[str, float]]:
    """Run the real command; return the metrics of its steps. Raises RuntimeError with the end of its output."""
    run_ppo(scene.folder, trial, config)
    return [row for row in metrics_of(scene.folder, trial) if "task_reward" in row]


_WARM_UP_STEPS, _STEPS, _TRL_STEPS = 2, 2, 1
_TRL_SECONDS = 240.0
"""Time limit of TRL, whose steps take long; its warm-up has short completions."""


def against_trl(scene: Scene) -> Iterator[Figure]:
    """Yield samples/s of this project, server and trainer on one GPU, and of TRL where an environment with it was
    given."""
    small = not query_gpus()
    prompts, answers, new_tokens, micro_batch = (4, 2, 8, 4) if small else (32, 8, 1024, 16)
    config = {
        **_common_config(scene),
        "allocation_mode": "sglang.d1m1p1",
        "n_gpus_per_node": 1,
        "actor.optimizer.lr": 1e-5,
        "algorithm.name": "grpo",
        "algorithm.correction": "bypass",
        "dataset.train_bs_n_seqs": prompts,
        "group_size": answers,
        "ppo.gen.max_new_tokens": new_tokens,
        "ppo.gen.min_new_tokens": new_tokens,
        "generator.max_running": prompts * answers,
        "exp_ctrl.benchmark_steps": _WARM_UP_STEPS + _STEPS,
    }
    rows = run(scene, "against-trl", config)[_WARM_UP_STEPS:]
    rate = sum(row["n_seqs"] for row in rows) / sum(row["time/step"] for row in rows)
    print(f"{rate:.2f} samples/s", flush=True)  # also where TRL does not end
    peer = None
    if scene.trl_python is not None:
        options = {
            "num-prompts": prompts,
            "group-size": answers,
            "new-tokens": new_tokens,
            "warm-up-steps": 1,
            "steps": _TRL_STEPS,
            "micro-batch": micro_batch,
            "warm-up-tokens": min(16, new_tokens),
        }
        try:
            flags = [] if small else ["--gpu"]
            peer = trl_samples_per_second(scene, _with_weights(scene), options, *flags, timeout=_TRL_SECONDS)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"TRL: {error}", flush=True)
    yield Figure(f"trl.{scene.shape}_{new_tokens}_samples_per_second", rate, "samples/s", peer, ">= 2x")
    for part in ("wait_for_rollout", "update"):
        yield Figure(f"trl.{scene.shape}_{part}_seconds", float(np.mean([row[f"time/{part}"] for row in rows])), "s")


def _with_weights(scene: Scene) -> Path:
    """Return a folder of the shape with random weights, which transformers reads."""
    path = scene.folder / f"{scene.shape}-with-weights"
    with torch.device(torch.accelerator.current_accelerator() or "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_of(scene)), dtype=torch.bfloat16)
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(model_of(scene)).save_pretrained(path)
    del model
    if query_gpus():
        torch.accelerator.empty_cache()
    return path
