"""Weights of a sharded model, read from a Hugging Face folder or drawn from a seed.

Every operation follows the tables of conversions.py. Invariant: no rank ever holds more than its own shard plus one
parameter.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

from mcore_adapter.hf.safetensors_folder import SafetensorsFolder
from mcore_adapter.models.conversions import Conversion, Piece
from mcore_adapter.models.gpt import ModelChunk, named_conversions
from mcore_adapter.parallel import ParallelState
from model_specs.config import ModelConfig
from model_specs.tensors import VALUE_HEAD, hf_shapes
from model_specs.weight_files import check_tensors

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
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
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
    std = 1.0 / (config.hidden_size + 1) if name == VALUE_HEAD else config.initializer_range
    return torch.empty(shape).normal_(0.0, std, generator=generator)
