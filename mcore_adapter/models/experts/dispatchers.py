"""How tokens reach stacked experts, in place of Megatron's dispatcher; see dispatcher_for().

The interface is that of megatron's MoETokenDispatcher, with the numbers of experts in place of a mask. Invariant: every
rank of an expert-parallel group calls the same collectives in the same order, whatever its tokens are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from mcore_adapter.data.routing_inputs import RoutingInputs
from mcore_adapter.models.experts.products import Pending, Rows, SharedRows, begin_gather, sorted_rows
from model_specs.moe import gathers_tokens


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
        self._copied: Any = None
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
