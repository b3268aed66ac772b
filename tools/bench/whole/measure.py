"""The measurements of a whole run of Qwen3-30B-A3B with random weights, or of a slice of its layers on fewer GPUs.

`whole` measures speed and memory, `experts` the log-probabilities of two or four expert-parallel ranks, `failures` a
checkpoint and two kills with few layers, because a checkpoint of all of them (430 GB) exceeds the disks of most hosts,
and `unreplayed` the mismatch without routing replay.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from model_specs.hf_config import parse_config
from rollout.inference.gpus import query_gpus
from tools.bench.figure import Figure
from tools.bench.gpu import PEAK_FLOPS, Scene
from tools.bench.gpu_memory import GB, WidthsScene
from tools.bench.gpu_runs import busy_share
from tools.bench.whole.running import Running, checkpoints, pushes, recovered_steps, sampled_per_second
from tools.bench.whole.size import (
    Size,
    configuration,
    has_servers,
    held_bytes,
    scene_of,
    shared_size_for,
    size_of_host,
)

WARM_UP_STEPS, STEPS = 2, 3
FAILURE_LAYERS, CHECKPOINT_STEPS = 2, 12
_GIB = 2**30
_PARTS = {"step": "time/step", "update": "time/update", "old_logprobs": "time/old_log-probs", "push_phase": "time/push",
          "wait_for_rollout": "time/wait_for_rollout"}  # fmt: skip


def whole(scene: Scene) -> Iterator[Figure]:
    """Yield speed, MFU, busy shares, weight updates, mismatch and memory of a run with routing replay."""
    size, total = size_of_host(), WARM_UP_STEPS + STEPS + 1
    own = scene_of(scene, size, "whole")
    # The last step is saved, which takes time: it does not count.
    config = {**configuration(own, size), "recover_mode": "disabled", "exp_ctrl.benchmark_steps": total}
    yield figure("layers", size.layers, "layers")
    yield figure("gpus", size.num_gpus, "GPUs")
    with Running(own, "whole", {**config, "monitor.save_batches": total}) as run:
        run.wait_for_step(WARM_UP_STEPS)
        begun = run.server_logs
        with busy_share(skipped=0.0) as shares:
            run.wait_for_step(WARM_UP_STEPS + STEPS)
            used = {gpu.index: gpu.used_mib * 2**20 for gpu in query_gpus()}
            sampled = sampled_per_second(path.read_text(errors="replace")[start:] for path, start in begun.items())
        run.finish()
        rows = run.rows[WARM_UP_STEPS : WARM_UP_STEPS + STEPS]
        yield from _speed(rows, size, own)
        if sampled:
            yield figure("rollout_tokens_per_second", sampled, "tokens/s")
        yield from _busy(shares, size)
        yield from _pushes(rows)
        yield figure("pushes_with_equal_checksums", pushes(run.output)[1], "pushes", "the first two")
        yield from _mismatch("replayed" if config.get("actor.moe_routing_replay", True) else "mock", run, total)
        yield from _memory(rows, used, size, own)


def unreplayed(scene: Scene) -> Iterator[Figure]:
    """Yield the mismatch without routing replay: the trainer chooses experts itself."""
    size = size_of_host()
    own = scene_of(scene, size, "unreplayed")
    config = {**configuration(own, size), "recover_mode": "disabled", "exp_ctrl.benchmark_steps": 1}
    with Running(own, "unreplayed", {**config, "actor.moe_routing_replay": False, "monitor.save_batches": 1}) as run:
        run.finish()
        yield from _mismatch("unreplayed", run, 1)


def experts(scene: Scene) -> Iterator[Figure]:
    """Yield the mismatch with routing replay of expert-parallel ranks, their log-probabilities per second, and a weight
    update, with servers and trainer in turns on two GPUs, or on four."""
    size, steps = size_of_host(shared_size_for), 2
    own = scene_of(scene, size, "experts")
    config = configuration(own, size) | {
        "recover_mode": "disabled", "exp_ctrl.benchmark_steps": steps, "monitor.save_batches": steps,
        "staleness.max_staleness": 0, "algorithm.correction": "decoupled",  # which computes log-probabilities
    }  # fmt: skip
    if query_gpus():
        config["ppo.gen.max_new_tokens"] = 1024  # longer answers would add nothing but their time
    with Running(own, "experts", config) as run:
        run.finish()
        yield figure("experts_layers", size.layers, "layers")
        yield _logprobs_rate("experts_logprobs_tokens_per_second", run.rows[steps - 1 :])
        for row in _pushes(run.rows[steps - 1 :]):
            yield replace(row, name=row.name.replace("push", "experts_push"))
        yield from _mismatch("experts", run, steps)


def failures(scene: Scene) -> Iterator[Figure]:
    """Yield the stall of a checkpoint, and the seconds after a killed server and a killed trainer rank."""
    size = replace(size_of_host(), layers=FAILURE_LAYERS, offload=False)
    own = scene_of(scene, size, "failures")
    config = configuration(own, size) | {
        "recover_retries": 2, "recover_keep": 1, "exp_ctrl.total_train_epochs": 1000,
        "exp_ctrl.ckpt_freq_steps": CHECKPOINT_STEPS, "exp_ctrl.save_hf_checkpoint": "never",
        "generator.health_interval_seconds": 2.0, "push.verify": "always",
    }  # fmt: skip
    with Running(own, "failures", config) as run:
        run.wait_for_step(3)
        if has_servers(scene):
            yield figure("server_killed_to_next_step", _kill_server(run), "s", "<= 60")
        run.wait_for(r"MiB written in")
        stall = run.wait_for(r"Recover checkpoint of step \d+: the trainer stopped for ([\d.]+) s")
        yield figure("checkpoint_stall", float(stall[1]), "s", "<= 1.5")
        yield figure("checkpoint", checkpoints(run.output)[-1][1] * 2**20 / GB, "GB")
        yield from _kill_trainer(run)
        steps = [row["step"] for row in run.rows]
        if steps != list(range(1, len(steps) + 1)):
            raise RuntimeError(f"each step must be in metrics.jsonl once, found {steps}")
        sent, equal = pushes(run.output)
        yield figure("failures_pushes_with_equal_checksums", equal, "pushes", "1.00 x", baseline=sent)


def _kill_server(run: Running) -> float:
    """Kill the last server; return the seconds until it has its weights again and a step has finished."""
    index = len(run.server_logs) - 1
    began = time.monotonic()
    run.server(index).kill()
    run.wait_for(rf"generator-{index} has restarted")
    run.wait_for(f"generator {index} has rejoined", file="rollout.log")
    run.wait_for(r"global step \d+\) finishes", start=len(run.output))
    return time.monotonic() - began


def _kill_trainer(run: Running) -> Iterator[Figure]:
    """Kill the first trainer rank; yield the seconds until a step has finished, and that step beside the one that
    follows the last checkpoint."""
    began = time.monotonic()
    run.process("trainer-rank0").kill()
    failed = run.wait_for("Attempt 1 failed after step")
    run.wait_for(r"global step \d+\) finishes", start=failed.end())
    yield figure("trainer_killed_to_first_step", time.monotonic() - began, "s", "<= 60")
    first, expected = recovered_steps(run.output)
    yield figure("trainer_killed_first_step", first, "step", "1.00 x", baseline=expected)


def figure(name: str, value: float, unit: str, target: str = "", *, baseline: float | None = None) -> Figure:
    return Figure(name=f"whole.{name}", value=float(value), unit=unit, baseline=baseline, target=target)


def _speed(rows: Sequence[Mapping[str, float]], size: Size, scene: WidthsScene) -> Iterator[Figure]:
    """Yield tokens/s of the loop and of the update alone, their MFU on the trainer's GPUs, and the parts of a step."""
    ranks = size.placed.trainer.layout.world_size
    tokens, sequences = sum(row["avg_seq_len"] * row["n_seqs"] for row in rows), sum(row["n_seqs"] for row in rows)
    steps, updates = (sum(row[name] for row in rows) for name in ("time/step", "time/update"))
    length = tokens / sequences
    flops = scene.flops_per_token(round(length))
    yield figure("trained_tokens_per_second", sum(row["n_valid_tokens"] for row in rows) / steps, "tokens/s")
    yield figure("tokens_per_second_per_gpu", tokens / steps / size.num_gpus, "tokens/s")
    yield figure("update_tokens_per_second", tokens / updates, "tokens/s")
    yield figure("step_mfu", 100 * flops * tokens / steps / (ranks * PEAK_FLOPS), "%")
    yield figure("update_mfu", 100 * flops * tokens / updates / (ranks * PEAK_FLOPS), "%")
    yield figure("mean_length", length, "tokens")
    yield _logprobs_rate("logprobs_tokens_per_second", rows)
    for label, name in _PARTS.items():
        yield figure(f"{label}_seconds", float(np.mean([row[name] for row in rows])), "s")


