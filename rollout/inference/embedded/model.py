"""The inference transformer: prompts in one padded pass, then one token per slot and step against the cache.

Invariant: a row's result does not depend on the other rows. Products of a single row take another kernel with another
summation order: a padded prompt has several, and the rows of a decoding step are padded to multiples of ROWS. Fewer
numbers of rows also mean fewer kernels, as one is made for each. In float32 products are computed by oneDNN:
torch calls MKL for them, which uses AVX-512 on Intel's processors only; oneDNN does on all that have it, and takes half
the time on an AMD EPYC.

Keys and values of the running requests are in pools of equal capacity. An entry holds one request. Attention reads a
whole pool as one dense batch of matrices, so a pool's entries are packed without holes, and an entry whose request
outgrows its pool moves to the next one: a short request never pays for a long neighbour. Invariant: entries [0, n) of a
pool are in use, and every entry's position p satisfies previous capacity <= p < capacity when a step begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model_specs.config import Llama3RopeScaling, ModelConfig
from rollout.inference.embedded.weights import LayerWeights, ModelWeights

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


SMALLEST_CAPACITY = 32
_NOBODY = np.empty(0, dtype=np.int64)


def capacity_for(length: int) -> int:
    """Return the smallest capacity >= length: multiples of 32, later of a quarter of the next smaller power of two."""
    step = max(SMALLEST_CAPACITY, 2 ** (max(length - 1, 1).bit_length() - 1) // 4)
    return -(-length // step) * step


def previous_capacity(capacity: int) -> int:
    """Return the largest capacity below this one, or 0."""
    return 0 if capacity == SMALLEST_CAPACITY else _floor_capacity(capacity - 1)


def _floor_capacity(length: int) -> int:
    step = max(SMALLEST_CAPACITY, 2 ** (length.bit_length() - 1) // 4)
    return length // step * step


@dataclass(frozen=True)
class _Step:
    """Values that every layer of one step reads of a pool. `first`: its first row among the entries of all pools."""

    first: int
    n: int
    rows: Tensor  # [n * 2 G] int64: where this step's keys and values go
    tail_mask: Tensor  # [n, 1, capacity - previous capacity]: -inf behind the entry's position, 0 before
    tail: int


class _Pool:
    """Slots of one capacity. kv: [layers, 2, entries, G, capacity, D], doubled when full. peak: most since trim()."""

    def __init__(self, cache: KVCache, capacity: int) -> None:
        self._cache = cache
        self.capacity = capacity
        self.slots = np.empty(cache.max_slots, dtype=np.int64)  # [:n] in entry order
        self.n = self.peak = 0
        self.tail = previous_capacity(capacity)
        self._columns = torch.arange(self.tail, capacity)
        self.kv = torch.empty(self._shape(0), dtype=cache.dtype)
        self._resize(0)

    def _shape(self, entries: int) -> tuple[int, ...]:
        c = self._cache.config
        return (c.num_layers, 2, entries, c.num_kv_heads, self.capacity, c.head_dim)

    def _resize(self, entries: int) -> None:
        c, old = self._cache.config, self.kv
        kept = min(entries, old.shape[2])
        # Zeros, because what lies behind a position is multiplied by zero: it must not be NaN.
        self.kv = torch.zeros(self._shape(entries), dtype=old.dtype)
        if kept:
            self.kv[:, :, :kept] = old[:, :, :kept]
        heads = entries * c.num_kv_heads
        self.keys = [layer[0].view(heads, self.capacity, c.head_dim).transpose(1, 2) for layer in self.kv]
        self.values = [layer[1].view(heads, self.capacity, c.head_dim) for layer in self.kv]
        self.flat = [layer.view(2 * heads * self.capacity, c.head_dim) for layer in self.kv]
        head = torch.arange(heads).view(entries, 1, c.num_kv_heads)
        values_follow = torch.tensor([[0], [heads]])
        self._row_of_head = (head + values_follow) * self.capacity  # [entries, 2, G]

    def reserve(self, more: int) -> None:
        """Append entries."""
        self.n += more
        self.peak = max(self.peak, self.n)
        entries = self.kv.shape[2]
        if self.n > entries:
            self._resize(min(self._cache.max_slots, max(2 * entries, self.n, 4)))

    def trim(self) -> None:
        """Give back memory that was not needed since the last call."""
        if 2 * self.peak < self.kv.shape[2]:
            self._resize(self.peak)
        self.peak = self.n

    def place(self, slots: np.ndarray, entries: np.ndarray) -> None:
        """Assign these entries to slots."""
        self.slots[entries] = slots
        self._cache.entry_of[slots] = entries
        self._cache.capacity_of[slots] = self.capacity

    def remove(self, entries: np.ndarray) -> None:
        """Free these entries; entries from the end move into the holes."""
        left = self.n - len(entries)
        holes = entries[entries < left]
        if len(holes):
            movers = np.setdiff1d(np.arange(left, self.n), entries, assume_unique=True)
            for hole, mover in zip(holes.tolist(), movers.tolist(), strict=True):
                self.kv[:, :, hole] = self.kv[:, :, mover]
            self.place(self.slots[movers], holes)
        self.n = left

    def begin_step(self, first: int, positions: Tensor) -> _Step:
        rows = self._row_of_head[: self.n] + positions[:, None, None]
        behind = self._columns > positions[:, None, None]
        mask = torch.zeros(behind.shape, dtype=self._cache.dtype).masked_fill_(behind, -torch.inf)
        return _Step(first, self.n, rows.view(-1), mask, self.tail)


class KVCache:
    """The pools of at most `max_slots` requests; slots number the requests in [0, max_slots)."""

    def __init__(self, config: ModelConfig, *, max_slots: int, dtype: torch.dtype) -> None:
        self.config = config
        self.max_slots = max_slots
        self.dtype = dtype
        self.entry_of = np.zeros(max_slots, dtype=np.int64)
        self.capacity_of = np.zeros(max_slots, dtype=np.int64)
        self._pools: dict[int, _Pool] = {}
        self._order: np.ndarray | None = None
        self._steps: list[tuple[_Pool, _Step]] = []

    @property
    def num_bytes(self) -> int:
        """Memory that the pools hold now."""
        return sum(pool.kv.numel() * pool.kv.element_size() for pool in self._pools.values())

    def order(self) -> np.ndarray:
        """Return the slots in the order of their rows in a step: [n] int64."""
        if self._order is None:
            pools = [pool.slots[: pool.n] for pool in self._pools.values() if pool.n]
            self._order = np.concatenate(pools) if pools else np.empty(0, dtype=np.int64)
        return self._order

    def add(self, slots: np.ndarray, capacity: int) -> Tensor:
        """Return room for `slots` in the pool of this capacity, for the caller to fill: [layers, 2, n, G, capacity,
        D]."""
        pool = self._pool(capacity)
        first = pool.n
        pool.reserve(len(slots))
        pool.place(slots, np.arange(first, pool.n))
        self._order = None
        return pool.kv[:, :, first : pool.n]

    def rearrange(self, gone: np.ndarray, full: np.ndarray) -> None:
        """Free the entries of the slots `gone` and move those `full` to the next capacity, first into entries just
        freed there."""
        entries, next_of = self.entry_of.copy(), {c: capacity_for(c + 1) for c in set(self.capacity_of[full].tolist())}
        gone_from, full_in = self._by_capacity(gone), self._by_capacity(full)
        came_from = {capacity: below for below, capacity in next_of.items()}
        # Downwards, so that a pool's full entries are copied up before anything takes their place.
        for capacity in sorted({*gone_from, *full_in, *came_from}, reverse=True):
            pool = self._pool(capacity)
            leaving = entries[np.concatenate((gone_from.get(capacity, _NOBODY), full_in.get(capacity, _NOBODY)))]
            below = came_from.get(capacity)
            arriving = _NOBODY if below is None else full_in[below]
            places = np.concatenate(
                (leaving[: len(arriving)], np.arange(pool.n, pool.n + len(arriving) - len(leaving)))
            )
            pool.reserve(len(places[len(leaving) :]))
            pool.place(arriving, places)
            for place, entry in zip(places.tolist(), entries[arriving].tolist(), strict=True):
                pool.kv[:, :, place, :, :below] = self._pools[cast(int, below)].kv[:, :, entry]
            pool.remove(leaving[len(arriving) :])
        self._order = None

    def trim(self) -> None:
        """Give back memory that was not needed since the last call. Not at once, nor when nothing runs: the next batch
        comes soon, and fetching memory costs more than attending to it."""
        for pool in self._pools.values():
            pool.trim()

    def _by_capacity(self, slots: np.ndarray) -> dict[int, np.ndarray]:
        capacities = self.capacity_of[slots]
        return {capacity: slots[capacities == capacity] for capacity in set(capacities.tolist())}

    def _pool(self, capacity: int) -> _Pool:
        if capacity not in self._pools:
            self._pools[capacity] = _Pool(self, capacity)
            self._pools = dict(sorted(self._pools.items()))
        return self._pools[capacity]

    def begin_step(self, positions: Tensor) -> None:
        """Prepare a step in which each slot, in order(), writes its token at `positions` ([n] int64) and attends up to
        it."""
        first = 0
        self._steps = []
        for pool in self._pools.values():
            if pool.n:
                self._steps.append((pool, pool.begin_step(first, positions[first : first + pool.n])))
                first += pool.n

    def attend(self, layer: int, queries: Tensor, new_kv: Tensor, out: Tensor) -> None:
        """Write this step's keys and values ([n * 2 G, D]) and attend with queries [n * G, H / G, D], already scaled;
        the result goes to `out`, of the queries' shape."""
        groups = self.config.num_kv_heads
        for pool, step in self._steps:
            first, n = step.first * groups, step.n * groups
            pool.flat[layer].index_copy_(0, step.rows, new_kv[2 * first : 2 * (first + n)])
            scores = torch.bmm(queries[first : first + n], pool.keys[layer][:n])
            scores.view(step.n, -1, pool.capacity)[:, :, step.tail :].add_(step.tail_mask)
            if scores.dtype == torch.float32:
                probs = torch.softmax(scores, dim=-1)
            else:
                probs = torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)
            torch.bmm(probs, pool.values[layer][:n], out=out[first : first + n])


