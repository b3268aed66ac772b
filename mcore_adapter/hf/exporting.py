"""Weights of a sharded model, gathered into buckets of full tensors under Hugging Face names.

Either global rank 0 receives everything, or every part of the model stays where it is: the first rank of each pipeline
stage gathers over tensor parallelism alone, and the first rank of each expert-parallel rank has its experts already.
Invariant: a rank that receives holds its shard and one bucket, the other ranks nothing but their shards; what is
exported is byte for byte what was loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_adapter.hf.pieces import Shapes, numel, parts_of, shapes_of, unwrap
from mcore_adapter.models.conversions import Conversion, OfExpert
from mcore_adapter.models.families import EMBEDDING, layer_table, outer_table
from mcore_adapter.models.gpt import ModelChunk, named_conversions
from mcore_adapter.models.parts import CORRECTION_BIAS
from mcore_adapter.models.transformer_config import layers_of_chunks
from mcore_adapter.parallel import ParallelState

DEFAULT_BUCKET_BYTES = 1 << 30


@dataclass(frozen=True)
class ExportBucket:
    """Parameters that one rank receives together."""

    target: int
    """Global rank that receives the full tensors."""
    dtype: torch.dtype
    held_by: Sequence[tuple[Conversion, list[int]]]
    """Parameters, with the global ranks that hold their shards, in this order."""


@dataclass(frozen=True)
class ExportPlan:
    """Whose shards make up which bucket: the same for every export of a model."""

    shapes: Shapes
    held: Mapping[Conversion, Tensor]
    """This rank's parameters."""
    rounds: Sequence[Sequence[ExportBucket]]
    """Each with at most one bucket for a rank."""