def _logprobs_rate(name: str, rows: Sequence[Mapping[str, float]]) -> Figure:
    """Return the tokens/s of the pass before the update, prompts included."""
    tokens = sum(row["avg_seq_len"] * row["n_seqs"] for row in rows)
    return figure(name, tokens / sum(row["time/old_log-probs"] for row in rows), "tokens/s")


def _busy(shares: Mapping[int, Sequence[float]], size: Size) -> Iterator[Figure]:
    """Yield the share of the time in which a kernel ran, of both sides."""
    border = size.num_generator_gpus
    for label, gpus in (("generators", range(border)), ("trainer", range(border, size.num_gpus))):
        samples = [share for gpu in gpus for share in shares.get(gpu, ())]
        if samples:
            yield figure(f"{label}_busy", float(np.mean(samples)), "%", ">= 90" if label == "generators" else "")


def _pushes(rows: Sequence[Mapping[str, float]]) -> Iterator[Figure]:
    """Yield medians of the weight updates; the gap is the pause of the generator that paused longest."""
    names = {"push": "push/seconds", "push_gap": "push/pause_seconds", "push_gather": "push/gather_seconds"}
    for label, name in names.items():
        yield figure(label, 1e3 * float(np.median([row[name] for row in rows])), "ms")
    yield figure("push_size", rows[-1]["push/gigabytes"], "GB")


