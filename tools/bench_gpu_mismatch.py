"""Do trainer and server agree on log-probabilities? The last measurement of `python -m tools.bench gpu` with a server.

Weights are random, so this is the noise of the format and of unlike kernels, not that of a trained model.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from rollout.sglang_generator import SGLangGenerator
from rollout.sglang_gpus import query_gpus
from rollout.types import Completion, GenerateRequest, SamplingParams
from tools.bench_gpu import Figure, Scene, make_engine, trainer_world
from tools.bench_gpu_servers import generator, load, prompts, push_once, sender, server_settings

logger = logging.getLogger(__name__)


def mismatch(scene: Scene) -> Iterator[Figure]:
    """What the server says of its tokens against what the trainer says: at the start, and after each of 20 updates."""
    num_gpus = len(query_gpus())
    gpu = None if not num_gpus else min(1, num_gpus - 1)
    with trainer_world() as (parallel, device):
        engine = make_engine(scene, parallel, device)
        yield from asyncio.run(_mismatch(scene, engine, device, gpu, colocated=num_gpus == 1))


async def _mismatch(scene: Scene, engine: Any, device: Any, gpu: int | None, *, colocated: bool) -> list[Figure]:
    from core.losses import ppo_loss

    settings = server_settings(scene, gpu, mem_fraction_static=0.4) if gpu is not None else server_settings(scene, gpu)
    if colocated:
        settings = replace(settings, colocated=True)
    loss = partial(
        ppo_loss, eps_clip=0.2, behave_imp_weight_cap=5.0, kl_coeff=0.0, kl_estimator="k3", entropy_coeff=0.0
    )
    async with generator(settings, "in_place") as served:
        beside = colocated or gpu is None
        sending = sender(scene, device, 1 << 30, beside=beside)
        address = replace(served.address, trainer_ranks=(0,)) if beside else served.address
        await asyncio.to_thread(sending.connect, [address])
        await push_once([served], sending, engine, 1, 1 << 30, verify=True)
        count = load().in_flight
        batch = await _sampled(scene, served, 1, count, 256 if gpu is not None else 16)
        first, tokens = _difference(engine, batch), int(batch.loss_mask.sum())
        logger.info("at the start: %.5f nats over %d tokens", first, tokens)
        later = []
        for version in range(2, 22):
            engine.train_step(batch, loss, max_tokens_per_mb=32768)
            await push_once([served], sending, engine, version, 1 << 30, verify=True)  # raises where a checksum differs
            batch = await _sampled(scene, served, version, count // 8, 256 if gpu is not None else 16)
            later.append(_difference(engine, batch))
            logger.info("version %d: %.5f nats", version, later[-1])
        await asyncio.to_thread(sending.close)
        trainer_off, server_off = _against_fp32(scene, engine, device, batch, count // 8)
    name = f"mismatch.{scene.shape}"
    return [
        Figure(name=f"{name}_at_start", value=first, unit="nats", baseline=None, target="<= 0.01"),
        Figure(name=f"{name}_trainer_against_fp32", value=trainer_off, unit="nats", baseline=None, target=""),
        Figure(name=f"{name}_server_against_fp32", value=server_off, unit="nats", baseline=None, target=""),
        Figure(name=f"{name}_num_tokens", value=float(tokens), unit="tokens", baseline=None, target=">= 100000"),
        Figure(name=f"{name}_worst_of_20_updates", value=max(later), unit="nats", baseline=first, target="no drift"),
        Figure(name=f"{name}_after_20_updates", value=later[-1], unit="nats", baseline=first, target="no drift"),
    ]


async def _sampled(scene: Scene, served: SGLangGenerator, version: int, count: int, length: int) -> Any:
    from mcore_adapter.batch import PackedBatch

    given = prompts(scene, count, seed=version)
    sampling = SamplingParams(max_new_tokens=length)
    completions: list[Completion] = await asyncio.gather(
        *(
            served.generate(GenerateRequest(request_id=f"{version}-{i}", prompt_ids=p, sampling=sampling))
            for i, p in enumerate(given)
        )
    )
    ids = [np.concatenate([p, c.token_ids]) for p, c in zip(given, completions, strict=True)]
    lens = torch.tensor([len(x) for x in ids])
    blank = [np.zeros(len(p), np.float32) for p in given]
    logprobs = np.concatenate([x for p, c in zip(blank, completions, strict=True) for x in (p, c.logprobs)])
    mask = np.concatenate([x for p, c in zip(blank, completions, strict=True) for x in (p > 0, c.logprobs <= 0)])
    sampled = torch.from_numpy(logprobs)
    advantages = torch.randn(len(sampled), generator=torch.Generator().manual_seed(version))
    return PackedBatch(
        token_ids=torch.from_numpy(np.concatenate(ids).astype(np.int64)),
        cu_seqlens=torch.cat((torch.zeros(1, dtype=torch.int64), lens.cumsum(0))),
        loss_mask=torch.from_numpy(mask),
        fields={"rollout_logprobs": sampled, "old_logprobs": sampled, "advantages": advantages},
    )


def _difference(engine: Any, batch: Any) -> float:
    """Mean absolute difference over the sampled tokens, nats."""
    return float((_trainers(engine, batch) - batch.fields["rollout_logprobs"]).abs()[batch.loss_mask].mean())


def _trainers(engine: Any, batch: Any) -> torch.Tensor:
    """[T] log-probabilities by the trainer."""
    shard = engine.logprobs(batch, max_tokens_per_mb=32768)
    ours = torch.zeros(batch.num_tokens)
    ours[batch.token_index(shard.sequences)] = shard.values.cpu()
    return ours


@torch.no_grad()
def _against_fp32(scene: Scene, engine: Any, device: Any, batch: Any, count: int) -> tuple[float, float]:
    """How far the trainer and the server each are from the same weights computed in float32 by transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    part = batch.select(range(count))
    ours, theirs = _trainers(engine, part), part.fields["rollout_logprobs"]
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
