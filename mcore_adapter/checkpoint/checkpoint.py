"""Checkpoints of an engine in Megatron's distributed format: any layout writes, any layout reads.

A folder holds the model and optimizer shards (*.distcp, .metadata), common.pt, metadata.json, and the config.json and
tokenizer files of the Hugging Face folder that the engine was built from, so that a converter needs nothing else.
Invariant: metadata.json is written last, so a folder that has it is complete; an error on one rank is raised on all.

Megatron's own writer forks a multi-threaded process and spawns a manager that imports __main__ again; neither is safe
inside an actor, so the shards are written by torch's writer (mcore_adapter/checkpoint/writing.py).
"""

import gc
import io
import json
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.tensor_parallel import random as megatron_random

from mcore_adapter.checkpoint.restricted import RestrictedStrategy, load_common
from mcore_adapter.checkpoint.writing import CopiedCheckpoint, HostCopy, gathered_by, gathered_sizes
from mcore_adapter.hf.weights import hf_config_json
from mcore_adapter.models.gpt import ModelChunk
from mcore_adapter.optimizer.training import TrainOptimizer
from mcore_adapter.parallel import ParallelState

logger = logging.getLogger(__name__)

_WEIGHTS = "weights"
_SAVED = {"layout": str, "num_updates": int, "has_optimizer": bool}
"""What the common part of a checkpoint has to hold, of what type."""
_ALIGNMENT = 64
_MOST_PARTS = 4
"""That a checkpoint has of one matrix, which lie apart in the copy: gate and up are two."""


def copy_checkpoint(
    path: str | Path,
    model: Sequence[ModelChunk],
    optimizer: TrainOptimizer | None,
    host: HostCopy,
    *,
    parallel: ParallelState,
    tokenizer_from: Path,
) -> CopiedCheckpoint:
    """Copy this rank's part of a checkpoint to `host`; collective. Training may continue at once.

    Raises OSError on all ranks when the folder exists or cannot be made."""
    path = Path(path)
    _on_first_rank(lambda: _make_folder(path))
    with _only_new_garbage(), gathered_by(host, optimizer.megatron.chained_optimizers if optimizer else []):
        state = _state(model, optimizer, parallel=parallel, loading=False)
    state["rng"] = _rng_object(parallel)
    state["slipstream"] = {
        "layout": str(parallel.layout),
        "num_updates": optimizer.num_updates if optimizer else 0,
        "has_optimizer": optimizer is not None,
        "device": _device_kind(model),
    }
    sharded, common = save_preprocess(state)
    _copy_weights(sharded, model, host)
    host.wait()
    config = hf_config_json(model[0].model_config, dtype=model[0].config.params_dtype, is_critic=model[0].is_critic)
    return CopiedCheckpoint(path, sharded, small_files(common, config), tokenizer_from=tokenizer_from)


@contextmanager
def _only_new_garbage() -> Iterator[None]:
    """Limit garbage collection to new objects while Megatron gathers the optimizer's state: through all objects of the
    process it takes several times as long as everything else."""
    if gc.get_freeze_count():  # the modules were frozen on purpose, and only they stay so
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _copy_weights(sharded: ShardedStateDict, model: Sequence[ModelChunk], host: HostCopy) -> None:
    """Put copies in place of the parameters; the optimizer's state is copied already."""
    live = {t.untyped_storage().data_ptr() for t in _parameters(model)}
    mine: list[ShardedTensor] = []

    def find(entry: object) -> object:
        if (
            isinstance(entry, ShardedTensor)
            and entry.data.untyped_storage().data_ptr() in live
            and is_main_replica(entry.replica_id)
        ):
            mine.append(entry)
        return entry

    dict_list_map_inplace(find, sharded)
    if not mine:
        return
    whole = host.room(_WEIGHTS, sum(_aligned(e.data.nbytes) for e in mine), torch.uint8, on=mine[0].data.device)
    start = 0
    for entry in mine:
        copy = whole[start : start + entry.data.nbytes].view(entry.data.dtype).view(entry.data.shape)
        host.fill(copy, entry.data)
        start += _aligned(entry.data.nbytes)
        entry.data = copy


def copied_sizes(
    model: Sequence[ModelChunk], optimizer: TrainOptimizer | None, *, parallel: ParallelState
) -> dict[str, int]:
    """Return the bytes of host memory that copy_checkpoint() uses on this rank, by name; an upper bound, except for
    experts, which ranks other than the first of data parallelism may hold."""
    sizes = gathered_sizes(optimizer.megatron.chained_optimizers if optimizer else [])
    if parallel.dp_cp_group.rank() == 0:
        sizes[_WEIGHTS] = sum(t.nbytes + _ALIGNMENT * _MOST_PARTS * _matrices(t) for t in _parameters(model))
    return sizes


