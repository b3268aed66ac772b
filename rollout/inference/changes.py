"""Changed values of weights: what a push through files writes in place of whole tensors, and how a server applies it.

One update with a small learning rate leaves most values in bfloat16 as they were. A folder of changes holds, for each
tensor, the positions and new values of those whose bits differ from the push before, and an index with the identity of
both pushes and the SHA-256 of every file. Only weights of the push before can take changes.

A server loads weights by code of its own, one for each model family, which cuts, joins and copies tensors. `Changed`
passes through that code like the whole tensor: shape operations act on values and mask, and where it is copied, values
that have not changed stay.

The file is also read by servers, which import nothing else of this project: it stands alone.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_VALUES, _GAPS = ":values", ":gaps"


class ChangesError(RuntimeError):
    """A folder of changes is damaged, or is for other weights than these."""


def changed_positions(new: Tensor, old: Tensor) -> Tensor:
    """Return the positions, in ascending order, of elements whose bits differ: [n] int64. Both of one shape and
    format."""
    bits = _BITS[new.element_size()]
    return (new.reshape(-1).view(bits) != old.reshape(-1).view(bits)).nonzero().reshape(-1)


def encode_gaps(positions: Tensor) -> Tensor:
    """Return ascending positions as bytes: [m] uint8. Each is the number of elements since the one before; 255 stands
    for 255 elements without a change."""
    gaps = torch.diff(positions, prepend=positions.new_tensor([-1])) - 1
    ends = torch.cumsum(gaps // _LONGEST_GAP + 1, 0)
    encoded = torch.full((int(ends[-1]) if len(ends) else 0,), _LONGEST_GAP, dtype=torch.uint8)
    encoded[ends - 1] = (gaps % _LONGEST_GAP).to(torch.uint8)
    return encoded


def decode_gaps(encoded: Tensor) -> Tensor:
    """Undo encode_gaps(): [n] int64."""
    ends = (encoded != _LONGEST_GAP).nonzero().reshape(-1)
    return torch.cumsum(encoded.to(torch.int64), 0)[ends] + torch.arange(len(ends), device=encoded.device)


def changes_of(new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """Return the tensors of a file of changes, and the number of values that have changed. A tensor is whole where its
    changed values and their positions would take more bytes."""
    content: dict[str, Tensor] = {}
    count = 0
    for name, tensor in new.items():
        positions = changed_positions(tensor, old[name])
        if not len(positions):
            continue
        gaps, values = encode_gaps(positions), tensor.reshape(-1)[positions]
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
        self.seconds = 0.0

    def add(self, new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> None:
        """Write what differs between two versions of a bucket. Raises OSError."""
        start = time.perf_counter()
        content, count = changes_of(new, old)
        self._shapes |= {name: list(tensor.shape) for name, tensor in new.items()}
        self.num_changed += count
        self.num_values += sum(tensor.numel() for tensor in new.values())
        if content:
            path = self._folder / f"changes-{len(self._files):05d}.safetensors"
            save_file(content, path)
            self._files[path.name] = _sha256(path)
            self.num_bytes += path.stat().st_size
        self.seconds += time.perf_counter() - start

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

    def tensors(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, tensor) of every tensor with changes: a Changed, or a whole one."""
        for file in self._files:
            # Not device=: to safetensors "cuda" is the first GPU, to torch the process's own.
            with safe_open(self._folder / file, framework="pt") as content:
                for key in content.keys():  # noqa: SIM118  it is no mapping
                    name, mark, kind = key.rpartition(":")
                    tensor = content.get_tensor(key).to(device)
                    if not mark:
                        yield key, tensor
                    elif f":{kind}" == _VALUES:
                        positions = decode_gaps(content.get_tensor(name + _GAPS).to(device))
                        yield name, Changed.of(self._shapes[name], positions, tensor)


