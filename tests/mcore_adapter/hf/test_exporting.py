"""Weights gathered by every rank that holds a part of the model, for pushes with several senders, or by every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from allocation import ParallelLayout
from helpers.mcore_ranks import Rank, RankPool, build
from helpers.saved_models import assert_same_bytes, tensors_of
from mcore_adapter.hf.exporting import Receivers
from rollout.inference.bucket import FlatBucket

Gathered = tuple[list[dict[str, Tensor]], int]
"""The buckets of a rank, and the elements that it received from others."""


def gathered_at_holders(rank: Rank, layout: ParallelLayout, source: Path, bucket_bytes: int) -> Gathered:
    from mcore_adapter.hf.exporting import plan_export, run_export

    received = 0
    operation = dist.P2POp

    def counted(op: Any, tensor: Tensor, peer: int) -> Any:
        nonlocal received
        received += tensor.numel() if op is dist.irecv else 0
        return operation(op, tensor, peer)

    with rank.joined(layout) as (parallel, device), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "P2POp", counted)
        chunks = build(source, parallel, device)
        plan = plan_export(chunks, parallel=parallel, bucket_bytes=bucket_bytes, to="holders")
        return [{k: v.clone() for k, v in b.items()} for b in run_export(plan, parallel=parallel)], received


@pytest.mark.parametrize(
    ("name", "layout", "holders"),
    [
        ("qwen2_tied", ParallelLayout(tp=2), (0,)),
        ("qwen3", ParallelLayout(pp=2), (0, 1)),
        ("qwen3", ParallelLayout(tp=2, pp=2), (0, 2)),
        ("qwen3_moe", ParallelLayout(tp=2, ep=2), (0, 1)),
        pytest.param("qwen2", ParallelLayout(pp=2, vpp=2), (0, 1), marks=pytest.mark.nightly),
        pytest.param("deepseek_v3", ParallelLayout(dp=2, pp=2, ep=2), (0, 1, 2, 3), marks=pytest.mark.nightly),
    ],
)
def test_each_part_of_the_model_is_gathered_where_it_is_held(
    ranks: RankPool, model_folders: Any, name: str, layout: ParallelLayout, holders: tuple[int, ...]
) -> None:
    """Nothing but shards over tensor parallelism travels between ranks, and every tensor arrives once."""
    source, _ = model_folders[name]
    results: list[Gathered] = ranks.run(gathered_at_holders, layout.world_size, layout, source, 16_000)
    assert layout.holders == holders
    assert [i for i, (buckets, _) in enumerate(results) if any(buckets)] == [*holders]
    assert len({len(buckets) for buckets, _ in results}) == 1, "as many rounds on every rank"
    sent = [(key, tensor) for buckets, _ in results for bucket in buckets for key, tensor in bucket.items()]
    assert_same_bytes(tensors_of(source), dict(sent))
    assert len(sent) == len(dict(sent)), "a tensor has one sender"
    per_stage = layout.tp * layout.cp * layout.dp
    for index, (buckets, received) in enumerate(results):
        mine = [(key, tensor) for bucket in buckets for key, tensor in bucket.items()]
        experts = [tensor.numel() for key, tensor in mine if ".experts." in key]
        others = sum(tensor.numel() for _, tensor in mine) - sum(experts)
        assert received <= others * (layout.tp - 1) / layout.tp, "other shards of the same tensors, and no expert"
        assert index % per_stage == 0 or len(experts) == len(mine), "only the first rank of a stage sends more"
    if layout.ep > 1:
        of_experts = [{key for b in buckets for key in b if ".experts." in key} for buckets, _ in results]
        assert all(of_experts[rank] for rank in holders)


def gathered_by(
    rank: Rank, layout: ParallelLayout, source: Path, to: Receivers
) -> list[tuple[dict[str, Tensor], bool]]:
    """Return the buckets of a model in bfloat16, and whether each one is a single piece of memory."""
    from mcore_adapter.hf.exporting import plan_export, run_export

    with rank.joined(layout) as (parallel, device):
        chunks = build(source, parallel, device, dtype=torch.bfloat16)
        plan = plan_export(chunks, parallel=parallel, bucket_bytes=16_000, to=to)
        return [
            ({k: v.clone() for k, v in bucket.items()}, not bucket or is_one_piece(bucket))
            for bucket in run_export(plan, parallel=parallel)
        ]


def is_one_piece(bucket: dict[str, Tensor]) -> bool:
    first = next(iter(bucket.values()))
    return FlatBucket.of(bucket).flat.data_ptr() == first.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen2_tied", ParallelLayout(tp=2)),
        ("qwen3_moe", ParallelLayout(dp=2, ep=2)),
        ("qwen3_moe", ParallelLayout(tp=2, ep=2)),
        ("qwen3", ParallelLayout(tp=2, pp=2)),
        ("deepseek_v3", ParallelLayout(dp=2, ep=2)),
        pytest.param("glm4", ParallelLayout(tp=2), marks=pytest.mark.nightly),
        pytest.param("deepseek_v3", ParallelLayout(dp=2, pp=2, ep=2), marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("to", ["first", "all"])
def test_a_bucket_is_one_piece_of_memory_on_each_rank_that_receives_it(
    ranks: RankPool, model_folders: Any, name: str, layout: ParallelLayout, to: Receivers
) -> None:
    source, _ = model_folders[name]
    results = ranks.run(gathered_by, layout.world_size, layout, source, to)
    for index, buckets in enumerate(results):
        received = {key: tensor for bucket, _ in buckets for key, tensor in bucket.items()}
        if to == "all" or index == 0:
            expected = {
                key: tensor if key.endswith("correction_bias") else tensor.to(torch.bfloat16)
                for key, tensor in tensors_of(source).items()
            }
            assert_same_bytes(expected, received)
            assert sum(len(bucket) for bucket, _ in buckets) == len(received), "every tensor arrives once"
        else:
            assert not received
        assert all(one_piece for _, one_piece in buckets)
