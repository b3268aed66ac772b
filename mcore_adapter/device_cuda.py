"""Megatron-core on NVIDIA GPUs: NCCL, TransformerEngine's layers, every fusion that is installed.

Invariant: the same interface as device_cpu. One thing of Megatron is replaced: its check for apex's weight-gradient
kernel, which guards a linear layer that no model here computes with (the head is fused, see model.LMHead).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl, swiglu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build


class SelectiveMLP(MLP):
    """The product of the two halves, input of the second linear layer, is not kept for the backward pass but made again
    from the halves. Next to them it is the largest activation of a layer."""

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not torch.is_grad_enabled():
            return super().forward(hidden_states, per_token_scale, **kwargs)
        halves, bias = self.linear_fc1(hidden_states)
        assert bias is None, "no supported family has a bias here"
        product = bias_swiglu_impl(halves, None)
        address = product.data_ptr()

        def pack(tensor: torch.Tensor) -> torch.Tensor | torch.Size:
            return tensor.shape if tensor.data_ptr() == address else tensor

        def unpack(kept: torch.Tensor | torch.Size) -> torch.Tensor:
            return kept if isinstance(kept, torch.Tensor) else swiglu(halves.detach()).view(kept)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return self.linear_fc2(product)


class CudaDevice:
    """See device.Device. The GPU is that of LOCAL_RANK, or the only one that the process sees."""

    backend = "nccl"
    shares_prompts = False

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ValueError("device='cuda': no GPU is visible to this process; use device=cpu")
        if importlib.util.find_spec("transformer_engine") is None:
            raise ValueError("device='cuda' needs transformer-engine: pip install 'slipstream[gpu]'")
        index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        self.torch_device = torch.device("cuda", index)

    def setup(self) -> None:
        torch.cuda.set_device(self.torch_device)
        # One queue: Megatron relies on communication launched first to start before the computation behind it.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        # TransformerEngine adds weight gradients into the fp32 buffers by itself; apex's kernel is for Megatron's own
        # linear layers. The head, the only such layer, is made with this flag set and never called.
        megatron_layers._grad_accum_fusion_available = True

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        with torch.cuda.device(self.torch_device):
            yield

    def config_overrides(self) -> dict[str, Any]:
        return dict(
            use_cpu_initialization=False,
            apply_rope_fusion=True,
            gradient_accumulation_fusion=True,
            bias_activation_fusion=True,
            bias_dropout_fusion=True,
            masked_softmax_fusion=True,
            persist_layer_norm=True,
            batch_p2p_sync=True,
            recompute_modules=[],  # "selective" is SelectiveMLP; attention recomputes by itself
        )

    def block_spec(self, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        if config.recompute_granularity == "selective":
            spec.submodules.mlp.module = SelectiveMLP
        return TransformerBlockSubmodules(
            layer_specs=[spec] * get_num_layers_to_build(config, vp_stage=vp_stage), layer_norm=TENorm
        )

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def memory_stats(self) -> dict[str, float]:
        return {
            "allocated_gib": torch.cuda.memory_allocated(self.torch_device) / 2**30,
            "peak_gib": torch.cuda.max_memory_allocated(self.torch_device) / 2**30,
        }

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)
