"""Reading of torch's distributed checkpoints without running code from them.

torch and Megatron unpickle `.metadata` and stored objects without restriction. Here `.metadata` may hold only instances
of the classes that describe tensors, with nothing but their fields; objects are read with weights_only=True; and files
lie in the checkpoint's own folder. Source: "Restricting globals" of the documentation of pickle.
"""

import io
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
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
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.storage import WriteResult

from mcore_adapter.checkpoint.owned import OwnedRows
from model_specs.untrusted import open_regular, read_bytes, read_json_object

METADATA_FILE = ".metadata"
_MAX_LIST_BYTES = 2**30
UNREADABLE = (
    OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError, LookupError, AttributeError, ImportError,
    TypeError, AssertionError, MemoryError,
)  # fmt: skip
"""What unpickling a damaged file raises: it depends on the byte."""
_DATACLASSES = {
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    WriteResult,
    _StorageInfo,
}
_CLASSES = {(kind.__module__, kind.__name__) for kind in _DATACLASSES} | {
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
    ("builtins", "OSError"),
    ("builtins", "RuntimeError"),
}
_OPCODES = (
    "PROTO FRAME MARK STOP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 SHORT_BINUNICODE BINUNICODE "
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS BINGET LONG_BINGET "
    "BINPUT LONG_BINPUT MEMOIZE GLOBAL STACK_GLOBAL NEWOBJ REDUCE BUILD"
)
"""What dataclasses, numbers, texts, tuples, lists and dicts are pickled as, by protocols 2 to 5."""
_Python: Any = pickle._Unpickler  # type: ignore[attr-defined]
"""The reader in Python: that in C cannot refuse state for a class."""


class _PlainUnpickler(_Python):  # type: ignore[misc]
    """Makes instances of _DATACLASSES and plain values, and changes nothing that was there before."""

    dispatch = {code: _Python.dispatch[code] for name in _OPCODES.split() for code in getattr(pickle, name)}

    def find_class(self, module: str, name: str) -> object:
        found = getattr(torch, name, None) if module == "torch" else None
        if (module, name) in _CLASSES or isinstance(found, torch.dtype):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint's list of tensors")

    def load_build(self) -> None:
        """Set the fields of an instance: never of a class, a function or anything else that this file did not make."""
        instance, state = self.stack[-2:]
        names = {field.name for field in fields(instance)} if type(instance) in _DATACLASSES else set()
        as_tuple = type(instance) is TensorProperties and type(state) is tuple
        if not names or not (as_tuple or (type(state) is dict and state.keys() <= names)):
            raise pickle.UnpicklingError(
                f"it holds state for a {type(instance).__name__}, which no list of tensors does"
            )
        super().load_build()

    def load_reduce(self) -> None:
        """Call one of _CLASSES with numbers and texts."""
        self._check_arguments()
        super().load_reduce()

    def load_newobj(self) -> None:
        self._check_arguments()
        super().load_newobj()

    def _check_arguments(self) -> None:
        arguments = self.stack[-1]
        inner = [x for value in arguments for x in (value if isinstance(value, tuple | list) else [value])]
        if any(type(x) not in (int, str) for x in inner):
            raise pickle.UnpicklingError(f"it calls {self.stack[-2]} with arguments that no list of tensors has")

    def load_setitems(self) -> None:
        for key in self.stack[::2]:
            self._check_key(key)
        super().load_setitems()

    def load_setitem(self) -> None:
        self._check_key(self.stack[-2])
        super().load_setitem()

    def _check_key(self, key: object) -> None:
        """Refuse keys that take for ever to hash, as do tuples of the same tuple twice, many times over."""
        if type(key) is MetadataIndex and type(key.fqn) is str and type(key.offset) in (torch.Size, type(None)):
            return
        if type(key) is not str:
            raise pickle.UnpicklingError(f"it has a {type(key).__name__} as a key")


