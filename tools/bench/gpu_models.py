"""The measurements of `python -m tools.bench gpu` of whole models: checkpoints, conversion, evaluation."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mcore_adapter.checkpoint.outcome import wait_for_outcome
from rollout.data.encoder import BOXED_INSTRUCTION, Encoder, PromptFormat
from rollout.data.source import DataSource
from rollout.inference.gpus import query_gpus
from rollout.inference.router import requests_at_once
from tools.bench.data import convert as bench_convert
from tools.bench.figure import Figure
from tools.bench.gpu import Scene, config_of, make_engine, ppo_update, random_batch, seconds_of, trainer_world
from tools.bench.gpu_servers import ask_plainly, generator, server_settings
from tools.eval.data import data_folders, find_benchmark, make_prompts
from tools.eval.meter import ALL
from tools.scratch_model import train_tokenizer

logger = logging.getLogger(__name__)

NUM_CHECKPOINTS = 2
BENCHMARKS = ("math_500", "aime24", "amc23", "gsm8k")
MAX_RUNNING = 256
"""What tools.eval runs at once by default."""


def checkpoint(scene: Scene) -> Iterator[Figure]:
    """Yield how long the trainer stops for a checkpoint of weights, masters and moments, and how long an update takes
    while threads write it. One GPU."""
    small = not query_gpus()
    with trainer_world() as (parallel, device), ThreadPoolExecutor(1) as pool:
        batch = random_batch(scene, [64] * 2 if small else [2048] * 16)
        engine = make_engine(scene, parallel, device, recompute="selective")
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
        name=f"{name}_update_while_writing", value=float(np.median(beside)), unit="s", baseline=float(np.median(quiet)),
        target="<= 1.05x",
    )  # fmt: skip
    yield Figure(name=f"{name}_size", value=gigabytes, unit="GB", baseline=None, target="")
    yield Figure(name=f"{name}_until_written", value=float(np.median(writing)), unit="s", baseline=None, target="")


def convert(scene: Scene) -> Iterator[Figure]:
    """Yield the rate of converting a model of the shape into a checkpoint and back, against a plain copy. Uses no
    GPU."""
    yield from bench_convert.compare(
        scene.folder, config_of(scene.shape), torch.bfloat16, name=f"convert.{scene.shape}", rounds=2
    )


def evaluation(scene: Scene) -> Iterator[Figure]:
    """Yield the rate of `tools.eval` of a checkpoint (random weights, converted both ways) on four real sets, against
    the same requests to a server with the same settings: on both sides one pool for all sets, from the first request to
    the last answer. Needs SLIPSTREAM_DATA. One GPU, the only one that it may see."""
    model, checkpoint = scene.folder / "evaluated", scene.folder / "evaluated-megatron"
    bench_convert.write_random(model, config_of(scene.shape), torch.bfloat16)
    _add_tokenizer(model, scene.vocab_size)
    bench_convert.run("--checkpoint_path", model, "--output_path", checkpoint, "--to-megatron")
    yield from _evaluate(scene, model, checkpoint, 512 if query_gpus() else 8)


def _num_questions() -> int:
    """Return the maximum number of questions of each set."""
    return 500 if query_gpus() else 4


def _add_tokenizer(model: Path, vocab_size: int) -> None:
    rows = (Path(os.environ["SLIPSTREAM_DATA"]) / "gsm8k" / "train.jsonl").read_text().splitlines()[:2000]
    train_tokenizer([json.loads(row)["question"] for row in rows], min(8192, vocab_size)).save_pretrained(model)


def _evaluate(scene: Scene, model: Path, checkpoint: Path, length: int) -> Iterator[Figure]:
    output, log = scene.folder / "evaluation", scene.folder / "evaluation.log"
    small = not query_gpus()
    words: list[Any] = ["--model_path", checkpoint, "--output_path", output, "--data_names", ",".join(BENCHMARKS)]
    words += ["--n_sampling", 2, "--max_gen_tokens", length, "--reward_workers", 4, "--num_questions", _num_questions()]
    words += ["--generator", "sglang", "--sglang", "max_total_tokens=8192"] if small else []
    words += ["--sglang_python", scene.sglang_python] if scene.sglang_python else []
    command = [sys.executable, "-m", "tools.eval", *map(str, words)]
    with log.open("w") as file:
        subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=True)
    (*_, rate) = re.findall(rf" {ALL}: .* answers, ([\d,]+) tokens/s", log.read_text())
    print(log.read_text()[-1500:], flush=True)
    plain = asyncio.run(_ask_server(scene, model, length))
    yield Figure(
        name=f"eval.{scene.shape}_tokens_per_second", value=float(rate.replace(",", "")), unit="tokens/s",
        baseline=plain, target=">= 0.9x",
    )  # fmt: skip


def _requests(model: Path, name: str, length: int) -> list[dict[str, Any]]:
    """Return the requests of the evaluation for one benchmark."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = make_prompts(
        find_benchmark(name, data_folders(None), DataSource(path="")),
        Encoder(tokenizer, PromptFormat(instruction=BOXED_INSTRUCTION), folder=model),
    )
    stop = {"max_new_tokens": length, "stop_token_ids": [tokenizer.eos_token_id, tokenizer.pad_token_id]}
    sampled = {**stop, "temperature": 0.6, "top_p": 0.95}
    return [
        {"input_ids": prompt.token_ids, "sampling_params": params}
        for prompt in prompts[: _num_questions()]
        for params in ({**stop, "temperature": 0.0}, sampled, sampled)
    ]


async def _ask_server(scene: Scene, model: Path, length: int) -> float:
    """Return tokens/s of the evaluation's requests, sent directly to a server with its settings. A server as SGLang
    starts it, with FlashInfer's sampling, stops responding where greedy and sampled requests meet."""
    server = server_settings(scene, scene.first_gpu if query_gpus() else None)
    flags = {name: value for name, value in server.flags.items() if name != "load_format"}
    at_once = requests_at_once(max_running=MAX_RUNNING, num_generators=1)  # as an evaluation makes them
    async with generator(replace(server, model_path=str(model), max_running=MAX_RUNNING, flags=flags)) as served:
        url = served.endpoint.url
        await ask_plainly(url, _requests(model, "aime24", length), at_once=at_once)  # warm-up
        requests = [request for name in BENCHMARKS for request in _requests(model, name, length)]
        start = time.perf_counter()
        return sum(await ask_plainly(url, requests, at_once=at_once)) / (time.perf_counter() - start)
