"""Experts whose weights lie in one tensor per linear layer, for grouped products; see products.py.

Stand in for Megatron's experts in its MoE layer, behind its dispatcher or one of dispatchers.py. Invariant: in
checkpoints they are what Megatron's own experts are.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from mcore_adapter.models.experts.products import Rows, SharedRows, experts_output


def stack_experts(spec: TransformerBlockSubmodules, config: TransformerConfig, device: torch.device) -> None:
    """Let the layers of `spec` stack their experts, where grouped products can read them: in 16 or 32 bits, and with
    rows of whole 16 bytes."""
    size = config.params_dtype.itemsize
    if config.fp8 or any(n * size % 16 for n in (config.hidden_size, cast(int, config.moe_ffn_hidden_size))):
        return
    for layer in spec.layer_specs or ():
        if layer.submodules.mlp.module is MoELayer:
            layer.submodules.mlp.submodules.experts = ModuleSpec(module=StackedExperts, params={"device": device})


class StackedExperts(MegatronModule):
    """gate_up [n, 2 * f, h] and down [n, h, f] of this rank's n experts."""

    keep_halves = True
    """Whether the outputs of the first linear layer stay in memory until the backward pass."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        device: torch.device,
    ) -> None:
        assert config.gated_linear_unit and config.activation_func is F.silu, "what every supported family has"
        assert not config.add_bias_linear and pg_collection is not None, "set by build_model()"
        super().__init__(config=config)
        hidden, width = config.hidden_size, cast(int, config.moe_ffn_hidden_size)
        self.gate_up = _parameter(num_local_experts, 2 * width, hidden, config.params_dtype, device)
        self.down = _parameter(num_local_experts, hidden, width, config.params_dtype, device)
        self._ep_group, self._replicas = pg_collection.ep, pg_collection.expt_dp

    def forward(self, hidden: Tensor, rows: Rows | SharedRows | Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Compute the experts' output, see experts_output(), and no bias; from hidden [t, h] with the rows of its
        copies and probs [t, k], or from hidden [r, h] sorted by expert with the number of rows of each expert and
        probs [r]."""
        if isinstance(rows, Tensor):
            rows = Rows(rows.to(hidden.device, torch.int64).cumsum(0).to(torch.int32))
        return experts_output(hidden, probs, self.gate_up, self.down, rows, keep_halves=self.keep_halves), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[object, ...] = (), metadata: dict[str, object] | None = None
    ) -> ShardedStateDict:
        """Return one piece for each expert and half, as of Megatron's experts that are modules of their own."""
        assert not (metadata or {}).get("singleton_local_shards"), "checkpoints are written with shared keys"
        replica = (0, 0, self._replicas.rank())
        state: ShardedStateDict = {}
        for name, layer, parts in (("gate_up", "linear_fc1", 2), ("down", "linear_fc2", 1)):
            weight: Tensor = getattr(self, name)
            first, total = self._ep_group.rank() * len(weight), self._ep_group.size() * len(weight)
            pieces = partial(_pieces, offsets=sharded_offsets, first=first, total=total, parts=parts)
            join = partial(_join, shape=tuple(weight.shape))
            key = f"{prefix}experts.{layer}.weight"
            state[f"{prefix}{name}"] = ShardedTensorFactory(key, weight, pieces, join, replica)
        return state


def _parameter(num: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.empty(num, rows, columns, dtype=dtype, device=device))
    # Other replicas of an expert are other ranks than those of what is around it: reduced and counted apart.
    cast(Any, weight).allreduce = False
    cast(Any, weight).tensor_model_parallel = True
    return weight


@torch.no_grad()
def _pieces(
    key: str,
    weight: Tensor,
    replica_id: ReplicaId,
    flattened_range: slice | None,
    *,
    offsets: tuple[object, ...],
    first: int,
    total: int,
    parts: int,
) -> list[ShardedTensor]:
    """Split weight [n, rows, columns] into `parts` pieces of each expert, n * parts of them, in order."""
    axis = len(offsets)
    return [
        ShardedTensor.from_rank_offsets(
            key, piece, *offsets, (axis, first + i, total), (axis + 1, part, parts),
            replica_id=replica_id, prepend_axis_num=axis + 1,
        )
        for i, expert in enumerate(weight)
        for part, piece in enumerate(expert.chunk(parts))
    ]  # fmt: skip


@torch.no_grad()
def _join(pieces: list[Tensor], *, shape: tuple[int, ...]) -> Tensor:
    return torch.cat(pieces).view(shape)
