"""Do trainer and server agree on log-probabilities? The last measurement of `python -m tools.bench gpu` with a server.

First with random weights, then with the shape trained for a minute on the worked solutions of GSM8K, if SLIPSTREAM_DATA
is set: mostly sure of its next token, as models that are trained further are.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core.algorithms.losses import policy_loss, sft_loss
from core.algorithms.settings import AlgorithmSettings
from mcore_adapter.data.batch import PackedBatch
from rollout.data.rows import read_examples
from rollout.inference.gpus import query_gpus
from rollout.inference.sglang.generator import SGLangGenerator
from rollout.types import Completion, GenerateRequest, SamplingParams
from tools.bench.figure import Figure
from tools.bench.gpu import Scene, make_engine, trainer_world
from tools.bench.gpu_push import drive, push_once, sender
from tools.bench.gpu_servers import generator, load, prompts, server_settings
from tools.scratch_model import EOS, train_tokenizer

NUM_ROWS = 1500
"""Rows of the data to learn by heart; a minute is not enough for more."""

logger = logging.getLogger(__name__)


def mismatch(scene: Scene) -> Iterator[Figure]:
    """Yield the difference between the server's and the trainer's log-probabilities: at the start, and after each of 20
    updates."""
    with trainer_world() as (parallel, device):
        optimizer = {"lr": 3e-4, "min_lr_ratio": 1 / 300, "lr_scheduler_type": "cosine", "eps": 1e-8}
        optimizer |= {"warmup_steps_proportion": 0.1, "total_steps": num_lessons()}
        engine = make_engine(scene, parallel, device, optimizer=optimizer, recompute="selective")
        yield from drive(_mismatch(scene, engine, device, scene.server_gpus[0], colocated=scene.colocated))


def num_lessons() -> int:
    return 240 if query_gpus() else 5


def corpus(scene: Scene) -> np.ndarray | None:
    """Return questions with their answers end to end, tokenised; None without the data."""
    path = Path(os.environ.get("SLIPSTREAM_DATA", "/nonexistent")) / "gsm8k" / "train.jsonl"
    if not path.exists():
        return None
    texts = [f"{row.prompt}\n{row.answer}{EOS}" for row in read_examples(path)[:NUM_ROWS]]
    tokenizer = train_tokenizer(texts, min(8192, scene.vocab_size))
    return np.array(tokenizer("".join(texts))["input_ids"], np.int32)


def learn(engine: Any, text: np.ndarray) -> float:
    """Train on pieces of the text; the loss at the end, nats."""
    length, count = (1024, 16) if query_gpus() else (64, 2)
    rng = np.random.default_rng(0)
    mask = torch.ones(count, length, dtype=torch.bool)
    mask[:, 0] = False
    losses = []
    for _ in range(num_lessons()):
        starts = rng.integers(0, len(text) - length, count)
        ids = np.stack([text[start : start + length] for start in starts])
        batch = PackedBatch(
            token_ids=torch.from_numpy(ids.astype(np.int64)).flatten(),
            cu_seqlens=torch.arange(count + 1) * length,
            loss_mask=mask.flatten(),
        )
        losses.append(engine.train_step(batch, sft_loss, max_tokens_per_mb=16384)["nll"])
    return float(np.mean(losses[-5:]))


async def _mismatch(
    scene: Scene, engine: Any, device: Any, gpu: int | None, *, colocated: bool
) -> AsyncIterator[Figure]:
    settings = server_settings(scene, gpu, mem_fraction_static=0.4) if gpu is not None else server_settings(scene, gpu)
    if colocated:
        settings = replace(settings, colocated=True)
    loss = partial(policy_loss, settings=AlgorithmSettings(correction="decoupled", behave_imp_weight_cap=5.0))
    async with generator(settings, "in_place") as served:
        beside = colocated or gpu is None
        sending = sender(scene, device, 1 << 30, beside=beside)
        address = replace(served.endpoint, trainer_ranks=(0,)) if beside else served.endpoint
        await asyncio.to_thread(sending.connect, [address])
        buckets = partial(engine.iter_hf_weights, 1 << 30)
        await push_once([served], sending, buckets, 1, verify=True)
        count = load().in_flight
        length = 256 if gpu is not None else 16
        batch = await sampled(served, 1, prompts(scene, count), length)
        for figure in _figures(f"mismatch.{scene.shape}_random", engine, device, scene, batch):
            yield figure
        text = corpus(scene)
        if text is not None:
            loss_of_text = await asyncio.to_thread(in_device, device, learn, engine, text)
            yield Figure(
                name=f"mismatch.{scene.shape}_trained_loss", value=loss_of_text, unit="nats", baseline=None, target=""
            )
        rng = np.random.default_rng(1)

        def asked(number: int) -> list[np.ndarray]:
            if text is None:
                return prompts(scene, number, seed=int(rng.integers(1 << 30)))
            width = load().prompt_tokens
            return [text[start : start + width] for start in rng.integers(0, len(text) - width, number)]

        await push_once([served], sending, buckets, 2, verify=True)
        batch = await sampled(served, 2, asked(count), length)
        name = f"mismatch.{scene.shape}_{'trained' if text is not None else 'untrained'}"
        for figure in _figures(name, engine, device, scene, batch):
            yield figure
        first, later = difference(engine, batch), []
        for version in range(3, 23):
            engine.train_step(batch, loss, max_tokens_per_mb=32768)
            await push_once([served], sending, buckets, version, verify=True)  # raises where a checksum differs
            batch = await sampled(served, version, asked(count // 8), length)
            later.append(difference(engine, batch))
            logger.info("version %d: %.5f nats", version, later[-1])
        await asyncio.to_thread(sending.close)
    yield Figure(name=f"{name}_worst_of_20_updates", value=max(later), unit="nats", baseline=first, target="no drift")
    yield Figure(name=f"{name}_after_20_updates", value=later[-1], unit="nats", baseline=first, target="no drift")


def in_device(device: Any, function: Callable[..., Any], *args: Any) -> Any:
    with device.activate():
        return function(*args)


def _figures(name: str, engine: Any, device: Any, scene: Scene, batch: Any) -> Iterator[Figure]:
    """Yield the difference over `batch`, the server's mean surprisal of its tokens, and each side against float32."""

    def figure(what: str, value: float, unit: str = "nats", target: str = "") -> Figure:
        return Figure(name=f"{name}_{what}", value=value, unit=unit, baseline=None, target=target)

    yield figure("at_start", difference(engine, batch), target="<= 0.01")
    yield figure("num_tokens", float(batch.loss_mask.sum()), "tokens", ">= 100000")
    yield figure("mean_surprise", -float(batch.fields["rollout_logprobs"][batch.loss_mask].mean()))
    trainer_off, server_off = _against_fp32(scene, engine, device, batch, min(32, batch.num_sequences))
    yield figure("trainer_against_fp32", trainer_off)
    yield figure("server_against_fp32", server_off)


