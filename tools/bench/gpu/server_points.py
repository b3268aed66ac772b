"""Measure the throughput of a SGLang server at several loads against the planner's prediction, and its cache.

    python -m tools.bench.gpu.server_points --predict benchmarks/predictions/servers.json   # before, no torch
    python -m tools.bench.gpu.server_points --shape 7B --against benchmarks/predictions/servers.json --output FILE

A load is a number of requests that begin at once, the length of their prompts, and that of their answers, which all
end at the same token. What is compared is the rate of new tokens from the first request to the last answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allocation import ParallelLayout
from core.planning.gpus import GPUS
from core.planning.memory import plan_servers
from core.planning.rates import calibration_of, wave_seconds
from core.planning.scene import Scene, Servers
from model_specs.hf_config import parse_config
from rollout.inference.gpus import query_gpus
from tools.bench.gpu.plan import gpu_name
from tools.bench.gpu.shapes import SHAPES

MAX_RUNNING = 520


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests that begin at once, and tokens of each."""

    running: int
    prompt: int
    answer: int

    def __str__(self) -> str:
        return f"{self.running} x ({self.prompt} + {self.answer})"


LOADS = (
    Load(running=128, prompt=128, answer=512),
    Load(running=64, prompt=2048, answer=512),
    Load(running=512, prompt=128, answer=256),
    Load(running=32, prompt=8192, answer=256),
    Load(running=256, prompt=128, answer=512),
    Load(running=32, prompt=128, answer=512),
)
TRIAL = (Load(running=4, prompt=16, answer=8), Load(running=2, prompt=32, answer=16))
"""In place of LOADS without GPUs."""


def predictions() -> dict[str, Any]:
    """Return tokens/s at every load and the tokens of the cache, by shape and GPU with a calibration."""
    return {
        shape: {gpu: one for gpu in GPUS if (one := _predicted(shape, gpu)) is not None}
        for shape in SHAPES
        if shape != "tiny"
    }


def _predicted(shape: str, gpu: str) -> dict[str, float] | None:
    calibration = calibration_of(gpu)
    if calibration is None:
        return None
    config = parse_config(SHAPES[shape])
    servers = Servers(
        backend="sglang", config=config, layout=ParallelLayout(), itemsize=2, fp8=False, max_running=MAX_RUNNING,
        share=None, colocated_share=0.6, on_gpu=True,
    )  # fmt: skip
    scene = Scene(
        gpu=GPUS[gpu], on_gpu=True, engines=(), servers=servers, shares_gpus=False, n_nodes=1, n_gpus_per_node=1,
        bucket_bytes=0, sequences=0, prompts=0, group_size=1, minibatches=1, prompt_tokens=0, answer_tokens=0,
        max_staleness=0, writes_checkpoints=False,
    )  # fmt: skip
    rates = {}
    for load in LOADS:
        seconds = wave_seconds(servers, calibration, running=load.running, prompt=load.prompt, answer=load.answer)
        rates[str(load)] = round(load.running * load.answer / seconds, 1)
    return {"cache": float(plan_servers(scene, servers).tokens), **rates}


async def measured(shape: str, folder: Path, *, seconds: float, python: Path) -> dict[str, float]:
    """Start a server on the first GPU and return its tokens/s at each load that begins within `seconds`, and the tokens
    of its cache. Without a GPU the loads are small."""
    from tools.bench.gpu.servers import generator, server_settings
    from tools.bench.gpu.trainer import Scene as Bench

    end = time.monotonic() + seconds
    gpu = 0 if query_gpus() else None
    scene = Bench(folder=folder, shape=shape, sglang_python=python)
    found: dict[str, float] = {}
    async with generator(server_settings(scene, gpu)) as server:
        url = server.endpoint.url
        found["cache"] = float(await _cache_tokens(url))
        print(f"cache: {found['cache']:,.0f} tokens", flush=True)
        for load in LOADS if gpu is not None else TRIAL:
            await _wave(scene, url, load, seed=1, answer=8)  # kernels for these sizes
            if time.monotonic() > end:
                print("no time is left for more", flush=True)
                break
            found[str(load)] = load.running * load.answer / await _wave(scene, url, load, seed=2, answer=load.answer)
            print(f"{load}: {found[str(load)]:,.0f} tokens/s", flush=True)
    return found


async def _wave(scene: Any, url: str, load: Load, *, seed: int, answer: int) -> float:
    """Return the seconds of one wave of requests."""
    import numpy as np

    from tools.bench.gpu.servers import ask_plainly

    rng = np.random.default_rng(seed)
    sampling = {"max_new_tokens": answer, "temperature": 1.0, "ignore_eos": True}
    bodies: list[dict[str, object]] = [
        {"input_ids": prompt, "return_logprob": True, "sampling_params": sampling}
        for prompt in rng.integers(0, scene.vocab_size, (load.running, load.prompt), dtype=np.int32)
    ]
    start = time.perf_counter()
    await ask_plainly(url, bodies, at_once=load.running)
    return time.perf_counter() - start


async def _cache_tokens(url: str) -> int:
    """Return what the server reports as the tokens of its cache, 0 where it does not."""
    import aiohttp

    async with aiohttp.ClientSession(url) as session, session.get("/server_info") as response:
        return next((int(value) for value in _values(await response.json(), "max_total_num_tokens")), 0)


def _values(data: Any, name: str) -> Iterator[Any]:
    """Yield the values of a key anywhere in JSON."""
    if isinstance(data, dict):
        if isinstance(data.get(name), int):
            yield data[name]
        for value in data.values():
            yield from _values(value, name)
    elif isinstance(data, list):
        for value in data:
            yield from _values(value, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", type=Path, metavar="FILE", help="write what is computed, measure nothing")
    parser.add_argument("--against", type=Path, metavar="FILE", help="predictions to compare with; default: today's")
    parser.add_argument("--shape", choices=list(SHAPES), default="1.5B", help="shape of the model")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no load after so many seconds")
    parser.add_argument("--sglang-python", type=Path, default=Path(sys.executable), help="interpreter with SGLang")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write what was measured as JSON, too")
    given = parser.parse_args()
    if given.predict is not None:
        given.predict.write_text(json.dumps(predictions(), indent=1) + "\n")
        return
    gpu = gpu_name()
    expected = json.loads(given.against.read_text()) if given.against else predictions()
    guesses = expected.get(given.shape, {}).get(gpu, {})
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measured(given.shape, Path(folder), seconds=given.seconds, python=given.sglang_python))
    print("| load | predicted | measured | error |\n|---|---|---|---|")
    for name, value in found.items():
        guess = guesses.get(name)
        shown = [f"{guess:,.0f}", f"{value:,.0f}", f"{guess / value - 1:+.1%}"] if guess else ["", f"{value:,.0f}", ""]
        print("|", " | ".join([f"{given.shape} {name}", *shown]), "|")
    if given.output is not None:
        given.output.write_text(json.dumps({"shape": given.shape, "gpu": gpu, "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
