"""Weights of a sharded model: streaming in from a Hugging Face folder, streaming out under Hugging Face names.

Every operation follows the tables of families.py. Invariant: no rank ever holds more than its own shard plus one
parameter (loading) or one bucket (exporting, on global rank 0); what is exported is byte for byte what was loaded.
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
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn

from mcore_adapter.hf.safetensors_folder import (
    SafetensorsFolder,
    ShardWriter,
    TensorSpec,
    WeightsError,
    copy_tokenizer,
    replacing_folder,
)
from mcore_adapter.models.conversions import Conversion, OfExpert, Piece
from mcore_adapter.models.families import (
    EMBEDDING,
    HF_VALUE_HEAD,
    hf_shapes,
    layer_table,
    outer_table,
)
from mcore_adapter.models.gpt import ModelChunk, named_conversions
from mcore_adapter.models.parts import CORRECTION_BIAS
from mcore_adapter.models.transformer_config import layers_of_chunks
from mcore_adapter.parallel import ParallelState
from model_specs.config import ModelConfig
from model_specs.families import FAMILIES

logger = logging.getLogger(__name__)

DEFAULT_BUCKET_BYTES = 1 << 30

Shapes = Mapping[str, tuple[int, ...]]


def load_hf_weights(chunks: Sequence[nn.Module], path: str | Path, *, parallel: ParallelState, seed: int = 0) -> None:
    """Fill the parameters of this rank from the safetensors of folder `path`, reading only this rank's slices.

    A critic loads from a critic's folder or from a language model's: there its value head is drawn from `seed`. Raises
    WeightsError naming the file where a tensor is missing, of another shape, unknown, or the file truncated.
    """
    models = unwrap(chunks)
    shapes = _shapes(models)
    with SafetensorsFolder(path) as folder:
        fresh_head = models[0].is_critic and HF_VALUE_HEAD not in folder.names
        check_names(
            folder, models[0].model_config, is_critic=models[0].is_critic, without=HF_VALUE_HEAD if fresh_head else None
        )

        def source(conversion: Conversion) -> Reader:
            if fresh_head and HF_VALUE_HEAD in conversion.names:
                return _scratch_reader(models[0].model_config, shapes, conversion, seed)
            for name in conversion.names:
                if folder.shape(name) != shapes[name]:
                    found, expected = folder.shape(name), shapes[name]
                    raise WeightsError(f"{folder.file_of(name)}: {name} is {found}; config.json requires {expected}")
            return folder.read

        _fill(models, shapes, parallel, source)
    if fresh_head:
        logger.info("%s holds no %s: a new value head was drawn", path, HF_VALUE_HEAD)


def init_from_scratch(chunks: Sequence[nn.Module], *, parallel: ParallelState, seed: int) -> None:
    """Draw the parameters as transformers does: normal matrices, zero biases, unit norms.

    The same model in every layout: each Hugging Face tensor is drawn whole from its own seed, then sharded.
    """
    models = unwrap(chunks)
    shapes = _shapes(models)
    conversions = [conversion for _, conversion in named_conversions(models)]
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        readers = _drawn_ahead(pool, models[0].model_config, shapes, conversions, seed)
        _fill(models, shapes, parallel, lambda _: next(readers))


@dataclass(frozen=True)
class ExportPlan:
    """Whose shards make up which bucket: the same for every export of a model."""

    shapes: Shapes
    held: Mapping[Conversion, Tensor]
    """This rank's parameters."""
    buckets: Sequence[tuple[torch.dtype, Sequence[tuple[Conversion, list[int]]]]]
    """dtype, and parameters with the global ranks that hold their shards, in this order."""