async def sampled(served: SGLangGenerator, version: int, given: list[np.ndarray], length: int) -> Any:
    """Return answers of `length` tokens to the given prompts as a batch for the trainer."""
    sampling = SamplingParams(max_new_tokens=length)
    completions: list[Completion] = await asyncio.gather(
        *(
            served.generate(GenerateRequest(request_id=f"{version}-{i}", prompt_ids=p.tolist(), sampling=sampling))
            for i, p in enumerate(given)
        )
    )
    ids = [np.concatenate([p, c.token_ids]) for p, c in zip(given, completions, strict=True)]
    lens = torch.tensor([len(x) for x in ids])
    blank = [np.zeros(len(p), np.float32) for p in given]
    logprobs = np.concatenate([x for p, c in zip(blank, completions, strict=True) for x in (p, c.logprobs)])
    mask = np.concatenate([x for p, c in zip(blank, completions, strict=True) for x in (p > 0, c.logprobs <= 0)])
    theirs = torch.from_numpy(logprobs)
    advantages = torch.randn(len(theirs), generator=torch.Generator().manual_seed(version))
    return PackedBatch(
        token_ids=torch.from_numpy(np.concatenate(ids).astype(np.int64)),
        cu_seqlens=torch.cat((torch.zeros(1, dtype=torch.int64), lens.cumsum(0))),
        loss_mask=torch.from_numpy(mask),
        fields={"rollout_logprobs": theirs, "old_logprobs": theirs, "advantages": advantages},
    )


def difference(engine: Any, batch: Any) -> float:
    """Return the mean absolute difference over the sampled tokens, nats."""
    return float((trainer_logprobs(engine, batch) - batch.fields["rollout_logprobs"]).abs()[batch.loss_mask].mean())


def trainer_logprobs(engine: Any, batch: Any) -> torch.Tensor:
    """Return the log-probabilities by the trainer: [T]."""
    shard = engine.logprobs(batch, max_tokens_per_mb=32768)
    ours = torch.zeros(batch.num_tokens)
    ours[batch.token_index(shard.sequences)] = shard.values.cpu()
    return ours


@torch.no_grad()
def _against_fp32(scene: Scene, engine: Any, device: Any, batch: Any, count: int) -> tuple[float, float]:
    """Return how far the trainer and the server each are from the same weights computed in float32 by transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    part = batch.select(range(count))
    ours, theirs = trainer_logprobs(engine, part), part.fields["rollout_logprobs"]
    with device.torch_device:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(scene.model), dtype=torch.float32).eval()
    for bucket in engine.iter_hf_weights(1 << 30):
        model.load_state_dict({name: t.float() for name, t in bucket.items()}, strict=False)
    exact = torch.zeros(part.num_tokens)
    bounds = part.cu_seqlens.tolist()
    for begin, end in zip(bounds, bounds[1:], strict=False):
        ids = part.token_ids[begin:end].to(device.torch_device)
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        exact[begin + 1 : end] = logprobs.gather(1, ids[1:, None])[:, 0].cpu()
    mask = part.loss_mask
    return float((ours - exact).abs()[mask].mean()), float((theirs - exact).abs()[mask].mean())
