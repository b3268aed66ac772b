"""Sections about models: which one, how it is optimised, where and in what pieces it runs.

Key names and defaults follow the AReaL 0.2 schema that tutorials for this kind of trainer use.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from pydantic import field_validator

from config_schema.needs import fact, given
from config_schema.section import Section, key, section
from mcore_adapter.settings import EXPERTS, EngineConfig
from model_specs.families import FAMILIES
from rollout.inference.backend import FlagValue


class ModelFamily(Section):
    """Kind of a model."""

    family: str = key(
        "auto",
        f"Model family ({', '.join(FAMILIES)}); must agree with config.json. auto: read from config.json",
        alias="_class",
    )
    is_critic: bool = key(False, "True for a model with a value head")


class _ModelFolder(Section):
    """Which model."""

    type: ModelFamily = section(ModelFamily, "Model family and head")
    path: str = key(
        "",
        "Hugging Face model folder, or id of a model of the hub, as owner/name or owner/name@revision. ref and critic: "
        "empty means actor.path",
    )

    @field_validator("path")
    @classmethod
    def _expand(cls, path: str) -> str:
        """Replace a leading ~ by the user's home folder."""
        return os.path.expanduser(path)


class ModelTrainEvalConfig(EngineConfig, _ModelFolder):
    """One model: its weights, numeric format and optimizer."""

    moe_routing_replay: bool = key(
        False,
        "Train each token through the experts that the generator used for it",
        needs=fact("actor with servers") & EXPERTS,
    )
    sglang: dict[str, FlagValue] = key(
        {},
        "Flags of the servers by name, as in mem_fraction_static: 0.8",
        needs=fact("actor with servers") & fact("servers"),
    )


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
