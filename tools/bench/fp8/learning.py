"""The demo's additions, learnt from answers of a server in bfloat16 and of one in FP8, from these also by a trainer in
FP8: held-out accuracy by step.

One supervised warm-up, then GRPO from its weights with each side and seed: 32 prompts of 8 answers a step, one update,
with truncated importance weights between the trainer and the server. Engine, push, server and loss are those of a run.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from core.algorithms.losses import policy_loss, sft_loss
from core.algorithms.settings import AlgorithmSettings
from mcore_adapter.data.batch import PackedBatch
from mcore_adapter.settings import EngineSettings, Fp8Recipe, OptimizerSettings
from rollout.inference.gpus import query_gpus
from rollout.types import Completion, GenerateRequest, Generator, SamplingParams
from tools.bench.figure import Figure
from tools.bench.fp8.servers import Served, serving
from tools.bench.gpu import Scene, trainer_world
from tools.bench.gpu_mismatch import trainer_logprobs
from tools.bench.gpu_push import drive
from tools.demo.data import EOS, NUM_HELD_OUT, answer_of, make_tokenizer, problems

GROUP = 8
TRAINER: Fp8Recipe = "blockwise"
"""FP8 in the trainer: factors for blocks, as in the server."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is done; less in a trial on the CPU."""

    steps: int = 80
    prompts: int = 32
    held_out: int = 256
    every: int = 20
    """Steps between evaluations."""
    lessons: int = 20
    """Supervised updates between evaluations of the warm-up."""
    warm_accuracy: float = 0.35
    """Where the warm-up ends."""
    seeds: tuple[int, ...] = (1, 2)
    """Of the order of prompts; curves are means over them."""


class Server(Protocol):
    """A generator, and the way of weights into it."""

    @property
    def generator(self) -> Generator: ...

    async def push(self, engine: Any, version: int, *, verify: bool) -> object: ...


class Sums:
    """The problems as tokens."""

    def __init__(self) -> None:
        self._tokenizer = make_tokenizer()
        rows = [(row["prompt"], answer_of(row)) for row in problems()]
        self.held_out, self.train = rows[:NUM_HELD_OUT], rows[NUM_HELD_OUT:]
        self.seeds = itertools.count()
        self.eos: int = self._tokenizer.convert_tokens_to_ids(EOS)

    def ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def text(self, completion: Completion) -> str:
        return str(self._tokenizer.decode(completion.token_ids, skip_special_tokens=True))


def learning(scene: Scene) -> Iterator[Figure]:
    """Yield the accuracy with FP8 at each evaluation, in the server and at both ends, with that of bfloat16 as
    baseline. One GPU."""
    trial = Size(steps=2, prompts=2, held_out=4, every=1, lessons=1, warm_accuracy=0.0, seeds=(1,))
    size = Size() if query_gpus() else trial
    with trainer_world() as (parallel, device):
        yield from drive(_measured(replace(scene, shape="sums"), parallel, device, size))


async def _measured(scene: Scene, parallel: Any, device: Any, size: Size) -> AsyncIterator[Figure]:
    from mcore_adapter.engine import MegatronEngine

    def engine_of(path: str, lr: float, **changes: Any) -> Any:
        settings = EngineSettings(hf_path=path, dtype="bfloat16", seed=1, **changes)
        optimizer = OptimizerSettings(lr=lr, total_steps=10_000, eps=1e-8, beta2=0.99)
        return MegatronEngine(parallel=parallel, device=device, settings=settings, optimizer=optimizer)

    sums = Sums()
    async with serving(scene, device) as both:
        warm = engine_of(str(scene.model), 1e-3, init_from_scratch=True)
        await warm_up(warm, both[0], sums, size)
        folder = str(scene.folder / "warm")
        warm.save_hf(folder, tokenizer_from=str(scene.model))

        async def curve(served: Served, **changes: Any) -> list[float]:
            logger.info("%s in the server, %s in the trainer", served.weight_format, changes)
            return await mean_curve(partial(engine_of, folder, 2e-4, **changes), served, sums, size)

        curves = [await curve(served) for served in both]
        for figure in figures("fp8.sums", curves, size):
            yield figure
        if len(both) > 1:
            for figure in figures("fp8.sums_both_ends", [curves[0], await curve(both[1], fp8=TRAINER)], size):
                yield figure


def figures(name: str, curves: Sequence[Sequence[float]], size: Size) -> Iterator[Figure]:
    """Yield the accuracies of the last curve against those of the first, where there are two."""
    for i, step in enumerate(range(0, size.steps + 1, size.every)):
        values = [curve[i] for curve in curves]
        yield Figure(
            name=f"{name}_accuracy_after_{step}_steps", value=values[-1], unit="",
            baseline=values[0] if len(values) > 1 else None, target="",
        )  # fmt: skip