ROWS = 8
_HAS_ONEDNN = torch.backends.mkldnn.is_available()

Attend = Callable[[int, Tensor], Tensor]
"""(layer, qkv [t, (H + 2 G) D], rotated) -> [t, H D]. H, G: query and key/value heads, D: head_dim."""
Store = Callable[[int, Tensor, Tensor], None]
"""(layer, keys [n, G, l, D], values [n, G, l, D]): takes what a prompt pass computed into a cache."""


class Transformer:
    """Forward passes over `weights`. Every method requires torch.inference_mode()."""

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self._weights = weights
        self._query_columns = config.num_heads * config.head_dim
        self._rotary_columns = self._query_columns + config.num_kv_heads * config.head_dim
        self._scale = 1.0 / math.sqrt(config.head_dim)
        self._frequencies = inverse_frequencies(config)
        self._rotations = self._frequencies.new_empty(0, config.rotary_dim // 2, dtype=torch.complex64)
        self._logits = torch.empty(0)

    def prefill(self, tokens: Tensor, lengths: Tensor, store: Store) -> Tensor:
        """Run prompts [n, l] (right-padded; true lengths [n]) and return the hidden state of each one's last token,
        [n, hidden_size]."""
        n, length = tokens.shape
        c = self.config

        def attend(layer: int, qkv: Tensor) -> Tensor:
            heads = qkv.view(n, length, -1, c.head_dim).transpose(1, 2)
            q, k, v = heads.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
            store(layer, k, v)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).reshape(n * length, -1)

        positions = torch.arange(length).repeat(n)
        x = self._layers(tokens.flatten(), positions, length, attend)
        last = x.view(n, length, -1)[torch.arange(n), lengths - 1]
        return self._final_norm(last)

    def decode(self, tokens: Tensor, positions: Tensor, longest: int, cache: KVCache) -> Tensor:
        """Run one token [n] of every slot of the cache, at `positions` [n] (the largest is longest - 1), and return
        the hidden states [n, hidden_size]."""
        n, c = tokens.shape[0], self.config
        tokens, positions = _padded(tokens), _padded(positions)
        cache.begin_step(positions[:n])
        out = torch.zeros(tokens.shape[0], self._query_columns, dtype=self._weights.norm.dtype)
        attended = out[:n].view(n * c.num_kv_heads, -1, c.head_dim)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            q = (qkv[:n, : self._query_columns] * self._scale).view(attended.shape)
            cache.attend(layer, q, qkv[:n, self._query_columns :].reshape(-1, c.head_dim), attended)
            return out

        return self._final_norm(self._layers(tokens, positions, longest, attend)[:n])

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits of [n, hidden_size]: [n, padded_size(vocab_size)] float32, -inf beyond the vocabulary. The
        next call overwrites the result."""
        n, vocab_size = hidden.shape[0], self.config.vocab_size
        hidden, head = _padded(hidden), self._weights.head
        if self._logits.shape[0] < hidden.shape[0]:
            shape = max(hidden.shape[0], 2 * self._logits.shape[0]), padded_size(vocab_size)
            self._logits = torch.full(shape, -torch.inf, dtype=torch.float32)
        out = self._logits[: hidden.shape[0], :vocab_size]
        out.copy_(linear(hidden, head))
        return self._logits[:n]

    def _layers(self, tokens: Tensor, positions: Tensor, longest: int, attend: Attend) -> Tensor:
        """Run all decoder layers over t tokens."""
        x = F.embedding(tokens, self._weights.embedding)
        rotation = self._rotation_table(longest)[positions][:, None]  # [t, 1, R / 2]
        width, eps = self.config.intermediate_size, self.config.rms_norm_eps
        for i, layer in enumerate(self._weights.layers):
            qkv = linear(F.rms_norm(x, x.shape[1:], layer.input_norm, eps), layer.qkv, layer.qkv_bias)
            self._rotate(qkv, layer, rotation)
            x = self._add_product(x, attend(i, qkv), layer.out, layer.out_norm)
            gate_up = linear(F.rms_norm(x, x.shape[1:], layer.post_norm, eps), layer.gate_up)
            gated = F.silu(gate_up[:, :width]).mul_(gate_up[:, width:])
            x = self._add_product(x, gated, layer.down, layer.down_norm)
        return x

    def _add_product(self, x: Tensor, y: Tensor, weight: Tensor, norm: Tensor | None) -> Tensor:
        """Return the residual x plus y weight^T [t, E], normed first where the family has a norm there."""
        if norm is None:
            return add_linear(x, y, weight)
        return x.add_(F.rms_norm(linear(y, weight), x.shape[1:], norm, self.config.rms_norm_eps))

    def _rotate(self, qkv: Tensor, layer: LayerWeights, rotation: Tensor) -> None:
        """Normalize (Qwen3) and rotate queries and keys [t, (H + G) D] in place."""
        c = self.config
        qk = qkv[:, : self._rotary_columns].view(qkv.shape[0], -1, c.head_dim)
        if layer.qk_norm is not None:
            qk.copy_(F.rms_norm(qk, (c.head_dim,), None, c.rms_norm_eps).mul_(layer.qk_norm))
        pairs = qk[..., : c.rotary_dim].unflatten(-1, (-1, 2))
        if qk.dtype == torch.float32:
            torch.view_as_complex(pairs).mul_(rotation)
        else:
            pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()).mul_(rotation)))

    def _final_norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[1:], self._weights.norm, self.config.rms_norm_eps)

    def _rotation_table(self, length: int) -> Tensor:
        """Return e^(i * position * frequency): [at least length, rotary_dim / 2] complex64."""
        if self._rotations.shape[0] < length:
            positions = torch.arange(2 * length, dtype=torch.float32)
            angles = positions[:, None] * self._frequencies
            self._rotations = torch.polar(torch.ones_like(angles), angles)
        return self._rotations


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x weight^T + bias for x [t, k], weight [n, k] and bias [n]: [t, n]."""
    if _HAS_ONEDNN and x.dtype == torch.float32:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def add_linear(total: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Compute total + x weight^T for total [t, n]: [t, n], which may be `total`, changed."""
    if _HAS_ONEDNN and x.dtype == torch.float32:
        return torch.ops.mkldnn._linear_pointwise.binary(x, total, weight, None, "add")
    return total.addmm_(x, weight.t())


def _padded(rows: Tensor) -> Tensor:
    """Return `rows` with zero rows appended up to a multiple of ROWS."""
    short = -rows.shape[0] % ROWS
    return rows if short == 0 else torch.cat((rows, rows.new_zeros(short, *rows.shape[1:])))


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Return the radians per position of each rotated pair of dimensions: [rotary_dim / 2] float32."""
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling is None:
        return frequencies
    assert isinstance(config.rope_scaling, Llama3RopeScaling), "Yarn belongs to latent attention"
    return _stretched(frequencies, config.rope_scaling)


def _stretched(frequencies: Tensor, rope: Llama3RopeScaling) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_position_embeddings / wavelengths  # within the original context
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / rope.factor)
