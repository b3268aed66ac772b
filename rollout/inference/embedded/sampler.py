"""Draws one token a row, by inversion of the cumulative distribution with a uniform number that belongs to the row.

Invariant: what is drawn for a row depends on that row's logits and uniform number alone, and its log-probability is the
one of the distribution drawn from: after temperature, top_k and top_p.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def _mix(x: np.ndarray) -> np.ndarray:
    """Mix bits with the finalizer of SplitMix64: a bijection of 64-bit integers whose output bits look independent of
    its input."""
    x = (x ^ (x >> np.uint64(30))) * _MULTIPLIERS[0]
    x = (x ^ (x >> np.uint64(27))) * _MULTIPLIERS[1]
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: np.ndarray, first: np.ndarray, count: int) -> np.ndarray:
    """Return the numbers first[r] .. first[r] + count - 1 of the streams of `seeds` ([n] uint64): [n, count] float64 in
    [0, 1).

    SplitMix64 read at any place. Multiples of 2**-52, so that u * total < total also after rounding."""
    places = (first[:, None] + np.arange(1, count + 1)).astype(np.uint64)
    return (_mix(_mix(seeds)[:, None] + places * _GAMMA) >> np.uint64(12)) * 2.0**-52


def num_blocks(vocab_size: int) -> int:
    """Return the number of blocks over which `draw` spreads a vocabulary: about its square root, a power of two."""
    return max(16, 2 ** round(math.log2(vocab_size) / 2))


def padded_size(vocab_size: int) -> int:
    """Return the number of columns of logits: the vocabulary padded to whole blocks. The padding must be -inf."""
    blocks = num_blocks(vocab_size)
    return -(-vocab_size // blocks) * blocks


def _require_finite(x: Tensor) -> None:
    if not torch.isfinite(x).all():
        raise FloatingPointError("logits are not finite; the weights hold NaN or inf, or overflow")


def draw(probs: Tensor, u: Tensor, blocks: int) -> Tensor:
    """Draw an index from each row of `probs` ([n, padded_size] float32) with `u` ([n] float64): [n] int64.

    Column c belongs to block c % blocks. The block is drawn first, then the column in it, so that only
    O(sqrt(vocabulary)) numbers are accumulated, in float64. Raises FloatingPointError if a row is not finite."""
    by_block = probs.view(probs.shape[0], -1, blocks)
    weights = by_block.sum(1)
    cdf = weights.cumsum(1, dtype=torch.float64)
    total = cdf[:, -1:]
    _require_finite(total)
    target = u[:, None] * total
    block = torch.searchsorted(cdf, target, right=True)
    weight = weights.gather(1, block).double()
    below = cdf.gather(1, block) - weight
    rest = ((target - below) / weight).clamp_(0.0, 1.0 - 2.0**-52)
    columns = block + blocks * torch.arange(by_block.shape[1])
    inner = probs.gather(1, columns).cumsum(1, dtype=torch.float64)
    index = torch.searchsorted(inner, rest * inner[:, -1:], right=True)
    return (index * blocks + block)[:, 0]


def restrict(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set `logits` ([n, v]) to -inf outside the top_k ([n] int64) most likely columns, and among these outside the
    smallest set with probability top_p ([n] float32). The most likely column always remains."""
    probs, order = torch.sort(torch.softmax(logits, dim=-1), dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[1])
    probs.masked_fill_(rank >= top_k[:, None], 0.0)
    before = probs.cumsum(-1) - probs
    keep = (rank < top_k[:, None]) & (before < (top_p * probs.sum(-1))[:, None])
    keep[:, 0] = True
    return logits.masked_fill(~torch.zeros_like(keep).scatter_(1, order, keep), -torch.inf)


def sample(
    logits: Tensor,  # [n, padded_size] float32, changed in place
    temperature: np.ndarray,  # [n] float32; 0: greedy
    top_p: np.ndarray,  # [n] float32
    top_k: np.ndarray,  # [n] int64, in 1 .. vocabulary
    u: np.ndarray,  # [n] float64
    *,
    vocab_size: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Sample tokens [n] int64 and return them with their log-probabilities [n] float32. Greedy rows report the
    log-probability under temperature 1, the only informative one."""
    greedy = temperature == 0
    if greedy.all():
        tokens = logits.argmax(-1)
        logprobs = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
        _require_finite(logprobs)
        return tokens.numpy(), logprobs.numpy()
    if (temperature != 1).any():
        logits /= torch.from_numpy(np.where(greedy, np.float32(1), temperature))[:, None]
    restricted = ((top_p < 1) | (top_k < vocab_size)) & ~greedy
    if restricted.any():
        rows = torch.from_numpy(restricted.nonzero()[0])
        limits = torch.from_numpy(top_k[restricted]), torch.from_numpy(top_p[restricted])
        logits[rows, :vocab_size] = restrict(logits[rows, :vocab_size], *limits)
    probs = torch.softmax(logits, dim=-1)
    tokens = draw(probs, torch.from_numpy(u), num_blocks(vocab_size))
    if greedy.any():
        rows = torch.from_numpy(greedy.nonzero()[0])
        tokens[rows] = logits[rows].argmax(-1)
    logprobs = probs.gather(1, tokens[:, None])[:, 0].log_()
    return tokens.numpy(), logprobs.numpy()
