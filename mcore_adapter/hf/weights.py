"""Weights of a sharded model, gathered into buckets of full tensors under Hugging Face names, or written as a folder.

Global rank 0 receives everything, or every rank does, or every part of the model stays where it is: the first rank of
each pipeline stage gathers over tensor parallelism alone, and the first rank of each expert-parallel rank has its
experts already. A bucket is one piece of memory: tensors that a rank holds as a whole come first, end to end, so that
its shards are received where they stay; tensors that several ranks hold, or that lie interleaved, are put together.
Invariant: a rank that receives holds its shard, one bucket and the shards that are put together in it, the other ranks
their shards and those of one bucket; what is exported is byte for byte what was loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn

from allocation import stages_of_layers
from mcore_adapter.hf.safetensors_folder import (
    SafetensorsFolder,
    ShardWriter,
    TensorSpec,
    copy_tokenizer,
    dtype_of,
    replacing_folder,
)
from mcore_adapter.models.conversions import EMBEDDING, Conversion, OfExpert, Piece, layer_table, outer_table
from mcore_adapter.models.gpt import ModelChunk, named_conversions
from mcore_adapter.parallel import ParallelState
from mcore_adapter.settings import DRAWING_THREADS, DRAWN_AHEAD
from model_specs.config import ModelConfig
from model_specs.families import FAMILIES
from model_specs.tensors import CORRECTION_BIAS, VALUE_HEAD, hf_shapes
from model_specs.weight_files import WeightsError, check_tensors

Shapes = Mapping[str, tuple[int, ...]]
"""Hugging Face name -> shape of the full tensor."""


def unwrap(chunks: Sequence[nn.Module]) -> list[ModelChunk]:
    """Return the chunks inside wrappers such as Megatron's DistributedDataParallel."""
    models = []
    for chunk in chunks:
        while not isinstance(chunk, ModelChunk):
            chunk = chunk.get_submodule("module")
        models.append(chunk)
    return models


def shapes_of(models: Sequence[ModelChunk]) -> dict[str, tuple[int, ...]]:
    """Return the full shapes of the tensors of a model, by Hugging Face name."""
    return hf_shapes(models[0].model_config, is_critic=models[0].is_critic)


def parts_of(
    local: Tensor, conversion: Conversion, shapes: Shapes, tp_rank: int, tp: int
) -> Iterator[tuple[Piece, Tensor]]:
    """Yield the pieces of a parameter's shard with the views of `local` where they lie."""
    dim, offset = conversion.tp_dim or 0, 0
    sizes = {name: shapes[name][dim] for name in conversion.names}
    for piece in conversion.pieces(sizes, rank=tp_rank, tp=tp):
        length = piece.stop - piece.start
        yield piece, local.narrow(dim, offset, length)
        offset += length
    assert offset == local.size(dim), f"{conversion} fills {offset} of {local.size(dim)}"


