"""Lays the sequences of one microbatch end to end, as Megatron's attention requires (thd), for one rank.

Completions of the same prompt may share it: its tokens pass through the model once a microbatch, not once a completion.
What depends on a token alone (embedding, norms, projections, MLP, head) sees each distinct row once. The core attention
may see whole sequences again (`SharedPromptParams.to_sequences`). The last token of a sequence predicts nothing and is
left out.

Invariants: every trained token is predicted from exactly the tokens before it in its own sequence. Every token of the
microbatch belongs to exactly one context-parallel rank, the one that holds its predecessor and so computes its
log-probability. Padding appears only where sequence parallelism (the total, a multiple of tp), context parallelism
(each sequence, a multiple of 2 cp) or 8-bit formats (each rank's share, a multiple of 16) demand it, always after the
tokens it could disturb.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mcore_adapter.autograd import Context
from mcore_adapter.data.batch import ROUTED_EXPERTS, PackedBatch, leading_prompt_lens, prompts_of, sequence_of_token
from model_specs.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class RoutingInputs:
    """Inputs of the routers beside hidden states: s rows of this rank, m tokens that predict another.

    A row may stand for tokens of several sequences (shared prompts), a padding row stands for none.
    """

    rows: Tensor  # [m] int64: row of each token
    sequences: Tensor  # [m] int64: its sequence, of num_sequences
    lens: Tensor  # [num_sequences] float32: such tokens of each whole sequence
    batch_tokens: int
    """Such tokens of the whole batch."""
    experts: Tensor | None  # [s, num_layers, k] chosen beforehand, signed integers; negative: the router chooses
    rows_of_ranks: list[int] = field(default_factory=list)
    """s of each expert-parallel rank; empty until the dispatcher of the first layer has exchanged them."""


def check_routed_experts(batch: PackedBatch, config: ModelConfig) -> None:
    """Check the experts that a batch prescribes, if it has any. Raises ValueError."""
    experts = batch.fields.get(ROUTED_EXPERTS)
    if experts is None:
        return
    if config.moe is None:
        raise ValueError(f"{ROUTED_EXPERTS} is given, but a {config.model_type} model has no experts")
    shape = (batch.num_tokens, config.num_layers, config.moe.top_k)
    if tuple(experts.shape) != shape:
        raise ValueError(f"{ROUTED_EXPERTS} has shape {tuple(experts.shape)}, expected [T, layers, k] = {shape}")
    sparse = experts[:, torch.tensor(config.moe.sparse_layers)]
    forced = sparse[(sparse >= 0).all(-1)]
    if forced.numel() and int(forced.max()) >= config.moe.num_experts:
        raise ValueError(f"{ROUTED_EXPERTS} names expert {int(forced.max())}; there are {config.moe.num_experts}")
    if bool((forced.sort(-1).values.diff(dim=-1) == 0).any()):
        raise ValueError(f"{ROUTED_EXPERTS} names an expert twice for the same token and layer")


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


@dataclass(frozen=True, kw_only=True)
class PackingLayout:
    """What the parallel layout requires of a packed microbatch."""

    cp_size: int = 1
    cp_rank: int = 0
    sequence_parallel_size: int = 1
    """Ranks that share a packed sequence: tp with sequence parallelism, else 1."""
    sequence_parallel_rank: int = 0
    row_multiple: int = 1
    """What the number of positions of each rank must be a multiple of."""
    share_prompts: bool = False
    """Run a prompt once for all its completions; not possible with context parallelism, which cuts sequences up."""
    routes: bool = False
    """The model has routers: the packing carries their RoutingInputs as its `routing`."""

    def __post_init__(self) -> None:
        assert not (self.share_prompts and self.cp_size > 1), "the engine decides"

    @property
    def sequence_multiple(self) -> int:
        return 2 * self.cp_size if self.cp_size > 1 else 1

    @property
    def total_multiple(self) -> int:
        return self.sequence_multiple * self.sequence_parallel_size * self.row_multiple

    def padded_lens(self, lens: Tensor) -> Tensor:
        """Return the tokens that each sequence occupies when packed (over all context-parallel ranks): [N] -> [N]."""
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
    num_sequences: int
    sequence_of_token: Tensor  # [t] int64: the sequence of each token, 0 .. num_sequences - 1
    trained: Tensor  # [n] int64: places in [t] of the tokens with loss_mask
    rows: Tensor  # [n] int64: the packed position that predicts each of them
    targets: Tensor  # [n] int64: their token ids


def pack_microbatch(
    batch: PackedBatch, sequences: Sequence[int], layout: PackingLayout, *, device: torch.device
) -> PackedMicrobatch:
    """Return the microbatch of `sequences` of `batch`, in this order; none of them makes a zero-weight filler of one
    token."""
    batch_tokens = batch.num_tokens - batch.num_sequences
    return pack_sequences(batch.select(sequences), layout, batch_tokens=batch_tokens, device=device)


def pack_sequences(
    own: PackedBatch, layout: PackingLayout, *, batch_tokens: int, device: torch.device
) -> PackedMicrobatch:
    """Pack all sequences as pack_microbatch() does. `batch_tokens`: tokens of the whole batch that predict another."""
    is_filler = not own.num_sequences
    own = _filler(own) if is_filler else own
    rows = _shared_rows(own, layout, device) if layout.share_prompts else _rows(own, layout, device)
    if layout.routes:
        forced = None if is_filler else own.fields.get(ROUTED_EXPERTS)
        cast(Any, rows.params).routing = _routing_inputs(own, rows, layout, forced, max(1, batch_tokens), device)
    fields = {name: value for name, value in own.fields.items() if name != ROUTED_EXPERTS}
    fields["loss_mask"] = own.loss_mask
    of_token = sequence_of_token(own.seq_lens)
    if rows.token_index is not None:
        fields = {name: value[rows.token_index] for name, value in fields.items()}
        of_token = of_token[rows.token_index]
    trained = fields["loss_mask"].nonzero().squeeze(1)
    token_of_trained = trained if rows.token_index is None else rows.token_index[trained]
    return PackedMicrobatch(
        token_ids=rows.tokens[None].to(device),
        position_ids=rows.positions[None].to(device),
        packed_seq_params=rows.params,
        fields={name: value.to(device) for name, value in fields.items()},
        token_index=rows.token_index,
        num_tokens=own.num_tokens,
        num_sequences=own.num_sequences,
        sequence_of_token=of_token.to(device),
        trained=trained.to(device),
        rows=rows.predictor[trained].to(device),
        targets=own.token_ids[token_of_trained].to(device),
    )


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """The s packed positions of this rank."""

    tokens: Tensor  # [s]
    positions: Tensor  # [s]
    predictor: Tensor  # [t] packed position that predicts each token of the loss
    token_index: Tensor | None  # see PackedMicrobatch
    row_of_token: Tensor  # [number of the microbatch's tokens] packed position of each; -1: not here
    params: PackedSeqParams


def _rows(own: PackedBatch, layout: PackingLayout, device: torch.device) -> _Rows:
    """Assign one position to each token."""
    lens = own.seq_lens
    padded = layout.padded_lens(lens)
    tail = -int(padded.sum()) % layout.total_multiple
    if tail:  # a sequence of its own, so that no real one attends to it
        padded = torch.cat((padded, padded.new_tensor([tail])))
    starts = padded.cumsum(0) - padded
    positions = torch.arange(int(padded.sum())) - starts.repeat_interleave(padded)
    token_place = torch.arange(own.num_tokens) + (starts[: len(lens)] - own.cu_seqlens[:-1]).repeat_interleave(lens)
    tokens = own.token_ids.new_zeros(len(positions))
    tokens[token_place] = own.token_ids
    predictor = torch.where(positions[token_place] == 0, token_place, token_place - 1)
    token_index = None
    if layout.cp_size > 1:
        local = _zigzag(positions, padded, layout)
        place_in_local = torch.full_like(positions, -1)
        place_in_local[local] = torch.arange(len(local))
        tokens, positions = tokens[local], positions[local]
        token_index = (place_in_local[predictor] >= 0).nonzero().squeeze(1)
        predictor = place_in_local[predictor[token_index]]
        token_place = place_in_local[token_place]
    return _Rows(
        tokens=tokens,
        positions=positions,
        predictor=predictor,
        token_index=token_index,
        row_of_token=token_place,
        params=PackedSeqParams(**_thd(padded, device)),
    )


def _shared_rows(own: PackedBatch, layout: PackingLayout, device: torch.device) -> _Rows:
    """Assign one position to each token that predicts another, the tokens of a prompt once for all its completions."""
    shared = share_prompts(own)
    tokens, positions, lens, source, first = shared.tokens, shared.positions, shared.lens, shared.source, shared.first
    tail = -len(tokens) % layout.total_multiple
    if tail:  # a sequence of its own, so that no real one attends to it
        padding = torch.arange(tail)
        source, first = torch.cat((source, padding + len(tokens))), torch.cat((first, padding + len(source)))
        tokens, positions = torch.cat((tokens, padding * 0)), torch.cat((positions, padding))
        lens = torch.cat((lens, lens.new_tensor([tail])))
    params = PackedSeqParams(**_thd(lens, device))
    if len(source) > len(first):
        is_copy = torch.ones_like(source, dtype=torch.bool)
        is_copy[first] = False
        one_sequence = torch.tensor([0, len(tokens)], dtype=torch.int32, device=device)
        params = SharedPromptParams(
            **_thd(lens, device),
            cu_seqlens_q_padded=one_sequence,
            cu_seqlens_kv_padded=one_sequence,
            source=source.to(device),
            first=first.to(device),
            copies=is_copy.nonzero().squeeze(1).to(device),
        )
    return _Rows(
        tokens=tokens,
        positions=positions,
        predictor=shared.predictor,
        token_index=None,
        row_of_token=shared.row_of_token,
        params=params,
    )


def _routing_inputs(
    own: PackedBatch, rows: _Rows, layout: PackingLayout, forced: Tensor | None, batch_tokens: int, device: torch.device
) -> RoutingInputs:
    """Return the inputs of the rows that this rank's routers process: with sequence parallelism a share of the
    packing."""
    share = len(rows.tokens) // layout.sequence_parallel_size
    row = rows.row_of_token - layout.sequence_parallel_rank * share
    here = (row >= 0) & (row < share) & (rows.row_of_token >= 0)
    experts = None
    if forced is not None:
        experts = forced.new_full((share, *forced.shape[1:]), -1)
        experts[row[here]] = forced[here]
        experts = experts.to(device)
    here[own.cu_seqlens[1:] - 1] = False
    return RoutingInputs(
        rows=row[here].to(device),
        sequences=sequence_of_token(own.seq_lens)[here].to(device),
        lens=(own.seq_lens - 1).float().to(device),
        batch_tokens=batch_tokens,
        experts=experts,
    )


def _filler(batch: PackedBatch) -> PackedBatch:
    """Return one sequence of one token that is not trained."""
    return PackedBatch(
        token_ids=batch.token_ids.new_zeros(1),
        cu_seqlens=batch.cu_seqlens.new_tensor([0, 1]),
        loss_mask=batch.loss_mask.new_zeros(1),
        fields={name: value.new_zeros((1, *value.shape[1:])) for name, value in batch.fields.items()},
    )


def _zigzag(positions: Tensor, padded: Tensor, layout: PackingLayout) -> Tensor:
    """Return the packed positions of this context-parallel rank: chunks r and 2 cp - 1 - r of each sequence, which
    gives every rank the same share of the causal triangle."""
    chunk = positions // (padded // (2 * layout.cp_size)).repeat_interleave(padded)
    mine = (chunk == layout.cp_rank) | (chunk == 2 * layout.cp_size - 1 - layout.cp_rank)
    return mine.nonzero().squeeze(1)


def _thd(lens: Tensor, device: torch.device) -> dict[str, Any]:
    """Return Megatron's description of packed sequences of these lengths."""
    cu_seqlens = torch.zeros(len(lens) + 1, dtype=torch.int32)
    cu_seqlens[1:] = lens.cumsum(0)
    cu_seqlens = cu_seqlens.to(device)
    longest = int(lens.max())
    return dict(
        qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest
    )
