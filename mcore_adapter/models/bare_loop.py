"""Megatron-core's own training step on packed sequences: what the benchmark of the RL update is held against. Of this
project it has the wrapper that adds and reduces gradients.

GPTModel with its output layer, cross entropy over full fp32 logits, backward, distributed optimizer. `fused` adds what
TransformerEngine has for a loop like this.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Literal

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from mcore_adapter.data.packing import PackedMicrobatch
from mcore_adapter.device import Device
from mcore_adapter.memory.recompute import checkpoint_first_layers
from mcore_adapter.models.gpt import block_spec, transformer_config
from mcore_adapter.optimizer.training import TrainOptimizer, wrap_for_training
from mcore_adapter.parallel import ParallelState
from mcore_adapter.settings import OptimizerConfig
from model_specs.config import ModelConfig

Fused = Literal["permutation", "routing", "weight_gradients"]


class BareLoop:
    """`step(microbatches)` is one update. Random weights; one rank."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        parallel: ParallelState,
        device: Device,
        recompute: Literal["none", "full"] = "none",
        fused: Collection[Fused] = (),
    ) -> None:
        """`fused`: what TransformerEngine computes instead of Megatron; with "weight_gradients" its layers add these in
        their products."""
        dtype = torch.bfloat16
        megatron = transformer_config(config, parallel=parallel, device=device, dtype=dtype, sequence_parallel=False)
        checkpoint_first_layers(megatron, config.num_layers if recompute == "full" else 0)
        # The output layer computes here, by Megatron's own kernel for it: the fused one belongs to apex.
        megatron.gradient_accumulation_fusion = False
        megatron.moe_permute_fusion, megatron.moe_router_fusion = "permutation" in fused, "routing" in fused
        model = GPTModel(
            megatron, block_spec(device, megatron, None), config.vocab_size, config.max_position_embeddings,
            share_embeddings_and_output_weights=config.tied, position_embedding_type="rope",
            rotary_base=config.rope_theta,
        )  # fmt: skip
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.02)
        for module in model.modules() if "weight_gradients" in fused else ():
            if hasattr(module, "fuse_wgrad_accumulation"):  # of TransformerEngine; the output layer is Megatron's own
                module.fuse_wgrad_accumulation = True
        self._chunks = wrap_for_training([model])
        self._optimizer = TrainOptimizer(self._chunks, OptimizerConfig(lr=1e-6), dtype, total_updates=1000)

    def step(self, microbatches: Sequence[PackedMicrobatch]) -> None:
        """Run forward, backward and update; return when everything is launched and the gradient norm is known. Raises
        FloatingPointError where that is not finite, and nothing was updated."""
        tokens = sum(m.num_tokens for m in microbatches)
        self._optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=partial(_forward_step, tokens),
            data_iterator=iter(microbatches), model=self._chunks[0], num_microbatches=len(microbatches),
            seq_length=microbatches[0].num_tokens, micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        if not self._optimizer.step().applied:
            raise FloatingPointError("the gradient norm of Megatron's own loop is not finite")


def _forward_step(
    tokens: int, iterator: Iterator[PackedMicrobatch], model: torch.nn.Module
) -> tuple[Tensor, Callable[[Tensor], object]]:
    microbatch = next(iterator)
    labels = torch.cat((microbatch.token_ids[:, 1:], microbatch.token_ids[:, :1]), 1)
    losses = model(
        microbatch.token_ids, microbatch.position_ids, None, labels=labels,
        packed_seq_params=microbatch.packed_seq_params,
    )  # fmt: skip

    def loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total = output.sum() / tokens
        return total, torch.zeros((), dtype=torch.int32, device=output.device), {"loss": total.detach()}

    return losses, loss
