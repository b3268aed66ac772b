"""Weights as numpy arrays: those cross the object store without copies, torch tensors do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.types import WeightBucket

if TYPE_CHECKING:
    import torch


def bucket_to_wire(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Convert a bucket to one flat byte array and the location of each tensor in it."""
    import torch

    layout = [(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()]
    flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors.values()]
    return {"layout": layout, "bytes": torch.cat(flat).cpu().numpy() if flat else np.empty(0, np.uint8)}


def bucket_from_wire(wire: dict[str, Any]) -> WeightBucket:
    """Return the inverse of `bucket_to_wire`."""
    import torch

    flat = torch.from_numpy(wire["bytes"].copy())
    tensors, start = {}, 0
    for name, dtype_name, shape in wire["layout"]:
        dtype: torch.dtype = getattr(torch, dtype_name)
        end = start + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        tensors[name] = flat[start:end].view(dtype).view(shape)
        start = end
    return WeightBucket(tensors=tensors)
