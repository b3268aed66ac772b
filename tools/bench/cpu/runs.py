"""The measurements of `python -m tools.bench cpu` that are whole runs of the command line."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

from core.monitoring.journal import read_rows
from tools.bench.cpu.components import Scene
from tools.bench.figure import Figure
from tools.bench.trl.peer import SCRIPT

PRECISIONS = ("float32", "bfloat16")


def dry_run(scene: Scene) -> Iterator[Figure]:
    """Yield the time from the command to the end of every check."""
    config = ppo_config(scene, scene.model("0.8M", hidden_size=128, num_layers=4), new_tokens=16)
    start = time.perf_counter()
    run_ppo(scene, "dry", config, "--dry-run")
    yield Figure(name="config.dry_run", value=time.perf_counter() - start, unit="s", baseline=None, target="< 3")


def ppo_config(scene: Scene, model: Path, *, new_tokens: int, **changes: object) -> dict[str, object]:
    """Return a configuration with 32 prompts x 8 answers a step, as dotted keys."""
    return {
        "experiment_name": "bench",
        "allocation_mode": "embedded.d1m1p1+d1m1p1",
        "n_gpus_per_node": 2,
        "external_configs.cluster_config.fileroot": scene.folder / "runs",
        "actor.path": model,
        "actor.optimizer.lr": 1e-5,
        "dataset.path": scene.prompts(),
        "dataset.train_bs_n_seqs": 32,
        "dataset.max_prompt_len": 16,
        "group_size": 8,
        "group_adv_norm": True,
        "ppo.gen.max_new_tokens": new_tokens,
        "ppo.ppo_n_minibatches": 1,
        "ppo.kl_ctl": 0.0,
        "ppo.disable_value": True,
        "staleness.max_staleness": 2,
        "generator.max_running": 256,
        "monitor.tensorboard": False,
        "reward.function": "tools.bench.reward:coin_reward",
        **changes,
    }


def run_ppo(
    scene: Scene, trial: str, config: dict[str, object], *flags: str, sample_memory: bool = False
) -> list[float]:
    """Run the real command; return samples of the memory of all its processes in MiB, one a second, if requested."""
    base = scene.folder / "empty.yaml"
    base.write_text("{}\n")
    words = [f"{key}={value}" for key, value in {**config, "trial_name": trial}.items()]
    memory = []
    with open(scene.folder / f"{trial}.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "core.quickstart", "ppo-math", "--config", str(base), *words, *flags],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        while process.poll() is None:
            if sample_memory:
                memory.append(family_mib(process.pid))
            time.sleep(1.0 if sample_memory else 0.05)
    if process.returncode:
        raise RuntimeError(
            f"{trial} ended with {process.returncode}:\n{(scene.folder / f'{trial}.log').read_text()[-3000:]}"
        )
    return memory


def family_mib(pid: int) -> float:
    """Return the proportional memory of a process and all below it, MiB."""
    total = 0
    for process in (family := [psutil.Process(pid)]) + family[0].children(recursive=True):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total / 2**20


def samples_per_second(scene: Scene, trial: str, config: dict[str, object], *, steps: int, warm_up: int = 5) -> float:
    """Return the rate of the whole loop: all samples of the steps after the warm-up over their time."""
    run_ppo(scene, trial, {**config, "exp_ctrl.benchmark_steps": steps})
    path = next((scene.folder / "runs" / "logs").glob(f"*/bench/{trial}/metrics.jsonl"))
    rows = read_rows(path)[warm_up:]
    return sum(r["n_seqs"] for r in rows) / sum(r["time/step"] for r in rows)


def sync_and_async(scene: Scene) -> Iterator[Figure]:
    """Yield runs with max_staleness 0 (both sides use all cores in turn) and 2."""
    model = scene.model("0.8M", hidden_size=128, num_layers=4)
    config = ppo_config(scene, model, new_tokens=64)
    rates = {0: [], 2: []}  # type: dict[int, list[float]]
    for round_ in range(2):
        for staleness in rates:
            changed = {**config, "staleness.max_staleness": staleness}
            rates[staleness].append(samples_per_second(scene, f"staleness{staleness}-{round_}", changed, steps=25))
    yield Figure(
        name="async.samples_per_second",
        value=float(np.mean(rates[2])),
        unit="samples/s",
        baseline=float(np.mean(rates[0])),
        target=">= 1.25x",
    )


def loop(scene: Scene) -> Iterator[Figure]:
    """Yield samples/s of the whole loop, against TRL's GRPOTrainer on the same model, prompts and lengths.

    Both sides run in both precisions, in turn; the row with the target sets the faster of ours against the faster of
    theirs.
    """
    model = scene.model("0.8M", hidden_size=128, num_layers=4)
    for new_tokens, steps, target in ((16, 60, ">= 1.5x"), (128, 15, ">= 1.9x")):
        ours: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
        theirs: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
        for round_, precision in itertools.product(range(2), PRECISIONS):
            changes = {"ppo.gen.min_new_tokens": new_tokens, "actor.bf16": precision == "bfloat16"}
            config = ppo_config(scene, model, new_tokens=new_tokens, **changes)
            # Three single-threaded processes on two cores: a process that waits leaves its core to the others.
            config |= {"allocation_mode": "embedded.d1m1p1+d2m1p1", "n_gpus_per_node": 3}
            config |= {"launch.threads_per_process": 1, "generator.interrupt": "in_place"}
            trial = f"loop{new_tokens}-{precision}-{round_}"
            ours[precision].append(samples_per_second(scene, trial, config, steps=steps))
            if scene.trl_python is not None:
                theirs[precision].append(trl_samples_per_second(scene, model, new_tokens, steps // 3, precision))
        rates, baselines = ({p: float(np.mean(v)) for p, v in side.items() if v} for side in (ours, theirs))
        for precision in PRECISIONS:
            yield Figure(
                name=f"loop.samples_per_second_{new_tokens}_{precision}",
                value=rates[precision],
                unit="samples/s",
                baseline=baselines.get(precision),
                target="",
            )
        yield Figure(
            name=f"loop.samples_per_second_{new_tokens}",
            value=max(rates.values()),
            unit="samples/s",
            baseline=max(baselines.values(), default=None),
            target=target,
        )


def trl_samples_per_second(scene: Scene, model: Path, new_tokens: int, steps: int, precision: str) -> float:
    """Run TRL's loop, in its own environment."""
    command = [
        str(scene.trl_python),
        str(SCRIPT),
        "--model",
        str(model),
        "--prompts",
        str(scene.prompts()),
        "--new-tokens",
        str(new_tokens),
        "--steps",
        str(steps),
        "--precision",
        precision,
    ]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])["samples_per_second"]


def memory(scene: Scene) -> Iterator[Figure]:
    """Yield the memory at the end over the memory at a third of 10,000 steps of a null run (tiny model, tokens made up
    at once), with a checkpoint every 100."""
    model = scene.model("tiny", hidden_size=64, num_layers=1)
    config = ppo_config(scene, model, new_tokens=4, **{"allocation_mode": "mock.d1m1p1+d1m1p1"})
    config |= {"dataset.train_bs_n_seqs": 4, "group_size": 2, "exp_ctrl.total_train_epochs": 10}
    config |= {"exp_ctrl.total_train_steps": 10_000, "recover_mode": "auto", "exp_ctrl.ckpt_freq_steps": 100}
    samples = run_ppo(scene, "nothing", config, sample_memory=True)
    # Start-up and shut-down are no part of the run: what counts lies between the first and the last quiet second.
    running = samples[int(0.3 * len(samples)) : -3]
    begin, end = running[: len(running) // 4 or 1], running[-(len(running) // 4 or 1) :]
    yield Figure(
        name="memory.null_run",
        value=float(np.median(end)),
        unit="MiB",
        baseline=float(np.median(begin)),
        target="< 1.05x",
    )
