"""The measurements of `python -m tools.bench gpu` of the trainer alone, and what all of them share.

Models have random weights: speed does not depend on them. What is compared runs in the same call. Without a GPU,
everything is small.
"""

import gc
import json
import logging
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from allocation import ParallelLayout, parse
from core.algorithms.losses import policy_loss
from core.config.algorithm import AlgorithmSettings
from core.experiments.workers import threads_per_process
from core.launch.trainer_group import PAGE_LOCKING
from mcore_adapter.checkpoint.outcome import wait_for_outcome
from mcore_adapter.data.batch import PackedBatch
from mcore_adapter.data.packing import PackingLayout, pack_microbatch
from mcore_adapter.device import Device, get_device
from mcore_adapter.engine import MegatronEngine
from mcore_adapter.memory.auto import Peak
from mcore_adapter.memory.out_of_memory import StepOutOfMemory
from mcore_adapter.models.bare_loop import BareLoop, Fused
from mcore_adapter.parallel import ParallelState, destroy_parallel, initialize_parallel
from mcore_adapter.settings import EngineConfig, EngineModel, OptimizerConfig
from model_specs.families import parse_config
from rollout.inference.gpus import query_gpus
from tools.bench import SLICE, SMALL, SMALL_EXPERTS, WIDTHS, Figure, Scene
from tools.demo.data import make_tokenizer

PEAK_FLOPS = 989e12
"""Dense bf16 of one H200 by its data sheet."""
WARM_UP, ROUNDS = 2, 5
GB = 1e9

logger = logging.getLogger(__name__)


def model_of(scene: Scene) -> Path:
    """Return a folder with config.json and a tokenizer, without weights, made where it does not exist."""
    path = scene.folder / scene.shape
    if not path.exists():
        make_tokenizer().save_pretrained(path)
        (path / "config.json").write_text(json.dumps(scene.raw))
    return path


def vocab_size(scene: Scene) -> int:
    return parse_config(scene.raw).vocab_size


def flops_per_token(scene: Scene, length: int) -> float:
    """Return the FLOPs of forward and backward of a causal sequence of `length` tokens, without the embedding look-up;
    of experts, the chosen ones."""
    config = parse_config(scene.raw)
    hidden, width = config.hidden_size, config.num_heads * config.head_dim
    attention = hidden * (2 * width + 2 * config.num_kv_heads * config.head_dim)
    if (moe := config.moe) is None:
        mlp = 3 * hidden * config.intermediate_size
    else:
        mlp = hidden * (moe.num_experts + 3 * moe.top_k * moe.intermediate_size)
    matrices = config.num_layers * (attention + mlp) + config.vocab_size * hidden
    return 6 * matrices + 6 * config.num_layers * width * length


def become_rank(*, num_ranks: int) -> None:
    """Give this process what a run gives one of `num_ranks` trainer ranks on a host: environment and CPU threads."""
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", PAGE_LOCKING)
    if query_gpus():
        ranks = parse(f"d{num_ranks}m1p1", n_nodes=1, n_gpus_per_node=num_ranks)
        torch.set_num_threads(threads_per_process(ranks, configured=0, takes_turns=True, gpus=True))


@contextmanager
def trainer_world() -> Iterator[tuple[ParallelState, Device]]:
    """Yield (parallel, device) of a world of one rank, on the first GPU where there is one."""
    become_rank(num_ranks=1)
    device = get_device("auto")
    with device.activate(), tempfile.TemporaryDirectory() as folder:
        init = f"file://{folder}/rendezvous"
        parallel = initialize_parallel(ParallelLayout(), rank=0, world_size=1, init_method=init, device=device, seed=1)
        yield parallel, device
        destroy_parallel()


def make_engine(
    scene: Scene, parallel: ParallelState, device: Device, config: EngineConfig | None = None
) -> MegatronEngine:
    """Return an engine with random weights in bfloat16; of `config`, how it recomputes is used."""
    optimizer = OptimizerConfig(lr=1e-6, weight_decay=0.0, warmup_steps_proportion=0.0)
    config = config or EngineConfig(gradient_checkpointing="selective")
    config = config.model_copy(update={"init_from_scratch": True, "bf16": True, "optimizer": optimizer})
    model = EngineModel(config=config, path=str(model_of(scene)), total_updates=1000)
    return MegatronEngine(model, parallel=parallel, device=device)