class Changed(Tensor):
    """A tensor of which only the values under `mask` count. Where it is copied to, the others stay as they are.

    Operations that only change the shape or the device keep both together; every other operation raises
    NotImplementedError. Values that are not there are NaN where the format has it: `parameter.data = tensor` is no
    operation that a tensor can refuse.
    """

    mask: Tensor

    @staticmethod
    def of(shape: list[int], positions: Tensor, values: Tensor) -> Changed:
        """Return a tensor of `shape` with `values` [n] at `positions` [n], int64 in the flattened tensor."""
        whole = values.new_full((torch.Size(shape).numel(),), torch.nan if values.is_floating_point() else 0)
        whole[positions] = values
        mask = torch.zeros(whole.shape, dtype=torch.bool, device=whole.device)
        mask[positions] = True
        return _with_mask(whole.view(shape), mask.view(shape))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        first: Any = args[0] if args else None
        if not isinstance(first, Changed):
            if name == "copy_" and len(args) > 1:
                return first.copy_(_merged(first, args[1]))
            if name == "__setitem__":
                _, place, source = args
                first[place] = _merged(first[place], source)
                return None
            raise _not_there(name)
        values_out = name in _VALUES_OUT and bool(first.mask.all())
        if not (values_out or name in _KEEPS_BOTH or name in _NO_VALUES):
            raise _not_there(name)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*_plain(args), **kwargs)
        tensors = _tensors(result)
        if not tensors:
            return result
        if name not in _KEEPS_BOTH or (name != "to" and any(t.dtype != first.dtype for t in tensors)):
            raise _not_there(name)
        with torch._C.DisableTorchFunctionSubclass():
            masks = func(*_masks(args), **_masks(kwargs))
        if isinstance(result, Tensor):
            return _with_mask(result, masks)
        return type(result)(map(_with_mask, result, masks))


_KEEPS_BOTH = frozenset(
    (
        *("narrow", "select", "__getitem__", "unbind", "chunk", "split", "tensor_split", "split_with_sizes"),
        *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", "expand"),
        *("transpose", "swapaxes", "t", "permute", "movedim"),
        *("contiguous", "clone", "detach", "to", "cpu", "__get__"),
    )
)
"""Operations whose result holds values of the tensor where the same operation puts the mask. `__get__`: the properties
that are tensors, such as `data` and `T`."""


_VALUES_OUT = frozenset(("item", "tolist", "numpy", "equal", "allclose", "__bool__", "__int__", "__float__"))
"""Operations whose result is no tensor and depends on every value: allowed where all are there."""
_NO_VALUES = frozenset(
    (
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "__len__"),
        *("is_contiguous", "is_floating_point", "is_complex", "get_device", "type", "__repr__", "__format__"),
    )
)
"""Operations whose result is no tensor and depends on no value, or is for people to read."""


def _not_there(name: str) -> NotImplementedError:
    return NotImplementedError(f"{name} of a tensor of which only some values are there")


def _with_mask(values: Tensor, mask: Tensor) -> Changed:
    changed = values.as_subclass(Changed)
    changed.mask = mask.to(torch.bool)  # to() another format means the values
    return changed


def _plain(values: Any) -> Any:
    if isinstance(values, Changed):
        return values.as_subclass(Tensor)
    return tuple(map(_plain, values)) if isinstance(values, tuple) else values


def _masks(values: Any) -> Any:
    """Return arguments with masks in place of tensors."""
    if isinstance(values, Changed):
        return values.mask
    if isinstance(values, dict):
        return {key: _masks(value) for key, value in values.items()}
    return tuple(map(_masks, values)) if isinstance(values, tuple) else values


def _tensors(result: Any) -> tuple[Tensor, ...]:
    """Return the tensors of a result: one, several, or none."""
    if isinstance(result, Tensor):
        return (result,)
    return tuple(t for t in result if isinstance(t, Tensor)) if isinstance(result, list | tuple) else ()


def _merged(target: Tensor, source: Tensor) -> Tensor:
    """Return `target` with the values of `source`."""
    if not isinstance(source, Changed):
        return source
    mask = source.mask.to(target.device)
    return torch.where(mask, _plain(source).to(target.device, target.dtype), target)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
