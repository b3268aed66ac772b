"""Leaf modules of a transformer layer on CPU: Megatron's own GPTModel, layers, attention and MLP around them.

RMSNorm and SwiGLU save their input only, and pass over memory a third as often as the formula written with torch's
operators. torch calls MKL for float32 products, which uses AVX-512 on Intel's processors only; oneDNN does on all that
have it, and takes half the time on an AMD EPYC. Invariants: same value and gradient as the formula; the parameter names
are those of Megatron's local layer spec.
"""

from __future__ import annotations

import math
import warnings

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

from mcore_adapter.autograd import Context, mark
from mcore_adapter.cpu.attention import packed_causal_attention, plan_trees, tree_attention, zigzag_attention
from mcore_adapter.data.packing import SharedPromptParams


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float() if x.dtype == torch.bfloat16 else x
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.size(-1)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        if x.dtype == torch.bfloat16:
            wide, grad = x.float(), grad.float()
        else:
            wide = x
        unit = wide * scale  # [..., h]
        grad_weight = (grad * unit).flatten(0, -2).sum(0)
        grad_unit = grad * weight
        along = (grad_unit * unit).mean(-1, keepdim=True)
        grad_x = torch.addcmul(grad_unit, unit, along, value=-1).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight for x [..., h] and weight [h], normalized in float32."""
    return _RMSNorm.apply(x, weight, eps)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        activated = F.silu(gate)
        ctx.save_for_backward(gate_up, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:  # type: ignore[override]
        gate_up, activated = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        torch.mul(grad, activated, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return out


def swiglu(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up of x [..., 2 f] (gate, then up): [..., f]."""
    return _SwiGLU.apply(gate_up)


_SMALL = 2**22
"""Products with fewer terms stay with torch: making oneDNN's kernel for new sizes takes longer."""

_library: object = None
"""What it replaces is replaced as long as it exists."""


def use_onednn() -> None:
    """Let oneDNN compute torch.mm, and what torch computes with it, from now on, in float32 on the CPU."""
    global _library
    if _library is None and torch.backends.mkldnn.is_available():
        _library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings(action="ignore"):  # that torch's own kernel is replaced
            _library.impl("mm", mm, "CPU")


def mm(a: Tensor, b: Tensor) -> Tensor:
    """Compute a b for a [m, k] and b [k, n]: [m, n], contiguous. Raises as torch.mm."""
    if not (_is_dense(a) and _is_dense(b) and a.shape[1] == b.shape[0] and len(a) * b.numel() >= _SMALL):
        return torch.mm(a, b, out=a.new_empty(0))
    if a.is_contiguous() or len(a) <= b.shape[1]:
        return _linear(a, b.t())
    return _linear(b.t(), a).t().contiguous()  # a left factor that is not contiguous is copied: here the smaller one


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


def _is_dense(x: Tensor) -> bool:
    """Return whether this is a matrix in float32 that lies in memory row by row, or column by column."""
    return x.dim() == 2 and x.dtype == torch.float32 and (x.is_contiguous() or x.t().is_contiguous())


class CpuRMSNorm(torch.nn.Module):
    """RMSNorm that may run on a sequence-parallel shard (Megatron's own torch wrapper refuses to)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        assert config.normalization == "RMSNorm" and not config.layernorm_zero_centered_gamma, "set by build_model()"
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        mark(self.weight, sequence_parallel=config.sequence_parallel)
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
        mark(self.weight, sequence_parallel=config.sequence_parallel)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None


class CpuCoreAttention(MegatronModule):
    """Causal attention of packed sequences, grouped queries, context parallelism by gathering keys and values."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: object,
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
        attn_mask_type: object = None,
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
