"""How a model's ranks cut a batch: which sequences each data-parallel rank runs, and in which microbatches.

A plan follows from the shape of the batch and plain settings alone. The process that cuts a batch makes it once, and it
travels with the batch; ranks make another one, all the same, where a limit of memory was lowered since.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np

from mcore_adapter.data.microbatch import Microbatch, check_longest, plan_microbatches
from mcore_adapter.data.shape import BatchShape, given_units, prompt_units
from model_specs.config import ModelConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Planner:
    """What the parallel layout and the model require of a cut."""

    dp: int
    pp: int = 1
    interleaved: bool = False
    """Pipeline stages of several parts, whose schedule runs microbatches in rounds of the pipeline's size."""
    sequence_multiple: int = 1
    """Each sequence is padded to a multiple of it."""
    share_prompts: bool = False
    """A prompt runs once for all its completions of a microbatch."""
    attention_cost: float = 0.0
    """Cost of a token pair relative to that of a token."""

    def padded_lens(self, shape: BatchShape) -> np.ndarray:
        """Return [N] int64, padding included."""
        return -(-shape.seq_lens // self.sequence_multiple) * self.sequence_multiple

    def limit(self, shape: BatchShape, max_tokens_per_mb: int, max_sequence_tokens: int) -> int:
        """Return tokens of a microbatch of this batch: a limit that was learnt from shorter sequences, or units of
        them, makes way for a longer one, up to max_sequence_tokens."""
        longest = self.padded_lens(shape)
        if shape.units is not None:
            longest = np.bincount(np.unique(shape.units, return_inverse=True)[1], weights=longest)
        return max(max_tokens_per_mb, min(int(longest.max()), max_sequence_tokens))

    def plan(self, shape: BatchShape, limit: int, owners: np.ndarray | None = None) -> list[list[Microbatch]]:
        """Return sequences of every microbatch of every data-parallel rank: [dp][num_microbatches].

        `owners`, [N] int64: the rank that must run each sequence; without them the ranks are balanced. Raises
        ValueError for an empty sequence, or one (or a unit) that is longer than `limit`."""
        if int(shape.seq_lens.min()) < 1:
            raise ValueError(f"sequence {int(shape.seq_lens.argmin())} of the batch has no tokens")
        min_microbatches = 2 * self.pp if self.pp > 1 else 1  # half of a pipeline's bubble is gone at 2 a stage
        if owners is None or self.dp == 1:
            return self._plan(shape, limit, min_microbatches)
        return self._plan_of_owners(shape, limit, min_microbatches, owners)

    def _plan_of_owners(
        self, shape: BatchShape, limit: int, min_microbatches: int, owners: np.ndarray
    ) -> list[list[Microbatch]]:
        """Plan each rank alone, until all have the same number of microbatches."""
        alone = replace(self, dp=1)
        owned = [np.flatnonzero(owners == rank) for rank in range(self.dp)]
        plans: list[list[Microbatch]] = [[] for _ in owned]
        count = min_microbatches
        while any(len(plan) != count for plan in plans):
            for rank, own in enumerate(owned):
                if len(plans[rank]) != count and len(own):
                    (plan,) = alone._plan(shape.select(own), limit, count)
                    plans[rank] = [own[microbatch].tolist() for microbatch in plan]
                plans[rank] += [[] for _ in range(count - len(plans[rank]))]
            count = max(map(len, plans))
        return plans

    def _plan(self, shape: BatchShape, limit: int, min_microbatches: int) -> list[list[Microbatch]]:
        padded = self.padded_lens(shape).tolist()
        multiple_of = self.pp if self.interleaved else 1
        units, sizes = [[i] for i in range(len(padded))], padded
        if shape.units is not None:
            units = given_units(shape.units)
            sizes = [sum(padded[i] for i in unit) for unit in units]
        elif self.share_prompts:
            check_longest(padded, limit)
            # A fourth of a microbatch that everybody gets: small enough to balance, large enough to share.
            fair = shape.num_tokens // (4 * self.dp * min_microbatches)
            # No rank runs a filler beside one that holds several completions of a prompt.
            everywhere = self.dp * multiple_of
            units, sizes = prompt_units(shape, max_tokens=min(limit, fair), at_least=everywhere)
        plan = plan_microbatches(
            sizes,
            dp=self.dp,
            max_tokens_per_mb=limit,
            costs=[
                size + self.attention_cost * sum(padded[i] ** 2 for i in unit)
                for unit, size in zip(units, sizes, strict=True)
            ],
            min_microbatches=min_microbatches,
            multiple_of=multiple_of,
        )
        cut = [[[i for unit in microbatch for i in units[unit]] for microbatch in rank] for rank in plan]
        if logger.isEnabledFor(logging.DEBUG):
            tokens = [[sum(padded[i] for i in microbatch) for microbatch in rank] for rank in cut]
            logger.debug("%d sequences in microbatches of at most %d tokens, by rank: %s", len(padded), limit, tokens)
        return cut


def attention_cost(config: ModelConfig) -> float:
    """Return the cost of a token pair relative to that of a token: causal attention against the matrix products, in
    FLOPs."""
    if config.mla is not None:
        attention_width = config.num_heads * (config.mla.qk_head_dim + config.mla.v_head_dim) // 2
    else:
        attention_width = config.num_heads * config.head_dim
    kv_width = 0 if config.mla else config.num_kv_heads * config.head_dim
    ffn_width = config.intermediate_size
    if config.moe is not None:
        ffn_width = config.moe.top_k * config.moe.intermediate_size + config.moe.shared_intermediate_size
    per_layer = config.hidden_size * (2 * attention_width + 2 * kv_width + 3 * ffn_width)
    linear = config.num_layers * per_layer + config.vocab_size * config.hidden_size
    return config.num_layers * attention_width / linear
