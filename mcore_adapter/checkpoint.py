"""Checkpoints of an engine in Megatron's distributed format: any layout writes, any layout reads.

A folder holds the model and optimizer shards (*.distcp, .metadata), common.pt, metadata.json, and the config.json and
tokenizer files of the Hugging Face folder that the engine was built from, so that a converter needs nothing else.
Invariant: metadata.json is written last, so a folder that has it is complete; an error on one rank is raised on all.

Megatron's own writer forks a multi-threaded process and spawns a manager that imports __main__ again; neither is safe
inside an actor, so the shards are written by torch's writer in the calling thread.
"""

from __future__ import annotations

import io
import json
import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.tensor_parallel import random as megatron_random

from mcore_adapter.model import ModelChunk
from mcore_adapter.optimizer import TrainOptimizer
from mcore_adapter.parallel import ParallelState
from mcore_adapter.safetensors_folder import copy_tokenizer
from mcore_adapter.weights import hf_config_json

logger = logging.getLogger(__name__)


def save_checkpoint(
    path: str | Path,
    model: Sequence[ModelChunk],
    optimizer: TrainOptimizer | None,
    *,
    parallel: ParallelState,
    tokenizer_from: Path,
) -> None:
    """Write a new folder; collective. Raises OSError on all ranks when it exists or cannot be written."""
    path = Path(path)
    _on_first_rank(lambda: _make_folder(path))
    state = _state(model, optimizer, parallel=parallel, loading=False)
    state["rng"] = _rng_object(parallel)
    state["slipstream"] = {
        "layout": str(parallel.layout),
        "num_updates": optimizer.num_updates if optimizer else 0,
        "has_optimizer": optimizer is not None,
        "device": _device_kind(model),
    }
    sharded, common = save_preprocess(state)
    _on_first_rank(lambda: _write_common(path, common))
    _write_shards(path, sharded)
    _on_first_rank(lambda: _finish(path, model[0], tokenizer_from))


def load_checkpoint(
    path: str | Path, model: Sequence[ModelChunk], optimizer: TrainOptimizer | None, *, parallel: ParallelState
) -> None:
    """Load what save_checkpoint() wrote, under any layout; collective. Without optimizer only the model is read.

    Raises FileNotFoundError where there is no complete checkpoint, OSError (on all ranks) where it is damaged, and
    ValueError where it lacks the optimizer.
    """
    path = Path(path)
    if not (path / "metadata.json").is_file():
        raise FileNotFoundError(f"{path}: no complete checkpoint in this folder (metadata.json is missing)")
    try:
        saved = dist_checkpointing.load_common_state_dict(str(path))["slipstream"]
    except RuntimeError as error:  # torch's word for a damaged file
        raise OSError(f"{path / 'common.pt'}: cannot be read: {error}") from error
    if optimizer is not None and not saved["has_optimizer"]:
        raise ValueError(f"{path}: this checkpoint has no optimizer state; it was saved by an inference-only engine")
    state = _state(model, optimizer, parallel=parallel, loading=True)
    same_place = (saved["layout"], saved["device"]) == (str(parallel.layout), _device_kind(model))
    if same_place:
        state["rng"] = _rng_object(parallel)
    try:
        loaded = dist_checkpointing.load(state, str(path))
    except dcp.CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise OSError(f"{path}: the checkpoint cannot be read, rank {rank} says: {cause}") from error
    for key, chunk in _model_keys(model):
        missing, unexpected = chunk.load_state_dict(loaded[key], strict=False)
        assert not unexpected and all(_is_extra_state(name) for name in missing), (missing, unexpected)
    if optimizer is not None:
        with torch.no_grad():
            optimizer.megatron.load_state_dict(loaded["optimizer"])
        optimizer.num_updates = saved["num_updates"]
    if same_place:
        _set_rng(loaded["rng"])
    else:
        logger.warning(
            "%s was saved under layout %s on %s; under %s on %s random states start from the seed",
            path, saved["layout"], saved["device"], parallel.layout, _device_kind(model),
        )  # fmt: skip


def _device_kind(model: Sequence[ModelChunk]) -> str:
    return next(model[0].parameters()).device.type


def _is_extra_state(name: str) -> bool:
    """What TransformerEngine keeps beside the weights for 8-bit formats: empty here, and absent on the CPU."""
    return "_extra_state" in name


def _model_keys(model: Sequence[ModelChunk]) -> list[tuple[str, ModelChunk]]:
    """Names that Megatron's optimizer expects for one model, or for several virtual stages."""
    return [(f"model{i}" if len(model) > 1 else "model", chunk) for i, chunk in enumerate(model)]


def _state(
    model: Sequence[ModelChunk], optimizer: TrainOptimizer | None, *, parallel: ParallelState, loading: bool
) -> ShardedStateDict:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel.dp_cp_group,
    }
    state: ShardedStateDict = {}
    for key, chunk in _model_keys(model):
        whole = chunk.sharded_state_dict(metadata=metadata)
        state[key] = {name: value for name, value in whole.items() if not _is_extra_state(name)}
    if optimizer is not None:
        of_model = dict(state) if len(model) > 1 else state["model"]
        state["optimizer"] = optimizer.megatron.sharded_state_dict(of_model, is_loading=loading, metadata=metadata)
    return state


def _rng_object(parallel: ParallelState) -> ShardedObject:
    """Every random state of this rank, as its own piece of one object."""
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": megatron_random._get_cuda_rng_state(),
        "megatron": megatron_random.get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject("rng", states, (parallel.world_size,), (parallel.rank,), replica_id=0)


def _set_rng(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    megatron_random._set_cuda_rng_state(states["device"])
    megatron_random.get_cuda_rng_tracker().set_states(states["megatron"])


def _write_shards(path: Path, sharded: ShardedStateDict) -> None:
    """Every rank writes the shards of which it holds the main replica. Errors of any rank are raised on all."""
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    try:
        dcp.save(
            mcore_to_pyt_state_dict(by_key, is_loading=False),
            storage_writer=dcp.FileSystemWriter(path),
            planner=planner,
        )
    except dcp.CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise OSError(f"{path}: rank {rank} could not write its part of the checkpoint: {cause}") from error


def _make_folder(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise FileExistsError(f"{path}: this folder is not empty; a checkpoint needs a new one")


def _write_common(path: Path, common: dict[str, Any]) -> None:
    buffer = io.BytesIO()  # torch.save to a file would turn a full disk into a RuntimeError
    torch.save(common, buffer)
    (path / "common.pt").write_bytes(buffer.getvalue())


def _finish(path: Path, model: ModelChunk, tokenizer_from: Path) -> None:
    config = hf_config_json(model.model_config, dtype=model.config.params_dtype, is_critic=model.is_critic)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    copy_tokenizer(tokenizer_from, path)
    save_config(CheckpointingConfig("torch_dist", 1), str(path))


def _on_first_rank(action: Callable[[], None]) -> None:
    """Run `action` on global rank 0; its OSError is raised on all ranks."""
    outcome: list[OSError | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as error:
            outcome = [error]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise outcome[0]
