"""Checkpoints and model folders: written by real ranks, converted, read and compared."""

import contextlib
import io
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from allocation import ParallelLayout
from helpers.engine_cases import make_engine, policy_loss, random_batch
from helpers.mcore_ranks import Rank, RankPool, build


def tensors_of(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    assert files, f"{folder} holds no weights"
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same_bytes(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        other = second[name]
        assert tensor.dtype == other.dtype and tensor.shape == other.shape, name
        assert torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)), name


def write_checkpoint(rank: Rank, layout: ParallelLayout, source: Path, target: Path, options: dict[str, Any]) -> None:
    from mcore_adapter.checkpoint.checkpoint import HostCopy, copy_checkpoint

    with rank.joined(layout) as (parallel, device):
        chunks = build(source, parallel, device, **options)
        copied = copy_checkpoint(target, chunks, None, HostCopy(), parallel=parallel, tokenizer_from=source)
        copied.write_in_background()
        wait_written(target)


def wait_written(path: str | Path) -> None:
    """Return on every rank when a checkpoint is complete."""
    from mcore_adapter.checkpoint.outcome import wait_for_outcome

    if torch.distributed.get_rank() == 0:
        wait_for_outcome(Path(path), threading.Event())
    torch.distributed.barrier()


def save(engine: Any, path: str | Path) -> None:
    """Save an engine, and return on every rank when its checkpoint is complete."""
    engine.begin_save(path)
    wait_written(path)


def run_convert(rank: Rank, *arguments: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr)"""
    from tools.convert import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
    return status, out.getvalue(), err.getvalue()


def convert(ranks: RankPool, source: Path, target: Path, *flags: str) -> tuple[int, str, str]:
    return ranks.run(run_convert, 1, "--checkpoint_path", str(source), "--output_path", str(target), *flags)[0]


OPTIMIZER = {"lr": 1e-2, "lr_scheduler_type": "cosine", "warmup_steps_proportion": 0.2, "total_steps": 10}

MAX_TOKENS = 128


def train(engine: Any, steps: int) -> list[dict[str, float]]:
    return [engine.train_step(random_batch(seed=i), policy_loss, max_tokens_per_mb=MAX_TOKENS) for i in range(steps)]


def draws() -> list[float]:
    return [random.random(), float(np.random.random()), float(torch.rand(()))]


def save_run(rank: Rank, layout: ParallelLayout, model: str, path: str, dtype: str) -> dict[str, Any]:
    """Three updates, a save, then what an uninterrupted run would do next."""
    with rank.joined(layout) as (parallel, device):
        engine = make_engine(parallel, device, model, dtype=dtype, optimizer=OPTIMIZER)
        train(engine, 3)
        random.seed(rank.rank)
        save(engine, path)
        return {"draws": draws(), "steps": train(engine, 2)}


def load_run(rank: Rank, layout: ParallelLayout, model: str, path: str, dtype: str) -> dict[str, Any]:
    with rank.joined(layout, seed=99) as (parallel, device):
        engine = make_engine(parallel, device, model, dtype=dtype, optimizer=OPTIMIZER)
        engine.load(path)
        return {"draws": draws(), "num_updates": engine.num_updates, "steps": train(engine, 2)}
