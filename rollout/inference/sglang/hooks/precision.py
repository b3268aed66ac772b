"""Formats of numbers inside a server: float32 logits, and FP8 weights without scales of an FP8 cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def fp32_logits(original: Any, processor: Any, hidden: Tensor, lm_head: Any, bias: Tensor | None = None) -> Tensor:
    """Compute float32 logits around LogitsProcessor._compute_lm_head, for plain heads on GPUs. The server's own
    enable_fp32_lm_head converts the whole weight at every step."""
    weight = getattr(lm_head, "weight", None)
    if (
        isinstance(weight, Tensor)
        and weight.is_cuda
        and weight.dtype == hidden.dtype == torch.bfloat16
        and hidden.dim() == 2
        and bias is None
        and not hasattr(lm_head, "apply_lora")
    ):
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return original(processor, hidden, lm_head, bias)


def no_cache_scales(original: Any, config: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Give attention no scales for an FP8 cache, around Fp8Config.get_quant_method, where weights are FP8 in blocks:
    such checkpoints have none. Without weights of its own a server would start with random ones, and attention in
    Triton multiplies with them whatever the format of the cache."""
    if config.weight_block_size is not None and type(layer).__name__ == "RadixAttention":
        return None
    return original(config, layer, *args, **kwargs)
