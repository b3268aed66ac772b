"""Lays the sequences of one microbatch end to end, as Megatron's attention wants them (thd), for one rank.

Invariant: every token of the microbatch belongs to exactly one context-parallel rank, the one that holds its
predecessor and so computes its log-probability. Padding appears only where sequence parallelism (the total, a multiple
of tp) or context parallelism (each sequence, a multiple of 2 cp) demands it, always after the tokens it could disturb.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mcore_adapter.batch import PackedBatch


@dataclass(frozen=True, kw_only=True)
class PackingLayout:
    """What the parallel layout asks of a packed microbatch."""

    cp_size: int = 1
    cp_rank: int = 0
    sequence_parallel_size: int = 1
    """Ranks that share a packed sequence: tp with sequence parallelism, else 1."""

    @property
    def sequence_multiple(self) -> int:
        return 2 * self.cp_size if self.cp_size > 1 else 1

    def padded_lens(self, lens: Tensor) -> Tensor:
        """[N] -> [N], tokens that each sequence takes up when packed (over all context-parallel ranks)."""
        multiple = self.sequence_multiple
        return (lens + multiple - 1) // multiple * multiple if multiple > 1 else lens


@dataclass(frozen=True, kw_only=True)
class PackedMicrobatch:
    """One microbatch on one rank: s packed positions, padding included; t tokens of the loss, n of them trained."""

    token_ids: Tensor  # [1, s] int64
    position_ids: Tensor  # [1, s] int64, within each sequence
    packed_seq_params: PackedSeqParams
    fields: Mapping[str, Tensor]  # [t] each, "loss_mask" among them
    token_index: Tensor | None  # [t] int64: place of each in the microbatch's own tokens; None: all of them, in order
    num_tokens: int  # of the microbatch, over all context-parallel ranks
    trained: Tensor  # [n] int64: places in [t] of the tokens with loss_mask
    rows: Tensor  # [n] int64: the packed position that predicts each of them
    targets: Tensor  # [n] int64: their token ids


def pack_microbatch(
    batch: PackedBatch, sequences: Sequence[int], layout: PackingLayout, *, device: torch.device
) -> PackedMicrobatch:
    """The microbatch of `sequences` of `batch`, in this order; none of them makes a zero-weight filler of one token."""
    own = batch.select(sequences) if len(sequences) else _filler(batch)
    lens = own.seq_lens
    padded = layout.padded_lens(lens)
    tail = -int(padded.sum()) % (layout.sequence_multiple * layout.sequence_parallel_size)
    if tail:  # a sequence of its own, so that no real one attends to it
        padded = torch.cat((padded, padded.new_tensor([tail])))
    starts = padded.cumsum(0) - padded
    positions = torch.arange(int(padded.sum())) - starts.repeat_interleave(padded)
    token_place = torch.arange(own.num_tokens) + (starts[: len(lens)] - own.cu_seqlens[:-1]).repeat_interleave(lens)
    tokens = own.token_ids.new_zeros(len(positions))
    tokens[token_place] = own.token_ids
    predictor = torch.where(positions[token_place] == 0, token_place, token_place - 1)

    token_index = None
    fields = {**own.fields, "loss_mask": own.loss_mask}
    if layout.cp_size > 1:
        local = _zigzag(positions, padded, layout)
        place_in_local = torch.full_like(positions, -1)
        place_in_local[local] = torch.arange(len(local))
        tokens, positions = tokens[local], positions[local]
        token_index = (place_in_local[predictor] >= 0).nonzero().squeeze(1)
        predictor = place_in_local[predictor[token_index]]
        fields = {name: value[token_index] for name, value in fields.items()}
    trained = fields["loss_mask"].nonzero().squeeze(1)
    token_of_trained = trained if token_index is None else token_index[trained]

    return PackedMicrobatch(
        token_ids=tokens[None].to(device),
        position_ids=positions[None].to(device),
        packed_seq_params=_packed_seq_params(padded, device),
        fields={name: value.to(device) for name, value in fields.items()},
        token_index=token_index,
        num_tokens=own.num_tokens,
        trained=trained.to(device),
        rows=predictor[trained].to(device),
        targets=own.token_ids[token_of_trained].to(device),
    )


def _filler(batch: PackedBatch) -> PackedBatch:
    """One sequence of one token that nobody trains on."""
    return PackedBatch(
        token_ids=batch.token_ids.new_zeros(1),
        cu_seqlens=batch.cu_seqlens.new_tensor([0, 1]),
        loss_mask=batch.loss_mask.new_zeros(1),
        fields={name: value.new_zeros((1, *value.shape[1:])) for name, value in batch.fields.items()},
    )


def _zigzag(positions: Tensor, padded: Tensor, layout: PackingLayout) -> Tensor:
    """Packed positions that this context-parallel rank holds: chunks r and 2 cp - 1 - r of each sequence, which gives
    every rank the same share of the causal triangle."""
    chunk = positions // (padded // (2 * layout.cp_size)).repeat_interleave(padded)
    mine = (chunk == layout.cp_rank) | (chunk == 2 * layout.cp_size - 1 - layout.cp_rank)
    return mine.nonzero().squeeze(1)


def _packed_seq_params(padded: Tensor, device: torch.device) -> PackedSeqParams:
    cu_seqlens = torch.zeros(len(padded) + 1, dtype=torch.int32)
    cu_seqlens[1:] = padded.cumsum(0)
    cu_seqlens = cu_seqlens.to(device)
    longest = int(padded.max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