def _parameters(model: Sequence[ModelChunk]) -> Iterator[torch.Tensor]:
    for chunk in model:
        yield from chunk.parameters()
        yield from chunk.buffers()


def _matrices(tensor: torch.Tensor) -> int:
    """Return the number of matrices in a parameter: those of experts may be stacked."""
    return len(tensor) if tensor.dim() == 3 else 1


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def load_checkpoint(
    path: str | Path, model: Sequence[ModelChunk], optimizer: TrainOptimizer | None, *, parallel: ParallelState
) -> None:
    """Load what copy_checkpoint() saved, under any layout; collective. Without optimizer only the model is read.

    Raises FileNotFoundError where there is no complete checkpoint, OSError (on all ranks) where it is damaged, and
    ValueError where it lacks the optimizer.
    """
    path = Path(path)
    if not (path / "metadata.json").is_file():
        raise FileNotFoundError(f"{path}: no complete checkpoint in this folder (metadata.json is missing)")
    saved = load_common(path).get("slipstream")
    if not isinstance(saved, dict) or any(type(saved.get(key)) is not kind for key, kind in _SAVED.items()):
        raise OSError(f"{path / 'common.pt'}: cannot be read: it holds {saved!r}, which no engine has written")
    if optimizer is not None and not saved["has_optimizer"]:
        raise ValueError(f"{path}: this checkpoint has no optimizer state; it was saved by an inference-only engine")
    with gathered_by(HostCopy(), optimizer.megatron.chained_optimizers if optimizer else []) as owned:
        state = _state(model, optimizer, parallel=parallel, loading=True)
    owned.join_in_place(state)
    saved_on = saved.get("device", "an unnamed device")
    same_place = (saved["layout"], saved_on) == (str(parallel.layout), _device_kind(model))
    if same_place:
        state["rng"] = _rng_object(parallel)
    try:
        loaded = dist_checkpointing.load(state, str(path), RestrictedStrategy(owned))
    except dcp.CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise OSError(f"{path}: the checkpoint cannot be read, rank {rank}: {cause}") from error
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
            path, saved["layout"], saved_on, parallel.layout, _device_kind(model),
        )  # fmt: skip


def _device_kind(model: Sequence[ModelChunk]) -> str:
    return next(model[0].parameters()).device.type


def _is_extra_state(name: str) -> bool:
    """Return whether a tensor is what TransformerEngine keeps beside the weights for 8-bit formats: empty here, and
    absent on the CPU."""
    return "_extra_state" in name


def _model_keys(model: Sequence[ModelChunk]) -> list[tuple[str, ModelChunk]]:
    """Return the names that Megatron's optimizer expects for one model, or for several virtual stages."""
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
    state = model_state(model, parallel=parallel, metadata=metadata)
    if optimizer is not None:
        of_model = dict(state) if len(model) > 1 else state["model"]
        state["optimizer"] = optimizer.megatron.sharded_state_dict(of_model, is_loading=loading, metadata=metadata)
    return state


def model_state(
    model: Sequence[ModelChunk], *, parallel: ParallelState, metadata: dict[str, object] | None = None
) -> ShardedStateDict:
    """Return where every tensor of the model lies in a checkpoint, by model chunk."""
    metadata = metadata or {"singleton_local_shards": False, "dp_cp_group": parallel.dp_cp_group}
    state: ShardedStateDict = {}
    for key, chunk in _model_keys(model):
        whole = chunk.sharded_state_dict(metadata=metadata)
        state[key] = {name: value for name, value in whole.items() if not _is_extra_state(name)}
    return state


def _rng_object(parallel: ParallelState) -> ShardedObject:
    """Return every random state of this rank, as its own piece of one object."""
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


def _make_folder(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise FileExistsError(f"{path}: this folder is not empty; a checkpoint needs a new one")


def converted_common() -> dict[str, object]:
    """Return the common part of a checkpoint that no engine has written."""
    return {"slipstream": {"layout": "none", "num_updates": 0, "has_optimizer": False, "device": "none"}}


def small_files(common: dict[str, object], config: dict[str, object]) -> dict[str, bytes]:
    """Return the contents of the files that hold no tensors: Megatron's common part, and the config.json of Hugging
    Face."""
    buffer = io.BytesIO()  # torch.save to a file would turn a full disk into a RuntimeError
    torch.save(common, buffer)
    return {"common.pt": buffer.getvalue(), "config.json": (json.dumps(config, indent=2) + "\n").encode()}


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
