"""Keys and values of the running requests, in pools of equal capacity.

An entry holds one request. Attention reads a whole pool as one dense batch of matrices, so a pool's entries are packed
without holes, and an entry whose request outgrows its pool moves to the next one: a short request never pays for a
long neighbour.
Invariant: entries [0, n) of a pool are in use, and every entry's position p satisfies previous capacity <= p < capacity
when a step begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from model_specs.config import ModelConfig

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
