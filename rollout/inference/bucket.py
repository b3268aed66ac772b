"""Weights on their way to a generator: many tensors laid end to end in one flat piece of memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class FlatBucket:
    """Tensors laid end to end as bytes, the widest elements first so that every one is aligned."""

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    flat: Tensor  # [bytes] uint8

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> FlatBucket:
        """Concatenate tensors. Raises ValueError on no tensors."""
        if not tensors:
            raise ValueError("a bucket needs at least one tensor")
        items = sorted(tensors.items(), key=lambda item: -item[1].element_size())
        return FlatBucket(
            names=tuple(name for name, _ in items),
            dtypes=tuple(t.dtype for _, t in items),
            shapes=tuple(tuple(t.shape) for _, t in items),
            flat=torch.cat([t.detach().contiguous().reshape(-1).view(torch.uint8) for _, t in items]),
        )

    @property
    def num_bytes(self) -> int:
        return self.flat.numel()

    def spans(self) -> Iterator[tuple[str, torch.dtype, torch.Size, int, int]]:
        """Yield (name, dtype, shape, first byte, byte after the last) of each tensor."""
        start = 0
        for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True):
            end = start + dtype.itemsize * torch.Size(shape).numel()
            yield name, dtype, torch.Size(shape), start, end
            start = end

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors again, as views."""
        return {name: self.flat[start:end].view(dtype).view(shape) for name, dtype, shape, start, end in self.spans()}
