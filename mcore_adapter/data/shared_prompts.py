"""Completions of the same prompt share it: its tokens pass through the model once a microbatch, not once a completion.

What depends on a token alone (embedding, norms, projections, MLP, head) sees each distinct row once. The core attention
may see whole sequences again (`SharedPromptParams.to_sequences`). The last token of a sequence predicts nothing
and is left out. Invariant: every trained token is predicted from exactly the tokens before it in its own sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mcore_adapter.autograd import Context
from mcore_adapter.data.batch import PackedBatch
from mcore_adapter.data.shape import leading_prompt_lens, prompts_of

T = TypeVar("T")


@dataclass
class SharedPromptParams(PackedSeqParams):
    """A packing of s rows that stand for the e >= s rows of whole sequences.

    cu_seqlens_q and cu_seqlens_kv are those of the whole sequences. To the rotary embedding the packing is one sequence
    (cu_seqlens_*_padded) with an angle for each row: see ModelChunk.
    """

    source: Tensor | None = None  # [e] int64: the packed row of each row of the whole sequences
    first: Tensor | None = None  # [s] int64: the first row of the whole sequences that stands for each packed row
    copies: Tensor | None = None  # [e - s] int64: the other ones
    plan: list[Any] = field(default_factory=list)  # what planned_once() has made

    def planned_once(self, make: Callable[[SharedPromptParams], T]) -> T:
        """Return make(self), which the layers of a model share."""
        if not self.plan:
            self.plan.append(make(self))
        plan: T = self.plan[0]
        return plan

    def to_sequences(self, x: Tensor) -> Tensor:
        """Expand packed rows to the rows of whole sequences: [s, ...] -> [e, ...]."""
        return _ToSequences.apply(x, self.source, self.first, self.copies)

    def to_packed(self, x: Tensor) -> Tensor:
        """Select one of the equal rows of each packed row: [e, ...] -> [s, ...]."""
        return _ToPacked.apply(x, self.first)


class _ToSequences(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, source: Tensor, first: Tensor, copies: Tensor) -> Tensor:
        ctx.save_for_backward(source, first, copies)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        source, first, copies = ctx.saved_tensors
        # In bfloat16 a sum stops growing at 256 times what is added.
        dtype = torch.promote_types(grad.dtype, torch.float32)
        total = grad.index_select(0, first).to(dtype)
        total.index_add_(0, source.index_select(0, copies), grad.index_select(0, copies).to(dtype))
        return total.to(grad.dtype), None, None, None


class _ToPacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, first: Tensor) -> Tensor:
        ctx.save_for_backward(first)
        ctx.rows = x.shape[0]
        return x.index_select(0, first)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (first,) = ctx.saved_tensors
        return grad.new_zeros((ctx.rows, *grad.shape[1:])).index_copy_(0, first, grad), None


@dataclass(frozen=True, kw_only=True)
class SharedRows:
    """Where the tokens of some sequences go when they share their prompts."""

    tokens: Tensor  # [s] int64
    positions: Tensor  # [s] int64, within a sequence
    lens: Tensor  # [N] int64: rows of each whole sequence, sum e
    source: Tensor  # [e] int64, see SharedPromptParams
    first: Tensor  # [s] int64
    predictor: Tensor  # [t] int64: the packed row that predicts each token (of a first token: its own row)
    row_of_token: Tensor  # [t] int64: the packed row of each token, -1 for a last one, which has none


def share_prompts(batch: PackedBatch) -> SharedRows:
    """Lay out all sequences of a batch."""
    starts, input_lens = batch.cu_seqlens[:-1], (batch.seq_lens - 1).clamp(min=1)
    cu_seqlens = batch.cu_seqlens.numpy()
    prompt_lens = torch.from_numpy(leading_prompt_lens(cu_seqlens, batch.loss_mask.numpy())).minimum(input_lens)
    prompts = prompts_of(batch.token_ids.numpy(), cu_seqlens, prompt_lens.numpy())
    owner_of: dict[bytes, int] = {}
    owners = [owner_of.setdefault(prompt, i) for i, prompt in enumerate(prompts)]
    owner = torch.tensor(owners)

    whole_starts = input_lens.cumsum(0) - input_lens  # in the whole sequences' rows
    positions = torch.arange(int(input_lens.sum())) - whole_starts.repeat_interleave(input_lens)
    token = starts.repeat_interleave(input_lens) + positions
    tokens = batch.token_ids[token]
    borrowed_lens = torch.where(owner == torch.arange(len(owner)), 0, prompt_lens)
    is_first = positions >= borrowed_lens.repeat_interleave(input_lens)
    row = is_first.cumsum(0) - 1
    source = torch.where(is_first, row, row[whole_starts[owner].repeat_interleave(input_lens) + positions])

    lens = batch.seq_lens
    place = torch.arange(batch.num_tokens) - starts.repeat_interleave(lens)
    predictor = source[whole_starts.repeat_interleave(lens) + (place - 1).clamp(min=0)]
    first = is_first.nonzero().squeeze(1)
    row_of_token = source.new_full((batch.num_tokens,), -1)
    row_of_token[token] = source
    return SharedRows(
        tokens=tokens[first],
        positions=positions[first],
        lens=input_lens,
        source=source,
        first=first,
        predictor=predictor,
        row_of_token=row_of_token,
    )