def random_batch(vocab_size: int, lens: Sequence[int]) -> PackedBatch:
    """Return sequences of these lengths as a PPO update gets them, every token but the first trained."""
    generator = torch.Generator().manual_seed(0)
    cu_seqlens = torch.tensor([0, *lens]).cumsum(0)
    total = int(cu_seqlens[-1])
    mask = torch.ones(total, dtype=torch.bool)
    mask[cu_seqlens[:-1]] = False
    old = torch.full((total,), -float(np.log(vocab_size)))
    return PackedBatch(
        token_ids=torch.randint(vocab_size, (total,), generator=generator),
        cu_seqlens=cu_seqlens,
        loss_mask=mask,
        fields={"advantages": torch.randn(total, generator=generator), "old_logprobs": old, "rollout_logprobs": old},
    )


def ppo_update(engine: MegatronEngine, batch: PackedBatch, tokens_per_mb: int) -> dict[str, float]:
    """Update on one minibatch as a run does."""
    settings = AlgorithmSettings(correction="decoupled", behave_imp_weight_cap=5.0, entropy_coeff=1e-3)
    loss = partial(policy_loss, settings=settings)
    return engine.train_step(batch, loss, max_tokens_per_mb=tokens_per_mb, with_entropy=True)


def seconds_of(device: Device, step: Callable[[], object]) -> float:
    """Return the seconds from an idle device to an idle device."""
    device.synchronize()
    start = time.perf_counter()
    step()
    device.synchronize()
    return time.perf_counter() - start


