"""A layer of experts that two ranks or more share, through the gathering dispatcher and by plain operators."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup


def make_dispatcher(group: ProcessGroup, num_experts: int, top_k: int) -> Any:
    from mcore_adapter.models.router import GatheringDispatcher, dispatcher_for

    config: Any = SimpleNamespace(num_moe_experts=num_experts, moe_router_topk=top_k)
    dispatcher = dispatcher_for(config, group, lambda: None)
    assert isinstance(dispatcher, GatheringDispatcher)
    return dispatcher


def dispatched(dispatcher: Any, leaves: list[Tensor], experts: Tensor) -> tuple[Tensor, Any, Tensor]:
    """Return what the experts get, for tokens [s, h] and weights [s, k], the first two of `leaves`."""
    tokens = leaves[0].unsqueeze(1)
    dispatcher.begin(tokens)
    given = dispatcher.dispatch_preprocess(tokens, experts, leaves[1])
    result: tuple[Tensor, Any, Tensor] = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(*given))
    return result


def shared_output(dispatcher: Any, leaves: list[Tensor], experts: Tensor, *, keep_halves: bool) -> Tensor:
    """Compute the layer: tokens [s, h], weights [s, k], gate_up, down -> [s, h]."""
    from mcore_adapter.models.experts import experts_output

    hidden, rows, probs = dispatched(dispatcher, leaves, experts)
    summed = experts_output(hidden, probs, *leaves[2:], rows, keep_halves=keep_halves)
    output: Tensor = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(summed)))
    return output.squeeze(1)


def plain_output(
    group: ProcessGroup, leaves: list[Tensor], experts: Tensor, *, num_experts: int, most: int, keep_halves: bool
) -> Tensor:
    """Compute shared_output() by operators that wait for each exchange; `most` tokens on any rank."""
    from megatron.core.tensor_parallel import mappings

    from mcore_adapter.models.experts import experts_output, sorted_rows

    def gathered(tensor: Tensor, value: int = 0) -> Tensor:
        padded = F.pad(tensor, (0, 0, 0, most - len(tensor)), value=value)
        result: Tensor = mappings.gather_from_sequence_parallel_region(padded, group=group)  # type: ignore[no-untyped-call]
        return result

    held = num_experts // group.size()
    part = range(held * group.rank(), held * (group.rank() + 1))
    rows = sorted_rows(gathered(experts.to(torch.int32), num_experts), num_experts, part=part)
    rows = rows.first(int(rows.ends[-1]))
    summed = experts_output(gathered(leaves[0]), gathered(leaves[1]), *leaves[2:], rows, keep_halves=keep_halves)
    own: Tensor = mappings.reduce_scatter_to_sequence_parallel_region(summed, group=group)  # type: ignore[no-untyped-call]
    return own[: len(leaves[0])]
