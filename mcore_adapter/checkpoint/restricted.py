"""Reading of torch's distributed checkpoints without running code from them.

torch and Megatron unpickle `.metadata` and stored objects without restriction. Here `.metadata` may name only the
classes that describe tensors, objects are read with weights_only=True, and shards lie in the checkpoint's own folder.
Source: "Restricting globals" of the documentation of pickle.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    TorchDistLoadShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

_DCP = "torch.distributed.checkpoint"
_CLASSES = {
    (f"{_DCP}.metadata", "BytesStorageMetadata"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "StorageMeta"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    (f"{_DCP}.storage", "WriteResult"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
    ("builtins", "OSError"),
    ("builtins", "RuntimeError"),
}


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" else None
        if (module, name) in _CLASSES or isinstance(found, torch.dtype):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint's list of tensors")


def load_plain(content: bytes) -> Any:
    """Unpickle the classes that describe tensors. Raises pickle.UnpicklingError for any other."""
    return _RestrictedUnpickler(io.BytesIO(content)).load()


class RestrictedReader(dcp.FileSystemReader):
    """Reads `.metadata` once, and shards of the folder itself only."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the list of tensors. Raises OSError, pickle.UnpicklingError."""
        if self._metadata is None:
            self._metadata = _checked(load_plain((Path(self.path) / ".metadata").read_bytes()))
            self._metadata.storage_meta = self._metadata.storage_meta or StorageMeta()
            self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


def _checked(metadata: Any) -> Metadata:
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}, not a list of tensors")
    for info in metadata.storage_data.values():
        name = info.relative_path
        if name in ("", "..") or name != Path(name).name or info.transform_descriptors:
            raise pickle.UnpicklingError(f"it names {name!r}, which is no file of the checkpoint's folder")
    return metadata


class _RestrictedPlanner(MCoreLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        path = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, path, torch.load(value, weights_only=True))


class RestrictedStrategy(TorchDistLoadShardedStrategy):
    """Megatron's strategy for torch_dist checkpoints with the reader and the planner of this module."""

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path) -> dict[str, Any]:
        """Return the state dict with everything loaded; as the method of the base class."""
        tensors = [entry for entry in nested_values(sharded_state_dict) if isinstance(entry, ShardedTensor)]
        planner = _RestrictedPlanner(
            shapes_validation_sharded_tensors=[t for t in tensors if not t.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={t.key: t for t in tensors if t.allow_shape_mismatch},
        )
        by_key, flat_mapping, rename_mapping = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        state = mcore_to_pyt_state_dict(by_key, True)
        dcp.state_dict_loader.load_state_dict(state, RestrictedReader(checkpoint_dir), planner=planner)
        loaded = {key: _unwrap_pyt_sharded_tensor(value) for key, value in state.items()}
        loaded = _replace_sharded_keys_with_state_dict_keys(loaded, flat_mapping, rename_mapping)
        _restore_dict_types(loaded, sharded_state_dict)
        return loaded
