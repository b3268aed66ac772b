"""Matrix products in float32 by oneDNN; installed by cpu/device.py.

torch calls MKL for them, which uses AVX-512 on Intel's processors only; oneDNN does on all that have it, and takes half
the time on an AMD EPYC. For bfloat16 torch calls oneDNN by itself.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

_SMALL = 2**22
"""Products with fewer terms stay with torch: making oneDNN's kernel for new sizes takes longer."""

_library: Any = None
"""What it replaces is replaced as long as it exists."""


def use_onednn() -> None:
    """Let oneDNN compute torch.mm, and what torch computes with it, from now on, in float32 on the CPU."""
    global _library
    if _library is None and torch.backends.mkldnn.is_available():
        _library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings(action="ignore"):  # that torch's own kernel is replaced
            _library.impl("mm", mm, "CPU")


def mm(a: Tensor, b: Tensor) -> Tensor:
    """Compute a b for a [m, k] and b [k, n]: [m, n], contiguous. Raises as torch.mm."""
    if not (_is_dense(a) and _is_dense(b) and a.shape[1] == b.shape[0] and len(a) * b.numel() >= _SMALL):
        return torch.mm(a, b, out=a.new_empty(0))
    if a.is_contiguous() or len(a) <= b.shape[1]:
        return _linear(a, b.t())
    return _linear(b.t(), a).t().contiguous()  # a left factor that is not contiguous is copied: here the smaller one


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


def _is_dense(x: Tensor) -> bool:
    """Return whether this is a matrix in float32 that lies in memory row by row, or column by column."""
    return x.dim() == 2 and x.dtype == torch.float32 and (x.is_contiguous() or x.t().is_contiguous())
