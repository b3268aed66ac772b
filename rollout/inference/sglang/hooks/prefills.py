"""When a server admits prompts: when there are places for many at once, and without a collective of one rank."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

PREFILL_SHARE = 0.1
"""Of a server's places: so many are free before prompts are admitted (BATCHED_PREFILLS in server.py)."""
_DELAYER_INFO = (
    "local_prefillable", "local_token_watermark_force_allow", "running_batch", "max_prefill_bs", "waiting_queue_len",
)  # fmt: skip
"""What a rank sends to the others about its prompts, in this order."""


def gather_of_one(original: Any, delayer: Any, **info: int) -> Tensor:
    """Skip the collective of PrefillDelayer._gather_info, called in every step, where there is a single rank."""
    if delayer._global_info_buffer.numel() != len(_DELAYER_INFO):
        return original(delayer, **info)
    return torch.tensor([[int(info[name]) for name in _DELAYER_INFO]])


def many_at_once(delayer: Any, *args: Any, **info: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Set the number of free slots from which a prefill is worthwhile, before
    PrefillDelayer._negotiate_should_allow_prefill. SGLang's own value, the maximum of recent waiting prompts, decays to
    one where slots become free one at a time."""
    return (delayer, *args), {**info, "max_prefill_bs": math.ceil(PREFILL_SHARE * info["max_running_requests"])}
