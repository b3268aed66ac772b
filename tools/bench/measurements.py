"""Every measurement by device and name, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tools.bench import (
    accuracy,
    convert,
    cpu,
    datapath,
    gpu,
    gpu_experts,
    gpu_mismatch,
    gpu_models,
    gpu_push,
    gpu_ranks,
    gpu_runs,
    gpu_servers,
    spans,
)
from tools.bench.figure import Figure

CPU: dict[str, Callable[[cpu.Scene], Iterator[Figure]]] = {
    "allocation": cpu.allocation,
    "config": cpu.dry_run,
    "update": cpu.train_step,
    "rollout": cpu.generator,
    "producer": cpu.producer,
    "async": cpu.sync_and_async,
    "loop": cpu.loop,
    "memory": cpu.memory,
    "time_to_accuracy": accuracy.time_to_accuracy,
    "datapath": datapath.datapath,
    "convert": convert.both_ways,
    "spans": spans.spans,
}
GPU: dict[str, Callable[[gpu.Scene], Iterator[Figure]]] = {
    "update": gpu.update,
    "options": gpu.options,
    "lengths": gpu.lengths,
    "experts": gpu_experts.experts,
    "rollout": gpu_servers.rollout,
    "push": gpu_push.push,
    "mismatch": gpu_mismatch.mismatch,
    "async": gpu_runs.asynchronous,
    "push_tp": gpu_ranks.push,
    "overlap": gpu_ranks.overlap,
    "checkpoint": gpu_models.checkpoint,
    "convert": gpu_models.convert,
    "eval": gpu_models.evaluation,
}

MEASUREMENTS: dict[str, dict[str, Callable[[Any], Iterator[Figure]]]] = {"cpu": CPU, "gpu": GPU}
SCENES: dict[str, Callable[..., Any]] = {"cpu": cpu.Scene, "gpu": gpu.Scene}
"""Where a device's measurements write, and how large they are."""
