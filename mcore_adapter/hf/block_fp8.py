"""Block-wise FP8 out of full tensors under Hugging Face names; see model_specs/tensors.py for the format."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from model_specs.weight_files import BLOCK, SCALE, is_quantized

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Of a block of zeros, or of values so small that their quotient would not be a normal number."""
_AT_ONCE = 1 << 27
"""Elements that are quantized by one kernel; each of their float32 copies takes 0.5 GiB."""


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize matrices [..., out, in]: float8_e4m3fn of that shape, and scales [..., ceil(out / 128), ceil(in / 128)]
    float32.

    In each block of 128 x 128, scale = max |w| / 448 and value = w / scale, rounded to nearest; w is about value *
    scale. DeepSeek-V3's `weight_dequant` reads this, and DeepGEMM's `per_block_cast_to_fp8` writes it, with scales of
    at least 1e-4 / 448.
    """
    *lead, rows, columns = weight.shape
    if rows % BLOCK or columns % BLOCK:
        weight = F.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = weight.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # [..., out / 128, 128, in / 128, 128]
    largest = blocks.abs().amax((-3, -1), keepdim=True).float()  # exact in any format
    scale = (largest / LARGEST).clamp_min(_SMALLEST_SCALE)
    values = (blocks / scale).to(FP8).flatten(-4, -3).flatten(-2, -1)  # divided in float32, whatever the format
    return values[..., :rows, :columns].contiguous(), scale.squeeze(-1).squeeze(-2)


def dequantize(values: Tensor, scale: Tensor) -> Tensor:
    """Return about what was quantized: [..., out, in] float32."""
    rows, columns = values.shape[-2:]
    factors = scale.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return values.float() * factors[..., :rows, :columns]


def quantize_bucket(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a bucket with each weight of a linear layer in FP8, and its scales beside it; the rest as it is. Matrices
    of one shape, such as experts, are quantized together."""
    groups: dict[torch.Size, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if is_quantized(name):
            groups[tensor.shape].append(name)
    quantized: dict[str, tuple[Tensor, Tensor]] = {}
    for shape, names in groups.items():
        step = max(1, _AT_ONCE // shape.numel())
        for start in range(0, len(names), step):
            some = names[start : start + step]
            if len(some) == 1:
                quantized[some[0]] = quantize(tensors[some[0]])
                continue
            values, scales = quantize(torch.stack([tensors[name] for name in some]))
            quantized |= {name: (values[i], scales[i]) for i, name in enumerate(some)}
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in quantized:
            result[name], result[name + SCALE] = quantized[name]
        else:
            result[name] = tensor
    return result
