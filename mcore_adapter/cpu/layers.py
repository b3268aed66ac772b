"""Leaf modules of a transformer layer on CPU: Megatron's own GPTModel, layers, attention and MLP around them.

Invariant: the parameter names are those of Megatron's local layer spec.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from mcore_adapter.cpu.attention import packed_causal_attention, plan_trees, tree_attention, zigzag_attention
from mcore_adapter.cpu.kernels import rms_norm
from mcore_adapter.data.shared_prompts import SharedPromptParams


class CpuRMSNorm(torch.nn.Module):
    """RMSNorm that may run on a sequence-parallel shard (Megatron's own torch wrapper refuses to)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        assert config.normalization == "RMSNorm" and not config.layernorm_zero_centered_gamma, "set by build_model()"
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        cast(Any, self.weight).sequence_parallel = config.sequence_parallel
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class CpuDuplicatedLinear(torch.nn.Module):
    """A linear layer that is whole on every tensor-parallel rank, each of which sees its share of the tokens."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, bias: bool, **_: object
    ) -> None:
        assert not bias, "no supported family has a bias here"
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        cast(Any, self.weight).sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None


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
        **_: object,
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
        """Attend in float32: query [t, h, d], key [t, g, d], value [t, g, e] -> [t, h * e] in value's format. t is this
        context-parallel rank's share."""
        width, wide = value.size(-1), value.float()
        if width < query.size(-1):  # latent attention; the kernels need one head_dim
            wide = F.pad(wide, (0, query.size(-1) - width))
        assert wide.size(-1) == query.size(-1), "no supported family has wider values than keys"
        out = self._attend(query.float(), key.float(), wide, packed_seq_params)
        return out[..., :width].flatten(1).to(value.dtype)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, packed_seq_params: PackedSeqParams | None) -> Tensor:
        assert packed_seq_params is not None and packed_seq_params.qkv_format == "thd", "the engine packs every batch"
        assert packed_seq_params.cu_seqlens_q is not None, "a packing has its sequences' lengths"
        lens = packed_seq_params.cu_seqlens_q.diff().tolist()
        if isinstance(packed_seq_params, SharedPromptParams):
            trees = packed_seq_params.planned_once(plan_trees)
            if trees is not None:
                return tree_attention(query, key, value, trees, scale=self.scale)
            query, key, value = (packed_seq_params.to_sequences(x) for x in (query, key, value))
            out = packed_causal_attention(query, key, value, lens, scale=self.scale)
            return packed_seq_params.to_packed(out)
        cp = self.cp_group.size()
        if cp == 1:
            return packed_causal_attention(query, key, value, lens, scale=self.scale)
        pair = gather_from_sequence_parallel_region(
            torch.stack((key, value), 1), group=self.cp_group, tensor_parallel_output_grad=True
        )
        key, value = pair.unbind(1)
        return zigzag_attention(query, key, value, lens, scale=self.scale, cp=cp, rank=self.cp_group.rank())


def cpu_layer_spec(config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
    """Return Megatron's local layer spec with the leaf modules of this file."""
    is_latent = config.multi_latent_attention
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=is_latent,
        normalization=config.normalization,
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = CpuRMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = CpuCoreAttention
    # Checkpoints name each norm as layers on a GPU do, where it may lie inside the linear layer behind it.
    names = {} if num_experts else {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    if is_latent:
        attention.linear_q_down_proj = attention.linear_kv_down_proj = CpuDuplicatedLinear
        attention.q_layernorm = attention.kv_layernorm = CpuRMSNorm
        names["self_attention.q_layernorm."] = "self_attention.linear_q_up_proj.layer_norm_"
        names["self_attention.kv_layernorm."] = "self_attention.linear_kv_up_proj.layer_norm_"
    else:
        names["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = CpuRMSNorm
    layer.sharded_state_dict_keys_map = names
    return spec
