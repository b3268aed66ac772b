"""Chunks of tokens: bounds the memory of a pass over logits."""

from __future__ import annotations

from collections.abc import Iterator


def chunks(num_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    """Yield slices of at most `chunk_tokens` tokens; at least one, so that zero tokens still give a zero gradient."""
    for start in range(0, max(num_tokens, 1), chunk_tokens):
        yield slice(start, min(start + chunk_tokens, num_tokens))
