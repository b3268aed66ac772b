"""Estimated host memory of a rank against the memory that a real engine takes on the CPU."""

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist

from allocation import ParallelLayout
from helpers.engine_cases import make_engine, policy_loss
from helpers.mcore_ranks import EXPERT_LAYOUTS, LAYOUTS, Rank, RankPool
from helpers.saved_models import train
from mcore_adapter.memory import host, recompute
from mcore_adapter.memory.estimate import (
    UpdateShape,
    checkpoint_pieces,
    drawing_bytes,
    host_bytes,
    in_flight,
    page_locked,
    rank_states,
)
from mcore_adapter.settings import Level
from model_specs.families import read_config

LENGTH, MICROBATCHES = 96, 4


def pages_run(rank: Rank, layout: ParallelLayout, model: str, levels: list[Level]) -> list[int]:
    """Return the bytes of each page of host memory that activations of an update took."""
    from mcore_adapter.data.batch import PackedBatch

    with pytest.MonkeyPatch.context() as patch, rank.joined(layout) as (parallel, device):
        patch.setattr(host, "SMALLEST_BYTES", 1)  # what the backward pass computes again has none
        patch.setattr(recompute, "_PAGES", pages := host.Pages())
        engine = make_engine(parallel, device, model)
        recompute.recompute_layers(engine._model, levels)
        tokens = LENGTH * MICROBATCHES
        mask = torch.arange(tokens) % LENGTH > 0
        batch = PackedBatch(
            token_ids=torch.arange(tokens) % 90, cu_seqlens=LENGTH * torch.arange(MICROBATCHES + 1), loss_mask=mask,
            fields={"advantages": torch.ones(tokens)},
        )  # fmt: skip
        engine.train_step(batch, policy_loss, max_tokens_per_mb=LENGTH)
        return [len(page) for page in pages._free]


