"""Which experts a token goes to, and how it gets there: router and dispatchers of every mixture-of-experts family.

The router sits inside Megatron's MoE layer in the place of its own, whose losses depend on how a batch is cut; it has
replay and both ways to balance. Invariant: what a router computes for a token, and what it adds to the loss, depends on
the batch alone, never on the microbatch, rank or packing in which the token passes. On GPUs cuda/experts.py computes
the scores in one kernel a pass. Each token's result depends on its logits alone; of experts or groups that score the
same, those of lower numbers are chosen, and NaN counts as the best score.

Dispatchers bring tokens to stacked experts, in place of Megatron's; see dispatcher_for(). The interface is that of
megatron's MoETokenDispatcher, with the numbers of experts in place of a mask. Invariant: every rank of an
expert-parallel group calls the same collectives in the same order, whatever its tokens are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mcore_adapter.autograd import Context
from mcore_adapter.data.packing import RoutingInputs
from mcore_adapter.models.experts import Pending, Rows, SharedRows, StackedExperts, begin_gather, sorted_rows
from model_specs.config import MoEConfig, gathers_tokens


def dispatcher_for(
    config: TransformerConfig, group: ProcessGroup, inputs: Callable[[], RoutingInputs | None]
) -> LocalDispatcher | GatheringDispatcher | None:
    """Return the dispatcher for stacked experts that are spread over `group`; None: Megatron's, which sends copies of
    tokens. `inputs` returns those of the microbatch under way."""
    if group.size() == 1:
        return LocalDispatcher(config)
    if gathers_tokens(group.size(), config.moe_router_topk):
        return GatheringDispatcher(config, group, inputs)
    return None


class LocalDispatcher:
    """Leave tokens where they are, as every rank has all experts: StackedExperts copies them."""

    def __init__(self, config: TransformerConfig) -> None:
        self._num_experts = cast(int, config.num_moe_experts)
        self._rows: Rows | None = None
        self._shape = torch.Size()

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Prepare tokens [s, 1, h] with the numbers of the chosen experts, routing_map [s, k], and probs [s, k]."""
        self._shape, self._rows = tokens.shape, sorted_rows(routing_map, self._num_experts)
        return tokens.view(-1, tokens.shape[-1]), probs

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_states, probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Rows | None, Tensor]:
        rows, self._rows = self._rows, None
        return hidden_states, rows, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.view(self._shape)


class GatheringDispatcher:
    """Gather the tokens of all ranks of `group` on each of them. Each rank's experts compute their part of every
    token's sum; the parts are added up on the rank of the token.

    Each rank gives the same number of tokens, S / size: those with fewer add rows of zeros without experts.
    """

    def __init__(
        self, config: TransformerConfig, group: ProcessGroup, inputs: Callable[[], RoutingInputs | None]
    ) -> None:
        self._num_experts = cast(int, config.num_moe_experts)
        held = self._num_experts // group.size()
        self._part = range(held * group.rank(), held * (group.rank() + 1))
        self._group, self._inputs = group, inputs
        self._experts: Tensor | None = None
        self._tokens: Pending | None = None
        self._weights: Pending | None = None
        self._rows: Rows | None = None
        self._num_rows: _HostNumber | None = None
        self._shape = torch.Size()
        self._missing = 0

    def begin(self, tokens: Tensor) -> None:
        """Begin to gather tokens [s, 1, h], before anything is computed of them."""
        self._shape = tokens.shape
        tokens = tokens.detach().view(-1, tokens.shape[-1])
        self._missing = self._most_rows(len(tokens), tokens.device) - len(tokens)
        self._tokens = begin_gather(_padded(tokens, self._missing), self._group)

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Prepare the tokens [s, 1, h] of begin() with the numbers of the chosen experts, routing_map [s, k], and
        probs [s, k]."""
        self._experts = _padded(routing_map.to(torch.int32), self._missing, self._num_experts)
        return tokens.view(-1, tokens.shape[-1]), probs

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the experts of all tokens, sort their copies, and begin to gather probs."""
        assert self._experts is not None, "dispatch_preprocess() comes first"
        experts, self._experts = begin_gather(self._experts, self._group).wait(), None
        self._weights = begin_gather(_padded(probs.detach(), self._missing), self._group)
        self._rows = sorted_rows(experts, self._num_experts, part=self._part)
        self._num_rows = _HostNumber(self._rows.ends[-1])
        return hidden_states, probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, SharedRows, Tensor]:
        """Wait for the number of rows: the device gathers meanwhile. Returns all tokens [S, h], their rows and their
        weights [S, k]."""
        assert self._rows is not None and self._num_rows is not None, "token_dispatch() comes first"
        assert self._tokens is not None and self._weights is not None, "begin() comes first"
        rows = SharedRows(self._rows.first(self._num_rows.value()), hidden_states, probs, self._group)
        tokens, weights = self._tokens.wait(), self._weights.wait()
        self._rows = self._num_rows = self._tokens = self._weights = None
        return tokens, rows, weights

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Return hidden_states [S / size, h] without padding: [s, 1, h]."""
        return hidden_states[: self._shape[0]].view(self._shape)

    def _most_rows(self, num_rows: int, device: torch.device) -> int:
        """Return the largest number of tokens of a rank, exchanged once per microbatch."""
        inputs = self._inputs()
        if inputs is None:
            return max(self._exchanged(num_rows, device))
        if not inputs.rows_of_ranks:
            inputs.rows_of_ranks.extend(self._exchanged(num_rows, device))
        return max(inputs.rows_of_ranks)

    def _exchanged(self, num_rows: int, device: torch.device) -> list[int]:
        number = torch.full((1,), num_rows, dtype=torch.int64, device=device)
        return begin_gather(number, self._group).wait().tolist()


class _HostNumber:
    """A number on its way from the device to the host."""

    def __init__(self, number: Tensor) -> None:
        self._number = number.to("cpu", non_blocking=True)  # into page-locked memory
        self._copied: torch.Event | None = None
        if number.device.type != "cpu":
            self._copied = torch.get_device_module(number.device).current_stream().record_event()

    def value(self) -> int:
        """Wait for it."""
        if self._copied is not None:
            self._copied.synchronize()
        return int(self._number)


def _padded(tensor: Tensor, missing: int, value: int = 0) -> Tensor:
    """Add rows of `value` behind tensor [s, n]."""
    return F.pad(tensor, (0, 0, 0, missing), value=value) if missing else tensor


class Routing(Protocol):
    """A function that routes tokens; differentiable by the logits."""

    def __call__(
        self, logits: Tensor, moe: MoEConfig, *, bias: Tensor | None = None, forced: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the weights of the chosen experts [t, k], and their numbers [t, k] int64, given logits [t,
        num_experts]. `bias` [num_experts] is added to the scores for choosing. A token takes the experts of its row in
        `forced` [t, k], any signed integers, unless one of them is negative."""


