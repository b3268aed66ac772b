"""What an engine is made from: plain values that the driver can name without importing megatron."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Level = Literal["none", "selective", "qkv", "linear", "offload", "full"]
"""What a layer computes again in the backward pass. none: nothing. selective: the activation function. qkv: also what
is before the core attention: norm, projection, rotary embedding. linear: also the norm before the MLP and its first
linear layer, or the first products of experts; not the core attention, nor the products that follow it and the
activation function. offload: the same, and what is kept is in host memory. full: the whole layer."""
LEVELS: tuple[Level, ...] = get_args(Level)

Fp8Recipe = Literal["tensorwise", "blockwise"]
"""What shares a factor in a matrix product in FP8. tensorwise: all of a tensor. blockwise: 128 values of a row of
activations and gradients, 128 x 128 of weights."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Which model, and how it is held."""

    hf_path: str
    """Folder with config.json and safetensors (not needed with init_from_scratch)."""
    is_critic: bool = False
    """A value head instead of the language-model head."""
    init_from_scratch: bool = False
    """Random weights from `seed`, the same in every layout."""
    init_critic_from_actor: bool = False
    """A critic whose folder holds a language model: everything but the value head is loaded from it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    recompute: Level | Literal["auto"] = "none"
    """What every layer computes again in the backward pass; auto: the least that fits, see activations/auto.py."""
    recompute_limit_gib: float | None = None
    """With recompute="auto": memory of the device that the process may use in an update; None: what is free."""
    recompute_host_gib: float | None = None
    """With recompute="auto" on GPUs: memory of the host that activations of the process may take; None: a share of what
    is free."""
    fp8: Fp8Recipe | None = None
    """The layers' matrix products in 8-bit floating point, on devices that have it."""
    grad_reduce_in_fp32: bool = True
    """False: gradients are added up and reduced over the ranks in `dtype`."""
    seed: int = 1
    moe_aux_loss_coeff: float = 0.0
    """Weight of the loss that balances experts; see router.Balance."""
    moe_bias_update_rate: float = 0.0
    """Step of the correction biases that balance experts without a loss; see router.Balance."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW and its learning-rate schedule."""

    lr: float
    min_lr_ratio: float = 0.0
    """Where the schedule ends, as a share of lr."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps_proportion: float = 0.0
    """Share of total_steps in which the rate rises linearly to lr; the first of n such steps has lr / n."""
    total_steps: int
    """Optimizer updates of the whole run."""
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-5
    gradient_clipping: float = 1.0
    offload: bool = False
    """Masters and moments are in host memory and are copied to the device for the update."""