_PlainUnpickler.dispatch |= {
    pickle.BUILD[0]: _PlainUnpickler.load_build,
    pickle.REDUCE[0]: _PlainUnpickler.load_reduce,
    pickle.NEWOBJ[0]: _PlainUnpickler.load_newobj,
    pickle.SETITEM[0]: _PlainUnpickler.load_setitem,
    pickle.SETITEMS[0]: _PlainUnpickler.load_setitems,
}


def load_plain(content: bytes) -> object:
    """Unpickle the classes that describe tensors. Raises one of UNREADABLE, a pickle.UnpicklingError for any other."""
    try:
        return _PlainUnpickler(io.BytesIO(content)).load()
    except KeyError as error:
        raise pickle.UnpicklingError(f"it has the opcode {error}, which no list of tensors has") from error


def load_common(folder: Path) -> dict[str, object]:
    """Return what a checkpoint holds beside its tensors. Raises OSError where common.pt or metadata.json is damaged."""
    try:
        read_json_object(folder / "metadata.json")
        open_regular(folder / "common.pt").close()
        found = dist_checkpointing.load_common_state_dict(str(folder))
        return {str(key): value for key, value in found.items()}
    except (*UNREADABLE, dist_checkpointing.core.CheckpointingException) as error:
        raise OSError(f"{folder}: common.pt or metadata.json cannot be read: {in_one_line(error)}") from error


