"""Checkpoint <-> Hugging Face folder, tensor by tensor: no model is built, no tensor is kept.

What is copied where follows the same tables as loading and exporting (conversions.py). Where each part of a parameter
lies in a distributed checkpoint, Megatron itself determines, by the sharded state of a model without memory, so every
family is covered. Invariants: a source of which anything is missing or of another shape is refused before the first
byte is written; nothing holds more than the requested part and the stored chunk that it comes from.
"""

import io
import math
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self, cast

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

from allocation import ParallelLayout, stages_of_layers
from mcore_adapter.checkpoint.checkpoint import converted_common, model_state, small_files
from mcore_adapter.checkpoint.restricted import METADATA_FILE, UNREADABLE, RestrictedReader, in_one_line, load_common
from mcore_adapter.checkpoint.writing import mark_complete, write_small_files
from mcore_adapter.device import Device, get_device
from mcore_adapter.hf.safetensors_folder import (
    FileRows,
    SafetensorsFolder,
    ShardWriter,
    copy_tokenizer,
    dtype_of,
    write_rows,
)
from mcore_adapter.hf.weights import hf_config_json, tensor_specs, write_config
from mcore_adapter.models.conversions import EMBEDDING, Conversion, OfExpert, outer_table
from mcore_adapter.models.gpt import build_model, check_layout, named_conversions
from mcore_adapter.parallel import ParallelState
from model_specs.config import ModelConfig
from model_specs.model_folder import TOKENIZER_FILES
from model_specs.tensors import hf_shapes
from model_specs.weight_files import INDEX_FILE, WeightsError, check_tensors


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
            part.key, TensorStorageMetadata(TensorProperties(dtype=part.dtype), torch.Size(part.global_shape), [])
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

    def __enter__(self) -> Self:
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


_CHECKPOINT_FILES = (METADATA_FILE, "common.pt", "metadata.json")
Progress = Callable[[int], None]
"""Called with the bytes written by each step."""


@dataclass(frozen=True)
class _Place:
    """Rows [start, stop) (or columns, where those are split) of a Hugging Face tensor, and the row of the unsharded
    parameter with which they begin."""

    start: int
    stop: int
    row: int


