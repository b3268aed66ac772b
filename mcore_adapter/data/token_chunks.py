"""Chunks of tokens: bounds the memory of a pass over logits or through an MLP."""

from __future__ import annotations

from collections.abc import Iterator

LOGITS_BYTES = 5 << 30
"""Most of a buffer of the logits of all tokens."""
SEVERAL_LOGITS_BYTES = 2 << 30
"""Size of the buffer where there are several. A larger one means fewer passes over the gradient of the weight."""
FP32_ROWS = 512
"""Rows of logits in float32 at a time."""
MLP_TOKENS = 16384
"""Most tokens of a rank that pass through a dense MLP at once where its inner activations are recomputed. A chunk adds
its gradient to that of each weight, 8 bytes of traffic: computed for an H100, 5 % of the time of the product with
16,384 tokens, 10 % with 8,192. With the widths of Qwen3-4B a chunk takes 1.4 GB."""


def chunks(num_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    """Yield slices of at most `chunk_tokens` tokens; at least one, so that zero tokens still give a zero gradient."""
    for start in range(0, max(num_tokens, 1), chunk_tokens):
        yield slice(start, min(start + chunk_tokens, num_tokens))
