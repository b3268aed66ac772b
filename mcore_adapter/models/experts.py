"""Experts whose weights lie in one tensor per linear layer, computed in one grouped product per linear layer.

Stand in for Megatron's experts in its MoE layer, behind its dispatcher or one of router.py. In checkpoints they are
what Megatron's own experts are. Nothing waits for the host: copies of tokens are laid out sorted by expert, and how
many each expert has stays on the device, as a grouped product takes the end of each expert's rows as a tensor. Between
the products, cuda/experts.py computes on GPUs what the torch operators in this file define.

Invariants: from forward to backward one layer keeps its input and the output of the first linear layer, or its input
alone; the sorted copies and the activations are made again. Ranks that share tokens call the same collectives in the
same order, whatever a layer keeps. The process group of an exchange holds what it reads and writes until wait(), which
every caller calls; until then nothing else reads or writes it.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Self, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mcore_adapter.autograd import Context, mark


@dataclass(frozen=True)
class Pending:
    """A tensor that a collective writes."""

    _tensor: Tensor
    _work: dist.Work | None = None

    def wait(self) -> Tensor:
        """Return it. On a GPU the current stream waits for the collective; the host does not."""
        if self._work is not None:
            self._work.wait()
        return self._tensor


def begin_gather(tensor: Tensor, group: ProcessGroup | None) -> Pending:
    """Begin to gather tensor [t, n] of all ranks, in their order: [size * t, n]; without group, of this one."""
    tensor = tensor.detach().contiguous()
    if group is None:
        return Pending(tensor)
    gathered = tensor.new_empty((group.size() * len(tensor), *tensor.shape[1:]))
    return Pending(gathered, dist.all_gather_into_tensor(gathered, tensor, group=group, async_op=True))


def begin_sum(tensor: Tensor, group: ProcessGroup | None) -> Pending:
    """Begin to add up tensor [size * t, n] over all ranks, of which this one gets its own rows: [t, n]."""
    if group is None:
        return Pending(tensor)
    tensor = tensor.contiguous()
    own = tensor.new_empty((len(tensor) // group.size(), *tensor.shape[1:]))
    return Pending(own, dist.reduce_scatter_tensor(own, tensor, group=group, async_op=True))


@dataclass(frozen=True)
class Rows:
    """Which expert computes which row: r rows, sorted by expert."""

    ends: Tensor  # [num_experts] int32: the row behind each expert's last
    of_copy: Tensor | None = None
    """[t, k] int32: the row of each token's k copies, -1 where absent; None: the rows are given, not copied from
    tokens."""
    copies: Tensor | None = None
    """[r] int64: its inverse, places in [t, k] flattened. r = t * k where no copy is absent."""

    def first(self, num_rows: int) -> Self:
        """Return these rows without what follows the first `num_rows` copies."""
        assert self.copies is not None, "rows that are given are all there"
        return replace(self, copies=self.copies[:num_rows].clone())


@dataclass(frozen=True)
class SharedRows:
    """Rows of copies of the tokens of all ranks of a group, each of which has some of the experts."""

    rows: Rows
    tokens: Tensor  # [s, h] of this rank; s <= t / size: what was gathered has padding behind them
    weights: Tensor  # [s, k]
    group: ProcessGroup


def sorted_rows(experts: Tensor, num_experts: int, *, part: range | None = None) -> Rows:
    """Sort rows by expert, given the choice of each token, experts [t, k]. Within an expert, tokens keep their
    order.

    With `part`, a copy for an expert outside of it, or for `num_experts`, which stands for none, is absent. The host
    does not know r then: `copies` is [t * k], and has the absent ones behind; ends[-1] is r, for Rows.first().
    """
    narrow = torch.int16 if num_experts <= torch.iinfo(torch.int16).max else torch.int32  # half the passes of int32
    if part is not None:  # numbers from 0 on for the part, larger ones for the others
        experts = (experts - part.start).remainder(num_experts + 1)
    by_expert, copies = experts.flatten().to(narrow).sort(stable=True)
    numbers = torch.arange(len(copies), dtype=torch.int32, device=copies.device)
    every = torch.arange(num_experts if part is None else len(part), dtype=narrow, device=copies.device)
    ends = torch.searchsorted(by_expert, every, right=True, out_int32=True)
    if part is not None:
        numbers = numbers.masked_fill(numbers >= ends[-1], -1)
    return Rows(ends, torch.empty_like(numbers).scatter_(0, copies, numbers).view(experts.shape), copies)


def experts_output(
    x: Tensor,  # [t, h], or [r, h] where the rows are given
    weights: Tensor,  # [t, k] float32, or [r]: of each copy
    gate_up: Tensor,  # [num_experts, 2 * f, h]
    down: Tensor,  # [num_experts, h, f]
    rows: Rows | SharedRows,
    *,
    keep_halves: bool = True,
) -> Tensor:
    """Compute for each token the sum over its copies of weight * down(silu(gate(x)) * up(x)), in x's shape; for given
    rows the summands. Without `keep_halves` the backward pass computes gate and up again.

    With SharedRows, x and weights are those of all ranks, and the result is the sum over the experts of all ranks for
    the tokens of this one, [t / size, h]; collective, as its backward pass, which leads to rows.tokens and
    rows.weights.
    """
    if isinstance(rows, Rows):
        return cast(Tensor, _Experts.apply(x, weights, gate_up, down, rows, keep_halves, None, None))
    own = (rows.tokens, rows.weights)
    return cast(Tensor, _Experts.apply(*own, gate_up, down, rows.rows, keep_halves, rows.group, (x, weights)))


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        rows: Rows,
        keep_halves: bool,
        group: ProcessGroup | None,
        gathered: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        ctx.rows, ctx.group, ctx.num_own = rows, group, len(x)
        if gathered is not None:
            x, weights = gathered
        halves = _product(spread(x, rows), gate_up.transpose(1, 2), rows)
        ctx.save_for_backward(x, weights, gate_up, down, *([halves] if keep_halves else []))
        product = weighted_swiglu(halves, weights, rows)
        del halves
        return begin_sum(collect(_product(product, down.transpose(1, 2), rows), rows), group).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, gate_up, down, *kept = ctx.saved_tensors
        rows: Rows = ctx.rows
        group: ProcessGroup | None = ctx.group
        gathering = begin_gather(grad, group)
        inputs = None
        if group is not None or not kept:
            inputs = spread(x, rows)
            if not kept:
                kept = [_product(inputs, gate_up.transpose(1, 2), rows)]
        grad_rows = spread(gathering.wait(), rows)
        del gathering
        grad_product = _product(grad_rows, down, rows)
        product, grad_halves, grad_weights = weighted_swiglu_backward(kept.pop(), weights, grad_product, rows)
        del grad_product
        summing_weights = begin_sum(grad_weights, group)
        grad_down = _product(grad_rows.t(), product, rows)
        del grad_rows, product
        summing = begin_sum(collect(_product(grad_halves, gate_up, rows), rows), group)
        if inputs is None:
            inputs = spread(x, rows)
        grad_gate_up = _product(grad_halves.t(), inputs, rows)
        own = (pending.wait()[: ctx.num_own] for pending in (summing, summing_weights))
        return *own, grad_gate_up, grad_down, None, None, None, None


def _product(a: Tensor, b: Tensor, rows: Rows) -> Tensor:
    """Multiply a [r, i] by b [n, i, j] -> [r, j], each row by its expert's; a [i, r] by b [r, j] -> [n, i, j], for each
    expert the sum over its rows."""
    if not a.numel():  # torch refuses
        return a.new_zeros((0, b.shape[2]) if b.dim() == 3 else (len(rows.ends), a.shape[0], b.shape[1]))
    return F.grouped_mm(a, b, offs=rows.ends)


def spread(x: Tensor, rows: Rows) -> Tensor:
    """Copy the rows of x [t, h] to [r, h]."""
    if rows.of_copy is None or rows.copies is None:
        return x
    if x.is_cuda:
        from mcore_adapter.cuda.experts import spread as fused

        return fused(x, rows.of_copy, len(rows.copies))
    return x.index_select(0, rows.copies // rows.of_copy.shape[1])


def collect(y: Tensor, rows: Rows) -> Tensor:
    """Sum each token's copies: y [r, h] -> [t, h], in float32 and then rounded. Absent ones count 0."""
    if rows.of_copy is None:
        return y
    if y.is_cuda:
        from mcore_adapter.cuda.experts import collect as fused

        return fused(y, rows.of_copy)
    (t, k), of_copy = rows.of_copy.shape, rows.of_copy.flatten()
    if len(y) < t * k:  # absent copies take a row of zeros behind the others
        y, of_copy = F.pad(y, (0, 0, 0, 1)), of_copy.where(of_copy >= 0, len(y))
    return y.index_select(0, of_copy).view(t, k, -1).sum(1, dtype=torch.float32).to(y.dtype)


