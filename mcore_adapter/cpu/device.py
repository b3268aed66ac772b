"""Megatron-core on a machine without a GPU: gloo, torch kernels, and every place where Megatron means CUDA redirected.

Invariant: nothing outside this file depends on the redirections. They are process-wide, made once by setup(); literal
device="cuda" arguments are caught only inside activate(), on the thread that entered it.

Adam holds the contract of TransformerEngine's FusedAdam (the step is in the param group, the state of a parameter is
exactly exp_avg and exp_avg_sq), because that is the only one whose checkpoints Megatron can load.
"""

import contextlib
import math
import resource
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import megatron.core.models.common.embeddings.rope_utils as rope_utils
import megatron.core.optimizer as megatron_optimizer
import megatron.core.transformer.mlp as megatron_mlp
import megatron.core.transformer.moe.moe_utils as megatron_moe
import megatron.core.transformer.multi_latent_attention as megatron_mla
import psutil
import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import clip_grads, distrib_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.utils import local_multi_tensor_applier, local_multi_tensor_l2_norm, local_multi_tensor_scale
from torch import Tensor
from torch.optim.optimizer import ParamsT
from torch.overrides import TorchFunctionMode

from mcore_adapter.autograd import Context, mark
from mcore_adapter.cpu.attention import (
    packed_causal_attention,
    plan_trees,
    rotary_thd,
    tree_attention,
    zigzag_attention,
)
from mcore_adapter.data.packing import SharedPromptParams
from mcore_adapter.settings import Fp8Recipe


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


class FusedAdam(torch.optim.Optimizer):
    """AdamW (or Adam with L2, adam_w_mode=False) on torch's fused CPU kernel."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        **_: object,
    ) -> None:
        assert bias_correction and not amsgrad, "Megatron requests plain Adam"
        super().__init__(
            params, dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        )
        self.adam_w_mode = adam_w_mode

    def _state_of(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.state[param]
        if not state:
            state.update(exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient once."""
        assert closure is None, "Megatron computes the gradients itself"
        fused = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            states = [self._state_of(p) for p in params]
            beta1, beta2 = group["betas"]
            fused(
                params,
                [p.grad for p in params],
                [s["exp_avg"] for s in states],
                [s["exp_avg_sq"] for s in states],
                [],
                [torch.tensor(float(group["step"]))] * len(params),
                amsgrad=False,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                grad_scale=None,
                found_inf=None,
            )


_CPU = torch.device("cpu")
_TENSOR_TYPE, _TENSOR_CUDA = torch.Tensor.type, torch.Tensor.cuda
_CUDA_TYPE_NAMES = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
}


class _CudaMeansCpu(TorchFunctionMode):
    """device="cuda" means the CPU, Tensor.cuda() is the identity, nothing is pinned, and Tensor.type() answers with the
    names that Megatron's optimizers compare against."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func is _TENSOR_CUDA:
            return args[0]
        if kwargs:
            device = kwargs.get("device")
            if device is not None and str(device).startswith("cuda"):
                kwargs = {**kwargs, "device": _CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
            return func(*args, **kwargs)
        result = func(*args)
        return _CUDA_TYPE_NAMES.get(result, result) if func is _TENSOR_TYPE and isinstance(result, str) else result


class _CpuRngTracker(megatron_random.CudaRNGStatesTracker):
    """Megatron's tracker of named random states, over torch's CPU generator."""

    def add(self, name: str, seed: int) -> None:
        self._is_initialized = True
        assert seed not in self.seeds_ and name not in self.states_, "Megatron seeds each name once"
        self.seeds_.add(seed)
        generator = torch.Generator()
        generator.manual_seed(seed)
        self.states_[name] = generator.get_state()

    @contextlib.contextmanager
    def fork(self, name: str = megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        outer = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outer)


def _bias_swiglu(gate_up: torch.Tensor, bias: torch.Tensor | None, *_: object) -> torch.Tensor:
    """Compute swiglu with the signature of Megatron's fused operation."""
    assert bias is None, "no supported family has a bias here"
    return swiglu(gate_up)