def free(device: Device) -> None:
    gc.collect()
    device.empty_cache()


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Updates of one kind: their rate, and the memory of the last one, in bytes."""

    tokens_per_second: float
    peak: float
    parts: dict[str, float]
    """Held before the update, by purpose."""
    activations: Peak | None = None
    """With gradient_checkpointing="auto": the last that were measured."""


def measure(
    engine: MegatronEngine, device: Device, batch: PackedBatch, tokens_per_mb: int, *, updates: int, label: str
) -> Measured:
    """Run updates, log each, and return the median rate of the second half. The first of a size take memory, and
    correct the choice of what is recomputed."""
    seconds = []
    for number in range(updates):
        device.forget_peak()
        seconds.append(seconds_of(device, lambda: ppo_update(engine, batch, tokens_per_mb)))
        stats, activations = device.memory_stats(), engine.recompute_peak
        peak = stats["peak_gib"] * 2**30
        logger.info(
            "%s, update %d: %.2f s, peak %.1f GB, %d times out of cache; %s",
            label,
            number,
            seconds[-1],
            peak / GB,
            stats["allocator_retries"],
            activations and activations.choice,
        )
    rate = batch.num_tokens / statistics.median(seconds[updates // 2 :])
    return Measured(tokens_per_second=rate, peak=peak, parts=engine.held_bytes(), activations=activations)


def fastest_bare(
    scene: Scene,
    parallel: ParallelState,
    device: Device,
    batch: PackedBatch,
    tokens_per_mb: int,
    choices: Sequence[tuple[Fused, ...]],
) -> Measured | None:
    """Return Megatron's own training step with the choice of fused kernels that is fastest, without recomputation where
    that fits; None if all ran out of memory."""
    found: list[Measured] = []
    recomputed: tuple[Literal["none", "full"], ...] = ("none", "full")
    for recompute in recomputed:
        for fused in choices:
            try:
                found.append(_bare(scene, parallel, device, batch, tokens_per_mb, recompute=recompute, fused=fused))
            except torch.OutOfMemoryError:
                logger.info("Megatron's own loop with %s, recompute=%s: out of memory", fused, recompute)
            free(device)
        if found:
            break
    return max(found, key=lambda one: one.tokens_per_second, default=None)


def _bare(
    scene: Scene,
    parallel: ParallelState,
    device: Device,
    batch: PackedBatch,
    tokens_per_mb: int,
    *,
    recompute: Literal["none", "full"],
    fused: tuple[Fused, ...],
) -> Measured:
    per_mb = tokens_per_mb // int(batch.seq_lens[0])
    parts = [list(range(i, i + per_mb)) for i in range(0, batch.num_sequences, per_mb)]
    packed = [pack_microbatch(batch, part, PackingLayout(), device=device.torch_device) for part in parts]
    device.forget_peak()
    config = parse_config(scene.raw)
    loop = BareLoop(config, parallel=parallel, device=device, recompute=recompute, fused=fused)
    seconds = [seconds_of(device, lambda: loop.step(packed)) for _ in range(WARM_UP + ROUNDS)][WARM_UP:]
    rate, peak = batch.num_tokens / statistics.median(seconds), device.memory_stats()["peak_gib"] * 2**30
    logger.info("Megatron's own loop with %s: %.0f tokens/s, peak %.1f GB", fused, rate, peak / GB)
    return Measured(tokens_per_second=rate, peak=peak, parts={})


def compared(
    name: str, ours: Measured, baseline: Measured | None, *, flops: float, mfu: str = "", peak: str = ""
) -> Iterator[Figure]:
    """Yield tokens/s, the model FLOPs utilization, which counts nothing that is computed twice, and memory: the peak,
    what is held before the update, and activations against their estimate. `flops`: of a token; `mfu` and `peak` are
    targets."""
    rate, bare_rate = ours.tokens_per_second, None if baseline is None else baseline.tokens_per_second
    share, memory = 100 * flops / PEAK_FLOPS, f"memory.{name.replace('.', '_', 1)}"
    yield Figure(f"{name}_tokens_per_second", rate, "tokens/s", bare_rate)
    yield Figure(f"{name}_mfu", share * rate, "%", None if bare_rate is None else share * bare_rate, mfu)
    yield Figure(memory, ours.peak / GB, "GB", None if baseline is None else baseline.peak / GB, peak)
    for part, size in ours.parts.items():
        yield Figure(f"{memory}_{part}", size / GB, "GB")
    if (found := ours.activations) is not None:
        yield Figure(f"{memory}_activations", found.measured / GB, "GB", found.estimated / GB, "<= 1.0x")


def update(scene: Scene) -> Iterator[Figure]:
    """Yield PPO updates against Megatron's own training step on the same packed tokens, which adds weight gradients in
    the products, or after them where that is faster."""
    choices: list[tuple[Fused, ...]] = [(), ("weight_gradients",)] if query_gpus() else [()]
    for length, count, tokens_per_mb, mfu, peak in (
        (2048, 32, 16384, ">= 52", "<= 60"),
        (16384, 8, 32768, "aim 45", ""),
    ):
        name = f"update.{scene.shape}_{length}"
        with trainer_world() as (parallel, device):
            batch = random_batch(vocab_size(scene), [length] * count)
            bare = fastest_bare(scene, parallel, device, batch, tokens_per_mb, choices)
            engine = make_engine(scene, parallel, device)
            ours = measure(engine, device, batch, tokens_per_mb, updates=WARM_UP + ROUNDS, label=name)
            del engine
            free(device)
        yield from compared(name, ours, bare, flops=flops_per_token(scene, length), mfu=mfu, peak=peak)


def experts(scene: Scene) -> Iterator[Figure]:
    """Yield PPO updates of 131,072 tokens of a model with experts (mcore_adapter/models/experts.py), in microbatches of
    32,768 and 16,384, against TransformerEngine's grouped layers and against Megatron's own training loop."""
    small = not query_gpus()
    ours = replace(scene, shape="experts", raw=SLICE | SMALL | SMALL_EXPERTS if small else SLICE)
    length, count, sizes = (32, 4, (64, 32)) if small else (4096, 32, (32768, 16384))
    # Of TransformerEngine. With its cross entropy, the gradients are infinite.
    fused: tuple[Fused, ...] = ("permutation", "routing", "weight_gradients")
    found: dict[bool, dict[int, Measured]] = {}
    bare: dict[int, Measured | None] = {}
    for stacked in (False, True):
        with trainer_world() as (parallel, device):
            device.has_grouped_products = stacked
            batch = random_batch(vocab_size(ours), [length] * count)
            if not stacked:
                choices = [()] if small else [fused, ()]
                bare = {size: fastest_bare(ours, parallel, device, batch, size, choices) for size in sizes}
            engine = make_engine(ours, parallel, device)
            found[stacked] = {
                size: measure(engine, device, batch, size, updates=WARM_UP + ROUNDS, label=f"{stacked=}, {size}")
                for size in sizes
            }
            del engine
            free(device)
    flops = flops_per_token(ours, length)
    for size, mfu in zip(sizes, (">= 38, aim 45", ">= 30"), strict=True):
        yield from compared(f"update.experts_{size}", found[True][size], found[False][size], flops=flops, mfu=mfu)
        yield from compared(f"update.experts_{size}_megatron", found[True][size], bare[size], flops=flops)


def long(scene: Scene) -> Iterator[Figure]:
    """Yield PPO updates on one sequence of 65,536 tokens, against recomputation of all layers as a whole, and on one of
    131,072 tokens, against the same without host memory for activations. A microbatch each. One GPU."""
    small = not query_gpus()
    ours = replace(scene, shape="4B", raw=WIDTHS | SMALL if small else WIDTHS)
    without_host = EngineConfig(gradient_checkpointing="auto", gradient_checkpointing_host_gib=0.0)
    for length, baseline, target in (
        (64 if small else 65536, EngineConfig(gradient_checkpointing=True), ">= 45"),
        (128 if small else 131072, without_host, "fits"),
    ):
        auto = _measure_long(ours, length, EngineConfig(gradient_checkpointing="auto"))
        if auto is None:
            return  # it did not fit; the log has the error
        bare = _measure_long(ours, length, baseline)
        yield from compared(f"long.4B_{length}", auto, bare, flops=flops_per_token(ours, length), mfu=target)


def _measure_long(scene: Scene, length: int, config: EngineConfig) -> Measured | None:
    """Return the updates on one sequence, by an engine of their own; None where they do not fit."""
    with trainer_world() as (parallel, device):
        engine = make_engine(scene, parallel, device, config)
        ppo_update(engine, random_batch(vocab_size(scene), [length // 16]), length)  # kernels and moments
        batch = random_batch(vocab_size(scene), [length])
        label = f"{config.recompute(on_gpu=True)} recomputation, {length} tokens"
        measured: Measured | None = None
        try:
            measured = measure(engine, device, batch, length, updates=3, label=label)
        except StepOutOfMemory as e:
            logger.warning("%s: %s", label, e)
        del engine
        free(device)
    return measured


def checkpoint(scene: Scene) -> Iterator[Figure]:
    """Yield how long the trainer stops for a checkpoint of weights, masters and moments, and how long an update takes
    while threads write it. One GPU."""
    small = not query_gpus()
    with trainer_world() as (parallel, device), ThreadPoolExecutor(1) as pool:
        batch = random_batch(vocab_size(scene), [64] * 2 if small else [2048] * 16)
        engine = make_engine(scene, parallel, device)
        engine.prepare_saves()

        def seconds_of_update() -> float:
            return seconds_of(device, lambda: ppo_update(engine, batch, 16384))

        for _ in range(3):
            seconds_of_update()
        stalls, meanwhile, writing = [], [], []
        for number in range(2):
            path = scene.folder / f"checkpoint{number}"
            path.mkdir()
            device.synchronize()
            start = time.perf_counter()
            engine.begin_save(path)
            stalls.append(time.perf_counter() - start)
            written = pool.submit(wait_for_outcome, path, threading.Event())
            while not written.done():
                meanwhile.append(seconds_of_update())
            written.result()
            writing.append(time.perf_counter() - start)
            gigabytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / GB
            shutil.rmtree(path)
        quiet = statistics.median(seconds_of_update() for _ in range(15))
    name = f"checkpoint.{scene.shape}"
    yield Figure(f"{name}_first_stall", stalls[0], "s")
    yield Figure(f"{name}_stall", stalls[1], "s", target="<= 1.5")
    yield Figure(f"{name}_update_while_writing", statistics.median(meanwhile), "s", quiet, "<= 1.05x")
    yield Figure(f"{name}_size", gigabytes, "GB")
    yield Figure(f"{name}_until_written", statistics.median(writing), "s")
