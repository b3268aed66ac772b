"""The experts of tokens, reported without a GPU too, for tests; and whether a server moves experts."""

from __future__ import annotations

from typing import Any

import torch


def kept_experts(original: Any, cache: Any, num_tokens: int, num_layers: int, topk_size: int, name: str) -> None:
    """Allocate page-locked memory around BaseHostCache.__init__."""
    if torch.cuda.is_available():
        original(cache, num_tokens, num_layers, topk_size, name)
        return
    cache.buffer = torch.zeros((num_tokens, num_layers, topk_size), dtype=torch.int32)
    cache.num_tokens, cache.num_layers, cache.topk_size, cache.name = num_tokens, num_layers, topk_size, name


def copy_experts(output: Any, *args: Any, **kwargs: Any) -> None:
    """Copy the experts to the host after BaseTopkCapturer.on_forward_end. Without a GPU they would be a view of the
    buffer that the next forward pass overwrites."""
    if output is not None and output.topk.device.type == "cpu":
        output.topk = output.topk.clone()


def moves_experts() -> bool:
    """Return whether the server balances experts between its ranks."""
    from sglang.srt.server_args import get_global_server_args

    return bool(get_global_server_args().enable_eplb)
