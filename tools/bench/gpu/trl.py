"""Samples/s of the whole loop on one GPU, against TRL's GRPOTrainer on the same GPU: `bench gpu --only trl`.

Both sides sample completions of a fixed number of tokens from the same shape with random weights, with the same prompts
and group size, and make one update of each batch. TRL runs in its own environment, with generate() and with continuous
batching; the faster one is the baseline. The second is ended when it has taken 1.5 times as long as the first, starts
and warm-ups included: then it is taken for slower, and has no figure. vLLM is not measured.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.inference.gpus import query_gpus
from tools.bench.figure import Figure
from tools.bench.gpu.runs import common_config, run
from tools.bench.gpu.trainer import Scene
from tools.bench.trl.peer import SCRIPT, output_of

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
        str(SCRIPT),
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