def routing_for(tensor: Tensor) -> Routing:
    """Return what routes tokens on the device of this tensor."""
    if tensor.is_cuda:
        from mcore_adapter.cuda.experts import fused_routing

        return fused_routing
    return routing


def routing(
    logits: Tensor, moe: MoEConfig, *, bias: Tensor | None = None, forced: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See Routing; in the format of the logits."""
    scores = all_scores(logits, moe)
    experts = _chosen(scores.detach() if bias is None else scores.detach() + bias, moe)
    if forced is not None:
        experts = torch.where((forced >= 0).all(-1, keepdim=True), forced, experts)
    weights = scores.gather(1, experts)
    if moe.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * moe.scaling, experts


def all_scores(logits: Tensor, moe: MoEConfig) -> Tensor:
    """Return the score of every expert: [t, num_experts]."""
    return logits.softmax(-1) if moe.score_function == "softmax" else logits.sigmoid()


def _chosen(scores: Tensor, moe: MoEConfig) -> Tensor:
    """Choose the experts of each token: [t, num_experts] -> [t, k] int64."""
    if moe.top_k_groups < moe.num_groups:
        grouped = scores.unflatten(1, (moe.num_groups, -1))
        best = grouped.amax(-1) if moe.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _best(best, moe.top_k_groups), True)
        scores = grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
    return _best(scores, moe.top_k)


def _best(scores: Tensor, num: int) -> Tensor:
    """Return the places of the best of each row, best first: [t, n] -> [t, num]. Unlike topk(), in a defined order."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :num]


@dataclass(frozen=True, kw_only=True)
class Balance:
    """How the load of experts is kept even; 0 switches a way off."""

    aux_loss_coeff: float = 0.0
    """Weight of the auxiliary loss: the mean over the tokens of their sequence's imbalance, which is 1 at best."""
    bias_update_rate: float = 0.0
    """Change of each expert's correction bias after an update, towards an even load; for families that have one."""


class _AttachLoss(torch.autograd.Function):
    """weights, with `loss` added to what is differentiated."""

    @staticmethod
    def forward(ctx: Context, weights: Tensor, loss: Tensor) -> Tensor:
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return grad, grad.new_ones(())


class Router(TopKRouter):
    """Scores in float32; see MoEConfig for how experts are chosen and weighed."""

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        moe: MoEConfig,
        balance: Balance,
        device: torch.device,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        if not self.weight.is_meta:
            self.weight.data = self.weight.data.to(device)
        self.moe, self.balance = moe, balance
        self.numbers_experts = False
        """Whether forward() returns the chosen experts' numbers, or a mask of all experts."""
        self.inputs: RoutingInputs | None = None
        """Of the microbatch under way; None: nothing is known of it."""
        zeros = torch.zeros(moe.num_experts, dtype=torch.float32, device=device)
        self.route = routing_for(zeros)
        del self.expert_bias, self.local_tokens_per_expert
        self.register_buffer("expert_bias", zeros if moe.correction_bias else None)
        self.register_buffer("load", zeros.clone(), persistent=False)
        """Tokens that chose each expert since the last update."""
        self.register_buffer("aux_loss", zeros.new_zeros(()), persistent=False)
        """This rank's part of the auxiliary loss since the last update, before its coefficient."""

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Route input [s, 1, h]: the weight of each expert [s, num_experts], 0 where not chosen, and a mask of those;
        with numbers_experts the weights of the chosen ones [s, k], and their numbers [s, k]."""
        logits = self.gating(input).view(-1, self.moe.num_experts)
        weights, experts = self.route(logits, self.moe, bias=self.expert_bias, forced=self._forced())
        # Where activations are recomputed, the first pass has no gradient: every token is counted once.
        if self.training and torch.is_grad_enabled() and self.inputs is not None:
            weights = self._balanced(weights, logits, experts, self.inputs)
        if self.numbers_experts:
            return weights, experts
        return torch.zeros_like(logits).scatter(1, experts, weights), _mask(logits, experts)

    def _forced(self) -> Tensor | None:
        """Return the experts [s, k] that the microbatch prescribes for this layer, if any."""
        if self.inputs is None or self.inputs.experts is None:
            return None
        return self.inputs.experts[:, self.layer_number - 1]

    def _balanced(self, weights: Tensor, logits: Tensor, experts: Tensor, inputs: RoutingInputs) -> Tensor:
        """Count the load, and attach the auxiliary loss to the weights."""
        if not (self.balance.aux_loss_coeff or self.balance.bias_update_rate):
            return weights
        own = _mask(logits, experts).index_select(0, inputs.rows).to(torch.float32)
        self.load += own.sum(0)
        if not self.balance.aux_loss_coeff:
            return weights
        scores = all_scores(logits, self.moe)
        empty = scores.new_zeros(len(inputs.lens), self.moe.num_experts, dtype=torch.float32)
        counts = empty.index_add(0, inputs.sequences, own)
        if self.tp_cp_group.size() > 1:  # other ranks hold other tokens of the same sequences
            dist.all_reduce(counts, group=self.tp_cp_group)
        share = scores if self.moe.score_function == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)
        mass = empty.index_add(0, inputs.sequences, share.float().index_select(0, inputs.rows))
        per_sequence = (counts * mass).sum(-1) / inputs.lens.clamp(min=1)
        loss = per_sequence.sum() * (self.moe.num_experts / (self.moe.top_k * inputs.batch_tokens))
        self.aux_loss += loss.detach()
        return _AttachLoss.apply(weights, loss * self.balance.aux_loss_coeff)


def _mask(logits: Tensor, experts: Tensor) -> Tensor:
    """Return the mask of the experts [s, k]: [s, num_experts] bool."""
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(1, experts, True)


class RoutedLayer(TransformerLayer):
    """A layer whose router receives the microbatch: its packing carries a `routing` beside it."""

    def __init__(self, config: TransformerConfig, *args: object, **kwargs: object) -> None:
        super().__init__(config, *args, **kwargs)
        if isinstance(self.mlp.experts, StackedExperts):
            router: Router = self.mlp.router
            dispatcher = dispatcher_for(config, self.mlp.ep_group, lambda: router.inputs)
            if dispatcher is not None:
                self.mlp.token_dispatcher, router.numbers_experts = dispatcher, True
            if isinstance(dispatcher, GatheringDispatcher):
                begin = dispatcher.begin
                self.mlp.register_forward_pre_hook(lambda mlp, args: begin(args[0]))

    def forward(self, *args: object, packed_seq_params: object = None, **kwargs: object) -> object:
        router = self.mlp.router
        router.inputs = getattr(packed_seq_params, "routing", None)
        try:
            return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        finally:
            router.inputs = None


def routers(chunks: Iterable[nn.Module]) -> Iterator[Router]:
    """Yield all routers of this rank."""
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, Router))


@torch.no_grad()
def forget_counts(chunks: Iterable[nn.Module]) -> None:
    """Count the load and the auxiliary loss of an update from nothing."""
    for router in routers(chunks):
        router.load.zero_()
        router.aux_loss.zero_()


@torch.no_grad()
def finish_update(
    chunks: Sequence[nn.Module], moe: MoEConfig, balance: Balance, *, applied: bool, device: torch.device
) -> dict[str, float]:
    """Move the correction biases after an optimizer step (unless it was skipped), and reset the counts; collective.
    Returns the mean auxiliary loss of a layer (1: every expert has the same load), where there is one."""
    total = torch.zeros((), device=device)
    for router in routers(chunks):
        if moe.correction_bias and balance.bias_update_rate and applied:
            dist.all_reduce(
                router.load, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
            )
            router.expert_bias.add_(torch.sign(router.load.mean() - router.load), alpha=balance.bias_update_rate)
        total += router.aux_loss
    forget_counts(chunks)
    if not balance.aux_loss_coeff:
        return {}
    dist.all_reduce(total)
    return {"moe_aux_loss": float(total) / sum(moe.sparse_layers)}