@pytest.mark.parametrize(("name", "layout"), [("qwen3", "one process"), ("qwen2_tied", "tp2"), ("glm4", "pp2")])
def test_activations_take_the_pages_that_are_planned(ranks: RankPool, model_folders: Any, name, layout) -> None:
    where, folder = LAYOUTS[layout], model_folders[name][0]
    config, num_layers = read_config(folder), 4 // where.pp
    levels: list[Level] = ["offload"] * (num_layers - 1) + ["linear"]
    for rank, pages in enumerate(ranks.run(pages_run, where.world_size, where, str(folder), levels)):
        shape = UpdateShape(
            config=config, layout=where, itemsize=4, tokens=LENGTH, layers=range(num_layers), has_head=True,
            in_flight=in_flight(where, rank if where.pp > 1 else 0, MICROBATCHES),
        )  # fmt: skip
        # On the CPU the output of the MLP's norm is a tensor of its own, which a layer keeps as well.
        norms = shape.in_flight * (num_layers - 1) * page_locked(4 * LENGTH * config.hidden_size // where.tp)
        planned = host_bytes(shape, levels)
        assert sum(map(page_locked, pages)) == planned + norms > norms


def checkpoint_run(rank: Rank, layout: ParallelLayout, model: str, path: str, dtype: str) -> dict[str, Any]:
    """Return the bytes of host memory by name that a save took; those that a load did."""
    from mcore_adapter.checkpoint import writing
    from mcore_adapter.checkpoint.outcome import wait_for_outcome

    with pytest.MonkeyPatch.context() as patch, rank.joined(layout) as (parallel, device):
        engine = make_engine(parallel, device, model, dtype=dtype)
        train(engine, 1)
        engine.begin_save(path)
        if rank.rank == 0:
            wait_for_outcome(Path(path), threading.Event())
        dist.barrier()
        loaded: list[torch.Tensor] = []
        gather = writing._Gather.__call__

        def gathered(self: Any, **options: Any) -> Any:
            state = gather(self, **options)
            for index, by_dtype in state.items():
                for tensors in by_dtype.values() if index != "buckets_coalesced" else ():
                    loaded.extend(t.fill_(torch.nan) for t in tensors.values() if isinstance(t, torch.Tensor))
            return state

        def optimizer_state() -> list[torch.Tensor]:
            return [
                tensor.clone()
                for one in engine._optimizer.megatron.chained_optimizers
                for ranges in one.gbuf_ranges
                for buckets in ranges.values()
                for bucket in buckets
                for param in bucket["param_map"]
                for tensor in one._get_main_param_and_optimizer_states(param).values()
            ]

        patch.setattr(writing._Gather, "__call__", gathered)
        before = optimizer_state()
        engine.load(path)
        assert all(map(torch.equal, before, optimizer_state())), "nothing comes from what is not read"
        return {
            "pp_rank": parallel.pp_rank,
            "saved": {name: len(buffer) for name, buffer in engine._host_copy._buffers.items()},
            "loaded": sum(4 * int((~tensor.isnan()).sum()) for tensor in loaded),
        }


@pytest.mark.parametrize(
    ("name", "layout", "dtype"),
    [
        ("qwen2_tied", ParallelLayout(dp=4), "float32"),
        ("qwen2_tied", LAYOUTS["pp2 vpp2"], "bfloat16"),
        ("qwen3_moe", EXPERT_LAYOUTS["tp2 ep2"], "bfloat16"),
        ("qwen3_moe", ParallelLayout(dp=2, ep=2), "bfloat16"),
    ],
)
def test_a_recover_checkpoint_takes_the_host_memory_that_is_planned(
    ranks: RankPool, model_folders: Any, tmp_path: Path, name: str, layout: ParallelLayout, dtype: str
) -> None:
    folder = model_folders[name][0]
    found = ranks.run(checkpoint_run, layout.world_size, layout, str(folder), str(tmp_path / "saved"), dtype)
    config, itemsize = read_config(folder), 2 if dtype == "bfloat16" else 4
    for pp_rank in range(layout.pp):
        stage = [one for one in found if one["pp_rank"] == pp_rank]
        pieces = checkpoint_pieces(config, layout, pp_rank=pp_rank, itemsize=itemsize)
        planned = Counter(piece.num_bytes for piece in pieces for _ in range(piece.num_ranks))
        taken = Counter(size for one in stage for name, size in one["saved"].items() if name != "weights")
        assert taken <= planned
        weights = sum(one["saved"].get("weights", 0) for one in stage)
        # Tensors are aligned; one that several stages or tensor-parallel ranks hold is saved once.
        assert weights == pytest.approx(sum((planned - taken).elements()), rel=0.2)
        held = rank_states(config, layout, pp_rank=pp_rank, itemsize=itemsize)
        for one in stage:
            assert 0 < one["loaded"] <= 1.01 * 12 / 8 * held.moments, "masters and moments of its own rows"


class InOrder:
    """Draws at once what is to be drawn ahead."""

    def __init__(self, threads: int) -> None:
        """Take no thread."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: nothing is under way."""

    def submit(self, call: Callable[..., object], *args: object) -> Future[object]:
        done = Future[object]()
        done.set_result(call(*args))
        return done


def drawn_run(rank: Rank, layout: ParallelLayout, model: str) -> int:
    """Return the most bytes of random weights that were there when one of them was copied."""
    from mcore_adapter.hf import weights

    with pytest.MonkeyPatch.context() as patch, rank.joined(layout) as (parallel, device):
        alive, sums = Counter[int](), []
        draw, parts = weights._scratch_tensor, weights.parts_of

        def drawn(*args: Any) -> torch.Tensor:
            tensor = draw(*args)
            alive[id(tensor)] = tensor.nbytes
            weakref.finalize(tensor, alive.pop, id(tensor))
            return tensor

        def copied(*args: Any) -> Any:
            sums.append(sum(alive.values()))
            return parts(*args)

        patch.setattr(weights, "_scratch_tensor", drawn)
        patch.setattr(weights, "parts_of", copied)
        patch.setattr(weights, "ThreadPoolExecutor", InOrder)
        make_engine(parallel, device, model, init_from_scratch=True)
        return max(sums)


@pytest.mark.parametrize(("name", "layout"), [("qwen3", "tp2"), ("llama", "tp2")])
def test_random_weights_take_the_host_memory_that_is_planned(ranks, model_folders, name, layout, monkeypatch) -> None:
    # Tensors are counted, not what malloc keeps of them. The embedding is the largest: all behind it are drawn sooner.
    monkeypatch.setattr("mcore_adapter.memory.estimate.DRAWING_THREADS", 0)
    where, folder = (LAYOUTS | EXPERT_LAYOUTS)[layout], model_folders[name][0]
    config = read_config(folder)
    copied = 4 * config.vocab_size * config.hidden_size // where.tp
    planned = drawing_bytes(config, where, pp_rank=0, itemsize=4)
    for most in ranks.run(drawn_run, where.world_size, where, str(folder)):
        assert most + copied == pytest.approx(planned, rel=0.02)
