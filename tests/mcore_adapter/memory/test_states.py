"""Bytes of weights, gradients, masters and moments of a rank, against what a real engine allocates."""

from pathlib import Path
from typing import Any

import pytest

from allocation import ParallelLayout
from helpers.engine_cases import make_engine
from helpers.mcore_ranks import EXPERT_LAYOUTS, LAYOUTS, Rank, RankPool
from helpers.tiny_models import EXPERT_MODELS, MODELS
from mcore_adapter.memory.estimate import rank_states
from model_specs.families import read_config

ALL_LAYOUTS = {**LAYOUTS, **EXPERT_LAYOUTS, "dp2": ParallelLayout(dp=2), "dp2 pp2": ParallelLayout(dp=2, pp=2)}
QUICK = {
    ("qwen2_tied", "dp2 pp2"), ("qwen2_tied", "pp2 vpp2"), ("glm4", "tp2"), ("qwen3", "cp2"),
    ("qwen3_moe", "tp2 ep2"), ("deepseek_v3", "dp2 pp2 ep2"),
}  # fmt: skip
"""Every term occurs in one of them."""


def held(rank: Rank, layout: ParallelLayout, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Run one update on a rank; return what its engine holds, from the tensors themselves."""
    import torch

    from mcore_adapter.data.batch import PackedBatch

    with rank.joined(layout) as (parallel, device):
        engine = make_engine(parallel, device, str(folder), init_from_scratch=True, **settings)
        count = 2 * layout.dp
        batch = PackedBatch(
            token_ids=torch.arange(8 * count) % 90,
            cu_seqlens=8 * torch.arange(count + 1),
            loss_mask=(torch.arange(8 * count) % 8) > 0,
        )

        def loss(output: Any, fields: Any, sequences: Any) -> Any:
            value = output.values if settings.get("is_critic") else output.logprobs
            return -(value * fields["token_weights"]).sum(), {}

        engine.train_step(batch, loss, max_tokens_per_mb=16)
        chunks: Any = engine._chunks
        buffers = [b for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        state = engine._optimizer.megatron  # type: ignore[union-attr]
        inner = [o.optimizer for o in state.chained_optimizers]
        shards = [p for o in inner for group in o.param_groups for p in group["params"]]
        moments = [t for o in inner for s in o.state.values() for t in s.values() if torch.is_tensor(t) and t.dim()]
        own = {b.param_data.untyped_storage().data_ptr() for b in buffers}
        return {
            "pp_rank": parallel.pp_rank,
            "parameters": sum(p.numel() for chunk in chunks for p in chunk.parameters()),
            "weights": sum(b.param_data.nbytes for b in buffers),
            "gradients": sum(b.grad_data.nbytes for b in buffers),
            "masters": sum(p.nbytes for p in shards if p.untyped_storage().data_ptr() not in own),
            "moments": sum(t.nbytes for t in moments),
        }


def cases() -> list[Any]:
    found = []
    for name in MODELS:
        for label, layout in ALL_LAYOUTS.items():
            if layout.ep > 1 and name not in EXPERT_MODELS:
                continue
            marks = () if (name, label) in QUICK else (pytest.mark.slow, pytest.mark.nightly)
            found.append(pytest.param(name, layout, marks=marks, id=f"{name} {label}"))
    return found


@pytest.mark.parametrize(("name", "layout"), cases())
def test_the_bytes_of_a_rank_are_those_that_its_engine_allocates(ranks, model_folders, name, layout) -> None:
    check(ranks, model_folders[name][0], layout)


def test_a_critic_has_no_head_over_the_vocabulary(ranks: RankPool, model_folders: Any) -> None:
    check(ranks, model_folders["qwen2_tied"][0], ParallelLayout(pp=2), is_critic=True)


def test_weights_in_float32_have_no_masters_beside_them(ranks: RankPool, model_folders: Any) -> None:
    check(ranks, model_folders["qwen3"][0], ParallelLayout(dp=2), dtype="float32")


def test_gradients_in_bfloat16_take_half(ranks: RankPool, model_folders: Any) -> None:
    check(ranks, model_folders["qwen3_moe"][0], ParallelLayout(dp=2, ep=2), grad_reduce_in_fp32=False)


def check(ranks: RankPool, folder: Path, layout: ParallelLayout, *, dtype: str = "bfloat16", **settings: Any) -> None:
    found = ranks.run(held, layout.world_size, layout, folder, {"dtype": dtype, **settings})
    config, itemsize = read_config(folder), 2 if dtype == "bfloat16" else 4
    for pp_rank in range(layout.pp):
        states = rank_states(
            config, layout, pp_rank=pp_rank, is_critic=settings.get("is_critic", False), itemsize=itemsize,
            gradient_itemsize=4 if settings.get("grad_reduce_in_fp32", True) else 2,
        )  # fmt: skip
        stage = [one for one in found if one["pp_rank"] == pp_rank]
        for one in stage:
            assert one["parameters"] == sum(states.parameters.values())
            assert one["weights"] == states.weights and one["gradients"] == states.gradients
        # The shards of a stage differ between its data-parallel ranks by padding, which the last ones hold; their mean
        # is predicted, as a whole number.
        padding = states.weights // itemsize - sum(states.parameters.values())
        for name, mean, size in (("masters", states.masters, 4), ("moments", states.moments, 8)):
            shards = [one[name] for one in stage]
            assert sum(shards) == pytest.approx(mean * len(stage), abs=len(stage) / 2)
            assert all(abs(shard - mean) <= padding * size for shard in shards)
