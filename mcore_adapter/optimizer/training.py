"""Megatron's data-parallel wrapper and distributed AdamW, with the learning-rate schedule and the check for
non-finite gradients.

Invariant: gradients are summed, never averaged, over ranks and microbatches: the engine divides the loss by the number
of trained tokens of the whole minibatch before the backward pass.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from mcore_adapter.optimizer.state import OptimizerState
from mcore_adapter.settings import OptimizerConfig

DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}
"""By lr_scheduler_type: share of (lr - min_lr) left at `progress` in [0, 1] through the decay."""


def learning_rate(
    step: int,
    *,
    lr: float,
    min_lr_ratio: float,
    lr_scheduler_type: str,
    warmup_steps_proportion: float,
    total_steps: int,
) -> float:
    """Return the learning rate of update number `step` (the first is 0).

    Rises linearly over the first warmup_steps_proportion * total_steps updates, the first of which is not zero, then
    decays to min_lr_ratio * lr at update total_steps and stays there. Raises ValueError on an unknown type.
    """
    if lr_scheduler_type not in DECAYS:
        raise ValueError(f"lr_scheduler_type={lr_scheduler_type!r} is unknown; use one of {', '.join(DECAYS)}")
    warmup_steps = round(warmup_steps_proportion * total_steps)
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    min_lr = lr * min_lr_ratio
    return min_lr + (lr - min_lr) * DECAYS[lr_scheduler_type](progress)


@dataclass(frozen=True, kw_only=True)
class Update:
    """What one optimizer step did, equal on all ranks."""

    grad_norm: float  # before clipping; not finite when the update was skipped
    lr: float
    applied: bool


class _Wrapper(DistributedDataParallel):
    """Megatron's wrapper, which autograd's nodes do not reference: the garbage collector does not see into them, and a
    graph of the last step that a layer still holds would keep model, buffers and process groups in memory. Its hook
    adds gradients with _add_gradient(), but for those that layers add to the buffer themselves."""

    def _make_backward_post_hook(self, param: torch.nn.Parameter) -> Callable[..., None]:
        held, make_hook = weakref.ref(self), super()._make_backward_post_hook.__func__

        def hook(*unused: object) -> None:
            wrapper = held()
            assert wrapper is not None, "an engine that trains is in use"
            parameter = cast(Any, param)
            added, shared = parameter.grad_added_to_main_grad, getattr(param, "zero_out_wgrad", False)
            if param.grad is not None and (shared or not added):  # as Megatron decides
                _add_gradient(parameter.main_grad, param.grad)
                parameter.grad_added_to_main_grad, parameter.zero_out_wgrad = True, False
            make_hook(wrapper, param)()
            parameter.grad_added_to_main_grad, parameter.zero_out_wgrad = added, shared

        return hook


def _add_gradient(total: Tensor, gradient: Tensor) -> None:
    addition(total, gradient.dtype)(total, gradient)


def addition(total: Tensor, dtype: torch.dtype) -> Callable[[Tensor, Tensor], object]:
    """Return what adds gradients of this format to `total`, in place."""
    if total.is_cuda and (total.dtype, dtype) == (torch.float32, torch.bfloat16):
        from mcore_adapter.cuda.elementwise import add_to

        return add_to
    return Tensor.add_


def wrap_for_training(
    chunks: list[GPTModel],
    *,
    overlap: bool = False,
    grad_reduce_in_fp32: bool = True,
    before_reduction: Callable[[], None] = lambda: None,
) -> list[DistributedDataParallel]:
    """Put the gradients of each chunk into one buffer, reduced over the data-parallel ranks once a step.

    `overlap`: gradients are reduced bucket by bucket while the backward pass of the last microbatch runs, and updated
    weights gathered while the next forward pass does; see TrainOptimizer.finish_param_gather(). The buffer is fp32, or
    without `grad_reduce_in_fp32` in the model's format. `before_reduction` is called when all gradients of this rank
    are there; without `overlap` that is before the ranks meet.
    """
    config = chunks[0].config
    assert config.calculate_per_token_loss, "otherwise DDP would average where the engine counts on sums"
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=grad_reduce_in_fp32,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
    )
    config.finalize_model_grads_func = partial(_finalize_sums, before_reduction)
    ddp = [_Wrapper(config, ddp_config, m, disable_bucketing=i > 0) for i, m in enumerate(chunks)]
    if overlap:
        config.no_sync_func = ddp[0].no_sync if len(ddp) == 1 else [chunk.no_sync for chunk in ddp]
    return ddp


def _finalize_sums(
    before_reduction: Callable[[], None],
    model: list[DistributedDataParallel],
    num_tokens: torch.Tensor | None,
    **kwargs: object,
) -> None:
    """Reduce gradients without Megatron's own division by a token count: it would cost two collectives a step to
    exchange what every rank has already."""
    before_reduction()
    finalize_model_grads(model, None, **kwargs)


class TrainOptimizer:
    """The optimizer of one engine. Its only state beside Megatron's is `num_updates`, which drives the schedule."""

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        config: OptimizerConfig,
        dtype: torch.dtype,
        *,
        total_updates: int,
    ) -> None:
        self._chunks, self._config, self._total_updates = chunks, config, total_updates
        self._on_host = False
        self._gathered = True
        self.num_updates = 0
        self._lr()  # an unknown schedule is an error before the first step
        self.megatron = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                min_lr=config.lr * config.min_lr_ratio,
                weight_decay=config.weight_decay,
                adam_beta1=config.beta1,
                adam_beta2=config.beta2,
                adam_eps=config.eps,
                clip_grad=config.gradient_clipping,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=True,
            ),
            chunks,
        )
        inner = [optimizer.optimizer for optimizer in self.megatron.chained_optimizers]
        device = chunks[0].buffers[0].grad_data.device
        self._state = OptimizerState(inner, device)
        if config.offload:
            for optimizer in inner:
                optimizer.step = partial(self._state.step_in_pieces, optimizer, optimizer.step)
            self._state.to_host()
            if device.type != "cpu":
                self._state.reserve()  # for the moments, which the first step makes

    def pending_bytes(self) -> float:
        """Return the bytes of moments that the first step will allocate on the device and keep."""
        if self._config.offload:
            return 0.0
        inner = [optimizer.optimizer for optimizer in self.megatron.chained_optimizers]
        masters = [(o.state, p) for o in inner for group in o.param_groups for p in group["params"]]
        return sum(2.0 * p.nbytes for state, p in masters if p not in state)

    def held_bytes(self) -> dict[str, float]:
        """Return the bytes on the device by use: "weights", "gradients" and "optimizer" (masters and moments)."""
        inner = [optimizer.optimizer for optimizer in self.megatron.chained_optimizers]
        masters = [p for o in inner for group in o.param_groups for p in group["params"]]
        moments = [t for o in inner for state in o.state.values() for t in state.values() if torch.is_tensor(t)]
        buffers = [b.grad_data for chunk in self._chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        device = buffers[0].device
        return {
            "weights": float(sum(p.nbytes for chunk in self._chunks for p in chunk.parameters())),
            "gradients": float(sum(b.untyped_storage().nbytes() for b in buffers)),
            "optimizer": float(sum(t.nbytes for t in (*masters, *moments) if t.device == device)),
        }

    def zero_grad(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def step(self) -> Update:
        """Clip and apply the reduced gradients. Collective. A gradient norm that is not finite changes nothing: neither
        weights, nor moments, nor the schedule."""
        lr = self._lr()
        for group in self.megatron.param_groups:
            group["lr"] = lr
        if self._config.offload:
            self._state.masters_to_device()
        self.megatron.prepare_grads()
        grad_norm = float(self.megatron.get_grad_norm())
        if not math.isfinite(grad_norm):
            return Update(grad_norm=grad_norm, lr=lr, applied=False)
        if grad_norm > self._config.gradient_clipping > 0:
            for optimizer in self.megatron.chained_optimizers:
                clip_grad_by_total_norm_fp32(optimizer.get_parameters(), self._config.gradient_clipping, grad_norm)
        self.megatron.step_with_ready_grads()
        self._gathered = not self._chunks[0].ddp_config.overlap_param_gather
        self.num_updates += 1
        if self._config.offload:
            self._state.to_host()
        return Update(grad_norm=grad_norm, lr=lr, applied=True)

    def finish_param_gather(self) -> None:
        """Gather updated weights that the next forward pass of a training step would: before anything else reads them.
        Collective."""
        if not self._gathered:
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)
            self._gathered = True

    def offload(self) -> None:
        """Move masters and moments to the host and drop the gradients: nothing but the weights stays on the device."""
        for chunk in self._chunks:
            chunk.offload_grad_buffers(empty_cache=False)
        if not self._on_host:
            self._state.to_host()
            self._on_host = True

    def reload(self) -> None:
        """Reverse offload(); gradients are zero."""
        if self._on_host:
            if not self._config.offload:
                self._state.to_device()
            self._on_host = False
            for chunk in self._chunks:
                chunk.restore_grad_buffers()

    def _lr(self) -> float:
        s = self._config
        return learning_rate(
            self.num_updates,
            lr=s.lr,
            min_lr_ratio=s.min_lr_ratio,
            lr_scheduler_type=s.lr_scheduler_type,
            warmup_steps_proportion=s.warmup_steps_proportion,
            total_steps=self._total_updates,
        )
