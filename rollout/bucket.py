"""Weights on their way to a generator: many tensors laid end to end in one flat piece of memory, and the group of
processes in which it is broadcast.

The one carrier from the exporter's tensors to the generator, whatever the transport. A bucket is pickled as one numpy
array, which crosses the object store without copies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d


@dataclass(frozen=True, kw_only=True)
class FlatBucket:
    """Tensors laid end to end as bytes, the widest elements first so that every one is aligned."""

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    flat: Tensor  # [bytes] uint8

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> FlatBucket:
        """Lay tensors end to end, without a copy where they fill one piece of memory in this order. Raises ValueError
        on no tensors."""
        if not tensors:
            raise ValueError("a bucket needs at least one tensor")
        items = sorted(tensors.items(), key=lambda item: -item[1].element_size())
        flat = _memory_of([t for _, t in items])
        if flat is None:
            flat = torch.cat([t.detach().contiguous().reshape(-1).view(torch.uint8) for _, t in items])
        return FlatBucket(
            names=tuple(name for name, _ in items),
            dtypes=tuple(t.dtype for _, t in items),
            shapes=tuple(tuple(t.shape) for _, t in items),
            flat=flat,
        )

    @property
    def num_bytes(self) -> int:
        return self.flat.numel()

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickle, (self.names, self.dtypes, self.shapes, self.flat.cpu().numpy())

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors again, as views."""
        sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in zip(self.dtypes, self.shapes, strict=True)]
        parts = zip(self.names, self.flat.split(sizes), self.dtypes, self.shapes, strict=True)
        return {name: part.view(dtype).view(shape) for name, part, dtype, shape in parts}


def _unpickle(
    names: tuple[str, ...], dtypes: tuple[torch.dtype, ...], shapes: tuple[tuple[int, ...], ...], flat: np.ndarray
) -> FlatBucket:
    writeable = flat if flat.flags.writeable else flat.copy()  # as torch needs it
    return FlatBucket(names=names, dtypes=dtypes, shapes=shapes, flat=torch.from_numpy(writeable))


def _memory_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the piece of memory that the tensors fill end to end, as bytes; None where they do not."""
    memory = tensors[0].untyped_storage()
    end = memory.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or not tensor.is_contiguous():
            return None
        end += tensor.nbytes
    if end != memory.data_ptr() + memory.nbytes():
        return None
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory, 0, (memory.nbytes(),), (1,))  # type: ignore[call-overload]


def join_group(
    store: dist.Store, name: str, *, backend: str, rank: int, world: int, timeout: timedelta
) -> dist.ProcessGroup:
    """Return a group beside this process's own world, as a SGLang server makes it: with the same prefixes in the store,
    and the same helper. Returns when all ranks have come."""
    group, _ = c10d._new_process_group_helper(
        world, rank, [], dist.Backend(backend), dist.PrefixStore(name, store), group_name=c10d.GroupName(name),
        timeout=timeout,
    )  # fmt: skip
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world)}
    return group