def weighted_swiglu(halves: Tensor, weights: Tensor, rows: Rows) -> Tensor:
    """Compute silu(first) * second * the row's weight of halves [r, 2 * f]: [r, f]."""
    if halves.is_cuda:
        from mcore_adapter.cuda.experts import weighted_swiglu as fused

        return fused(halves, weights, rows.copies)
    gate, up = halves.float().chunk(2, -1)
    return (F.silu(gate) * up * _of_rows(weights, rows)).to(halves.dtype)


def weighted_swiglu_backward(
    halves: Tensor, weights: Tensor, grad: Tensor, rows: Rows
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (result, gradients of halves and weights) of weighted_swiglu(), given grad [r, f]; the weights of
    absent copies have gradient 0. `grad` may be overwritten."""
    if halves.is_cuda:
        from mcore_adapter.cuda.experts import weighted_swiglu_backward as fused

        return fused(halves, weights, grad, rows.copies)
    gate, up = halves.float().chunk(2, -1)
    wide, weight = grad.float(), _of_rows(weights, rows)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    by_product = wide * weight
    grad_gate = by_product * up * (sigmoid + silu * (1 - sigmoid))
    grad_halves = torch.cat((grad_gate, by_product * silu), -1).to(halves.dtype)
    by_row = (wide * silu * up).sum(-1)
    if rows.copies is not None:
        by_row = by_row.new_zeros(weights.numel()).index_copy_(0, rows.copies, by_row)
    return (silu * up * weight).to(halves.dtype), grad_halves, by_row.view(weights.shape).to(weights.dtype)


def _of_rows(weights: Tensor, rows: Rows) -> Tensor:
    """Return the weights as a column: [r, 1] float32."""
    flat = weights.flatten().float()
    return (flat if rows.copies is None else flat.index_select(0, rows.copies)).unsqueeze(1)


def stack_experts(spec: TransformerBlockSubmodules, config: TransformerConfig, device: torch.device) -> None:
    """Let the layers of `spec` stack their experts, where grouped products can read them: in 16 or 32 bits, and with
    rows of whole 16 bytes."""
    size = config.params_dtype.itemsize
    if config.fp8 or any(n * size % 16 for n in (config.hidden_size, cast(int, config.moe_ffn_hidden_size))):
        return
    for layer in spec.layer_specs or ():
        if layer.submodules.mlp.module is MoELayer:
            layer.submodules.mlp.submodules.experts = ModuleSpec(module=StackedExperts, params={"device": device})


class StackedExperts(MegatronModule):
    """gate_up [n, 2 * f, h] and down [n, h, f] of this rank's n experts."""

    keep_halves = True
    """Whether the outputs of the first linear layer stay in memory until the backward pass."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        device: torch.device,
    ) -> None:
        assert config.gated_linear_unit and config.activation_func is F.silu, "what every supported family has"
        assert not config.add_bias_linear and pg_collection is not None, "set by build_model()"
        super().__init__(config=config)
        hidden, width = config.hidden_size, cast(int, config.moe_ffn_hidden_size)
        self.gate_up = _parameter(num_local_experts, 2 * width, hidden, config.params_dtype, device)
        self.down = _parameter(num_local_experts, hidden, width, config.params_dtype, device)
        self._ep_group, self._replicas = pg_collection.ep, pg_collection.expt_dp

    def forward(self, hidden: Tensor, rows: Rows | SharedRows | Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Compute the experts' output, see experts_output(), and no bias; from hidden [t, h] with the rows of its
        copies and probs [t, k], or from hidden [r, h] sorted by expert with the number of rows of each expert and
        probs [r]."""
        if isinstance(rows, Tensor):
            rows = Rows(rows.to(hidden.device, torch.int64).cumsum(0).to(torch.int32))
        return experts_output(hidden, probs, self.gate_up, self.down, rows, keep_halves=self.keep_halves), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[object, ...] = (), metadata: dict[str, object] | None = None
    ) -> ShardedStateDict:
        """Return one piece for each expert and half, as of Megatron's experts that are modules of their own."""
        assert not (metadata or {}).get("singleton_local_shards"), "checkpoints are written with shared keys"
        replica = (0, 0, self._replicas.rank())
        state: ShardedStateDict = {}
        for name, layer, parts in (("gate_up", "linear_fc1", 2), ("down", "linear_fc2", 1)):
            weight: Tensor = getattr(self, name)
            first, total = self._ep_group.rank() * len(weight), self._ep_group.size() * len(weight)
            pieces = partial(_pieces, offsets=sharded_offsets, first=first, total=total, parts=parts)
            join = partial(_join, shape=tuple(weight.shape))
            key = f"{prefix}experts.{layer}.weight"
            state[f"{prefix}{name}"] = ShardedTensorFactory(key, weight, pieces, join, replica)
        return state


def _parameter(num: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.empty(num, rows, columns, dtype=dtype, device=device))
    # Other replicas of an expert are other ranks than those of what is around it: reduced and counted apart.
    mark(weight, allreduce=False, tensor_model_parallel=True)
    return weight


@torch.no_grad()
def _pieces(
    key: str,
    weight: Tensor,
    replica_id: ReplicaId,
    flattened_range: slice | None,
    *,
    offsets: tuple[object, ...],
    first: int,
    total: int,
    parts: int,
) -> list[ShardedTensor]:
    """Split weight [n, rows, columns] into `parts` pieces of each expert, n * parts of them, in order."""
    axis = len(offsets)
    return [
        ShardedTensor.from_rank_offsets(
            key, piece, *offsets, (axis, first + i, total), (axis + 1, part, parts),
            replica_id=replica_id, prepend_axis_num=axis + 1,
        )
        for i, expert in enumerate(weight)
        for part, piece in enumerate(expert.chunk(parts))
    ]  # fmt: skip


@torch.no_grad()
def _join(pieces: list[Tensor], *, shape: tuple[int, ...]) -> Tensor:
    return torch.cat(pieces).view(shape)
