"""Log-probabilities of a trained model: servers in bfloat16 and in FP8 against the trainer, and with updates that the
truncated importance weight corrects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from core.algorithms.losses import policy_loss
from core.algorithms.settings import AlgorithmSettings
from mcore_adapter.settings import EngineSettings
from rollout.inference.gpus import query_gpus
from tools.bench.figure import Figure
from tools.bench.fp8.servers import serving
from tools.bench.gpu import Scene, make_engine, trainer_world
from tools.bench.gpu_mismatch import corpus, difference, in_device, learn, num_lessons, sampled, trainer_logprobs
from tools.bench.gpu_push import drive
from tools.bench.gpu_servers import load, prompts

UPDATES = 5


def mismatch(scene: Scene) -> Iterator[Figure]:
    """Yield the difference to the trainer after it has learnt by heart, and after updates on answers of the FP8 server.
    The servers start meanwhile."""
    with trainer_world() as (parallel, device):
        optimizer = {"lr": 3e-4, "min_lr_ratio": 1 / 300, "lr_scheduler_type": "cosine", "eps": 1e-8}
        optimizer |= {"warmup_steps_proportion": 0.1, "total_steps": num_lessons()}
        engine = make_engine(scene, parallel, device, optimizer=optimizer, recompute="selective")
        yield from drive(_mismatch(scene, engine, parallel, device))


async def _mismatch(scene: Scene, engine: Any, parallel: Any, device: Any) -> AsyncIterator[Figure]:
    text = corpus(scene)

    def name(what: str) -> str:
        return f"fp8.{scene.shape}_mismatch_{'untrained' if text is None else 'trained'}_{what}"

    learning = None if text is None else asyncio.create_task(asyncio.to_thread(in_device, device, learn, engine, text))
    async with serving(scene, device) as both:
        if learning is not None:
            yield Figure(name=name("loss"), value=await learning, unit="nats", baseline=None, target="")
        rng = np.random.default_rng(1)

        def asked(count: int) -> list[np.ndarray]:
            if text is None:
                return prompts(scene, count, seed=int(rng.integers(1 << 30)))
            width = load().prompt_tokens
            return [text[start : start + width] for start in rng.integers(0, len(text) - width, count)]

        count, length = (256, 256) if query_gpus() else (4, 8)
        differences, tails = [], []
        for served in both:
            await served.push(engine, 1, verify=True)
            batch = await sampled(served.generator, 1, asked(count), length)
            differences.append(difference(engine, batch))
            tails.append(_share_truncated(engine, batch))
        plain = differences[0] if len(both) > 1 else None
        yield Figure(name=name("at_start"), value=differences[-1], unit="nats", baseline=plain, target="")
        yield Figure(
            name=name("share_of_tokens_with_w_above_2"), value=tails[-1], unit="",
            baseline=tails[0] if len(both) > 1 else None, target="",
        )  # fmt: skip
        if len(both) > 1:
            exact = await asyncio.to_thread(_block_engine, scene, parallel, device, engine)
            value = difference(exact, batch)
            yield Figure(
                name=name("trainer_in_blockwise_fp8"), value=value, unit="nats", baseline=differences[-1], target=""
            )
            del exact
        loss = partial(policy_loss, settings=AlgorithmSettings(correction="tis", correction_level="token"))
        later = []
        for version in range(2, 2 + UPDATES):
            old = trainer_logprobs(engine, batch)  # the proximal policy: w is old / server
            engine.train_step(
                replace(batch, fields={**batch.fields, "old_logprobs": old}), loss, max_tokens_per_mb=32768
            )  # fmt: skip
            await both[-1].push(engine, version, verify=True)
            batch = await sampled(both[-1].generator, version, asked(count // 4), length)
            later.append(difference(engine, batch))
        yield Figure(
            name=name(f"worst_of_{UPDATES}_updates"), value=max(later), unit="nats", baseline=differences[-1],
            target="no drift",
        )  # fmt: skip


def _block_engine(scene: Scene, parallel: Any, device: Any, engine: Any) -> Any:
    """Return an engine with the same weights that computes in block-wise FP8, as an FP8 server does."""
    from mcore_adapter.engine import MegatronEngine

    folder = str(scene.folder / "trained")
    with device.activate():
        engine.save_hf(folder, tokenizer_from=str(scene.model))
        settings = EngineSettings(hf_path=folder, dtype="bfloat16", fp8="blockwise")
        return MegatronEngine(parallel=parallel, device=device, settings=settings, optimizer=None)


def _share_truncated(engine: Any, batch: Any) -> float:
    """Return the share of tokens whose weight, trainer / server, the default of tis truncates."""
    log_weight = trainer_logprobs(engine, batch) - batch.fields["rollout_logprobs"]
    return float((log_weight.exp() > 2.0)[batch.loss_mask].float().mean())
