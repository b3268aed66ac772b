"""Process groups of one trainer rank, as one typed object.

Invariant: ranks are ordered tp, cp, dp, pp (tensor parallel fastest), the order in which allocation lays them out; the
ranks of a stage hold the experts of expert-parallel ranks 0, 1, ..., 0, 1, ...; a ParallelState that exists describes
the process's one set of Megatron groups.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

from allocation import ParallelLayout
from mcore_adapter.device import Device


@dataclass(frozen=True, kw_only=True)
class ParallelState:
    """Where this rank stands in its layout, and the groups it belongs to."""

    layout: ParallelLayout
    rank: int
    world_size: int
    dp_rank: int
    tp_rank: int
    pp_rank: int
    cp_rank: int
    ep_rank: int
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    dp_cp_group: dist.ProcessGroup
    """Data and context parallel ranks together: those that hold the same parameters."""

    @property
    def is_first_stage(self) -> bool:
        """First pipeline stage (with virtual stages: it holds the first one)."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.layout.pp - 1

    def rank_at(self, *, tp: int, pp: int) -> int:
        """Return the global rank of (tp, pp) with cp and dp 0: the first of those that hold these parameters."""
        return tp + self._stage_start(pp)

    def rank_of_experts(self, *, ep: int, pp: int) -> int:
        """Return the global rank of the first of those that hold the experts of expert-parallel rank `ep` in stage
        `pp`."""
        return ep + self._stage_start(pp)

    def _stage_start(self, pp: int) -> int:
        return self.layout.tp * self.layout.cp * self.layout.dp * pp


def initialize_parallel(
    layout: ParallelLayout,
    *,
    rank: int,
    world_size: int,
    init_method: str | dist.Store,
    device: Device,
    seed: int,
    timeout_seconds: float = 600.0,
) -> ParallelState:
    """Join the world of `world_size` ranks at `init_method`, a URL or a store, and build Megatron's groups; collective.

    A collective that waits longer than timeout_seconds fails on the ranks that wait. Raises ValueError where the layout
    does not fit the world size or splits single experts.
    """
    if layout.world_size != world_size:
        raise ValueError(f"layout {layout} needs {layout.world_size} ranks; world_size={world_size}")
    if layout.etp != 1:
        raise ValueError(
            f"layout {layout}: m{layout.etp} of ffn, tensor parallelism inside an expert, is not supported; use m1"
        )
    device.setup()
    with device.activate():
        dist.init_process_group(
            device.backend,
            **{"init_method" if isinstance(init_method, str) else "store": init_method},  # type: ignore[arg-type]
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_seconds),
        )
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=1,
            distributed_timeout_minutes=timeout_seconds / 60,
        )
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return ParallelState(
        layout=layout,
        rank=rank,
        world_size=world_size,
        dp_rank=parallel_state.get_data_parallel_rank(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
        cp_group=parallel_state.get_context_parallel_group(),
        dp_group=parallel_state.get_data_parallel_group(),
        dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
    )


def destroy_parallel() -> None:
    """Leave the world; nothing happens where none was joined. What Megatron still refers to is let go: each group of
    gloo has threads that wake up a hundred times a second for as long as it is there."""
    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        embedding.forward.cache_clear()
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    for name, value in vars(parallel_state).items():
        if isinstance(value, dist.ProcessGroup):
            setattr(parallel_state, name, None)