class ModelFile:
    """Where every tensor of one model lies in both formats."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, parallel: ParallelState) -> None:
        """`parallel`: a world of one rank on the CPU, inside Device.activate()."""
        self.config, self.dtype = config, dtype
        self.shapes = hf_shapes(config, is_critic=config.is_critic)
        self.parts: dict[Conversion, list[StoredPart]] = {}
        for part in stored_parts(
            config, parallel=parallel, device=get_device("cpu"), dtype=dtype, is_critic=config.is_critic
        ):
            self.parts.setdefault(part.conversion, []).append(part)
        self.specs = tensor_specs(self.shapes, dtype)
        self._of_name = {name: conversion for conversion in self.parts for name in conversion.names}

    @property
    def num_bytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs.values())

    def places(self, conversion: Conversion) -> Iterator[tuple[str, _Place]]:
        """Yield the pieces of a parameter, in the order of its rows."""
        dim, row = conversion.tp_dim or 0, 0
        sizes = {name: self.shapes[name][dim] for name in conversion.names}
        for piece in conversion.pieces(sizes, rank=0, tp=1):
            yield piece.name, _Place(piece.start, piece.stop, row)
            row += piece.stop - piece.start

    def read_stored(self, stored: StoredTensors, name: str) -> Tensor:
        """Return the Hugging Face tensor `name` out of a checkpoint."""
        conversion = self._of_name[name]
        parts = self.parts[conversion]
        if conversion.tp_dim == 1:  # one tensor, whole
            return stored.read(parts[0], 0, parts[0].shape[0])
        result: Tensor | None = None
        for of, place in self.places(conversion):
            if of != name:
                continue
            for part, a, b in rows_of(parts, place.row, place.row + place.stop - place.start):
                found = stored.read(part, a, b)
                if tuple(found.shape) == self.shapes[name]:
                    return found
                if result is None:
                    result = found.new_empty(self.shapes[name])
                low = place.start + a - place.row
                result[low : low + b - a] = found
        assert result is not None, f"{name} has no rows"
        return result

    def rows_stored(self, stored: StoredTensors, name: str) -> Iterator[FileRows | Tensor]:
        """Yield the tensor in consecutive pieces, without copies where possible."""
        conversion = self._of_name[name]
        if conversion.tp_dim == 1:
            (part,) = self.parts[conversion]
            yield stored.rows(part, 0, part.shape[0])
            return
        places = [place for of, place in self.places(conversion) if of == name]
        if [p.start for p in places] != [0, *(p.stop for p in places[:-1])]:
            yield self.read_stored(stored, name)
            return
        for place in places:
            for part, a, b in rows_of(self.parts[conversion], place.row, place.row + place.stop - place.start):
                yield stored.rows(part, a, b)

    def rows_of_folder(
        self, folder: SafetensorsFolder, part: StoredPart, dim: int, start: int, stop: int
    ) -> list[FileRows]:
        """Return rows (dim 0) or columns (dim 1) [start, stop) of a stored part from a Hugging Face folder, in
        consecutive pieces."""
        conversion = part.conversion
        if dim == 1 or conversion.tp_dim == 1:
            return [folder.rows(conversion.names[0], dim, start, stop)]
        low, high = part.first_row + start, part.first_row + stop
        found = []
        for name, place in self.places(conversion):
            a, b = max(low, place.row), min(high, place.row + place.stop - place.start)
            if a < b:
                found.append(folder.rows(name, 0, place.start + a - place.row, place.start + b - place.row))
        return found


def checkpoint_to_hf(source: Path, target: Path, model: ModelFile, progress: Progress) -> None:
    """Fill the folder `target` from the checkpoint `source`. Raises OSError, WeightsError."""
    stored = open_checkpoint(source, model)
    write_config(target, model.config, dtype=model.dtype, is_critic=model.config.is_critic)
    copy_tokenizer(source, target)
    writer = ShardWriter(target, model.specs)
    try:
        for name, spec in model.specs.items():
            writer.add_rows(name, model.rows_stored(stored, name))
            progress(spec.nbytes)
        writer.finish()
    finally:
        writer.close()


def hf_to_checkpoint(source: Path, target: Path, model: ModelFile, layout: ParallelLayout, progress: Progress) -> None:
    """Fill the folder `target` from the Hugging Face folder `source`, cut as ranks of `layout` would. Raises OSError,
    WeightsError, ModelConfigError."""
    check_layout(model.config, layout)
    with open_folder(source, model) as folder, StoredTensorsWriter(target) as writer:
        holders = _Holders(model, layout)
        for parts in model.parts.values():
            for part in parts:
                dim, ranks = part.conversion.tp_dim or 0, holders.of(part.conversion)
                share = part.shape[dim] // len(ranks)
                for i, rank in enumerate(ranks):
                    pieces = model.rows_of_folder(folder, part, dim, i * share, (i + 1) * share)
                    at = (0,) * dim + (i * share,) + (0,) * (len(part.shape) - dim - 1)
                    shape = (*part.shape[:dim], share, *part.shape[dim + 1 :])
                    writer.add(part, at, pieces, shape, rank=rank)
                    progress(math.prod(shape) * part.dtype.itemsize)
        writer.finish()
    config = hf_config_json(model.config, dtype=model.dtype, is_critic=model.config.is_critic)
    write_small_files(target, small_files(converted_common(), config), source)
    mark_complete(target)


def num_chunks(model: ModelFile, layout: ParallelLayout) -> int:
    """Return the number of pieces of the checkpoint that ranks of `layout` would write. Raises ModelConfigError."""
    check_layout(model.config, layout)
    holders = _Holders(model, layout)
    return sum(len(parts) * len(holders.of(conversion)) for conversion, parts in model.parts.items())


def why_no_conversion(folder: Path) -> str | None:
    """Return a reason why a folder was not written by a conversion; None if it was, so that it can be recreated."""
    names = {path.name for path in folder.iterdir()}
    is_checkpoint = "metadata.json" in names
    own = {"config.json", *TOKENIZER_FILES, *(_CHECKPOINT_FILES if is_checkpoint else (INDEX_FILE,))}
    tensors = {name for name in names if name.endswith(".distcp" if is_checkpoint else ".safetensors")}
    others = sorted(name for name in names if name not in own | tensors or not (folder / name).is_file())
    if others:
        return f"it holds {others[0]}"
    if "config.json" not in names or not tensors | names & {INDEX_FILE}:
        return "it has no config.json next to the tensors"
    if is_checkpoint:
        try:
            common = load_common(folder)
        except OSError as error:
            return str(error)
        if common != converted_common():
            return "it holds an engine's checkpoint"
    return None


def different_tensors(
    stored: StoredTensors, folder: SafetensorsFolder, model: ModelFile, dtype: torch.dtype, progress: Progress
) -> list[str]:
    """Return the names of the tensors that differ in any byte between a checkpoint and a Hugging Face folder; both as
    `dtype`."""
    different = []
    for name, spec in model.specs.items():
        wanted = dtype_of(name, dtype)
        first = model.read_stored(stored, name)
        same = first.shape == folder.shape(name)
        rows = max(1, (16 << 20) // max(1, first[0].nbytes)) if first.dim() else 1
        for start in range(0, first.shape[0], rows) if same else ():
            mine = first[start : start + rows].to(wanted).contiguous()
            other = folder.read(name, 0, start, min(start + rows, first.shape[0])).to(wanted).contiguous()
            same = same and torch.equal(mine.view(torch.uint8), other.view(torch.uint8))
        if not same:
            different.append(name)
        progress(spec.nbytes)
    return different


def open_checkpoint(source: Path, model: ModelFile) -> StoredTensors:
    """Open a checkpoint. Raises OSError, and WeightsError where it is damaged or not of this model."""
    load_common(source)
    stored = StoredTensors(source)
    stored.check([part for parts in model.parts.values() for part in parts])
    return stored


def open_folder(source: Path, model: ModelFile) -> SafetensorsFolder:
    """Open a Hugging Face folder. Raises WeightsError where it is damaged or not of this model."""
    folder = SafetensorsFolder(source)
    check_tensors(source, folder.stored, model.config, value_head=model.config.is_critic)
    return folder


def model_dtype(config: ModelConfig, name: str | None) -> torch.dtype:
    """Return `name` as a dtype, or the dtype that the config names."""
    return getattr(torch, name or config.dtype or "float32")


class _Holders:
    """Which rank of a layout writes which parameter."""

    def __init__(self, model: ModelFile, layout: ParallelLayout) -> None:
        self._layout, moe = layout, model.config.moe
        self._experts_per_rank = moe.num_experts // layout.ep if moe else 0
        self._stage_of_layer = stages_of_layers(model.config.num_layers, layout)
        self._embedding = outer_table(model.config, is_critic=model.config.is_critic)[EMBEDDING]

    def of(self, conversion: Conversion) -> Sequence[int]:
        """Return the global ranks between which tensor parallelism splits the parameter, in order, or the one that has
        it."""
        layer = re.match(r"model\.layers\.(\d+)\.", conversion.names[0])
        if layer is not None:
            stage = self._stage_of_layer[int(layer[1])]
        else:
            stage = 0 if conversion == self._embedding else self._layout.pp - 1
        first = stage * self._layout.world_size // self._layout.pp
        if isinstance(conversion, OfExpert):
            return (first + conversion.expert // self._experts_per_rank,)
        return range(first, first + (self._layout.tp if conversion.tp_dim is not None else 1))