def _mismatch(label: str, run: Running, step: int) -> Iterator[Figure]:
    """Yield the mean absolute difference of log-probabilities in a saved step."""
    found = run.mismatch(step)
    if len(found):
        yield figure(f"mismatch_{label}", float(found.mean()), "nats")
        yield figure(f"mismatch_{label}_tokens", len(found), "tokens")


def _memory(
    rows: Sequence[Mapping[str, float]], used: Mapping[int, int], size: Size, scene: WidthsScene
) -> Iterator[Figure]:
    """Yield the largest allocation of a trainer rank beside what it holds without activations, the memory in use on the
    GPUs of each side, and the largest processes."""
    held = sum(held_bytes(parse_config(scene.raw), size.placed.trainer.layout, offload=size.offload).values())
    row, border = rows[-1], size.num_generator_gpus
    if used:
        peak = row["memory/trainer_gpu_gib"] * _GIB / GB
        yield figure("memory_trainer_allocated", peak, "GB", "<= 141", baseline=held / GB)
        for label, gpus in (("generators", range(border)), ("trainer", range(border, size.num_gpus))):
            yield figure(f"memory_{label}_gpu", max(used[gpu] for gpu in gpus) / GB, "GB")
    for name in ("driver", "rollout", "trainer"):
        yield figure(f"memory_{name}_process", row[f"memory/{name}_gib"] * _GIB / GB, "GB")