def plan_export(chunks: Sequence[nn.Module], *, parallel: ParallelState, bucket_bytes: int) -> ExportPlan:
    """Plan the buckets from shapes and layout alone, without communication. A bucket holds at most `bucket_bytes`, or
    one parameter that is larger."""
    models = unwrap(chunks)
    shapes, dtype, moe = _shapes(models), models[0].config.params_dtype, models[0].model_config.moe
    num_experts = moe.num_experts if moe else 0
    return ExportPlan(
        shapes=shapes,
        held={conversion: param for param, conversion in named_conversions(models)},
        buckets=[
            (
                torch.float32 if bucket[0].is_float32 else dtype,
                [(item.conversion, item.holders(parallel, num_experts)) for item in bucket],
            )
            for bucket in _buckets(_owners(models[0], parallel), shapes, bucket_bytes // dtype.itemsize)
        ],
    )


def iter_hf_weights(
    chunks: Sequence[nn.Module], *, parallel: ParallelState, bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> Iterator[dict[str, Tensor]]:
    """Run run_export() with a plan of its own."""
    return run_export(plan_export(chunks, parallel=parallel, bucket_bytes=bucket_bytes), parallel=parallel)


def run_export(plan: ExportPlan, *, parallel: ParallelState) -> Iterator[dict[str, Tensor]]:
    """Yield the whole model as buckets of full tensors under Hugging Face names, in the order of the network;
    collective.

    Every rank iterates to the end; global rank 0 gets the tensors (its own copies, on its device, in the parameters'
    dtype), the others empty dicts.
    """
    device = next(iter(plan.held.values())).device
    for dtype, held_by in plan.buckets:
        if parallel.rank == 0:
            like = torch.empty(0, dtype=dtype, device=device)
            yield _receive(held_by, plan.shapes, plan.held, parallel.layout.tp, like=like)
        else:
            _send(held_by, plan.held, parallel.rank)
            yield {}


def save_hf(
    chunks: Sequence[nn.Module], path: str | Path, *, parallel: ParallelState, tokenizer_from: str | Path | None = None
) -> None:
    """Write the model as a Hugging Face folder that transformers loads; collective, global rank 0 writes.

    `path` appears, or is replaced, only when complete. tokenizer_from: folder whose tokenizer files and
    generation_config.json are copied. Raises WeightsError on every rank where writing fails.
    """
    model = unwrap(chunks)[0]
    buckets = iter_hf_weights(chunks, parallel=parallel)
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


def unwrap(chunks: Sequence[nn.Module]) -> list[ModelChunk]:
    """Return the chunks inside wrappers such as Megatron's DistributedDataParallel."""
    models = []
    for chunk in chunks:
        while not isinstance(chunk, ModelChunk):
            chunk = chunk.get_submodule("module")
        models.append(chunk)
    return models


# Loading

Reader = Callable[[str, int, int, int], Tensor]
"""(Hugging Face name, dim, start, stop) -> that part of the tensor."""


def _shapes(models: Sequence[ModelChunk]) -> dict[str, tuple[int, ...]]:
    return hf_shapes(models[0].model_config, is_critic=models[0].is_critic)


def check_names(folder: SafetensorsFolder, config: ModelConfig, *, is_critic: bool, without: str | None) -> None:
    """Raise WeightsError unless the folder holds the tensors of this model (except `without`), and no others that would
    have an effect."""
    expected = set(hf_shapes(config, is_critic=is_critic)) - {without}
    missing = sorted(expected - folder.names)
    if missing:
        raise WeightsError(f"{folder.folder}: {len(missing)} tensors are missing, the first is {missing[0]}")
    ignored = {"lm_head.weight"} if is_critic or config.tied else set()
    prefixes = FAMILIES[config.model_type].ignored_tensors(config)
    unknown = sorted(
        n for n in folder.names - expected - ignored
        if not n.endswith("rotary_emb.inv_freq") and not n.startswith(prefixes)
    )  # fmt: skip
    if unknown:
        raise WeightsError(
            f"{folder.file_of(unknown[0])}: {unknown[0]} has no place in a {config.model_type} model "
            f"({len(unknown)} unknown tensors)"
        )


@torch.no_grad()
def _fill(
    models: Sequence[ModelChunk], shapes: Shapes, parallel: ParallelState, source: Callable[[Conversion], Reader]
) -> None:
    """Copy every piece of every parameter from where `source` finds it."""
    for param, conversion in named_conversions(models):
        read, dim = source(conversion), conversion.tp_dim or 0
        for piece, part in _parts(param, conversion, shapes, parallel.tp_rank, parallel.layout.tp):
            part.copy_(read(piece.name, dim, piece.start, piece.stop))


def _parts(
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


def _drawn_ahead(
    pool: ThreadPoolExecutor, config: ModelConfig, shapes: Shapes, conversions: Sequence[Conversion], seed: int
) -> Iterator[Reader]:
    """Yield one reader for each of `conversions`, in order, read by many threads slightly ahead of the consumer."""
    ahead: deque[Future[Reader]] = deque()
    for conversion in conversions:
        ahead.append(pool.submit(_scratch_reader, config, shapes, conversion, seed))
        if len(ahead) > 32:
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
    std = 1.0 / (config.hidden_size + 1) if name == HF_VALUE_HEAD else config.initializer_range
    return torch.empty(shape).normal_(0.0, std, generator=generator)


# Exporting


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
        size = sum(_numel(shapes[name]) for name in item.conversion.names)
        if bucket and (filled + size > max_elements or item.is_float32 != bucket[0].is_float32):
            yield bucket
            bucket, filled = [], 0
        bucket.append(item)
        filled += size
    yield bucket


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _send(held_by: Sequence[tuple[Conversion, list[int]]], held: Mapping[Conversion, Tensor], rank: int) -> None:
    """Send this rank's shards of the bucket, flat and end to end, to global rank 0."""
    mine = [held[conversion].detach().flatten() for conversion, holders in held_by if rank in holders]
    if mine:
        _wait([dist.P2POp(dist.isend, torch.cat(mine), 0)])


def _receive(
    held_by: Sequence[tuple[Conversion, list[int]]],
    shapes: Shapes,
    held: Mapping[Conversion, Tensor],
    tp: int,
    *,
    like: Tensor,
) -> dict[str, Tensor]:
    """Receive full tensors on global rank 0, of the dtype and device of `like`, from the shards of all ranks that hold
    some."""
    shards: dict[int, list[tuple[Conversion, int, tuple[int, ...]]]] = {}
    for conversion, holders in held_by:
        for index, rank in enumerate(holders):
            shape = _local_shape(conversion, shapes, index, tp)
            shards.setdefault(rank, []).append((conversion, index, shape))
    flat = {rank: like.new_empty(sum(_numel(shape) for _, _, shape in of)) for rank, of in shards.items() if rank != 0}
    _wait([dist.P2POp(dist.irecv, tensor, rank) for rank, tensor in flat.items()])
    full = {name: like.new_empty(shapes[name]) for conversion, _ in held_by for name in conversion.names}
    for rank, of in shards.items():
        if rank == 0:
            local = [held[conversion].detach() for conversion, _, _ in of]
        else:
            flats = flat[rank].split([_numel(shape) for _, _, shape in of])
            local = [x.view(shape) for x, (_, _, shape) in zip(flats, of, strict=True)]
        for shard, (conversion, index, _) in zip(local, of, strict=True):
            dim = conversion.tp_dim or 0
            for piece, part in _parts(shard, conversion, shapes, index, tp):
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


# Writing


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
    return {
        name: TensorSpec(torch.float32 if name.endswith(CORRECTION_BIAS) else dtype, shape)
        for name, shape in shapes.items()
    }


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
