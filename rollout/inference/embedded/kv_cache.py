"""Keys and values of the running requests, in pools of equal capacity.

A lane holds one request. Attention reads a whole pool as one dense batch of matrices, so a pool's lanes are packed
without holes, and a lane whose request outgrows its pool moves to the next one: a short request never pays for a
long neighbour.
Invariant: lanes [0, n) of a pool are in use, and every lane's position p satisfies previous capacity <= p < capacity
when a step begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from rollout.inference.embedded.config import InferenceConfig

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
    """What a pool needs in every layer of one step. `first`: its first row among the lanes of all pools."""

    first: int
    n: int
    rows: Tensor  # [n * 2 G] int64: where this step's keys and values go
    tail_mask: Tensor  # [n, 1, capacity - previous capacity]: -inf behind the lane's position, 0 before
    tail: int


class _Pool:
    """Slots of one capacity. kv: [layers, 2, lanes, G, capacity, D], grown by doubling. peak: the most since trim()."""

    def __init__(self, cache: KVCache, capacity: int) -> None:
        self._cache = cache
        self.capacity = capacity
        self.slots = np.empty(cache.max_lanes, dtype=np.int64)  # [:n] in lane order
        self.n = self.peak = 0
        self.tail = previous_capacity(capacity)
        self._columns = torch.arange(self.tail, capacity, device=cache.device)
        self.kv = torch.empty(self._shape(0), dtype=cache.dtype, device=cache.device)
        self._resize(0)

    def _shape(self, lanes: int) -> tuple[int, ...]:
        c = self._cache.config
        return (c.num_layers, 2, lanes, c.num_kv_heads, self.capacity, c.head_dim)

    def _resize(self, lanes: int) -> None:
        c, old = self._cache.config, self.kv
        kept = min(lanes, old.shape[2])
        # Zeros, because what lies behind a position is multiplied by zero: it must not be NaN.
        self.kv = torch.zeros(self._shape(lanes), dtype=old.dtype, device=old.device)
        if kept:
            self.kv[:, :, :kept] = old[:, :, :kept]
        heads = lanes * c.num_kv_heads
        self.keys = [layer[0].view(heads, self.capacity, c.head_dim).transpose(1, 2) for layer in self.kv]
        self.values = [layer[1].view(heads, self.capacity, c.head_dim) for layer in self.kv]
        self.flat = [layer.view(2 * heads * self.capacity, c.head_dim) for layer in self.kv]
        head = torch.arange(heads, device=old.device).view(lanes, 1, c.num_kv_heads)
        values_follow = torch.tensor([[0], [heads]], device=old.device)
        self._row_of_head = (head + values_follow) * self.capacity  # [lanes, 2, G]

    def reserve(self, more: int) -> None:
        """Append lanes."""
        self.n += more
        self.peak = max(self.peak, self.n)
        lanes = self.kv.shape[2]
        if self.n > lanes:
            self._resize(min(self._cache.max_lanes, max(2 * lanes, self.n, 4)))

    def trim(self) -> None:
        """Give back memory that was not needed since the last call."""
        if 2 * self.peak < self.kv.shape[2]:
            self._resize(self.peak)
        self.peak = self.n

    def place(self, slots: np.ndarray, lanes: np.ndarray) -> None:
        """Let lanes hold these slots from now on."""
        self.slots[lanes] = slots
        self._cache.lane_of[slots] = lanes
        self._cache.capacity_of[slots] = self.capacity

    def remove(self, lanes: np.ndarray) -> None:
        """Free these lanes; lanes from the end move into the holes."""
        left = self.n - len(lanes)
        holes = lanes[lanes < left]
        if len(holes):
            movers = np.setdiff1d(np.arange(left, self.n), lanes, assume_unique=True)
            for hole, mover in zip(holes.tolist(), movers.tolist(), strict=True):
                self.kv[:, :, hole] = self.kv[:, :, mover]
            self.place(self.slots[movers], holes)
        self.n = left

    def begin_step(self, first: int, positions: Tensor) -> _Step:
        rows = self._row_of_head[: self.n] + positions[:, None, None]
        behind = self._columns > positions[:, None, None]
        mask = torch.zeros(behind.shape, dtype=self._cache.dtype, device=behind.device).masked_fill_(behind, -torch.inf)
        return _Step(first, self.n, rows.view(-1), mask, self.tail)


class KVCache:
    """The pools of at most `max_lanes` requests; requests are named by slots in [0, max_lanes)."""

    def __init__(self, config: InferenceConfig, *, max_lanes: int, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.max_lanes = max_lanes
        self.dtype = dtype
        self.device = device
        self.lane_of = np.zeros(max_lanes, dtype=np.int64)
        self.capacity_of = np.zeros(max_lanes, dtype=np.int64)
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
        """Free the lanes of the slots `gone` and move those `full` to the next capacity, into lanes just freed there
        as far as they reach."""
        lanes, next_of = self.lane_of.copy(), {c: capacity_for(c + 1) for c in set(self.capacity_of[full].tolist())}
        gone_from, full_in = self._by_capacity(gone), self._by_capacity(full)
        came_from = {capacity: below for below, capacity in next_of.items()}
        # Downwards, so that a pool's full lanes are copied up before anything takes their place.
        for capacity in sorted({*gone_from, *full_in, *came_from}, reverse=True):
            pool = self._pool(capacity)
            leaving = lanes[np.concatenate((gone_from.get(capacity, _NOBODY), full_in.get(capacity, _NOBODY)))]
            below = came_from.get(capacity)
            arriving = _NOBODY if below is None else full_in[below]
            places = np.concatenate(
                (leaving[: len(arriving)], np.arange(pool.n, pool.n + len(arriving) - len(leaving)))
            )
            pool.reserve(len(places[len(leaving) :]))
            pool.place(arriving, places)
            for place, lane in zip(places.tolist(), lanes[arriving].tolist(), strict=True):
                pool.kv[:, :, place, :, :below] = self._pools[cast(int, below)].kv[:, :, lane]
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
