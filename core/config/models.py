"""Sections about models: which one, how it is optimised, where and in what pieces it runs.

Key names and defaults follow the AReaL 0.2 schema that tutorials for this kind of trainer use.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from pydantic import field_validator

from core.config.base import Section, key, section
from core.config.needs import equals, fact, given, refused_without, unlike
from mcore_adapter.settings import Fp8Recipe
from model_specs.families import FAMILIES
from rollout.inference.backend import FlagValue, WeightFormat

_GPUS = refused_without("trainer on GPUs")
_TRAINED = fact("trained model")
_AUTO = _TRAINED & equals(".gradient_checkpointing", "auto")
_EXPERTS = fact("model with experts")


class ModelFamily(Section):
    """Kind of a model."""

    family: str = key(
        "auto",
        f"Model family ({', '.join(FAMILIES)}); must agree with config.json. auto: read from config.json",
        alias="_class",
    )
    is_critic: bool = key(False, "True for a model with a value head")


class OptimizerConfig(Section):
    """Adam and its learning-rate schedule."""

    type: Literal["adam", "empty"] = key("adam", "Optimizer; empty is for models that are not trained")
    lr: float = key(2e-5, "Learning rate after the warm-up", gt=0)
    weight_decay: float = key(0.05, "Decoupled weight decay", ge=0)
    beta1: float = key(0.9, "Adam's decay rate of the first moment", ge=0, lt=1)
    beta2: float = key(0.95, "Adam's decay rate of the second moment", ge=0, lt=1)
    eps: float = key(1e-5, "Adam's epsilon", gt=0)
    min_lr_ratio: float = key(
        0.0,
        "Learning rate at the end of a decay, as a fraction of lr",
        ge=0,
        le=1,
        needs=unlike(".lr_scheduler_type", "constant"),
    )
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = key("constant", "Decay after the warm-up")
    warmup_steps_proportion: float = key(0.001, "Fraction of all updates spent on the linear warm-up", ge=0, le=1)
    gradient_clipping: float = key(1.0, "Maximum global gradient norm; 0 disables clipping", ge=0)
    offload: bool = key(
        False,
        "Keep fp32 master weights and moments in host memory; copy them to the GPU for each update",
        needs=_GPUS,
    )


class ModelTrainEvalConfig(Section):
    """One model: its weights, numeric format and optimizer."""

    type: ModelFamily = section(ModelFamily, "Model family and head")
    path: str = key("", "Hugging Face model folder. ref and critic: empty means actor.path")
    init_from_scratch: bool = key(False, "Start from random weights; read only config.json and the tokenizer from path")
    init_critic_from_actor: bool = key(
        False, "The path is a language model; initialize a new value head", needs=fact("critic")
    )
    gradient_checkpointing: bool | Literal["auto", "selective", "linear"] | None = key(
        None,
        "Recompute activations in the backward pass. true: full layers. linear: layers without the core attention. "
        "selective: activation functions. auto: for each layer the least that fits in memory; on GPUs activations move "
        "to host memory before full layers are recomputed. null: selective with GPUs, none without GPUs",
        needs=_TRAINED & fact("layers that it reaches"),
    )
    gradient_checkpointing_limit_gib: float | None = key(
        None,
        "Memory that the model may use on a device during an update. null: what is free, less 14 %",
        gt=0,
        needs=_AUTO,
    )
    gradient_checkpointing_host_gib: float | None = key(
        None,
        "Host memory that activations of a trainer rank may take. 0: they stay on the GPU. null: 60 % of what is "
        "available, shared by the ranks of a host",
        ge=0,
        needs=_AUTO & fact("trainer on GPUs"),
    )
    bf16: bool | None = key(
        None, "True: bfloat16, False: float32. null: bfloat16 where the trainer computes on GPUs, else float32"
    )
    fp8: bool | Fp8Recipe = key(
        False,
        "Compute matrix products of the layers in FP8; the weights stay in bfloat16. tensorwise (or true): one factor "
        "for each tensor. blockwise: one for 128 values of a row, for 128 x 128 of a weight",
        needs=_GPUS,
    )
    grad_reduce_in_fp32: bool = key(
        True, "false: accumulate and reduce gradients in bfloat16", needs=_TRAINED & refused_without("bf16")
    )
    optimizer: OptimizerConfig = section(
        OptimizerConfig, "Optimizer and learning-rate schedule", needs=fact("trained model, or type=empty")
    )
    moe_aux_loss_coeff: float = key(
        0.0,
        "Coefficient of the load-balancing loss (mean over sequences; 1 if even)",
        ge=0,
        needs=_TRAINED & _EXPERTS,
    )
    moe_bias_update_rate: float = key(
        0.0,
        "Update rate of the correction biases of experts after an optimizer step",
        ge=0,
        needs=_TRAINED & _EXPERTS & fact("correction biases (DeepSeek-V3)"),
    )
    moe_routing_replay: bool = key(
        False,
        "Train each token through the experts that the generator used for it",
        needs=fact("actor with servers") & _EXPERTS,
    )
    sglang: dict[str, FlagValue] = key(
        {},
        "Flags of the servers by name, as in mem_fraction_static: 0.8",
        needs=fact("actor with servers") & fact("servers"),
    )

    @property
    def fp8_recipe(self) -> Fp8Recipe | None:
        """How matrix products are scaled in FP8. None: they are not in FP8."""
        return ("tensorwise" if self.fp8 else None) if isinstance(self.fp8, bool) else self.fp8

    @field_validator("path")
    @classmethod
    def _expand(cls, path: str) -> str:
        """Replace a leading ~ by the user's home folder."""
        return os.path.expanduser(path)

    def dtype(self, *, on_gpu: bool) -> WeightFormat:
        """Return the format of the weights of a trainer on GPUs or on the CPU."""
        bf16 = on_gpu if self.bf16 is None else self.bf16
        return "bfloat16" if bf16 else "float32"

    def recompute(self, *, on_gpu: bool) -> Literal["none", "selective", "linear", "full", "auto"]:
        """Return what a trainer on GPUs or on the CPU recomputes in the backward pass."""
        if self.gradient_checkpointing is None:
            return "selective" if on_gpu else "none"
        if isinstance(self.gradient_checkpointing, str):
            return self.gradient_checkpointing
        return "full" if self.gradient_checkpointing else "none"


