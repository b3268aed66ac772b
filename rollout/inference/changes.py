"""Changed values of weights: what a push through files writes in place of whole tensors, and how a server applies it.

One update with a small learning rate leaves most values in bfloat16 as they were. A folder of changes holds, for each
tensor, the positions and new values of those whose bits differ from the push before, and an index with the identity of
both pushes and the SHA-256 of every file. Only weights of the push before can take changes.

A server loads weights by code of its own, one for each model family, which cuts, joins and copies tensors. `Changed`
passes through that code like the whole tensor, without its memory: shape operations act on a tensor of the meta device,
whose strides give the place of each changed value where the tensor is copied to; the others stay.

The file is also read by servers, so nothing else of this project is imported.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

INDEX = "changes.json"
IDENTITY = "push.json"
"""File with the identity of the push, in a folder of whole tensors."""
NOT_THE_BASE = "other weights than these changes are for"
"""Part of the message of a server that needs a whole push."""

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


def _index_type(count: int) -> type[np.signedinteger]:
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

    def tensors(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, tensor) of every tensor with changes: a whole one, or a Changed."""
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
                        yield name, Changed.of(shape, positions, tensor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Changed(Tensor):
    """A tensor of which only some values are there. Where it is copied to, the others stay as they are.

    Operations that only change the shape, the format or the device are possible; every other operation raises
    NotImplementedError. Values that are not there are NaN where the format has it: `parameter.data = tensor` is no
    operation that a tensor can refuse.
    """

    meta: Tensor
    """A meta tensor: its strides tell where the elements lie in the contiguous tensor that `positions` refer to."""
    positions: Tensor
    """[n] integers, ascending: where those lie in that tensor."""
    present: Tensor  # [n]

    @staticmethod
    def of(shape: Sequence[int], positions: Tensor, values: Tensor) -> Changed:
        """Return a tensor of `shape` with `values` [n] at `positions` [n], ascending, in the flattened tensor."""
        return _changed(torch.empty(shape, dtype=values.dtype, device="meta"), positions, values)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"Changed({list(self.meta.shape)}, {len(self.present)} values)"

    def __format__(self, specification: str) -> str:
        return repr(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        first: Any = args[0] if args else None
        if not isinstance(first, Changed):
            if name == "copy_" and len(args) > 1:
                _put(first, args[1])
                return first
            if name == "__setitem__":
                _set(*args)
                return None
            raise _not_there(name)
        if name in ("to", "cpu"):
            values = getattr(first.present, name)(
                *(a.present if isinstance(a, Changed) else a for a in args[1:]), **kwargs
            )
            return _changed(first.meta, first.positions.to(values.device), values)
        if name == "contiguous" and not first.meta.is_contiguous() and not _overlaps(first.meta):
            return _contiguous(first)  # so that view() is possible, as of a whole tensor
        if name in ("clone", "contiguous", "detach"):
            return _changed(first.meta, first.positions, first.present)
        if name in _SHAPES:
            return _reshaped(func, name, first, args, kwargs)
        if name in _VALUES_OUT and not any(isinstance(a, Changed) for a in args[1:]):
            values, mask = _dense(first)
            if bool(mask.all()):
                return func(values, *args[1:], **kwargs)
        elif name in ("stride", "storage_offset", "is_contiguous"):
            return func(first.meta, *args[1:], **kwargs)
        elif name in _NO_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        raise _not_there(name)


_SHAPES = frozenset(
    (
        *("narrow", "select", "__getitem__", "unbind", "chunk", "split", "tensor_split", "split_with_sizes"),
        *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", "expand"),
        *("transpose", "swapaxes", "t", "permute", "movedim", "__get__"),
    )
)
"""Operations whose result holds elements of the tensor at other places. `__get__`: the properties that are tensors,
such as `data` and `T`, and those that depend on no value, such as `shape`."""


_VALUES_OUT = frozenset(("item", "tolist", "numpy", "equal", "allclose", "__bool__", "__int__", "__float__"))
"""Operations whose result is no tensor and depends on every value: allowed where all are there."""
_NO_VALUES = frozenset(
    (
        *("size", "dim", "ndimension", "numel", "nelement", "element_size", "__len__"),
        *("is_floating_point", "is_complex", "get_device", "type"),
    )
)
"""Operations whose result is no tensor and depends on no value."""


def _not_there(name: str) -> NotImplementedError:
    return NotImplementedError(f"{name} of a tensor of which only some values are there")


def _changed(meta: Tensor, positions: Tensor, present: Tensor) -> Changed:
    nothing = present.new_full((), torch.nan if present.is_floating_point() else 0)  # for all elements
    changed = nothing.expand(meta.shape).as_subclass(Changed)
    changed.meta, changed.positions, changed.present = meta, positions, present
    return changed


def _reshaped(func: Any, name: str, changed: Changed, args: Any, kwargs: Any) -> Any:
    """Return the result of an operation of _SHAPES."""
    metas = [a.meta if isinstance(a, Changed) else a for a in args[1:]]
    result = func(changed.meta, *metas, **kwargs)
    parts = (result,) if isinstance(result, Tensor) else result if isinstance(result, tuple | list) else ()
    if not parts or not all(isinstance(part, Tensor) for part in parts):  # no tensor: a property
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if any(part.dtype != changed.meta.dtype for part in parts) or any(isinstance(a, torch.dtype) for a in args):
        raise _not_there(name)
    if any(part.untyped_storage()._cdata != changed.meta.untyped_storage()._cdata for part in parts):
        if _overlaps(changed.meta):
            raise _not_there(name)
        return func(_contiguous(changed), *args[1:], **kwargs)  # the operation copies
    wrapped = [_changed(part, changed.positions, changed.present) for part in parts]
    return wrapped[0] if isinstance(result, Tensor) else type(result)(wrapped)


def _contiguous(changed: Changed) -> Changed:
    """Return the same of contiguous strides; without overlaps."""
    whole = torch.empty(changed.meta.shape, dtype=changed.meta.dtype, device="meta")
    places, values = _places(changed, whole.stride())
    order = torch.argsort(places)
    return _changed(whole, places[order], values[order])


def _places(changed: Changed, strides: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the values that lie in a tensor without overlaps, and the place of each in memory of these strides."""
    sizes, own, offset = changed.meta.size(), changed.meta.stride(), int(changed.meta.storage_offset())
    axes = sorted((axis for axis, size in enumerate(sizes) if size > 1), key=lambda axis: -own[axis])
    limits = torch.tensor([offset, offset + _reach(sizes, own)], device=changed.positions.device)
    begin, end = torch.searchsorted(changed.positions, limits.to(changed.positions.dtype)).tolist()
    left, values = changed.positions[begin:end], changed.present[begin:end]
    if offset:
        left = left - offset
    if _reach(sizes, strides) >= 1 << 31:
        left = left.to(torch.int64)
    if changed.meta.is_contiguous() and tuple(strides) == own:
        return left, values
    places, inside = torch.zeros_like(left), torch.ones_like(left, dtype=torch.bool)
    for axis in axes:
        index = left // own[axis]
        left = left - index * own[axis]
        places += index * strides[axis]
        inside &= index < sizes[axis]
    inside &= left == 0
    return places[inside], values[inside]


def _reach(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements of memory from the first element to the last one."""
    return sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1


def _overlaps(view: Tensor) -> bool:
    """Return whether an element of memory is at several places of a view, or may be."""
    axes = sorted((view.stride(axis), view.size(axis)) for axis in range(view.dim()) if view.size(axis) > 1)
    reach = 0
    for stride, size in axes:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _put(target: Tensor, source: Tensor) -> None:
    """Write the values of `source` into `target`."""
    if not isinstance(source, Changed):
        target.copy_(source)
    elif target.shape != source.meta.shape or _overlaps(source.meta) or _overlaps(target):
        values, mask = (x.to(target.device) for x in _dense(source))
        target.copy_(torch.where(mask, values.to(target.dtype), target))
    elif target.numel():
        places, values = _places(source, target.stride())
        reach = _reach(target.shape, target.stride())
        memory = torch.as_strided(target.detach(), (reach,), (1,), int(target.storage_offset()))
        values = values.to(target.device, target.dtype)
        if target.device.type == "cpu":  # numpy takes less time there, and has no bfloat16
            bits = _BITS[target.element_size()]
            memory.view(bits).numpy()[places.numpy()] = values.view(bits).numpy()
        else:
            memory[places.to(target.device)] = values


def _set(target: Tensor, place: Any, source: Tensor) -> None:
    part = target[place]
    _put(part, source)
    if part.untyped_storage().data_ptr() != target.untyped_storage().data_ptr():  # a copy: `place` is a tensor
        target[place] = part


def _dense(changed: Changed) -> tuple[Tensor, Tensor]:
    """Return the tensor, with zeros for what is not there, and a mask of what is."""
    count = changed.meta.untyped_storage().nbytes() // changed.meta.element_size()
    values, mask = changed.present.new_zeros(count), torch.zeros(count, dtype=torch.bool, device=changed.present.device)
    values[changed.positions], mask[changed.positions] = changed.present, True
    size, stride, offset = changed.meta.size(), changed.meta.stride(), changed.meta.storage_offset()
    return torch.as_strided(values, size, stride, offset), torch.as_strided(mask, size, stride, offset)
