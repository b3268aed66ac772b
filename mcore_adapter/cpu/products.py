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
    """Compute a b for a [m, k] and b [k, n]: [m, n]."""
    m, k, n = *a.shape, b.shape[1]
    if a.dtype != torch.float32 or m * k * n < _SMALL or not (_is_dense(a) and _is_dense(b)):
        return torch.mm(a, b, out=a.new_empty(m, n))
    if a.is_contiguous() or m <= n:
        return _linear(a, b.t())
    return _linear(b.t(), a).t()  # the left factor is copied where it is not contiguous: the smaller one


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


def _is_dense(x: Tensor) -> bool:
    return x.is_contiguous() or x.t().is_contiguous()
