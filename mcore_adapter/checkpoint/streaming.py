"""Checkpoint <-> Hugging Face folder, tensor by tensor: no model is built, no tensor is kept.

What is copied where follows the same tables as loading and exporting (conversions.py); stored_tensors.py finds
parameters in a checkpoint. Invariant: a source of which anything is missing or of another shape is refused before the
first byte is written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from allocation import ParallelLayout, stages_of_layers
from mcore_adapter.checkpoint.checkpoint import converted_common, small_files
from mcore_adapter.checkpoint.restricted import METADATA_FILE, load_common
from mcore_adapter.checkpoint.stored_tensors import (
    StoredPart,
    StoredTensors,
    StoredTensorsWriter,
    rows_of,
    stored_parts,
)
from mcore_adapter.checkpoint.writing import mark_complete, write_small_files
from mcore_adapter.device import get_device
from mcore_adapter.hf.exporting import hf_config_json, tensor_specs, write_config
from mcore_adapter.hf.safetensors_folder import (
    FileRows,
    SafetensorsFolder,
    ShardWriter,
    copy_tokenizer,
    dtype_of,
)
from mcore_adapter.models.conversions import EMBEDDING, Conversion, OfExpert, outer_table
from mcore_adapter.models.gpt import check_layout
from mcore_adapter.parallel import ParallelState
from model_specs.config import ModelConfig
from model_specs.model_folder import TOKENIZER_FILES
from model_specs.tensors import hf_shapes
from model_specs.weight_files import INDEX_FILE, check_tensors

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
