"""Where the pieces of a Hugging Face tensor lie in the parameters of a rank: shared by loading and exporting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from mcore_adapter.models.conversions import Conversion, Piece
from mcore_adapter.models.gpt import ModelChunk
from model_specs.tensors import hf_shapes

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