async def warm_up(engine: Any, served: Server, sums: Sums, size: Size) -> None:
    """Imitate answers until some held-out problems are solved."""
    rng = np.random.default_rng(0)
    for version in range(1, 40):
        for _ in range(size.lessons):
            rows = [sums.train[i] for i in rng.integers(0, len(sums.train), 4 * size.prompts)]
            pairs = [(sums.ids(prompt), [*sums.ids(answer), sums.eos]) for prompt, answer in rows]
            engine.train_step(_packed(pairs, {}), sft_loss, max_tokens_per_mb=16384)
        await served.push(engine, version, verify=False)
        if await _accuracy(served, sums, size) >= size.warm_accuracy:
            return


async def mean_curve(make_engine: Callable[[], Any], served: Server, sums: Sums, size: Size) -> list[float]:
    """Return the means over the seeds of learn(), each with an engine of its own."""
    of = [await learn(make_engine(), served, sums, size, seed=seed) for seed in size.seeds]
    logger.info("accuracies seed by seed: %s", of)
    return list(np.mean(of, axis=0))


async def learn(engine: Any, served: Server, sums: Sums, size: Size, *, seed: int = 1) -> list[float]:
    """Return the held-out accuracy before the first step and after each `size.every` steps."""
    rng, first = np.random.default_rng(seed), 100
    loss = partial(policy_loss, settings=AlgorithmSettings(correction="tis"))
    curve: list[float] = []
    for step in range(size.steps + 1):
        await served.push(engine, first + step, verify=step == 0)
        if step % size.every == 0:
            curve.append(await _accuracy(served, sums, size))
        if step == size.steps:
            break
        rows = [sums.train[i] for i in rng.integers(0, len(sums.train), size.prompts) for _ in range(GROUP)]
        completions = await _answers(served, sums, [prompt for prompt, _ in rows], temperature=1.0)
        solved = [sums.text(c) == answer for c, (_, answer) in zip(completions, rows, strict=True)]
        batch = batch_of(sums, rows, completions, torch.tensor(solved, dtype=torch.float32))
        old = trainer_logprobs(engine, batch)
        engine.train_step(
            replace(batch, fields={**batch.fields, "old_logprobs": old}), loss, max_tokens_per_mb=16384
        )  # fmt: skip
    return curve


async def _accuracy(served: Server, sums: Sums, size: Size) -> float:
    rows = sums.held_out[: size.held_out]
    completions = await _answers(served, sums, [prompt for prompt, _ in rows], temperature=0.0)
    return float(np.mean([sums.text(c) == answer for c, (_, answer) in zip(completions, rows, strict=True)]))


async def _answers(served: Server, sums: Sums, prompts: Sequence[str], *, temperature: float) -> list[Completion]:
    sampling = SamplingParams(max_new_tokens=6, temperature=temperature, stop_token_ids=(sums.eos,))
    requests = [
        GenerateRequest(request_id=str(seed), prompt_ids=sums.ids(prompt), sampling=sampling, seed=seed)
        for seed, prompt in zip(sums.seeds, prompts, strict=False)
    ]
    return list(await asyncio.gather(*map(served.generator.generate, requests)))


def batch_of(
    sums: Sums, rows: Sequence[tuple[str, str]], completions: Sequence[Completion], rewards: torch.Tensor
) -> PackedBatch:
    """Return the answers with group-normalised advantages; rewards: [prompts * GROUP]."""
    groups = rewards.view(-1, GROUP)
    normalised = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten().tolist()
    pairs = [(sums.ids(prompt), c.token_ids.tolist()) for (prompt, _), c in zip(rows, completions, strict=True)]
    theirs = [[0.0] * len(p) + c.logprobs.tolist() for (p, _), c in zip(pairs, completions, strict=True)]
    advantages = [[a] * (len(p) + len(c)) for a, (p, c) in zip(normalised, pairs, strict=True)]
    fields = {"rollout_logprobs": theirs, "advantages": advantages}
    return _packed(pairs, {name: torch.tensor([x for row in of for x in row]) for name, of in fields.items()})


def _packed(pairs: Sequence[tuple[list[int], list[int]]], fields: dict[str, torch.Tensor]) -> PackedBatch:
    """Return (prompt, answer) pairs end to end, answers trained."""
    ids = [x for prompt, answer in pairs for x in (*prompt, *answer)]
    mask = [x for prompt, answer in pairs for x in ([False] * len(prompt) + [True] * len(answer))]
    lens = torch.tensor([0, *(len(prompt) + len(answer) for prompt, answer in pairs)])
    return PackedBatch(
        token_ids=torch.tensor(ids), cu_seqlens=lens.cumsum(0), loss_mask=torch.tensor(mask), fields=fields
    )  # fmt: skip
