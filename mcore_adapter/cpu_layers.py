"""Leaf modules of a transformer layer on CPU: Megatron's own GPTModel, layers, attention and MLP around them.

Invariant: the parameter names are those of Megatron's local layer spec.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor

from mcore_adapter.cpu_attention import packed_causal_attention, zigzag_attention
from mcore_adapter.cpu_elementwise import rms_norm
from mcore_adapter.shared_prompts import SharedPromptParams


class CpuRMSNorm(torch.nn.Module):
    """RMSNorm that may run on a sequence-parallel shard (Megatron's own torch wrapper refuses to)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        assert config.normalization == "RMSNorm" and not config.layernorm_zero_centered_gamma, "set by build_model()"
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        cast(Any, self.weight).sequence_parallel = config.sequence_parallel
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class CpuCoreAttention(MegatronModule):
    """Causal attention of packed sequences, grouped queries, context parallelism by gathering keys and values."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.cp_group = groups.cp
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        assert not (attention_dropout or config.attention_dropout), "set by build_model()"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """query [t, h, d], key and value [t, g, d] -> [t, h * d]; t is this context-parallel rank's share."""
        assert packed_seq_params is not None and packed_seq_params.qkv_format == "thd", "the engine packs every batch"
        assert packed_seq_params.cu_seqlens_q is not None, "a packing has its sequences' lengths"
        lens = packed_seq_params.cu_seqlens_q.diff().tolist()
        if isinstance(packed_seq_params, SharedPromptParams):
            query, key, value = (packed_seq_params.to_sequences(x) for x in (query, key, value))
            out = packed_causal_attention(query, key, value, lens, scale=self.scale)
            return packed_seq_params.to_packed(out.flatten(1))
        cp = self.cp_group.size()
        if cp == 1:
            return packed_causal_attention(query, key, value, lens, scale=self.scale).flatten(1)
        pair = gather_from_sequence_parallel_region(
            torch.stack((key, value), 1), group=self.cp_group, tensor_parallel_output_grad=True
        )
        key, value = pair.unbind(1)
        out = zigzag_attention(query, key, value, lens, scale=self.scale, cp=cp, rank=self.cp_group.rank())
        return out.flatten(1)


def cpu_block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Megatron's local layer spec with the leaf modules of this file."""
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = CpuRMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = CpuCoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = CpuRMSNorm
    return TransformerBlockSubmodules(
        layer_specs=[spec] * get_num_layers_to_build(config, vp_stage=vp_stage), layer_norm=CpuRMSNorm
    )