def _weighted_swiglu(
    gate_up: torch.Tensor, bias: torch.Tensor | None, weight: torch.Tensor, *_: object
) -> torch.Tensor:
    """Return the same for an expert: weight [t, 1] of each token."""
    assert bias is None, "no supported family has a bias here"
    return (swiglu(gate_up) * weight).to(gate_up.dtype)


def _splits_on_host(
    dispatcher: MoEAlltoAllTokenDispatcher, point: str, tokens_per_expert: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Change only the types of the numbers, in place of the dispatcher's copy to the host on a stream of its own."""
    if point == dispatcher.cuda_dtoh_point:
        for name in ("input_splits", "output_splits"):
            splits = getattr(dispatcher, name)
            if splits is not None:
                setattr(dispatcher, name, splits.tolist())
    return tokens_per_expert


_is_set_up = False


class CpuDevice:
    """See device.Device."""

    torch_device = _CPU
    backend = "gloo"
    shares_prompts = True
    overlaps_communication = False
    fp8_recipes: tuple[Fp8Recipe, ...] = ()
    has_grouped_products = False

    def __init__(self) -> None:
        self._mode = _CudaMeansCpu()

    def setup(self) -> None:
        global _is_set_up
        if _is_set_up:
            return
        cuda: Any = torch.cuda  # Any: a device where an index is declared; Megatron passes it on as device=
        cuda.current_device = lambda: _CPU
        cuda.synchronize = lambda device=None: None
        megatron_random._CUDA_RNG_STATE_TRACKER = _CpuRngTracker()
        megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
        megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
        megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
        megatron_optimizer.Adam = distrib_optimizer.Adam = FusedAdam
        megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
        distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
        # Where TransformerEngine is installed Megatron takes its kernels, which on CPU tensors do nothing.
        clip_grads.multi_tensor_applier = megatron_optimizer.optimizer.multi_tensor_applier = local_multi_tensor_applier
        clip_grads.multi_tensor_scale_impl = local_multi_tensor_scale
        megatron_optimizer.optimizer.multi_tensor_scale_impl = local_multi_tensor_scale
        clip_grads.l2_norm_impl = local_multi_tensor_l2_norm
        rope_utils.fused_apply_rotary_pos_emb_thd = rotary_thd  # for apply_rope_fusion
        megatron_mlp.bias_swiglu_impl = _bias_swiglu  # for bias_activation_fusion
        megatron_mlp.weighted_bias_swiglu_impl = _weighted_swiglu
        megatron_moe.te_general_gemm = None
        megatron_mla.TELinear = CpuDuplicatedLinear  # the only one that it lets compute the projections down
        dispatcher: Any = MoEAlltoAllTokenDispatcher
        dispatcher.cuda_dtoh_stream = ()  # not None: no stream is made
        dispatcher._maybe_dtoh_and_synchronize = _splits_on_host
        use_onednn()
        _is_set_up = True

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        self.setup()
        with self._mode:
            yield

    def config_overrides(self) -> dict[str, object]:
        return dict(
            use_cpu_initialization=True,
            apply_rope_fusion=True,
            bias_activation_fusion=True,
            gradient_accumulation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            persist_layer_norm=False,
            batch_p2p_sync=False,
        )

    def layer_spec(self, config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
        return cpu_layer_spec(config, num_experts)

    final_norm = CpuRMSNorm

    def synchronize(self) -> None:
        """Do nothing: CPU operations are complete when they return."""

    def empty_cache(self) -> None:
        """Do nothing: torch has no cache of CPU memory."""

    def memory_stats(self) -> dict[str, float]:
        with open("/proc/self/statm") as statm:
            now = int(statm.read().split()[1]) * resource.getpagesize() / 2**30
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        free = psutil.virtual_memory().available / 2**30
        return {"allocated_gib": now, "peak_gib": max(now, peak), "available_gib": free, "allocator_retries": 0.0}

    def memory_holders(self) -> str:
        sizes = {
            p: p.info["memory_info"].rss for p in psutil.process_iter(["name", "memory_info"]) if p.info["memory_info"]
        }
        largest = sorted(sizes, key=lambda p: -sizes[p])[:3]
        return ", ".join(f"process {p.pid} ({p.info['name']}) holds {sizes[p] / 2**30:.2f} GiB" for p in largest)

    def forget_peak(self) -> None:
        """Do nothing: the system keeps the peak until the process exits."""
