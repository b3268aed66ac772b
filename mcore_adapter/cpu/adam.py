"""Adam for Megatron's distributed optimizer on CPU; installed by cpu/device.py.

Invariant: the contract of TransformerEngine's FusedAdam holds (the step is in the param group, the state of a parameter
is exactly exp_avg and exp_avg_sq), because that is the only one whose checkpoints Megatron can load.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


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
        **_: Any,
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
