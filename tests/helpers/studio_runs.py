"""Runs as files, made by the product's own writers, for the tests of the studio."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from core.monitoring.metrics import Histogram, Journal
from core.monitoring.samples import Sample, SampleFile, Turn
from core.runs.paths import RunPaths
from core.runs.record import write_complete, write_record

Change = Callable[[int, int], Mapping[str, float]]
"""(step, steps) -> the metrics of a step that differ from those of a healthy run."""


def healthy(step: int, steps: int) -> dict[str, float]:
    """Return the metrics of a step of a run without a fault."""
    at = step / steps
    noise = math.sin(12.9898 * step) * 0.01
    return {
        "reward/mean": 0.2 + 0.5 * at + noise, "reward/std": 0.4, "reward/min": 0.0, "reward/max": 1.0,
        "groups/equal": 0.2 + noise, "groups/solved": 0.1, "groups/unsolved": 0.1, "entropy": 1.2 - 0.3 * at + noise,
        "ppo_approx_kl": 0.002 + noise / 100, "ref_kl": 0.01 + 0.01 * at, "importance_weight": 1.0 + noise / 100,
        "actor_clip_ratio": 0.02, "behave_imp_weight": 1.001, "behave_approx_kl": 0.001,
        "answer_length/mean": 200 + 20 * at + 100 * noise, "answer_length/max": 400, "no_eos_ratio": 0.02,
        "loss": 0.01 + noise, "grad_norm": 0.5 + noise, "n_tokens": 12800.0, "n_seqs": 64.0,
        "staleness/mean": 0.8, "staleness/max": 1.0, "rollout/generators_busy": 0.9, "rollout/wait_seconds": 0.2,
        "reward/num_scored": 64.0 * step, "reward/num_error": 0.0, "reward/num_timeout": 0.0, "reward/num_crash": 0.0,
        "router/num_generators": 2.0, "router/slowest_share": 0.95, "rollout/num_skipped": 0.0, "update_skipped": 0.0,
        "memory/driver_gib": 0.5, "memory/trainer_gib": 3.0, "memory/rollout_gib": 0.6, "tokens_per_second": 6400.0,
        "time/wait_for_rollout": 0.1, "time/update": 1.4, "time/push": 0.2, "time/step": 2.0,
    }  # fmt: skip


def make_run(
    root: Path,
    name: str = "sums/good",
    *,
    steps: int = 40,
    change: Change = lambda step, steps: {},
    config: Mapping[str, object] | None = None,
    answer: Callable[[int, int], str] = lambda step, index: f"The sum is {step + index}.",
    complete: bool = True,
) -> RunPaths:
    """Write the files of a run: metrics, evaluations, two groups of four samples a step, its record."""
    experiment, _, trial = name.partition("/")
    paths = RunPaths.for_trial(str(root), experiment, trial)
    paths.logs.mkdir(parents=True)
    write_record("ppo-math", config or {"seed": 1, "staleness": {"max_staleness": 2}}, paths, ["python"])
    metrics = Journal(paths.logs / "metrics.jsonl", continue_after=None)
    samples = SampleFile(paths.logs, continue_after=-1, max_bytes=20_000, keep=50)
    for step in range(1, steps + 1):
        row: dict[str, object] = {**healthy(step, steps), **change(step, steps)}
        metrics.write(step, {**row, "staleness/ages": Histogram(np.array([0] * 40 + [1] * 20 + [2] * 4))})
        if step % 10 == 0:
            evaluation = {"eval/accuracy": 0.3 + 0.4 * step / steps, "eval/reward": 0.3 + 0.4 * step / steps}
            metrics.write(
                step, {**evaluation, **{k: v for k, v in change(step, steps).items() if k.startswith("eval/")}}
            )
        samples.write(_sample(step, row, answer, row_of, index) for row_of in range(2) for index in range(4))
    metrics.close()
    samples.close()
    if complete:
        write_complete(paths, {})
    return paths


def _sample(step: int, row: Mapping[str, object], answer: Callable[[int, int], str], prompt: int, index: int) -> Sample:
    text = answer(step, index)
    longest = step == 7 and prompt == 1 and index == 2
    return Sample(
        step=step, query_id=f"prompts-{prompt}", episode=f"prompts/prompts-{prompt}/{step}", index=index,
        prompt=f"{step}+{prompt}=", answer=text + " again" * 90 if longest else text,
        reward=float(index % 2), finish_reason="length" if longest else "stop", prompt_tokens=5,
        answer_tokens=512 if longest else 20 + index, oldest_version=max(0, step - 2), newest_version=step - 1,
        notable=("best",) if index == 1 and prompt == 0 else (), reference=str(step + prompt),
        turns=(Turn(by="model", text=text), Turn(by="environment", text="wrong")) if index == 3 else (),
        metrics={"reward/format": 1.0},
    )  # fmt: skip
