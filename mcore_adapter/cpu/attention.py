"""Core attention and rotary embedding of packed (thd) sequences on CPU; leaf functions of cpu/device.py.

Both compute in float32 whatever the model's format: torch's bfloat16 attention for CPU takes in its backward pass eight
times as long at 16 tokens a sequence, twice at 128 and no less before 1,000.
Invariant: a token attends to the tokens before it in its own sequence and to nothing else, and its result does not
depend on which sequences are packed beside it (beyond summation order).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_adapter.autograd import Context
from mcore_adapter.data.packing import SharedPromptParams

_MAX_PADDING = 1.1  # sequences share a block while the longest has at most this many times the tokens of the shortest
_SHORT_TOKENS = 48  # up to here matrix products over the whole batch beat the flash kernel (2x at 20 tokens, 1x at 56)
_LONGEST_TREE = 256  # tokens of a prompt with all its completions, the scores of which are kept for the backward pass
_SCORES_PER_COPY = 12  # for which there is time while a row of a whole sequence is copied, there and back
_TRUNK = -1  # in place of a sequence: all completions of the prompt
_ALONE_ELEMENTS = 1 << 14  # with more query elements (tokens x heads x head_dim) sequences keep a core busy


@dataclass(frozen=True)
class _Block:
    """`batch` sequences attended in one kernel call, each of (or padded to) `length` tokens."""

    batch: int
    length: int
    start: int
    """First token; the block is contiguous where `index` is None."""
    index: Tensor | None = None
    """[batch * length] rows to gather; padding repeats the last token of its sequence."""
    valid: Tensor | None = None
    """[sum of lengths] positions in `index` that are not padding; None: all."""
    unseen: Tensor | None = None
    """[batch, length, length] float32: -inf where a key (first) is none that a query (second) attends to, else 0. None:
    a query attends to all keys up to its own."""

    def take(self, x: Tensor) -> Tensor:
        """Select the block's sequences: [t, h, d] -> [batch, h, length, d]."""
        rows = (
            x[self.start : self.start + self.batch * self.length]
            if self.index is None
            else x.index_select(0, self.index)
        )
        return rows.unflatten(0, (self.batch, self.length)).transpose(1, 2)

    def take_grad(self, x: Tensor) -> Tensor:
        """Select as take(), with zeros for the padding."""
        if self.valid is None:
            return self.take(x)
        assert self.index is not None, "only gathered blocks are padded"
        rows = x.new_zeros(self.index.numel(), *x.shape[1:])
        rows.index_copy_(0, self.valid, x.index_select(0, self.index[self.valid]))
        return rows.unflatten(0, (self.batch, self.length)).transpose(1, 2)

    def put(self, target: Tensor, x: Tensor) -> None:
        """Write [batch, h, length, d] to the block's rows of target [t, h, d]."""
        rows = x.transpose(1, 2)
        if self.index is None:
            target[self.start : self.start + self.batch * self.length].unflatten(0, (self.batch, self.length)).copy_(
                rows
            )
        elif self.valid is None:
            target.index_copy_(0, self.index, rows.flatten(0, 1))
        else:
            target.index_copy_(0, self.index[self.valid], rows.flatten(0, 1).index_select(0, self.valid))


@lru_cache(maxsize=8)
def _plan(lens: tuple[int, ...], elements_per_token: int) -> tuple[_Block, ...]:
    """Cut a packing into blocks: long sequences, and many neighbours of equal length, as they lie (there the kernel
    call is worth its overhead, and gathering copies is not), others by similar length."""
    blocks: list[_Block] = []
    short: list[tuple[int, int]] = []
    start = i = 0
    while i < len(lens):
        run = i + 1
        while run < len(lens) and lens[run] == lens[i]:
            run += 1
        tokens = lens[i] * (run - i)
        if tokens * elements_per_token > _ALONE_ELEMENTS:
            blocks.append(_Block(run - i, lens[i], start))
        else:
            short.extend((lens[i], start + lens[i] * n) for n in range(run - i))
        start += tokens
        i = run
    blocks.extend(map(_gathered, _by_length(short)))
    return tuple(blocks)


