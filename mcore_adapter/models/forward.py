"""Runs packed microbatches through Megatron's pipeline schedules, from token ids to what a loss sees.

Invariant: the LM head and the value head are evaluated at trained tokens only (loss_mask); every other entry of a
`ModelOutput` is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from mcore_adapter.data.batch import ModelOutput
from mcore_adapter.data.packing import PackedMicrobatch
from mcore_adapter.models.logprobs import linear_logprobs


def lm_output(
    hidden: Tensor,  # [1, s, h], or [1, s / tp, h] with sequence parallelism
    weight: Tensor,  # [v / tp, h]
    microbatch: PackedMicrobatch,
    *,
    tp_group: torch.distributed.ProcessGroup,
    sequence_parallel: bool,
    temperature: float,
    with_entropy: bool,
) -> ModelOutput:
    """Compute log-probabilities and entropies of the trained tokens."""
    flat = hidden.squeeze(0)
    if sequence_parallel:
        flat = gather_from_sequence_parallel_region(flat, tensor_parallel_output_grad=True, group=tp_group)
    elif tp_group.size() > 1:
        flat = copy_to_tensor_model_parallel_region(flat, group=tp_group)
    logprobs, entropy = linear_logprobs(
        flat.index_select(0, microbatch.rows),
        weight,
        microbatch.targets,
        temperature=temperature,
        tp_group=tp_group,
        with_entropy=with_entropy,
    )
    return ModelOutput(
        logprobs=_spread(logprobs, microbatch), entropy=None if entropy is None else _spread(entropy, microbatch)
    )


def value_output(values: Tensor, microbatch: PackedMicrobatch) -> ModelOutput:
    """Select the values of the trained tokens from those of every packed position, [1, s, 1]."""
    return ModelOutput(values=_spread(values.reshape(-1).float().index_select(0, microbatch.rows), microbatch))


def _spread(trained: Tensor, microbatch: PackedMicrobatch) -> Tensor:
    """Scatter [n] to [t], 0 elsewhere."""
    num_tokens = microbatch.fields["loss_mask"].numel()
    return trained.new_zeros(num_tokens).index_copy(0, microbatch.trained, trained)


def run_schedule(
    chunks: Sequence[Any],
    microbatches: Sequence[PackedMicrobatch],
    postprocess: Callable[[PackedMicrobatch, Tensor], Any],
    *,
    forward_only: bool,
) -> list[Any]:
    """Run forward (and backward) over all microbatches, with the pipeline schedule of the layout. Collective.

    `postprocess(microbatch, model output)` runs on the last stage. Forward only, it returns anything; else the triple
    (loss, token count, anything) of Megatron's per-token losses. Returns the anythings, in order; [] on other stages.
    """

    def forward_step(iterator: Any, model: torch.nn.Module) -> tuple[Tensor, Callable[..., object]]:
        microbatch = next(iterator)
        output = model(
            microbatch.token_ids, microbatch.position_ids, None, packed_seq_params=microbatch.packed_seq_params
        )
        return output, partial(_ignore_non_loss, partial(postprocess, microbatch))

    iterators = [iter(microbatches) for _ in chunks]
    single = len(chunks) == 1
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators[0] if single else iterators,
        model=chunks[0] if single else list(chunks),
        num_microbatches=len(microbatches),
        seq_length=max(m.token_ids.shape[1] for m in microbatches),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def _ignore_non_loss(function: Callable[[Tensor], Any], output: Tensor, non_loss_data: bool = False) -> Any:
    """Accept the argument non_loss_data=True, which Megatron passes where it collects results instead of losses."""
    return function(output)