def plan_export(
    chunks: Sequence[nn.Module], *, parallel: ParallelState, bucket_bytes: int, at_holders: bool = False
) -> ExportPlan:
    """Plan the buckets from shapes and layout alone, without communication. A bucket holds at most `bucket_bytes`, or
    one parameter that is larger. `at_holders`: parameters go to the ranks of ParallelLayout.holders that hold them, not
    to global rank 0."""
    models = unwrap(chunks)
    shapes, dtype, moe = shapes_of(models), models[0].config.params_dtype, models[0].model_config.moe
    num_experts = moe.num_experts if moe else 0
    owned: dict[int, list[_Owned]] = {}
    for item in _owners(models[0], parallel):
        owned.setdefault(item.holders(parallel, num_experts)[0] if at_holders else 0, []).append(item)
    buckets = [
        [
            ExportBucket(
                target=target,
                dtype=torch.float32 if bucket[0].is_float32 else dtype,
                held_by=[(item.conversion, item.holders(parallel, num_experts)) for item in bucket],
            )
            for bucket in _buckets(items, shapes, bucket_bytes // dtype.itemsize)
        ]
        for target, items in sorted(owned.items())
    ]
    return ExportPlan(
        shapes=shapes,
        held={conversion: param for param, conversion in named_conversions(models)},
        rounds=[[bucket for bucket in one if bucket is not None] for one in zip_longest(*buckets)],
    )


def iter_hf_weights(
    chunks: Sequence[nn.Module],
    *,
    parallel: ParallelState,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    device: torch.device | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Run run_export() with a plan of its own."""
    plan = plan_export(chunks, parallel=parallel, bucket_bytes=bucket_bytes)
    return run_export(plan, parallel=parallel, device=device)


def run_export(
    plan: ExportPlan, *, parallel: ParallelState, device: torch.device | None = None
) -> Iterator[dict[str, Tensor]]:
    """Yield the whole model as buckets of full tensors under Hugging Face names, in the order of the network;
    collective.

    Every rank iterates to the end. In each round a rank gets the tensors of its bucket (its own copies, on its device,
    in the parameters' dtype), or an empty dict where it has none. `device`: of the ranks' communication, where the
    parameters are not there.
    """
    device = device or next(iter(plan.held.values())).device
    for buckets in plan.rounds:
        mine: dict[str, Tensor] = {}
        for bucket in buckets:  # the same order on all ranks
            if bucket.target == parallel.rank:
                mine = _receive(bucket, plan, parallel, device)
            else:
                _send(bucket, plan.held, parallel.rank, device)
        yield mine


@dataclass(frozen=True)
class _Owned:
    """One parameter of the model and the pipeline stage that exports it."""

    conversion: Conversion
    stage: int

    @property
    def is_float32(self) -> bool:
        """Whatever the dtype of the model."""
        return self.conversion.names[0].endswith(CORRECTION_BIAS)

    def holders(self, parallel: ParallelState, num_experts: int) -> list[int]:
        """Return the global ranks whose shards, in this order, make up the parameter."""
        if isinstance(self.conversion, OfExpert):
            ep = self.conversion.expert // (num_experts // parallel.layout.ep)
            return [parallel.rank_of_experts(ep=ep, pp=self.stage)]
        ranks = range(parallel.layout.tp) if self.conversion.tp_dim is not None else range(1)
        return [parallel.rank_at(tp=rank, pp=self.stage) for rank in ranks]


def _owners(model: ModelChunk, parallel: ParallelState) -> Iterator[_Owned]:
    """Yield every parameter of the whole model once, in the order of the network; the same on every rank."""
    config, layout = model.model_config, parallel.layout
    stage_of_layer = {
        layer: chunk % layout.pp
        for chunk, layers in enumerate(layers_of_chunks(config.num_layers, layout))
        for layer in layers
    }
    outer = outer_table(config, is_critic=model.is_critic)
    yield _Owned(outer.pop(EMBEDDING), 0)
    for layer in range(config.num_layers):
        for conversion in layer_table(config, layer).values():
            yield _Owned(conversion, stage_of_layer[layer])
    for conversion in outer.values():
        yield _Owned(conversion, layout.pp - 1)


def _buckets(owned: Iterable[_Owned], shapes: Shapes, max_elements: int) -> Iterator[list[_Owned]]:
    bucket: list[_Owned] = []
    filled = 0
    for item in owned:
        size = sum(numel(shapes[name]) for name in item.conversion.names)
        if bucket and (filled + size > max_elements or item.is_float32 != bucket[0].is_float32):
            yield bucket
            bucket, filled = [], 0
        bucket.append(item)
        filled += size
    yield bucket


def _send(bucket: ExportBucket, held: Mapping[Conversion, Tensor], rank: int, device: torch.device) -> None:
    """Send this rank's shards of the bucket, flat and end to end, to the rank that receives it."""
    mine = [held[conversion].detach().to(device).flatten() for conversion, holders in bucket.held_by if rank in holders]
    if mine:
        _wait([dist.P2POp(dist.isend, torch.cat(mine), bucket.target)])


def _receive(
    bucket: ExportBucket, plan: ExportPlan, parallel: ParallelState, device: torch.device
) -> dict[str, Tensor]:
    """Receive full tensors on this rank, on `device`, from the shards of all ranks that hold some."""
    shapes, tp, like = plan.shapes, parallel.layout.tp, torch.empty(0, dtype=bucket.dtype, device=device)
    shards: dict[int, list[tuple[Conversion, int, tuple[int, ...]]]] = {}
    for conversion, holders in bucket.held_by:
        for index, rank in enumerate(holders):
            shape = _local_shape(conversion, shapes, index, tp)
            shards.setdefault(rank, []).append((conversion, index, shape))
    flat = {
        rank: like.new_empty(sum(numel(shape) for _, _, shape in of))
        for rank, of in shards.items()
        if rank != parallel.rank
    }
    _wait([dist.P2POp(dist.irecv, tensor, rank) for rank, tensor in flat.items()])
    full = {name: like.new_empty(shapes[name]) for conversion, _ in bucket.held_by for name in conversion.names}
    for rank, of in shards.items():
        if rank == parallel.rank:
            local = [plan.held[conversion].detach() for conversion, _, _ in of]
        else:
            flats = flat[rank].split([numel(shape) for _, _, shape in of])
            local = [x.view(shape) for x, (_, _, shape) in zip(flats, of, strict=True)]
        for shard, (conversion, index, _) in zip(local, of, strict=True):
            dim = conversion.tp_dim or 0
            for piece, part in parts_of(shard, conversion, shapes, index, tp):
                full[piece.name].narrow(dim, piece.start, piece.stop - piece.start).copy_(part)
    return full


def _local_shape(conversion: Conversion, shapes: Shapes, rank: int, tp: int) -> tuple[int, ...]:
    dim = conversion.tp_dim or 0
    sizes = {name: shapes[name][dim] for name in conversion.names}
    shape = list(shapes[conversion.names[0]])
    shape[dim] = sum(p.stop - p.start for p in conversion.pieces(sizes, rank=rank, tp=tp))
    return tuple(shape)


def _wait(operations: list[dist.P2POp]) -> None:
    if operations:
        for request in dist.batch_isend_irecv(operations):
            request.wait()