def _by_length(pieces: Iterable[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield groups of pieces (length, first row) of similar length, the longest first. Empty pieces are left out."""
    group: list[tuple[int, int]] = []
    for piece in sorted((p for p in pieces if p[0]), reverse=True):
        if group and group[0][0] > _MAX_PADDING * piece[0]:
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def _padded_rows(group: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Return the rows of a group's pieces, with the last row of a piece as its padding, and which of them are real:
    [pieces, longest length] each."""
    lens = torch.tensor([n for n, _ in group])[:, None]
    starts = torch.tensor([s for _, s in group])[:, None]
    column = torch.arange(group[0][0])[None, :]
    return starts + torch.minimum(column, lens - 1), column < lens


def _gathered(group: Sequence[tuple[int, int]]) -> _Block:
    """Return a block of sequences (length, first token), the longest first."""
    if len(group) == 1:
        return _Block(1, *group[0])
    index, real = _padded_rows(group)
    return _Block(len(group), group[0][0], -1, index.flatten(), _valid(real))


def _valid(real: Tensor) -> Tensor | None:
    """Return what _Block.valid holds."""
    return None if bool(real.all()) else real.flatten().nonzero().flatten()


class _PackedCausalAttention(torch.autograd.Function):
    """Block by block; saves unexpanded keys and values, and for long blocks no probabilities (flash attention)."""

    @staticmethod
    def forward(ctx: Context, q: Tensor, k: Tensor, v: Tensor, blocks: tuple[_Block, ...], scale: float) -> Tensor:
        out, kept = torch.empty_like(q), []
        for block in blocks:
            inputs = (block.take(q), block.take(k), block.take(v))
            if _is_short(block):
                o, for_backward = _short_forward(*inputs, scale, block.unseen)
            else:
                o, for_backward = _flash_forward(*inputs, scale)
            block.put(out, o)
            kept.append(for_backward)
        ctx.save_for_backward(q, k, v, out, *kept)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # type: ignore[override]
        q, k, v, out, *kept = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for block, from_forward in zip(ctx.blocks, kept, strict=True):
            inputs = (block.take_grad(grad), block.take(q), block.take(k), block.take(v))
            if _is_short(block):
                grads = _short_backward(*inputs, from_forward, ctx.scale)
            else:
                grads = _flash_backward(*inputs, block.take(out), from_forward, ctx.scale)
            for target, block_grad in zip((dq, dk, dv), grads, strict=True):
                block.put(target, block_grad)
        return dq, dk, dv, None, None


def _is_short(block: _Block) -> bool:
    return block.unseen is not None or block.length <= _SHORT_TOKENS


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute the output [b, h, l, d] and the log-sum-exp of the scores, of q [b, h, l, d] and k and v [b, g, l, d]."""
    ratio = q.size(1) // k.size(1)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, _expand(k, ratio), _expand(v, ratio), 0.0, True, scale=scale
    )
    return out, lse


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    ratio = q.size(1) // k.size(1)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, _expand(k, ratio), _expand(v, ratio), out, lse, 0.0, True, scale=scale
    )
    return dq, _reduce(dk, ratio), _reduce(dv, ratio)


def _short_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, unseen: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute as _flash_forward(), or with other keys (_Block.unseen); keep the probabilities [b * g, l, h / g * l],
    those of a query in a column: torch normalizes columns many at a time, and rows element by element where they are
    shorter than a vector."""
    (batch, heads, length, _), groups = q.shape, k.size(1)
    ratio = heads // groups
    keys, queries = _rows(k), _rows(q, ratio).transpose(1, 2)
    if unseen is None:
        behind = torch.full((length, length), -torch.inf).tril_(-1).repeat(1, ratio)
        scores = torch.baddbmm(behind, keys, queries, alpha=scale)
    else:
        scores = torch.bmm(keys, queries)
        by_head = scores.view(batch, groups, length, ratio, length)
        torch.add(unseen[:, None, :, None], by_head, alpha=scale, out=by_head)
    probs = scores.softmax(1)
    return torch.bmm(probs.transpose(1, 2), _rows(v)).view(q.shape), probs


def _short_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, probs: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    ratio = q.size(1) // k.size(1)
    grad_rows = _rows(grad, ratio)
    grad_probs = torch.bmm(_rows(v), grad_rows.transpose(1, 2))
    grad_scores = torch._softmax_backward_data(grad_probs, probs, 1, probs.dtype).mul_(scale)
    dq, dk = torch.bmm(grad_scores.transpose(1, 2), _rows(k)), torch.bmm(grad_scores, _rows(q, ratio))
    return dq.view(q.shape), dk.view(k.shape), torch.bmm(probs, grad_rows).view(v.shape)


def _rows(x: Tensor, heads_per_group: int = 1) -> Tensor:
    """Rearrange into one matrix per group of heads: [b, h, l, d] -> [b * h / heads_per_group, heads_per_group * l,
    d]."""
    b, h, length, d = x.shape
    return x.reshape(b * h // heads_per_group, heads_per_group * length, d)


def _expand(kv: Tensor, heads_per_group: int) -> Tensor:
    """Give every query head its key/value head: [b, g, l, d] -> [b, h, l, d]."""
    return kv if heads_per_group == 1 else kv.repeat_interleave(heads_per_group, dim=1)


def _reduce(grad: Tensor, heads_per_group: int) -> Tensor:
    """Compute the transpose of _expand()."""
    return grad if heads_per_group == 1 else grad.unflatten(1, (-1, heads_per_group)).sum(2)


def packed_causal_attention(q: Tensor, k: Tensor, v: Tensor, lens: Sequence[int], *, scale: float) -> Tensor:
    """Attend causally within packed sequences: q [t, h, d], k and v [t, g, d] with g dividing h, `lens` tokens per
    sequence -> [t, h, d]."""
    return _PackedCausalAttention.apply(q, k, v, _plan(tuple(lens), q.size(1) * q.size(2)), scale)


def tree_attention(q: Tensor, k: Tensor, v: Tensor, trees: tuple[_Block, ...], *, scale: float) -> Tensor:
    """Attend where completions share their prompt's rows: q [s, h, d], k and v [s, g, d], one row of each packed row ->
    [s, h, d]. `trees`: plan_trees()."""
    return _PackedCausalAttention.apply(q, k, v, trees, scale)


def plan_trees(shared: SharedPromptParams) -> tuple[_Block, ...] | None:
    """Cut a packing into trees, each a prompt with all its completions: one matrix of scores, in which a completion
    sees the prompt and itself. None where whole sequences, with copies of their prompts, are estimated to take less
    time."""
    assert shared.cu_seqlens_q is not None and shared.source is not None and shared.first is not None
    starts, lens = shared.cu_seqlens_q[:-1].long(), shared.cu_seqlens_q.diff().long()
    root = shared.source[starts.repeat_interleave(lens)][shared.first]  # of each packed row: the first one of its tree
    sizes = root.bincount()
    scores = lens.square() * torch.where(lens > _SHORT_TOKENS, 0.5, 1.0)  # flash attention computes the lower half
    if int(sizes.max()) > _LONGEST_TREE or sizes.square().sum() > (scores + _SCORES_PER_COPY * lens).sum():
        return None
    sequence = torch.arange(len(lens)).repeat_interleave(lens)
    position = (torch.arange(len(sequence)) - starts.repeat_interleave(lens))[shared.first]
    branch = sequence[shared.first].index_fill_(0, shared.source[shared.copies], _TRUNK)
    order = root.argsort(stable=True)  # the rows of a tree, one after the other
    trees = zip(sizes.tolist(), (sizes.cumsum(0) - sizes).tolist(), strict=True)
    return tuple(_tree_block(group, order, branch, position) for group in _by_length(trees))


def _tree_block(group: Sequence[tuple[int, int]], order: Tensor, branch: Tensor, position: Tensor) -> _Block:
    """Return a block of trees (length, first place in `order`), the longest first."""
    places, real = _padded_rows(group)
    index = order[places]
    of, at = branch[index], position[index]
    seen = ((of[:, :, None] == of[:, None]) | (of[:, :, None] == _TRUNK)) & (at[:, :, None] <= at[:, None])
    unseen = torch.zeros(seen.shape).masked_fill_(~(seen & real[:, :, None]), -torch.inf)
    return _Block(len(group), group[0][0], -1, index.flatten(), _valid(real), unseen)


def zigzag_attention(
    q: Tensor, k: Tensor, v: Tensor, lens: Sequence[int], *, scale: float, cp: int, rank: int
) -> Tensor:
    """Attend causally from this context-parallel rank's queries to the whole sequences.

    Every sequence is cut into 2 * cp chunks; rank r holds chunks r and 2 * cp - 1 - r. q [t / cp, h, d]: the own chunks
    of all sequences; k, v [t, g, d]: the ranks' shards, one after the other; lens: full lengths, multiples of 2 * cp.
    """
    local = [n // cp for n in lens]
    keys, values = ([shard.split(local) for shard in x.chunk(cp)] for x in (k, v))
    out = []
    for i, (q_i, n) in enumerate(zip(q.split(local), lens, strict=True)):
        chunk = n // (2 * cp)
        k_i, v_i = _in_order([s[i] for s in keys], chunk), _in_order([s[i] for s in values], chunk)
        for part, position in zip(q_i.split(chunk) if chunk else (), (rank, 2 * cp - 1 - rank), strict=False):
            end = (position + 1) * chunk
            mask = torch.ones(chunk, end, dtype=torch.bool).tril(position * chunk)
            q_h, k_h, v_h = (x.transpose(0, 1)[None] for x in (part, k_i[:end], v_i[:end]))
            o = F.scaled_dot_product_attention(
                q_h, k_h, v_h, attn_mask=mask, scale=scale, enable_gqa=q.size(1) != k.size(1)
            )
            out.append(o[0].transpose(0, 1))
    return torch.cat(out)


def _in_order(shards: Sequence[Tensor], chunk: int) -> Tensor:
    """Return one sequence from the shards of all context-parallel ranks, in token order."""
    first, last = [s[:chunk] for s in shards], [s[chunk:] for s in shards]
    return torch.cat(first + last[::-1])


class _Rotate(torch.autograd.Function):
    """(a, b) -> (a cos - b sin, b cos + a sin) for the two halves of the last dimension."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return _rotate(x.float(), cos, sin)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin).to(ctx.dtype), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype)
    first, second = out.chunk(2, dim=-1)
    torch.mul(a, cos, out=first).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=second).addcmul_(a, sin)
    return out


class RotaryCache:
    """Cosines and sines of the last few packings: all layers of a microbatch share them."""

    def __init__(self, size: int = 4) -> None:
        self._entries: dict[tuple[object, ...], tuple[Tensor, Tensor, Tensor]] = {}
        self._size = size

    def get(self, freqs: Tensor, cu_seqlens: Tensor, cp: int, rank: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin [t / cp, 1, d / 2] of the tokens of this rank, given the angles freqs [max_len, 1, 1,
        d]."""
        key = (id(freqs), cp, rank, tuple(cu_seqlens.tolist()))
        if key not in self._entries:
            if len(self._entries) >= self._size:
                del self._entries[next(iter(self._entries))]
            angles = freqs[:, 0, :, : freqs.size(-1) // 2]
            positions = _positions(cu_seqlens, cp, rank)
            cos, sin = (f(angles.float()).index_select(0, positions) for f in (torch.cos, torch.sin))
            self._entries[key] = (freqs, cos, sin)  # holding freqs keeps its id from being given away
        _, cos, sin = self._entries[key]
        return cos, sin


def _positions(cu_seqlens: Tensor, cp: int, rank: int) -> Tensor:
    """Return the position of every token of this context-parallel rank in its sequence: [t / cp]."""
    lens = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    if cp == 1:
        return torch.arange(int(cu_seqlens[-1])) - cu_seqlens[:-1].long().repeat_interleave(lens)
    chunks = (torch.arange(n).chunk(2 * cp) for n in lens.tolist() if n)
    return torch.cat([torch.cat((c[rank], c[2 * cp - 1 - rank])) for c in chunks])


_ROTARY_CACHE = RotaryCache()


def rotary_thd(t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_size: int = 1, cp_rank: int = 0) -> Tensor:
    """Rotate t [tokens, h, d] -> float32; the signature of TransformerEngine's fused kernel, so that one switch serves
    both."""
    return _Rotate.apply(t, *_ROTARY_CACHE.get(freqs, cu_seqlens, cp_size, cp_rank))
