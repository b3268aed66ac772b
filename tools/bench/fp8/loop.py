"""The whole loop on one GPU, server and trainer in turns: an FP8 server against one in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median

from rollout.inference.gpus import query_gpus
from tools.bench.against_trl.samples import Load, configuration, load
from tools.bench.figure import Figure
from tools.bench.fp8.servers import formats, require_deep_gemm
from tools.bench.gpu import Scene
from tools.bench.gpu_runs import run

SIZE = Load(answers=16, new_tokens=256, steps=6)
"""512 requests at once. With two steps a host that is slow for ten seconds decides the result."""
WARM_UP_STEPS = 5
"""In which an FP8 server compiles kernels for the numbers of rows that it meets."""
PARTS = ("wait_for_rollout", "update", "push")


def loop(scene: Scene) -> Iterator[Figure]:
    """Yield trained tokens/s and parts of a step, medians, with truncated importance weights; of 7B the 12 layers that
    one GPU trains."""
    require_deep_gemm(scene)
    scene = replace(scene, shape="7B_12_layers") if scene.shape == "7B" else scene
    size = SIZE if query_gpus() else load()
    measured: list[dict[str, float]] = []
    for weight_format in formats():
        config = {**configuration(scene, size), "generator.weight_format": weight_format, "algorithm.correction": "tis"}
        config["exp_ctrl.benchmark_steps"] = WARM_UP_STEPS + size.steps
        rows = run(scene, f"loop-{weight_format}", config)[WARM_UP_STEPS:]
        rate = median(row["n_valid_tokens"] / row["time/step"] for row in rows)
        parts = {f"{part}_seconds": median(row[f"time/{part}"] for row in rows) for part in PARTS}
        measured.append({"tokens_per_second": rate, **parts})
        print(f"{weight_format}: {measured[-1]}", flush=True)
    for name, value in measured[-1].items():
        yield Figure(
            name=f"fp8.{scene.shape}_loop_{name}", value=value, unit="s" if name.endswith("_seconds") else "tokens/s",
            baseline=measured[0][name] if len(measured) > 1 else None, target="",
        )  # fmt: skip
