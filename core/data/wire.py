"""Weights and completions as few numpy arrays: those cross the object store without copies, torch tensors do not. An
array costs a fixed time, as much as that of many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.types import Completion, WeightBucket

if TYPE_CHECKING:
    import torch

_PER_TOKEN = ("token_ids", "logprobs", "versions")


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


def completions_to_wire(ended: Sequence[tuple[str, Completion | Exception]]) -> dict[str, Any]:
    """Convert how requests have ended, by request id: the tokens of all completions end to end."""
    errors = [(name, end) for name, end in ended if not isinstance(end, Completion)]
    done = [(name, end) for name, end in ended if isinstance(end, Completion)]
    if not done:
        return {"errors": errors, "done": []}
    return {
        "errors": errors,
        "done": [(name, len(c.token_ids), c.finish_reason, c.routed_experts) for name, c in done],
        **{field: np.concatenate([getattr(c, field) for _, c in done]) for field in _PER_TOKEN},
    }


def completions_from_wire(wire: dict[str, Any]) -> list[tuple[str, Completion | Exception]]:
    """Return the inverse of `completions_to_wire`, errors first; arrays are views."""
    ended: list[tuple[str, Completion | Exception]] = list(wire["errors"])
    start = 0
    for name, num_tokens, reason, experts in wire["done"]:
        own = {field: wire[field][start : start + num_tokens] for field in _PER_TOKEN}
        ended.append((name, Completion(**own, finish_reason=reason, routed_experts=experts)))
        start += num_tokens
    return ended
