"""Megatron-core on NVIDIA GPUs: NCCL, TransformerEngine's layers, every fusion that is installed.

Invariant: the same interface as cpu/device.py. Two things of Megatron are replaced: its SwiGLU (see elementwise.py; no
dense model needs torch's compiler then), and its check for apex's weight-gradient kernel, which guards a linear layer
that no model here computes with (the head is fused, see models/gpt.py, LMHead).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
from collections.abc import Iterator

import megatron.core.transformer.mlp as megatron_mlp
import megatron.core.transformer.moe.shared_experts as megatron_shared_experts
import torch
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec

from mcore_adapter.settings import Fp8Recipe


def _fp8_recipes(capability: tuple[int, int]) -> tuple[Fp8Recipe, ...]:
    """Return what TransformerEngine computes in FP8 with this torch: see its check_fp8_block_scaling_support()."""
    if capability < (8, 9):
        return ()
    cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    return ("tensorwise", "blockwise") if capability >= (9, 0) and cuda >= (12, 9) else ("tensorwise",)


class CudaDevice:
    """See device.Device. The GPU is that of LOCAL_RANK, or the only one that the process sees."""

    backend = "nccl"
    shares_prompts = False
    overlaps_communication = True

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ValueError("device='cuda': no GPU is visible to this process; use device=cpu")
        if importlib.util.find_spec("transformer_engine") is None:
            raise ValueError("device='cuda' needs transformer-engine: pip install 'slipstream[gpu]'")
        index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        self.torch_device = torch.device("cuda", index)
        capability = torch.cuda.get_device_capability(self.torch_device)
        self.fp8_recipes = _fp8_recipes(capability)
        self.has_grouped_products = capability in ((9, 0), (10, 0))  # elsewhere torch computes expert by expert

    def setup(self) -> None:
        from mcore_adapter.cuda.elementwise import bias_swiglu

        torch.cuda.set_device(self.torch_device)
        # One queue: Megatron relies on communication launched first to start before the computation behind it.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        # TransformerEngine adds weight gradients into the fp32 buffers by itself; apex's kernel is for Megatron's own
        # linear layers. The head, the only such layer, is made with this flag set and never called.
        megatron_layers._grad_accum_fusion_available = True
        megatron_mlp.bias_swiglu_impl = megatron_shared_experts.bias_swiglu_impl = bias_swiglu

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        with torch.cuda.device(self.torch_device):
            yield

    def config_overrides(self) -> dict[str, object]:
        return dict(
            use_cpu_initialization=False,
            apply_rope_fusion=True,
            gradient_accumulation_fusion=True,
            bias_activation_fusion=True,
            bias_dropout_fusion=False,  # without bias and dropout an addition is left, which needs no compiler
            masked_softmax_fusion=True,
            persist_layer_norm=True,
            batch_p2p_sync=True,
            moe_grouped_gemm=True,
        )

    def layer_spec(self, config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=num_experts,
            moe_grouped_gemm=True,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
        )

    final_norm = TENorm

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def memory_stats(self) -> dict[str, float]:
        cached = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return {
            "available_gib": (free + cached) / 2**30,
            "allocated_gib": torch.cuda.memory_allocated(self.torch_device) / 2**30,
            "peak_gib": torch.cuda.max_memory_allocated(self.torch_device) / 2**30,
            "allocator_retries": float(torch.cuda.memory_stats(self.torch_device).get("num_alloc_retries", 0)),
        }

    def memory_holders(self) -> str:
        uuid = f"GPU-{torch.cuda.get_device_properties(self.torch_device).uuid}"
        query = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader"]
        try:
            answer = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout
        except (OSError, subprocess.TimeoutExpired) as e:
            return f"nvidia-smi failed: {e}"
        rows = [line.split(", ") for line in answer.splitlines() if line.startswith(uuid)]
        others = [f"process {pid} ({name}) holds {used}" for _, pid, name, used in rows if int(pid) != os.getpid()]
        free, total = (n / 2**30 for n in torch.cuda.mem_get_info(self.torch_device))
        return f"{free:.1f} of {total:.1f} GiB are free; " + (", ".join(others) or "no other visible process holds any")

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)
