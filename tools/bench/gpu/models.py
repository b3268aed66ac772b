"""The measurements of `python -m tools.bench gpu` of whole models: checkpoints, conversion, evaluation."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from mcore_adapter.checkpoint.outcome import wait_for_outcome
from rollout.inference.gpus import query_gpus
from tools.bench.data import convert as bench_convert
from tools.bench.figure import Figure
from tools.bench.gpu.trainer import Scene, config_of, make_engine, ppo_update, random_batch, seconds_of, trainer_world

logger = logging.getLogger(__name__)

NUM_CHECKPOINTS = 2


def checkpoint(scene: Scene) -> Iterator[Figure]:
    """Yield how long the trainer stops for a checkpoint of weights, masters and moments, and how long an update takes
    while threads write it. One GPU."""
    small = not query_gpus()
    with trainer_world() as (parallel, device), ThreadPoolExecutor(1) as pool:
        batch = random_batch(scene, [64] * 2 if small else [2048] * 16)
        engine = make_engine(scene, parallel, device, gradient_checkpointing="selective")
        engine.prepare_saves()

        def seconds_of_update() -> float:
            return seconds_of(device, lambda: ppo_update(engine, batch, 16384))

        for _ in range(3):
            seconds_of_update()
        stalls, beside, writing = [], [], []
        for number in range(NUM_CHECKPOINTS):
            path = scene.folder / f"checkpoint{number}"
            path.mkdir()
            device.synchronize()
            start = time.perf_counter()
            engine.begin_save(path)
            stalls.append(time.perf_counter() - start)
            logger.info("checkpoint %d: stopped for %.3f s", number, stalls[-1])
            written = pool.submit(wait_for_outcome, path, threading.Event())
            while not written.done():
                beside.append(seconds_of_update())
            written.result()
            writing.append(time.perf_counter() - start)
            logger.info("checkpoint %d: written after %.1f s; updates meanwhile %s", number, writing[-1], beside)
            gigabytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / 1e9
            shutil.rmtree(path)
        quiet = [seconds_of_update() for _ in range(15)]  # nothing is taken, copied or written any more
        logger.info("updates afterwards %s", quiet)
    name = f"checkpoint.{scene.shape}"
    yield Figure(name=f"{name}_first_stall", value=stalls[0], unit="s", baseline=None, target="")
    yield Figure(name=f"{name}_stall", value=max(stalls[1:]), unit="s", baseline=None, target="<= 1.5")
    yield Figure(
        name=f"{name}_update_while_writing",
        value=float(np.median(beside)),
        unit="s",
        baseline=float(np.median(quiet)),
        target="<= 1.05x",
    )
    yield Figure(name=f"{name}_size", value=gigabytes, unit="GB", baseline=None, target="")
    yield Figure(name=f"{name}_until_written", value=float(np.median(writing)), unit="s", baseline=None, target="")


def convert(scene: Scene) -> Iterator[Figure]:
    """Yield the rate of converting a model of the shape into a checkpoint and back, against a plain copy. Uses no
    GPU."""
    yield from bench_convert.compare(
        scene.folder, config_of(scene.shape), torch.bfloat16, name=f"convert.{scene.shape}", rounds=2
    )
