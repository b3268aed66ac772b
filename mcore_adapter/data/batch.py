"""The data plane of the trainer: a batch is flat, packed tensors; its shape, and sums over its tokens.

Invariants: every per-token tensor is aligned with `token_ids`: entry t refers to token t. `logprobs[t]` is log p(token
t | tokens before it), 0 for the first token of a sequence; `values[t]` is the critic's estimate of the state in which
token t was chosen. Every rank computes token weights from the whole minibatch, in float64: their sums depend neither on
the layout nor on the cut into microbatches. Context parallelism spreads the tokens of a sequence over several ranks:
`Sequences.sum` returns the same on every rank of such a group, and its gradient reaches the tokens on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_adapter.autograd import Context

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


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """N sequences of a batch. Equal batches have equal shapes, and from a shape follows every cut of the batch."""

    seq_lens: np.ndarray  # [N] int64
    prompt_lens: np.ndarray  # [N] int64: tokens before the first trained one; all of them where none is trained
    prompt_ids: np.ndarray  # [N] int64: equal where these tokens are equal
    units: np.ndarray | None = None
    """[N] int64: equal for sequences that run in one microbatch; None: each is a unit of its own."""

    @property
    def num_sequences(self) -> int:
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        return int(self.seq_lens.sum())

    def select(self, sequences: Sequence[int] | np.ndarray) -> BatchShape:
        """Return the shape of the batch of these sequences, in this order."""
        chosen = np.asarray(sequences, np.int64)
        return BatchShape(
            seq_lens=self.seq_lens[chosen], prompt_lens=self.prompt_lens[chosen], prompt_ids=self.prompt_ids[chosen],
            units=None if self.units is None else self.units[chosen],
        )  # fmt: skip


def shape_of(batch: PackedBatch) -> BatchShape:
    """Return the shape of a batch whose tokens are all here."""
    pair = batch.fields.get(PAIR)
    units = None if pair is None else pair[batch.cu_seqlens[:-1]].abs().numpy()
    return read_shape(batch.token_ids.numpy(), batch.cu_seqlens.numpy(), batch.loss_mask.numpy(), units)


def read_shape(
    token_ids: np.ndarray, cu_seqlens: np.ndarray, loss_mask: np.ndarray, units: np.ndarray | None = None
) -> BatchShape:
    """Return the shape of N sequences laid end to end: token_ids and loss_mask [T], cu_seqlens [N + 1], units [N]."""
    prompt_lens = leading_prompt_lens(cu_seqlens, loss_mask)
    number_of: dict[bytes, int] = {}
    prompts = prompts_of(token_ids, cu_seqlens, prompt_lens)
    return BatchShape(
        seq_lens=np.diff(cu_seqlens),
        prompt_lens=prompt_lens,
        prompt_ids=np.array([number_of.setdefault(prompt, len(number_of)) for prompt in prompts], np.int64),
        units=units,
    )


def given_units(units: np.ndarray) -> list[list[int]]:
    """Return the sequences of each unit, in the order of their first ones."""
    members: dict[int, list[int]] = {}
    for sequence, unit in enumerate(units.tolist()):
        members.setdefault(unit, []).append(sequence)
    return list(members.values())


def leading_prompt_lens(cu_seqlens: np.ndarray, loss_mask: np.ndarray) -> np.ndarray:
    """Return [N] int64: tokens of each sequence before its first trained one; all of them where none is trained."""
    starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    trained = np.flatnonzero(loss_mask)
    first = np.append(trained, cu_seqlens[-1])[np.searchsorted(trained, starts)]
    return np.minimum(first, ends) - starts


def prompts_of(token_ids: np.ndarray, cu_seqlens: np.ndarray, prompt_lens: np.ndarray) -> list[bytes]:
    """Return the first prompt_lens [N] tokens of each sequence."""
    return [
        token_ids[start : start + n].tobytes()
        for start, n in zip(cu_seqlens[:-1].tolist(), prompt_lens.tolist(), strict=True)
    ]


def prompt_units(shape: BatchShape, *, max_tokens: int, at_least: int = 1) -> tuple[list[list[int]], list[int]]:
    """Return sequences that should stay together because they share a prompt: (units, tokens of each unit).

    A unit of several sequences has at most `max_tokens` tokens, the shared prompt counted once. There are `at_least` so
    many units, or as many as sequences.
    """
    lens, prompt_lens = shape.seq_lens.tolist(), shape.prompt_lens.tolist()
    units: list[list[int]] = []
    sizes: list[int] = []
    unit_of: dict[int, int] = {}
    for i, prompt in enumerate(shape.prompt_ids.tolist()):
        own = lens[i] - prompt_lens[i]
        unit = unit_of.get(prompt)
        if unit is not None and sizes[unit] + own <= max_tokens:
            units[unit].append(i)
            sizes[unit] += own
        else:
            unit_of[prompt] = len(units)
            units.append([i])
            sizes.append(lens[i])
    while len(units) < min(at_least, len(lens)):
        largest = max((u for u, unit in enumerate(units) if len(unit) > 1), key=lambda u: sizes[u])
        half = units[largest][::2]
        del units[largest][::2]
        own = sum(lens[i] - prompt_lens[i] for i in half)
        sizes[largest] -= own
        sizes.append(prompt_lens[half[0]] + own)
        units.append(half)
    return units, sizes


TOKEN_WEIGHTS = "token_weights"
"""The field [T] float32 in which a loss finds the weights of its tokens."""
ROLLOUTS = "rollouts"
"""The field [T] int64 with the rollout of each token, where rollouts have several sequences."""
TokenWeights = Callable[[PackedBatch], Tensor]
"""minibatch -> weight of each of its tokens [T]."""


def token_mean(minibatch: PackedBatch) -> Tensor:
    """Weigh every trained token alike: [T] float64, 0 outside loss_mask."""
    return minibatch.loss_mask.double()


def sequence_mean(minibatch: PackedBatch) -> Tensor:
    """Weigh every sequence alike, and so every trained token of its L: 1 / L, [T] float64. The branches of a rollout
    are one sequence.

    Sequences without trained tokens have no weight, so that the sum is the number of those that have some."""
    mask = minibatch.loss_mask
    sequence = sequence_of_token(minibatch.seq_lens)
    if ROLLOUTS in minibatch.fields:
        sequence = minibatch.fields[ROLLOUTS].unique(return_inverse=True)[1]
    trained = torch.zeros(minibatch.num_sequences, dtype=torch.float64).index_add(0, sequence, mask.double())
    return torch.where(mask, 1.0 / trained[sequence].clamp(min=1), 0.0)


def token_sum(minibatch: PackedBatch, *, divisor: float) -> Tensor:
    """Weigh every trained token by 1, with a sum of `divisor` whatever their number: [T] float64.

    The first token is never trained; it holds the difference, and no loss has a term for it. Source: Liu et al. 2025
    ("Understanding R1-Zero-like training"), which divides by a constant."""
    weights = minibatch.loss_mask.double()
    weights[0] = divisor - weights.sum()
    return weights


@dataclass(frozen=True)
class Divisors:
    """Sums of the weights of a minibatch."""

    loss: float
    """Of all tokens."""
    metrics: float
    """Of the trained tokens."""


def weigh_tokens(minibatch: PackedBatch, token_weights: TokenWeights) -> tuple[PackedBatch, Divisors]:
    """Return the minibatch with the field TOKEN_WEIGHTS, and the sums of the weights; 1 where a sum is 0.

    Raises ValueError where the weights are not one finite number a token, or their sum is negative."""
    weights = token_weights(minibatch).detach().double()
    if weights.shape != minibatch.loss_mask.shape:
        raise ValueError(f"token_weights: shape {tuple(weights.shape)}, expected [T] = [{minibatch.num_tokens}]")
    total = float(weights.sum())
    trained = float(weights[minibatch.loss_mask].sum())
    if not 0.0 <= total < float("inf") or not 0.0 <= trained < float("inf"):
        raise ValueError(f"token_weights: a sum of {total}, {trained} of trained tokens; expected positive numbers")
    return minibatch.with_fields(**{TOKEN_WEIGHTS: weights.float()}), Divisors(total or 1.0, trained or 1.0)


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """The n sequences that the t tokens of a loss belong to, as this rank sees them."""

    of_token: Tensor  # [t] int64: the sequence of each token on this rank, 0 .. count - 1
    count: int  # n, the same on every context-parallel rank
    group: object = None
    """Ranks that share the tokens of a sequence (torch.distributed.ProcessGroup); None: this rank has all of them."""

    def sum(self, x: Tensor) -> Tensor:
        """Sum x [t] over the tokens of each sequence, on all context-parallel ranks: [n]. Differentiable.

        Collective where `group` is not None: every rank of it must call this, also one without tokens.
        """
        # In float64, so that neither the order of tokens nor their split over ranks shows in float32.
        sums = x.new_zeros(self.count, dtype=torch.float64).index_add(0, self.of_token, x.double())
        if self.group is not None:
            sums = _AllReduce.apply(sums, self.group)
        return sums.to(x.dtype) if x.is_floating_point() else sums.float()

    def spread(self, values: Tensor) -> Tensor:
        """Give each token the value of its sequence: [n] -> [t]."""
        return values.index_select(0, self.of_token)

    def mean(self, x: Tensor, mask: Tensor) -> Tensor:
        """Average x [t] over the tokens of each sequence where mask [t] is True: [n], 0 where there are none."""
        return self.sum(x * mask) / self.sum(mask).clamp(min=1)


class _AllReduce(torch.autograd.Function):
    """Sum over ranks. Every rank's loss depends on the sum, so the gradients of all ranks add up as well."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, group: object) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
