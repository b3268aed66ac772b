"""Changed values of weights: what a push through files writes in place of whole tensors, and how a server applies it.

One update with a small learning rate leaves most values in bfloat16 as they were. A folder of changes holds, for each
tensor, the positions and new values of those whose bits differ from the push before, and an index with the identity of
both pushes and the SHA-256 of every file. Only weights of the push before can take changes.

The file is also read by servers, which import nothing else of this project: it stands alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

INDEX = "changes.json"
IDENTITY = "push.json"
"""In a folder of whole tensors: the identity of the push."""
NOT_THE_BASE = "other weights than these changes are for"
"""In the message of a server that needs a whole push."""

_LONGEST_GAP = 255
_BLOCK = 1 << 18
"""Elements that are compared at once: they stay in the cache."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_VALUES, _GAPS = ":values", ":gaps"


class ChangesError(RuntimeError):
    """A folder of changes is damaged, or is for other weights than these."""


def changed_positions(new: Tensor, old: Tensor) -> Tensor:
    """Return the positions, in ascending order, of elements whose bits differ: [n] integers. Both of one shape and
    format, on the CPU."""
    bits = _BITS[new.element_size()]
    after, before = (np.asarray(tensor.reshape(-1).view(bits)) for tensor in (new, old))
    parts = [
        np.flatnonzero(after[start : start + _BLOCK] != before[start : start + _BLOCK]).astype(_index_type(len(after)))
        + start
        for start in range(0, len(after), _BLOCK)
    ]
    return torch.from_numpy(np.concatenate(parts)) if parts else torch.empty(0, dtype=torch.int32)


def _index_type(count: int) -> Any:
    return np.int32 if count < 1 << 31 else np.int64


def encode_gaps(positions: Tensor) -> Tensor:
    """Return ascending positions, on the CPU, as bytes: [m] uint8. Each is the number of elements since the one before;
    255 stands for 255 elements without a change."""
    gaps = np.diff(positions.numpy(), prepend=positions.numpy().dtype.type(-1)) - 1
    encoded, far = gaps.astype(np.uint8), np.flatnonzero(gaps >= _LONGEST_GAP)
    encoded[far] = gaps[far] % _LONGEST_GAP
    return torch.from_numpy(np.insert(encoded, np.repeat(far, gaps[far] // _LONGEST_GAP), np.uint8(_LONGEST_GAP)))


def decode_gaps(encoded: Tensor, num_elements: int) -> Tensor:
    """Undo encode_gaps() of a tensor of `num_elements`: [n] integers."""
    dtype = _index_type(num_elements)
    if encoded.device.type == "cpu":  # torch takes many times as long there
        steps, kept = encoded.numpy().astype(dtype), encoded.numpy() != _LONGEST_GAP
        steps += kept
        positions = np.cumsum(steps, dtype=dtype) - dtype(1)
        return torch.from_numpy(positions if kept.all() else positions[kept])
    kept_there = encoded != _LONGEST_GAP
    of_torch = torch.int32 if dtype is np.int32 else torch.int64
    return (torch.cumsum(encoded.to(of_torch) + kept_there, 0, dtype=of_torch) - 1)[kept_there]


def changes_of(new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """Return the tensors of a file of changes, and the number of values that have changed. A tensor is whole where its
    changed values and their positions would take more bytes."""
    content: dict[str, Tensor] = {}
    count = 0
    for name, tensor in new.items():
        positions = changed_positions(tensor, old[name])
        if not len(positions):
            continue
        gaps, values = encode_gaps(positions), tensor.reshape(-1).index_select(0, positions)
        if gaps.nbytes + values.nbytes < tensor.nbytes:
            content |= {name + _GAPS: gaps, name + _VALUES: values}
        else:
            content[name] = tensor
        count += len(positions)
    return content, count


class ChangesWriter:
    """Writes a folder of changes, one file for each bucket."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, str] = {}
        self._shapes: dict[str, list[int]] = {}
        self.num_bytes = 0
        self.num_changed = 0
        self.num_values = 0

    def add(self, new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> None:
        """Write what differs between two versions of a bucket. Raises OSError."""
        content, count = changes_of(new, old)
        self._shapes |= {name: list(tensor.shape) for name, tensor in new.items()}
        self.num_changed += count
        self.num_values += sum(tensor.numel() for tensor in new.values())
        if content:
            path = self._folder / f"changes-{len(self._files):05d}.safetensors"
            save_file(content, path)
            self._files[path.name] = _sha256(path)
            self.num_bytes += path.stat().st_size

    def finish(self, *, base: str, identity: str) -> None:
        """Write the index, without which a server takes the folder for one of whole tensors. Raises OSError."""
        index = {"base": base, "id": identity, "files": self._files, "shapes": self._shapes}
        (self._folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


class ChangesReader:
    """A folder of changes to the weights of the push `base`; its files are checked."""

    def __init__(self, folder: Path, base: str | None) -> None:
        """Raises ChangesError where the receiver's weights are not those of the push before, or a file is damaged."""
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if index["base"] != base:
            raise ChangesError(
                f"{NOT_THE_BASE}: it has {base or 'those of no push through files'}, not {index['base']}"
            )
        for file, expected in index["files"].items():
            if _sha256(folder / file) != expected:
                raise ChangesError(f"{folder / file}: its SHA-256 is not the one in {INDEX}")
        self.identity: str = index["id"]
        self._folder, self._files, self._shapes = folder, list(index["files"]), index["shapes"]

    def tensors(
        self, device: torch.device, changed: Callable[[Sequence[int], Tensor, Tensor], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, tensor) of every tensor with changes: a whole one, or what `changed` returns:
        Changed.of of changed.py."""
        for file in self._files:
            # Not device=: to safetensors "cuda" is the first GPU, to torch the process's own.
            with safe_open(self._folder / file, framework="pt") as content:
                for key in content.keys():  # noqa: SIM118  it is no mapping
                    name, mark, kind = key.rpartition(":")
                    tensor = content.get_tensor(key).to(device)
                    if not mark:
                        yield key, tensor
                    elif f":{kind}" == _VALUES:
                        shape = torch.Size(self._shapes[name])
                        positions = decode_gaps(content.get_tensor(name + _GAPS).to(device), shape.numel())
                        yield name, changed(shape, positions, tensor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