def in_one_line(error: Exception) -> str:
    """Return the type and the first line of an error: unpickling explains at length how to treat intact files."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


class RestrictedReader(dcp.FileSystemReader):
    """Reads `.metadata` once, and shards of the folder itself only."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """Return the list of tensors. Raises one of UNREADABLE."""
        if self._metadata is None:
            content = read_bytes(Path(self.path) / METADATA_FILE, max_bytes=_MAX_LIST_BYTES)
            self._metadata = _checked(load_plain(content), Path(self.path))
            self._metadata.storage_meta = self._metadata.storage_meta or StorageMeta()
            self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


_PLAIN = {
    type(None), bool, int, str, tuple, list, dict, type(Path()), torch.Size, torch.dtype, torch.layout,
    torch.memory_format,
}  # fmt: skip


def _checked(metadata: object, folder: Path) -> Metadata:
    """Return a list of tensors in which everything has exactly the type that it should have, and every shard is a file
    of the folder itself."""
    if type(metadata) is not Metadata:
        raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}, not a list of tensors")
    for part in _parts(metadata):
        if type(part) not in _PLAIN | _DATACLASSES:
            raise pickle.UnpicklingError(f"it holds a {type(part).__name__}, which is no part of a list of tensors")
    tensors, storage = metadata.state_dict_metadata, metadata.storage_data
    if type(tensors) is not dict or type(storage) is not dict:
        raise pickle.UnpicklingError("it holds no list of tensors and of their places")
    for entry in tensors.values():
        if type(entry) is TensorStorageMetadata:
            _require(torch.Size, entry.size)
            _require(list, entry.chunks)
            for chunk in entry.chunks:
                _require(ChunkStorageMetadata, chunk)
                _require(torch.Size, chunk.offsets, chunk.sizes)
        else:
            _require(BytesStorageMetadata, entry)
    for index, info in storage.items():
        _require(MetadataIndex, index)
        _require(_StorageInfo, info)
        _require(int, info.offset, info.length)
        _require(str, info.relative_path)
        if info.transform_descriptors or min(info.offset, info.length) < 0:
            raise pickle.UnpicklingError(f"{index.fqn} is stored in a way that no checkpoint of a run is")
    for name in {info.relative_path for info in storage.values()}:
        if name in ("", "..") or name != Path(name).name or _leads_out(folder / name):
            raise pickle.UnpicklingError(f"it names {name!r}, which is no file of the checkpoint's folder")
    return metadata


def _require(kind: type, *values: object) -> None:
    for value in values:
        if type(value) is not kind:
            raise pickle.UnpicklingError(f"it holds a {type(value).__name__} in place of a {kind.__name__}")


def _leads_out(path: Path) -> bool:
    """Return whether there is something that is no file of this folder: a link to elsewhere, a pipe, a device."""
    return path.exists() and not (path.is_file() and path.resolve().parent == path.parent.resolve())


def _parts(root: object) -> Iterator[object]:
    """Yield every object inside another once."""
    seen: set[int] = set()
    left = [root]
    while left:
        part = left.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if isinstance(part, dict):
            left += [*part.keys(), *part.values()]
        elif isinstance(part, tuple | list):
            left += part
        elif is_dataclass(part):
            left += vars(part).values()


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """What is read of a tensor with so many dimensions, along the first of them."""

    num_dims: int
    first: int
    end: int


class _RestrictedPlanner(MCoreLoadPlanner):
    def __init__(self, rows: Mapping[tuple[str, torch.Size], _Rows], **options: Any) -> None:
        """`rows`: by key and offset of the tensors of which not all is read."""
        super().__init__(**options)
        self._rows = rows

    def create_local_plan(self) -> LoadPlan:
        """Return what this rank reads."""
        plan = super().create_local_plan()
        return replace(plan, items=[part for item in plan.items if (part := self._needed(item))])

    def _needed(self, item: ReadItem) -> ReadItem | None:
        """Return what is read of a piece, or None."""
        rows = self._rows.get((item.dest_index.fqn, item.dest_index.offset or torch.Size()))
        if rows is None:
            return item
        dim, at = len(item.lengths) - rows.num_dims, item.dest_offsets
        first, end = max(at[dim], rows.first), min(at[dim] + item.lengths[dim], rows.end)
        if first >= end:
            return None

        def moved(sizes: torch.Size, value: int) -> torch.Size:
            return torch.Size((*sizes[:dim], value, *sizes[dim + 1 :]))

        stored = item.storage_offsets
        return replace(
            item, dest_offsets=moved(at, first), lengths=moved(item.lengths, end - first),
            storage_offsets=moved(stored, stored[dim] + first - at[dim]),
        )  # fmt: skip

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        path = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, path, torch.load(value, weights_only=True))


class RestrictedStrategy(TorchDistLoadShardedStrategy):
    """Megatron's strategy for torch_dist checkpoints with the reader and the planner of this module."""

    def __init__(self, owned: OwnedRows) -> None:
        """`owned`: what is read of the optimizer's state."""
        super().__init__()
        self._owned = owned

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path) -> dict[str, object]:
        """Return the state dict with everything loaded; as the method of the base class."""
        tensors = [entry for entry in nested_values(sharded_state_dict) if isinstance(entry, ShardedTensor)]
        owned = [(tensor, own) for tensor in tensors if (own := self._owned.of(tensor.data)) is not None]
        rows = {
            (tensor.key, torch.Size(tensor.global_offset)): _Rows(num_dims=tensor.data.dim(), first=first, end=end)
            for tensor, (first, end) in owned
        }
        planner = _RestrictedPlanner(
            rows,
            shapes_validation_sharded_tensors=[t for t in tensors if not t.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={t.key: t for t in tensors if t.allow_shape_mismatch},
        )
        for tensor, (first, end) in owned:
            if tensor.allow_shape_mismatch:
                # Rows of padding are not in the checkpoint; Megatron would write zeros to all.
                tensor.data[first:end].zero_()
                tensor.allow_shape_mismatch = False
        by_key, flat_mapping, rename_mapping = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        state = mcore_to_pyt_state_dict(by_key, True)
        dcp.state_dict_loader.load_state_dict(state, RestrictedReader(checkpoint_dir), planner=planner)
        loaded = {key: _unwrap_pyt_sharded_tensor(value) for key, value in state.items()}
        loaded = _replace_sharded_keys_with_state_dict_keys(loaded, flat_mapping, rename_mapping)
        _restore_dict_types(loaded, sharded_state_dict)
        return loaded
