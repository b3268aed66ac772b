"""The measurements of `python -m tools.bench gpu` of the trainer alone, and what all of them share.

Models have random weights: speed does not depend on them. Each measurement yields figures; what is compared runs in the
same call.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from allocation import ParallelLayout, parse
from core.algorithms.losses import policy_loss
from core.config.algorithm import AlgorithmSettings
from mcore_adapter.checkpoint.outcome import wait_for_outcome
from mcore_adapter.data.batch import PackedBatch
from mcore_adapter.device import Device, get_device
from mcore_adapter.settings import EngineConfig, EngineModel, OptimizerConfig
from model_specs.hf_config import read_config
from rollout.inference.gpus import query_gpus
from tools.bench import Figure
from tools.bench.convert import compare
from tools.bench.gpu.shapes import DEFAULT_SHAPE, SHAPES
from tools.demo.data import make_tokenizer

if TYPE_CHECKING:
    from mcore_adapter.engine import MegatronEngine
    from mcore_adapter.models.bare_loop import Fused
    from mcore_adapter.parallel import ParallelState

PEAK_FLOPS = 989e12
"""Dense bf16 of one H200 by its data sheet."""
NVLINK_BYTES_PER_SECOND = 371e9
"""A NCCL broadcast between two H200s of one host, measured without anything around it: the floor of a push."""
WARM_UP, ROUNDS = 2, 5

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The folder and the size of the measurements."""

    folder: Path
    shape: str = DEFAULT_SHAPE
    sglang_python: Path | None = None
    """Interpreter that has SGLang; None: this one."""
    trl_python: Path | None = None
    """Interpreter of an environment that has TRL."""

    @property
    def server_gpus(self) -> list[int | None]:
        """GPUs for servers apart from the trainer's first one; the trainer's own where there is no other, None where
        there is none at all."""
        num_gpus = len(query_gpus())
        return list(range(1, num_gpus)) or [0 if num_gpus else None]

    @property
    def colocated(self) -> bool:
        return self.server_gpus == [0]

    @property
    def vocab_size(self) -> int:
        return int(SHAPES[self.shape]["vocab_size"])

    @property
    def model(self) -> Path:
        """A folder with config.json and a tokenizer of the shape's vocabulary, without weights."""
        path = self.folder / self.shape
        if not path.exists():
            make_tokenizer().save_pretrained(path)
            (path / "config.json").write_text(json.dumps(SHAPES[self.shape]))
        return path

    @property
    def num_parameters(self) -> int:
        s = SHAPES[self.shape]
        hidden, ffn, head_dim = s["hidden_size"], s["intermediate_size"], s["hidden_size"] // s["num_attention_heads"]
        qkv = (s["num_attention_heads"] + 2 * s["num_key_value_heads"]) * head_dim
        layer = hidden * (qkv + hidden + 3 * ffn) + qkv + 2 * hidden
        return s["num_hidden_layers"] * layer + (1 + (not s["tie_word_embeddings"])) * s["vocab_size"] * hidden + hidden

    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs of forward and backward of a causal sequence of `length` tokens, without the embedding
        look-up."""
        s = SHAPES[self.shape]
        lookup = 0 if s["tie_word_embeddings"] else s["vocab_size"] * s["hidden_size"]
        attention = 6 * s["num_hidden_layers"] * s["hidden_size"] * length
        return 6 * (self.num_parameters - lookup) + attention


def become_rank(*, num_ranks: int) -> None:
    """Give this process what a run gives one of `num_ranks` trainer ranks on a host: environment and CPU threads."""
    from core.experiments.workers import threads_per_process
    from core.launch.trainer_group import PAGE_LOCKING

    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", PAGE_LOCKING)
    if query_gpus():
        ranks = parse(f"d{num_ranks}m1p1", n_nodes=1, n_gpus_per_node=num_ranks)
        torch.set_num_threads(threads_per_process(ranks, configured=0, max_staleness=0, gpus=True))


@contextmanager
def trainer_world() -> Iterator[tuple[ParallelState, Device]]:
    """Yield (parallel, device) of a world of one rank, on the first GPU where there is one."""
    from mcore_adapter.parallel import destroy_parallel, initialize_parallel

    become_rank(num_ranks=1)
    device = get_device("auto")
    with device.activate(), tempfile.TemporaryDirectory() as folder:
        init = f"file://{folder}/rendezvous"
        parallel = initialize_parallel(ParallelLayout(), rank=0, world_size=1, init_method=init, device=device, seed=1)
        yield parallel, device
        destroy_parallel()


def make_engine(
    scene: Scene,
    parallel: ParallelState,
    device: Device,
    *,
    trains: bool = True,
    optimizer: Mapping[str, Any] | None = None,
    **settings: Any,
) -> MegatronEngine:
    """Return an engine with random weights. `settings`: keys of EngineConfig; `optimizer`: those of OptimizerConfig;
    without `trains` there is none."""
    from mcore_adapter.engine import MegatronEngine

    adam = {"lr": 1e-6, "weight_decay": 0.0, "warmup_steps_proportion": 0.0, **(optimizer or {})}
    config = EngineConfig(init_from_scratch=True, bf16=True, optimizer=OptimizerConfig(**adam), **settings)
    model = EngineModel(config=config, path=str(scene.model), total_updates=1000 if trains else None)
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
        fields={
            "advantages": torch.randn(total, generator=generator),
            "old_logprobs": old,
            "rollout_logprobs": old,
        },
    )


def seconds_of(device: Device, step: Callable[[], object]) -> float:
    """Return the seconds from an idle device to an idle device."""
    device.synchronize()
    start = time.perf_counter()
    step()
    device.synchronize()
    return time.perf_counter() - start


def measured_seconds(device: Device, step: Callable[[], object]) -> list[float]:
    """Return the seconds of each round after the warm-up."""
    return [seconds_of(device, step) for _ in range(WARM_UP + ROUNDS)][WARM_UP:]


def update(scene: Scene) -> Iterator[Figure]:
    """Yield one PPO update against Megatron's own training step on the same packed tokens, which adds weight gradients
    in the products, or after them where that is faster."""
    choices: list[tuple[Fused, ...]] = [(), ("weight_gradients",)] if query_gpus() else [()]
    for length, count, tokens_per_mb, bare_recompute, (rate_target, mfu_target, peak_target) in (
        (2048, 32, 16384, "none", (">= 1.1x", ">= 52", "<= 60")),
        (16384, 8, 32768, "full", (">= 1.0x", "aim 45", "")),
    ):
        name = f"update.{scene.shape}_{length}"
        with trainer_world() as (parallel, device):
            batch = random_batch(scene.vocab_size, [length] * count)
            found = fastest_bare_rate(
                scene, parallel, device, batch, tokens_per_mb, choices=choices, recompute=bare_recompute
            )
            bare, bare_peak = found or (None, None)
            ours, peak = update_rate(scene, parallel, device, batch, tokens_per_mb)
            free(device)
        yield Figure(name=f"{name}_tokens_per_second", value=ours, unit="tokens/s", baseline=bare, target=rate_target)
        mfu = 100 * ours * scene.flops_per_token(length) / PEAK_FLOPS
        bare_mfu = None if bare is None else 100 * bare * scene.flops_per_token(length) / PEAK_FLOPS
        yield Figure(name=f"{name}_mfu", value=mfu, unit="%", baseline=bare_mfu, target=mfu_target)
        yield Figure(
            name=f"memory.update_{scene.shape}_{length}", value=peak, unit="GB", baseline=bare_peak, target=peak_target
        )


def fastest_bare_rate(
    scene: Scene,
    parallel: ParallelState,
    device: Device,
    batch: PackedBatch,
    tokens_per_mb: int,
    *,
    choices: Sequence[tuple[Fused, ...]],
    **settings: Any,
) -> tuple[float, float] | None:
    """Return (tokens/s, peak GB) of Megatron's own training step with the choice of fused kernels that is fastest; None
    if all ran out of memory."""
    found: list[tuple[float, float]] = []
    for fused in choices:
        try:
            found.append(bare_rate(scene, parallel, device, batch, tokens_per_mb, fused=fused, **settings))
            result = "{:.0f} tokens/s, peak {:.1f} GB".format(*found[-1])
        except torch.OutOfMemoryError:
            result = "out of memory"
        free(device)
        logger.info("Megatron's own loop with %s, %d: %s", fused, tokens_per_mb, result)
    return max(found, default=None)


def bare_rate(
    scene: Scene,
    parallel: ParallelState,
    device: Device,
    batch: PackedBatch,
    tokens_per_mb: int,
    *,
    of: Callable[[list[float]], float] = statistics.median,
    **settings: Any,
) -> tuple[float, float]:
    """Return (tokens/s, peak GB) of Megatron's own training step with these settings of BareLoop; `of` makes one
    duration of those that were measured."""
    from mcore_adapter.data.packing import PackingLayout, pack_microbatch
    from mcore_adapter.models.bare_loop import BareLoop

    per_mb = tokens_per_mb // int(batch.seq_lens[0])
    parts = [list(range(i, i + per_mb)) for i in range(0, batch.num_sequences, per_mb)]
    packed = [pack_microbatch(batch, part, PackingLayout(), device=device.torch_device) for part in parts]
    device.forget_peak()
    loop = BareLoop(read_config(scene.model), parallel=parallel, device=device, **settings)
    seconds = of(measured_seconds(device, lambda: loop.step(packed)))
    return batch.num_tokens / seconds, device.memory_stats()["peak_gib"] * 2**30 / 1e9


def update_rate(
    scene: Scene, parallel: ParallelState, device: Device, batch: PackedBatch, tokens_per_mb: int, **settings: Any
) -> tuple[float, float]:
    """Return (tokens/s, peak GB) of updates of an engine with these settings."""
    device.forget_peak()
    engine = make_engine(scene, parallel, device, **{"gradient_checkpointing": "selective", **settings})

    def step() -> object:
        return ppo_update(engine, batch, tokens_per_mb)

    seconds = measured_seconds(device, step)
    peak = device.memory_stats()["peak_gib"] * 2**30 / 1e9
    return batch.num_tokens / float(np.median(seconds)), peak


def ppo_update(engine: MegatronEngine, batch: PackedBatch, tokens_per_mb: int) -> dict[str, float]:
    """Update on one minibatch as a run does."""
    settings = AlgorithmSettings(correction="decoupled", behave_imp_weight_cap=5.0, entropy_coeff=1e-3)
    loss = partial(policy_loss, settings=settings)
    return engine.train_step(batch, loss, max_tokens_per_mb=tokens_per_mb, with_entropy=True)


def free(device: Device) -> None:
    gc.collect()
    device.empty_cache()


NUM_CHECKPOINTS = 2


def checkpoint(scene: Scene) -> Iterator[Figure]:
    """Yield how long the trainer stops for a checkpoint of weights, masters and moments, and how long an update takes
    while threads write it. One GPU."""
    small = not query_gpus()
    with trainer_world() as (parallel, device), ThreadPoolExecutor(1) as pool:
        batch = random_batch(scene.vocab_size, [64] * 2 if small else [2048] * 16)
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
    yield from compare(scene.folder, SHAPES[scene.shape], torch.bfloat16, name=f"convert.{scene.shape}", rounds=2)
