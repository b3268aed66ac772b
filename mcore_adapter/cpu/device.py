"""Megatron-core on a machine without a GPU: gloo, torch kernels, and every place where Megatron means CUDA redirected.

Invariant: nothing outside this file depends on the redirections. They are process-wide, made once by setup(); literal
device="cuda" arguments are caught only inside activate(), on the thread that entered it.

Adam holds the contract of TransformerEngine's FusedAdam (the step is in the param group, the state of a parameter is
exactly exp_avg and exp_avg_sq), because that is the only one whose checkpoints Megatron can load.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import megatron.core.models.common.embeddings.rope_utils as rope_utils
import megatron.core.optimizer as megatron_optimizer
import megatron.core.transformer.mlp as megatron_mlp
import megatron.core.transformer.moe.moe_utils as megatron_moe
import megatron.core.transformer.multi_latent_attention as megatron_mla
import psutil
import torch
from megatron.core.optimizer import clip_grads, distrib_optimizer
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.utils import local_multi_tensor_applier, local_multi_tensor_l2_norm, local_multi_tensor_scale
from torch.overrides import TorchFunctionMode

from mcore_adapter.cpu.attention import rotary_thd
from mcore_adapter.cpu.layers import CpuDuplicatedLinear, CpuRMSNorm, cpu_layer_spec, swiglu, use_onednn
from mcore_adapter.settings import Fp8Recipe


class FusedAdam(torch.optim.Optimizer):
    """AdamW (or Adam with L2, adam_w_mode=False) on torch's fused CPU kernel."""

    def __init__(
        self,
        params: Iterable[Any],
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
    def step(self, closure: Any = None) -> Any:
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
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _TENSOR_CUDA:
            return args[0]
        if kwargs:
            device = kwargs.get("device")
            if device is not None and str(device).startswith("cuda"):
                kwargs = {**kwargs, "device": _CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
            return func(*args, **kwargs)
        if func is _TENSOR_TYPE and len(args) == 1:
            name = func(args[0])
            return _CUDA_TYPE_NAMES.get(name, name)
        return func(*args)


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


def _splits_on_host(dispatcher: Any, point: str, tokens_per_expert: torch.Tensor | None = None) -> torch.Tensor | None:
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