@dataclass(frozen=True, kw_only=True)
class ModelUse:
    """A model that a run loads, and the roles that use it."""

    key: str
    section: ModelTrainEvalConfig
    path: str
    roles: tuple[str, ...]
    tokenizer: bool = False

    @property
    def value_head(self) -> bool | None:
        """Whether the weights at `path` must end in a value head; None: a critic starts from either."""
        if self.key == "critic":
            return None if self.section.init_critic_from_actor else True
        return False


class MicroBatchSpec(Section):
    """How a minibatch is cut into microbatches."""

    max_tokens_per_mb: int | None = key(
        None,
        "Maximum tokens per microbatch, prompts included (on CPU a prompt shared by completions counts once). "
        "Reduce it to use less memory. "
        "null: value of actor_train; for actor_train 16384 or the longest possible sequence, whichever is larger",
        ge=1,
    )


class GenerationRoleConfig(Section):
    """Where the generators run, if allocation_mode does not specify it."""

    device_mapping: str | list[int] | None = key(
        None, "Global GPU indices of the role, such as list(range(0,8)); replaces allocation_mode"
    )
    layout: str | None = key(
        None,
        "Parallel layout of device_mapping, such as d4m2p1. null: all data parallel",
        needs=given(".device_mapping"),
    )


class MFCConfig(GenerationRoleConfig):
    """One use of a model (training or inference): microbatches, and where it runs if allocation_mode does not specify
    it."""

    mb_spec: MicroBatchSpec = section(MicroBatchSpec, "Size of microbatches")