def numel(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a shape."""
    return torch.Size(shape).numel()


logger = logging.getLogger(__name__)

Reader = Callable[[str, int, int, int], Tensor]
"""(Hugging Face name, dim, start, stop) -> that part of the tensor."""


def load_hf_weights(
    chunks: Sequence[nn.Module],
    path: str | Path,
    *,
    parallel: ParallelState,
    seed: int = 0,
    needs_value_head: bool = False,
) -> None:
    """Fill the parameters of this rank from the safetensors of folder `path`, reading only this rank's slices.

    A critic loads from a critic's folder or, unless `needs_value_head`, from a language model's: there its value head
    is drawn from `seed`. Raises WeightsError naming the file where a tensor is missing, of another shape, unknown, or
    the file truncated.
    """
    models = unwrap(chunks)
    shapes = shapes_of(models)
    with SafetensorsFolder(path) as folder:
        is_critic = models[0].is_critic
        value_head = (True if needs_value_head else None) if is_critic else False
        check_tensors(path, folder.stored, models[0].model_config, value_head=value_head)
        fresh_head = is_critic and VALUE_HEAD not in folder.stored

        def source(conversion: Conversion) -> Reader:
            if fresh_head and VALUE_HEAD in conversion.names:
                return _scratch_reader(models[0].model_config, shapes, conversion, seed)
            return folder.read

        _fill(models, shapes, parallel, source)
    if fresh_head:
        logger.info("%s holds no %s: a new value head was drawn", path, VALUE_HEAD)


def init_from_scratch(chunks: Sequence[nn.Module], *, parallel: ParallelState, seed: int) -> None:
    """Draw the parameters as transformers does: normal matrices, zero biases, unit norms.

    The same model in every layout: each Hugging Face tensor is drawn whole from its own seed, then sharded.
    """
    models = unwrap(chunks)
    shapes = shapes_of(models)
    conversions = [conversion for _, conversion in named_conversions(models)]
    with ThreadPoolExecutor(min(DRAWING_THREADS, os.cpu_count() or 1)) as pool:
        readers = _drawn_ahead(pool, models[0].model_config, shapes, conversions, seed)
        _fill(models, shapes, parallel, lambda _: next(readers))


@torch.no_grad()
def _fill(
    models: Sequence[ModelChunk], shapes: Shapes, parallel: ParallelState, source: Callable[[Conversion], Reader]
) -> None:
    """Copy every piece of every parameter from where `source` finds it."""
    for param, conversion in named_conversions(models):
        read, dim = source(conversion), conversion.tp_dim or 0
        for piece, part in parts_of(param, conversion, shapes, parallel.tp_rank, parallel.layout.tp):
            part.copy_(read(piece.name, dim, piece.start, piece.stop))


def _drawn_ahead(
    pool: ThreadPoolExecutor, config: ModelConfig, shapes: Shapes, conversions: Sequence[Conversion], seed: int
) -> Iterator[Reader]:
    """Yield one reader for each of `conversions`, in order, read by many threads slightly ahead of the consumer."""
    ahead: deque[Future[Reader]] = deque()
    for conversion in conversions:
        ahead.append(pool.submit(_scratch_reader, config, shapes, conversion, seed))
        if len(ahead) > DRAWN_AHEAD:
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()


def _scratch_reader(config: ModelConfig, shapes: Shapes, conversion: Conversion, seed: int) -> Reader:
    """Return new random tensors of one conversion."""
    whole = {name: _scratch_tensor(config, name, shapes[name], seed) for name in conversion.names}
    return lambda name, dim, start, stop: whole[name].narrow(dim, start, stop - start)


def _scratch_tensor(config: ModelConfig, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith("bias"):  # also a correction bias
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    # A value head that starts near zero: with transformers' width its first values would dwarf the rewards.
    std = 1.0 / (config.hidden_size + 1) if name == VALUE_HEAD else config.initializer_range
    return torch.empty(shape).normal_(0.0, std, generator=generator)


DEFAULT_BUCKET_BYTES = 1 << 30

Receivers = Literal["first", "all"]
"""Which ranks receive full tensors: global rank 0, or every rank."""


@dataclass(frozen=True)
class ExportBucket:
    """Parameters that are received together."""

    to: Receivers
    dtype: torch.dtype
    shapes: Mapping[str, tuple[int, ...]]
    """Of its tensors, in the order in which they lie in the bucket."""
    sizes: Sequence[int]
    """Elements of each tensor."""
    whole: Mapping[int, Sequence[Conversion]]
    """By global rank: parameters that are tensors of the bucket end to end, from its beginning, in this order."""
    cut: Mapping[int, Sequence[_Shard]]
    """By global rank: shards of the other parameters."""


@dataclass(frozen=True)
class ExportPlan:
    """Whose shards make up which bucket: the same for every export of a model."""

    shapes: Shapes
    held: Mapping[Conversion, Tensor]
    """This rank's parameters."""
    buckets: Sequence[ExportBucket]


def plan_export(
    chunks: Sequence[nn.Module], *, parallel: ParallelState, bucket_bytes: int, to: Receivers = "first"
) -> ExportPlan:
    """Plan the buckets from shapes and layout alone, without communication. A bucket holds at most `bucket_bytes`, or
    one parameter that is larger."""
    models = unwrap(chunks)
    shapes, dtype, moe = shapes_of(models), models[0].config.params_dtype, models[0].model_config.moe
    num_experts = moe.num_experts if moe else 0
    buckets = [
        _lay_out(
            [(item.conversion, item.holders(parallel, num_experts)) for item in bucket],
            shapes,
            tp=parallel.layout.tp,
            to=to,
            dtype=torch.float32 if bucket[0].is_float32 else dtype,
        )
        for bucket in _buckets(_owners(models[0], parallel), shapes, bucket_bytes // dtype.itemsize)
    ]
    held = {conversion: param for param, conversion in named_conversions(models)}
    return ExportPlan(shapes=shapes, held=held, buckets=buckets)


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

    Every rank iterates to the end. A rank that receives gets the tensors of each bucket (its own copies, views of one
    piece of memory on its device, in the parameters' dtype), another rank an empty dict. `device`: of the ranks'
    communication, where the parameters are not there.
    """
    device = device or next(iter(plan.held.values())).device
    for bucket in plan.buckets:  # in the same order on all ranks
        yield _gather(bucket, plan, parallel, device)


@dataclass(frozen=True)
class _Shard:
    """A rank's part of a parameter that is not received in its place."""

    conversion: Conversion
    index: int
    """Of the rank among those that hold the parameter."""
    shape: tuple[int, ...]


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
    stage_of_layer = stages_of_layers(config.num_layers, layout)
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


def _lay_out(
    held_by: Sequence[tuple[Conversion, list[int]]], shapes: Shapes, *, tp: int, to: Receivers, dtype: torch.dtype
) -> ExportBucket:
    """Return a bucket of parameters, given with the global ranks that hold their shards."""
    whole: dict[int, list[Conversion]] = {}
    cut: dict[int, list[_Shard]] = {}
    rest: list[Conversion] = []
    for conversion, holders in held_by:
        if len(holders) == 1 and _lies_end_to_end(conversion, shapes, tp):
            whole.setdefault(holders[0], []).append(conversion)
            continue
        rest.append(conversion)
        for index, rank in enumerate(holders):
            cut.setdefault(rank, []).append(_Shard(conversion, index, _local_shape(conversion, shapes, index, tp)))
    ordered = [name for of in (*whole.values(), rest) for conversion in of for name in conversion.names]
    return ExportBucket(
        to=to,
        dtype=dtype,
        shapes={name: shapes[name] for name in ordered},
        sizes=[numel(shapes[name]) for name in ordered],
        whole=whole,
        cut=cut,
    )


def _lies_end_to_end(conversion: Conversion, shapes: Shapes, tp: int) -> bool:
    """Return whether the only shard of a parameter holds its Hugging Face tensors one after the other in memory."""
    dim = conversion.tp_dim or 0
    sizes = {name: shapes[name][dim] for name in conversion.names}
    runs: list[tuple[str, int, int]] = []
    for piece in conversion.pieces(sizes, rank=0, tp=tp):
        begin = piece.start
        if runs and runs[-1][0] == piece.name and runs[-1][2] == begin:
            begin = runs.pop()[1]
        runs.append((piece.name, begin, piece.stop))
    assert dim == 0 or len(sizes) == 1, "columns of several tensors would lie interleaved"
    return runs == [(name, 0, sizes[name]) for name in conversion.names]


def _gather(bucket: ExportBucket, plan: ExportPlan, parallel: ParallelState, device: torch.device) -> dict[str, Tensor]:
    """Move every shard of a bucket; return its full tensors, on `device`, on a rank that receives them."""
    rank, receives = parallel.rank, bucket.to == "all" or parallel.rank == 0
    alone = (bucket.to == "first" and receives) or parallel.world_size == 1  # what this rank holds reaches no other
    like = torch.empty(0, dtype=bucket.dtype, device=device)
    flat = like.new_empty(sum(bucket.sizes) if receives else 0)
    begin, sizes = 0, iter(bucket.sizes)
    moves: list[tuple[int, Tensor]] = []
    for holder, conversions in bucket.whole.items():
        size = sum(islice(sizes, sum(len(conversion.names) for conversion in conversions)))
        place = flat[begin : begin + size] if receives else like.new_empty(size if holder == rank else 0)
        if holder == rank:
            _join([plan.held[conversion] for conversion in conversions], place)
        moves.append((holder, place))
        begin += size
    shards: dict[int, list[Tensor]] = {}
    for holder, of in bucket.cut.items():
        lengths = [numel(shard.shape) for shard in of]
        held = [plan.held[shard.conversion].detach() for shard in of] if holder == rank else []
        if alone and holder == rank:
            shards[holder] = held
            continue
        place = like.new_empty(sum(lengths) if receives or holder == rank else 0)
        if holder == rank:
            _join(held, place)
        moves.append((holder, place))
        if receives:
            shards[holder] = [x.view(shard.shape) for x, shard in zip(place.split(lengths), of, strict=True)]
    _move(moves, bucket.to, rank, parallel.world_size)
    if not receives:
        return {}
    parts = zip(bucket.shapes.items(), flat.split(bucket.sizes), strict=True)
    full = {name: part.view(shape) for (name, shape), part in parts}
    for holder, of in bucket.cut.items():
        for shard, local in zip(of, shards[holder], strict=True):
            _put_in_place(local, shard, full, plan.shapes, parallel.layout.tp)
    return full


def _join(shards: Sequence[Tensor], place: Tensor) -> None:
    """Copy shards end to end to `place` [their elements]."""
    torch.cat([shard.detach().flatten().to(place.device) for shard in shards], out=place)


def _put_in_place(local: Tensor, shard: _Shard, full: Mapping[str, Tensor], shapes: Shapes, tp: int) -> None:
    """Copy a shard to its places in the full tensors."""
    dim = shard.conversion.tp_dim or 0
    for piece, part in parts_of(local, shard.conversion, shapes, shard.index, tp):
        full[piece.name].narrow(dim, piece.start, piece.stop - piece.start).copy_(part)


def _move(moves: Sequence[tuple[int, Tensor]], to: Receivers, rank: int, world_size: int) -> None:
    """Send the tensor of each (holder, tensor) to the first rank, or to all; the same moves on all of them."""
    if to == "all":
        if world_size > 1:
            for work in [dist.broadcast(tensor, src=holder, async_op=True) for holder, tensor in moves]:
                work.wait()
        return
    operations = [
        dist.P2POp(*((dist.irecv, tensor, holder) if rank == 0 else (dist.isend, tensor, 0)))
        for holder, tensor in moves
        if (rank == 0) != (rank == holder)
    ]
    if operations:
        for request in dist.batch_isend_irecv(operations):
            request.wait()


def _local_shape(conversion: Conversion, shapes: Shapes, rank: int, tp: int) -> tuple[int, ...]:
    dim = conversion.tp_dim or 0
    sizes = {name: shapes[name][dim] for name in conversion.names}
    shape = list(shapes[conversion.names[0]])
    shape[dim] = sum(p.stop - p.start for p in conversion.pieces(sizes, rank=rank, tp=tp))
    return tuple(shape)


def save_hf(
    chunks: Sequence[nn.Module],
    path: str | Path,
    *,
    parallel: ParallelState,
    tokenizer_from: str | Path | None = None,
    device: torch.device | None = None,
) -> None:
    """Write the model as a Hugging Face folder that transformers loads; collective, global rank 0 writes.

    `path` appears, or is replaced, only when complete. tokenizer_from: folder whose tokenizer files and
    generation_config.json are copied. `device`: see run_export(). Raises WeightsError on every rank if writing fails.
    """
    model = unwrap(chunks)[0]
    buckets = iter_hf_weights(chunks, parallel=parallel, device=device)
    error: Exception | None = None
    if parallel.rank == 0:
        try:
            _write(buckets, model, Path(path), tokenizer_from)
        except (OSError, SafetensorError) as caught:
            error = caught
    for _ in buckets:  # the other ranks' part; after an error, what rank 0 has not received yet
        pass
    outcome = [str(error) if error else None]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise WeightsError(f"{path}: the model could not be written: {outcome[0]}") from error


def _write(
    buckets: Iterator[dict[str, Tensor]], model: ModelChunk, path: Path, tokenizer_from: str | Path | None
) -> None:
    dtype = model.config.params_dtype
    shapes = hf_shapes(model.model_config, is_critic=model.is_critic)
    with replacing_folder(path) as folder:
        write_config(folder, model.model_config, dtype=dtype, is_critic=model.is_critic)
        if tokenizer_from is not None:
            copy_tokenizer(tokenizer_from, folder)
        writer = ShardWriter(folder, tensor_specs(shapes, dtype))
        try:
            for bucket in buckets:
                for name, tensor in bucket.items():
                    writer.add(name, tensor.cpu())
            writer.finish()
        finally:
            writer.close()


def tensor_specs(shapes: Shapes, dtype: torch.dtype) -> dict[str, TensorSpec]:
    """Return the shape and dtype in which each tensor of a model of this dtype is written."""
    return {name: TensorSpec(dtype_of(name, dtype), shape) for name, shape in shapes.items()}


def write_config(folder: Path, config: ModelConfig, *, dtype: torch.dtype, is_critic: bool) -> None:
    """Write the config.json of weights of this dtype."""
    content = hf_config_json(config, dtype=dtype, is_critic=is_critic)
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")


def hf_config_json(config: ModelConfig, *, dtype: torch.dtype, is_critic: bool) -> dict[str, object]:
    """Return the content of config.json for these weights: the one that was read, with the architecture and dtype of
    now."""
    content = dict(config.raw)
    content["dtype" if "dtype" in content else "torch_dtype"] = str(dtype).removeprefix("torch.")
    architecture = FAMILIES[config.model_type].architecture
    if is_critic:
        architecture = architecture.replace("ForCausalLM", "ForSequenceClassification")
        content.update(id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0})
    content["architectures"] = [architecture]
    return content
