"""Megatron's data-parallel wrapper and distributed AdamW, with the learning-rate schedule and the guard against
non-finite gradients.

Invariant: gradients are summed, never averaged, over ranks and microbatches: the engine divides the loss by the number
of trained tokens of the whole minibatch before the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from mcore_adapter.lr_schedule import learning_rate
from mcore_adapter.settings import OptimizerSettings

StateKey = tuple[int, int, str]
"""Which optimizer, which of its parameters, which tensor of that."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """What one optimizer step did, equal on all ranks."""

    grad_norm: float  # before clipping; not finite when the update was skipped
    lr: float
    applied: bool


def wrap_for_training(chunks: list[GPTModel]) -> list[DistributedDataParallel]:
    """Put the gradients of each chunk into one fp32 buffer, reduced once a step."""
    config = chunks[0].config
    assert config.calculate_per_token_loss, "otherwise DDP would average where the engine counts on sums"
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    config.finalize_model_grads_func = _finalize_sums
    return [DistributedDataParallel(config, ddp_config, m, disable_bucketing=i > 0) for i, m in enumerate(chunks)]


def _finalize_sums(model: list[DistributedDataParallel], num_tokens: torch.Tensor | None, **kwargs: Any) -> None:
    """Reduce gradients without Megatron's own division by a token count: it would cost two collectives a step to learn
    what every rank knows beforehand."""
    finalize_model_grads(model, None, **kwargs)


class TrainOptimizer:
    """The optimizer of one engine. Its only state beside Megatron's is `num_updates`, which drives the schedule."""

    def __init__(self, chunks: list[DistributedDataParallel], settings: OptimizerSettings, dtype: torch.dtype) -> None:
        self._chunks, self._settings = chunks, settings
        self._host: dict[StateKey, torch.Tensor] = {}
        self._on_host = False
        self.num_updates = 0
        self._lr()  # an unknown schedule is an error before the first step
        self.megatron = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=settings.lr,
                min_lr=settings.lr * settings.min_lr_ratio,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.beta1,
                adam_beta2=settings.beta2,
                adam_eps=settings.eps,
                clip_grad=settings.gradient_clipping,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=True,
            ),
            chunks,
        )

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
        self.megatron.prepare_grads()
        grad_norm = float(self.megatron.get_grad_norm())
        if not math.isfinite(grad_norm):
            return Update(grad_norm=grad_norm, lr=lr, applied=False)
        if grad_norm > self._settings.gradient_clipping > 0:
            for optimizer in self.megatron.chained_optimizers:
                clip_grad_by_total_norm_fp32(optimizer.get_parameters(), self._settings.gradient_clipping, grad_norm)
        self.megatron.step_with_ready_grads()
        self.num_updates += 1
        return Update(grad_norm=grad_norm, lr=lr, applied=True)

    def offload(self) -> None:
        """Move masters and moments to the host and drop the gradients: nothing but the weights stays on the device."""
        for chunk in self._chunks:
            chunk.offload_grad_buffers(empty_cache=False)
        if not self._on_host:
            self._host = {key: _to_host(t, self._host.get(key)) for key, t in self._state_tensors()}
            self._move(self._host)
            self._on_host = True

    def reload(self) -> None:
        """The inverse of offload(); gradients are zero."""
        if self._on_host:
            device = self._chunks[0].buffers[0].grad_data.device
            self._move({key: t.to(device, non_blocking=True) for key, t in self._host.items()})
            self._on_host = False
            for chunk in self._chunks:
                chunk.restore_grad_buffers()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """With everything on the device inside, and where it was afterwards."""
        was_on_host = self._on_host
        self.reload()
        yield
        if was_on_host:
            self.offload()

    def _state_tensors(self) -> Iterator[tuple[StateKey, torch.Tensor]]:
        """Everything that the optimizers hold per parameter: masters (under ""), moments."""
        for i, optimizer in enumerate(self.megatron.chained_optimizers):
            for j, param in enumerate(p for group in optimizer.optimizer.param_groups for p in group["params"]):
                yield (i, j, ""), param.data
                for name, value in optimizer.optimizer.state.get(param, {}).items():
                    if isinstance(value, torch.Tensor) and value.dim():
                        yield (i, j, name), value

    def _move(self, tensors: Mapping[StateKey, torch.Tensor]) -> None:
        for i, optimizer in enumerate(self.megatron.chained_optimizers):
            for j, param in enumerate(p for group in optimizer.optimizer.param_groups for p in group["params"]):
                param.data = tensors[i, j, ""]
                state = optimizer.optimizer.state.get(param, {})
                state.update({name: tensors[i, j, name] for name in state if (i, j, name) in tensors})

    def _lr(self) -> float:
        s = self._settings
        return learning_rate(
            self.num_updates,
            lr=s.lr,
            min_lr_ratio=s.min_lr_ratio,
            lr_scheduler_type=s.lr_scheduler_type,
            warmup_steps_proportion=s.warmup_steps_proportion,
            total_steps=s.total_steps,
        )


def _to_host(tensor: torch.Tensor, buffer: torch.Tensor | None) -> torch.Tensor:
    """A copy in page-locked memory, which the device reads and writes at full speed; `buffer` is used again."""
    if buffer is None or buffer.shape != tensor.shape:
        buffer = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return buffer.copy_(tensor)
