"""A checkpoint's model tensor by tensor, without building the model: where each part of each parameter lies in a
distributed checkpoint, reading such parts and writing them. What tools/convert.py streams through.

Megatron itself determines where (by the sharded state of a model without memory), so every family is covered.
Invariant: nothing here holds more than the requested part and the stored chunk that it comes from.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from mcore_adapter.checkpoint.checkpoint import model_state
from mcore_adapter.checkpoint.restricted import METADATA_FILE, UNREADABLE, RestrictedReader, in_one_line
from mcore_adapter.device import Device
from mcore_adapter.hf.safetensors_folder import FileRows, write_rows
from mcore_adapter.models.conversions import Conversion
from mcore_adapter.models.gpt import build_model, named_conversions
from mcore_adapter.parallel import ParallelState
from model_specs.config import ModelConfig
from model_specs.weight_files import WeightsError


@dataclass(frozen=True, kw_only=True)
class StoredPart:
    """Rows [first_row, first_row + shape[0]) of an unsharded parameter, and where they lie in the checkpoint."""

    conversion: Conversion
    first_row: int
    shape: tuple[int, ...]
    key: str
    global_shape: tuple[int, ...]
    """Of the tensor `key`: perhaps of all layers or experts."""
    prefix: tuple[int, ...]
    """Place in the leading dimensions of `key` that the parameter does not have (layer, expert)."""
    offset: tuple[int, ...]
    """Place in the remaining dimensions."""
    dtype: torch.dtype


def stored_parts(
    config: ModelConfig, *, parallel: ParallelState, device: Device, dtype: torch.dtype, is_critic: bool
) -> list[StoredPart]:
    """Return every part of every parameter, in the order of Megatron's modules. `parallel` must be a world of one
    rank."""
    assert parallel.world_size == 1, "parts of whole parameters"
    with torch.device("meta"):
        model = build_model(config, parallel=parallel, device=device, dtype=dtype, is_critic=is_critic)
    of_storage = {param.untyped_storage()._cdata: conversion for param, conversion in named_conversions(model)}
    state = model_state(model, parallel=parallel)
    apply_factories(state)
    parts = []
    for tensor in nested_values(state):
        if not isinstance(tensor, ShardedTensor):
            continue
        leading = tensor.prepend_axis_num
        shape = tuple(tensor.data.shape)
        parts.append(
            StoredPart(
                conversion=of_storage[tensor.data.untyped_storage()._cdata],
                first_row=tensor.data.storage_offset() // math.prod(shape[1:]),
                shape=shape,
                key=tensor.key,
                global_shape=tuple(tensor.global_shape),
                prefix=tuple(tensor.global_offset[:leading]),
                offset=tuple(tensor.global_offset[leading:]),
                dtype=tensor.dtype,
            )
        )
    return parts


class StoredTensors:
    """The tensors of a distributed checkpoint, whichever layout wrote it."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError where the list of tensors cannot be read."""
        self._folder, self._reader = folder, RestrictedReader(folder)
        try:
            metadata = self._reader.read_metadata()
        except UNREADABLE as error:
            raise OSError(f"{folder / METADATA_FILE}: cannot be read: {in_one_line(error)}") from error
        self._tensors = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self._storage: dict[MetadataIndex, _StorageInfo] = metadata.storage_data
        self._last: tuple[MetadataIndex, FileRows] | None = None

    def check(self, parts: Sequence[StoredPart]) -> None:
        """Raise WeightsError where the checkpoint is not of the model that these parts belong to, OSError where a file
        is missing or too short."""
        for part in parts:
            entry = self._tensors.get(part.key)
            if entry is None:
                raise WeightsError(f"{self._folder}: {part.key} is missing; config.json requires it")
            if tuple(entry.size) != part.global_shape:
                shapes = f"is {tuple(entry.size)}; config.json requires {part.global_shape}"
                raise WeightsError(f"{self._folder}: {part.key} {shapes}")
        sizes: dict[str, int] = {}
        for key in {part.key for part in parts}:
            for chunk in self._tensors[key].chunks:
                info = self._storage[MetadataIndex(key, chunk.offsets)]
                sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), info.offset + info.length)
        for name, size in sizes.items():
            path = self._folder / name
            found = path.stat().st_size if path.is_file() else None
            if found is None or found < size:
                state = "is missing" if found is None else f"has {found} bytes, not {size}"
                raise OSError(f"{path}: the checkpoint cannot be read, this file {state}")

    def read(self, part: StoredPart, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of the parameter, all of them within `part`."""
        rows = self.rows(part, start, stop)
        return rows.tensor if isinstance(rows, FileRows) else rows

    def rows(self, part: StoredPart, start: int, stop: int) -> FileRows | Tensor:
        """Return the same with their place in the file, where one chunk holds them all."""
        low = start - part.first_row + part.offset[0]
        wanted = (
            (low, low + stop - start),
            *((o, o + n) for o, n in zip(part.offset[1:], part.shape[1:], strict=True)),
        )
        result: Tensor | None = None
        for chunk in self._tensors[part.key].chunks:
            leading = len(part.prefix)
            if not all(o <= p < o + n for p, o, n in zip(part.prefix, chunk.offsets, chunk.sizes, strict=False)):
                continue
            offsets, sizes = chunk.offsets[leading:], chunk.sizes[leading:]
            overlap = [(max(a, o), min(b, o + n)) for (a, b), o, n in zip(wanted, offsets, sizes, strict=True)]
            if any(a >= b for a, b in overlap):
                continue
            whole = self._chunk(MetadataIndex(part.key, chunk.offsets))
            own = whole.tensor[tuple(p - o for p, o in zip(part.prefix, chunk.offsets, strict=False))]
            found = own[tuple(slice(a - o, b - o) for (a, b), o in zip(overlap, offsets, strict=True))]
            if tuple(overlap) == wanted:
                return whole.part(found)
            if result is None:
                result = found.new_empty(tuple(b - a for a, b in wanted))
            result[tuple(slice(a - w, b - w) for (a, b), (w, _) in zip(overlap, wanted, strict=True))] = found
        assert result is not None, f"{part.key} has no chunk at {part.prefix} {wanted}"
        return result

    def _chunk(self, index: MetadataIndex) -> FileRows:
        if self._last is None or self._last[0] != index:
            self._last = None  # let go of it before the next one comes
            info = self._storage[index]
            path = self._folder / info.relative_path
            try:
                with open(path, "rb") as stream:
                    view = self._reader._slice_file(stream, info)
                    self._last = index, _mapped(path, info.offset, view)
            except (OSError, RuntimeError, ValueError, pickle.UnpicklingError, EOFError) as error:
                raise OSError(f"{path}: the checkpoint cannot be read: {error}") from error
        return self._last[1]


def _elements_offset(view: IO[bytes]) -> int:
    """Return where the elements of a tensor begin in what torch.save() wrote."""
    reader: Any = torch._C.PyTorchFileReader(view)  # torch's stub lacks the method
    return reader.get_record_offset("data/0")


def _mapped(path: Path, offset: int, view: IO[bytes]) -> FileRows:
    """Return the tensor that torch.save() wrote at `offset` of a file, without reading it."""
    with torch.serialization.skip_data():
        like = torch.load(view, map_location="cpu", weights_only=True)
    if not like.numel():
        return FileRows(like, path, None)
    view.seek(0)
    begin = offset + _elements_offset(view)
    content = np.memmap(path, dtype=np.uint8, mode="c", offset=begin, shape=(like.untyped_storage().nbytes(),))
    stored = torch.from_numpy(content).view(like.dtype)
    return FileRows(stored, path, begin).part(stored.as_strided(like.shape, like.stride(), like.storage_offset()))


class StoredTensorsWriter:
    """Writes tensors chunk by chunk, each into the file of a rank, as if that rank had saved it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, IO[bytes]] = {}
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}

    def add(
        self,
        part: StoredPart,
        at: Sequence[int],
        pieces: Sequence[FileRows | Tensor],
        shape: Sequence[int],
        *,
        rank: int,
    ) -> None:
        """Add the piece of `part` that begins `at` this position within it; its `pieces` are consecutive."""
        name = f"__{rank}_0.distcp"
        if name not in self._files:
            self._files[name] = open(self._folder / name, "w+b")  # noqa: SIM115  closed by finish()
        stream = self._files[name]
        begin = stream.tell()
        offsets = torch.Size((*part.prefix, *(o + a for o, a in zip(part.offset, at, strict=True))))
        sizes = torch.Size((*(1 for _ in part.prefix), *shape))
        with torch.serialization.skip_data():
            torch.save(torch.empty(sizes, dtype=part.dtype), stream)  # all but the elements, for which there is room
        end = stream.tell()
        stream.flush()
        view = cast("IO[bytes]", _create_file_view(cast(io.IOBase, stream), begin, end - begin))
        if math.prod(sizes):
            offset = begin + _elements_offset(view)
            for piece in pieces:
                offset += write_rows(stream.fileno(), offset, piece, part.dtype)
        stream.seek(end)
        entry = self._tensors.setdefault(
            part.key,
            TensorStorageMetadata(TensorProperties(dtype=part.dtype), torch.Size(part.global_shape), []),
        )
        entry.chunks.append(ChunkStorageMetadata(offsets, sizes))
        index = MetadataIndex(part.key, offsets, len(entry.chunks) - 1)
        self._storage[index] = _StorageInfo(name, begin, end - begin)

    def finish(self) -> None:
        """Write the list of tensors."""
        for stream in self._files.values():
            stream.close()
        metadata = Metadata(state_dict_metadata=dict(self._tensors), storage_data=self._storage)
        buffer = io.BytesIO()
        pickle.dump(metadata, buffer)
        (self._folder / METADATA_FILE).write_bytes(buffer.getvalue())

    def __enter__(self) -> StoredTensorsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._files.values():
            stream.close()


def rows_of(parts: Sequence[StoredPart], start: int, stop: int) -> Iterator[tuple[StoredPart, int, int]]:
    """Yield the parts of a parameter that make up its rows [start, stop), each with its share of them."""
    for part in parts:
        a, b = max(start, part.first_row), min(stop, part.first_row + part.shape[0])
        if a < b:
            yield part, a, b
