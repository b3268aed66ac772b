"""The data plane of the trainer: a batch is flat, packed tensors.

Invariant: every per-token tensor is aligned with `token_ids`: entry t refers to token t. `logprobs[t]` is log p(token t
| tokens before it), 0 for the first token of a sequence; `values[t]` is the critic's estimate of the state in which
token t was chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

ROUTED_EXPERTS = "routed_experts"
"""The field [T, num_layers, k] of experts (any signed integers) that each token is sent to in place of the router's own
choice (what a generator reports); negative: the router chooses. Entries of layers without experts are not read."""

PAIR = "pair"
"""The field [T] int64 of pairs of sequences that a loss compares: k for the chosen and -k for the rejected sequence of
pair k, from 1 on. The sequences of a pair run in one microbatch."""


def sequence_of_token(lens: Tensor) -> Tensor:
    """Return the sequence of each token, for sequences of `lens` [N] tokens laid end to end: [sum of lens] int64."""
    return torch.arange(lens.numel()).repeat_interleave(lens)


def index_of_tokens(starts: Tensor, lens: Tensor) -> Tensor:
    """Return the positions of the tokens of sequences that begin at `starts` [N] and have `lens` [N] tokens, in that
    order: [sum of lens] int64."""
    shift = starts - (lens.cumsum(0) - lens)
    return torch.arange(int(lens.sum())) + shift.repeat_interleave(lens)


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """N sequences laid end to end; T is the sum of their lengths."""

    token_ids: Tensor  # [T] int64
    cu_seqlens: Tensor  # [N + 1] int64, cu_seqlens[0] == 0, cu_seqlens[-1] == T
    loss_mask: Tensor  # [T] bool, False on the first token of every sequence
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    """Further per-token inputs of the loss ([T] each), by name: advantages, old_logprobs, ..."""

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def num_tokens(self) -> int:
        return self.token_ids.numel()

    @property
    def seq_lens(self) -> Tensor:
        """[N] int64"""
        return self.cu_seqlens[1:] - self.cu_seqlens[:-1]

    def token_index(self, sequences: Sequence[int]) -> Tensor:
        """Return the positions in [0, T) of the tokens of `sequences`, in that order: [sum of their lengths] int64."""
        chosen = torch.as_tensor(sequences, dtype=torch.int64)
        return index_of_tokens(self.cu_seqlens[chosen], self.seq_lens[chosen])

    def select(self, sequences: Sequence[int]) -> PackedBatch:
        """Return the batch of these sequences, in this order."""
        index = self.token_index(sequences)
        lens = self.seq_lens[list(sequences)]
        return PackedBatch(
            token_ids=self.token_ids[index],
            cu_seqlens=torch.cat((lens.new_zeros(1), lens.cumsum(0))),
            loss_mask=self.loss_mask[index],
            fields={name: value[index] for name, value in self.fields.items()},
        )

    def with_fields(self, **fields: Tensor) -> PackedBatch:
        """Return the same sequences with these per-token fields added or replaced. Raises ValueError on a wrong
        length."""
        for name, value in fields.items():
            if value.shape[0] != self.num_tokens:
                raise ValueError(f"field {name}: {value.shape[0]} entries for {self.num_tokens} tokens")
        return PackedBatch(
            token_ids=self.token_ids,
            cu_seqlens=self.cu_seqlens,
            loss_mask=self.loss_mask,
            fields={**self.fields, **fields},
        )


@dataclass(frozen=True, kw_only=True)
class ModelOutput:
    """Per-token results of one microbatch; entry t refers to token t, and is 0 where loss_mask is False."""

    logprobs: Tensor | None = None  # [t] float32
    entropy: Tensor | None = None  # [t] float32
    values: Tensor | None = None  # [t] float32
