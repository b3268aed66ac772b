"""Weights gathered by the first rank, or by every rank."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from allocation import ParallelLayout
from helpers.mcore_ranks import Rank, build
from helpers.saved_models import assert_same_bytes, tensors_of
from mcore_adapter.hf.weights import Receivers
from rollout.bucket import FlatBucket


def gathered_by(
    rank: Rank, layout: ParallelLayout, source: Path, to: Receivers
) -> list[tuple[dict[str, Tensor], bool]]:
    """Return the buckets of a model in bfloat16, and whether each one is a single piece of memory."""
    from mcore_adapter.hf.weights import plan_export, run_export

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
        ("qwen3_moe", ParallelLayout(tp=2, ep=2)),
        ("qwen3", ParallelLayout(tp=2, pp=2)),
        ("deepseek_v3", ParallelLayout(dp=2, ep=2)),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                ("qwen2_tied", ParallelLayout(tp=2)),
                ("qwen3_moe", ParallelLayout(dp=2, ep=2)),
                ("glm4", ParallelLayout(tp=2)),
                ("deepseek_v3", ParallelLayout(dp=2, pp=2, ep=2)),
            )
        ),
    ],
)
@pytest.mark.parametrize("to", ["first", "all"])
def test_a_bucket_is_one_piece_of_memory_on_each_rank_that_receives_it(ranks, model_folders, name, layout, to) -> None:
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
