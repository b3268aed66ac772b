"""Copies of a bucket into a model: recorded when the model loads it for the first time, and repeated after that.

SGLang finds the parameter of every tensor by its name, in Python: for a model with experts that takes longer than to
send it. Where it copies goes by names, formats and shapes alone, so a later bucket of the same ones needs the copies
alone. Stands alone, as hooks.py does. Invariant: copies are repeated only if loading was nothing but copies into
parameters and buffers of the model and constants that fill the rest of them, each to a place of its own, and those
parameters and buffers are still where they were.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

logger = logging.getLogger(__name__)

MOST_BUCKETS = 1024
"""Recorded at once: a sender makes the same ones in every push."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RecordedCopies:
    """What one scheduler process has recorded."""

    def __init__(self) -> None:
        self._recorded: dict[Any, _Copies | None] = {}
        """By names, formats and places of a bucket; None: to be loaded by the model."""

    def load(self, model: Any, flat: Tensor, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Load `tensors`, views of the bucket `flat`, as load_weights() of the model, a module of torch, does."""
        key = tuple((name, t.dtype, t.shape, t.storage_offset()) for name, t in tensors)
        copies = self._recorded.get(key)
        if copies is not None and copies.are_valid():
            copies.repeat(flat)
            return
        if key in self._recorded and copies is None:
            model.load_weights(tensors)
            return
        if len(self._recorded) >= MOST_BUCKETS:
            self._recorded.clear()
        with _Recorder(model, flat) as recorder:
            model.load_weights(tensors)
        self._recorded[key] = recorder.copies()


@dataclass(frozen=True, kw_only=True)
class _Owner:
    """A parameter or a buffer of the model, and where it was."""

    module: nn.Module
    name: str
    tensor: Tensor
    address: int

    def is_valid(self) -> bool:
        return (
            getattr(self.module, self.name, None) is self.tensor
            and self.tensor.untyped_storage().data_ptr() == self.address
        )


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A view of a bucket."""

    dtype: torch.dtype
    offset: int
    """In elements."""
    shape: torch.Size
    stride: tuple[int, ...]

    def of(self, flat: Tensor) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=flat.device)
        return empty.set_(flat.untyped_storage(), self.offset, self.shape, self.stride)  # type: ignore[call-overload]


@dataclass(kw_only=True)
class _Copies:
    """The copies of one bucket."""

    owners: list[_Owner]
    together: list[tuple[list[Tensor], list[_Part]]] = field(default_factory=list)
    """Contiguous ones of equal formats, which a few kernels copy."""
    alone: list[tuple[Tensor, _Part]] = field(default_factory=list)
    constants: list[tuple[Tensor, float]] = field(default_factory=list)
    """What is filled with them, as the padding of an embedding."""

    def are_valid(self) -> bool:
        """Return whether the model still has its parameters where they were."""
        return all(owner.is_valid() for owner in self.owners)

    @torch.no_grad()
    def repeat(self, flat: Tensor) -> None:
        for targets, parts in self.together:
            torch._foreach_copy_(targets, [part.of(flat) for part in parts])
        for target, part in self.alone:
            target.copy_(part.of(flat))
        for target, value in self.constants:
            target.fill_(value)


class _Recorder(TorchDispatchMode):
    """Records what runs inside it."""

    def __init__(self, model: nn.Module, flat: Tensor) -> None:
        super().__init__()
        self._source = flat.untyped_storage().data_ptr()
        self._owners = {
            tensor.untyped_storage().data_ptr(): _Owner(
                module=module, name=name, tensor=tensor, address=tensor.untyped_storage().data_ptr()
            )
            for module in model.modules()
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        }
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._constants: list[tuple[Tensor, float]] = []
        self._other = ""
        """What else ran."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and self._is_copy(*args[:2]):
            self._copies.append((args[0], args[1]))
        elif func is torch.ops.aten.fill_.Scalar and self._is_owned(args[0]):
            self._constants.append((args[0], args[1]))
        elif not func.is_view and not self._other:
            self._other = str(func)
        return func(*args, **(kwargs or {}))

    def _is_copy(self, target: Tensor, source: Tensor) -> bool:
        return (
            source.untyped_storage().data_ptr() == self._source
            and self._is_owned(target)
            and source.shape == target.shape
        )

    def _is_owned(self, target: Tensor) -> bool:
        return target.untyped_storage().data_ptr() in self._owners

    def copies(self) -> _Copies | None:
        """Return what was recorded; None if it cannot be repeated."""
        targets = [target for target, _ in (*self._copies, *self._constants) if target.numel()]
        if self._other or _overlap(targets):
            reason = f"it runs {self._other}" if self._other else "it writes one place twice"
            logger.info("weight updates: the model itself loads buckets such as this one: %s", reason)
            return None
        used = {target.untyped_storage().data_ptr() for target in targets}
        recorded = _Copies(owners=[self._owners[address] for address in used], constants=self._constants)
        together: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[_Part]]] = {}
        for target, source in self._copies:
            contiguous = target.is_contiguous() and source.is_contiguous()
            if contiguous and target.dtype == source.dtype:  # any kernel copies integers
                bits = _BITS[target.itemsize]
                target, source = target.view(bits), source.view(bits)
            part = _Part(
                dtype=source.dtype, offset=int(source.storage_offset()), shape=source.shape, stride=source.stride()
            )
            if contiguous:
                targets, parts = together.setdefault((target.dtype, source.dtype), ([], []))
                targets.append(target)
                parts.append(part)
            else:
                recorded.alone.append((target, part))
        recorded.together = list(together.values())
        return recorded


def _overlap(tensors: Sequence[Tensor]) -> bool:
    """Return whether two of the tensors may have an element in common: interleaved ones count as such."""
    spans = sorted(map(_span, tensors))
    return any(end > begin for (_, end), (begin, _) in pairwise(spans))


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of the first element and after the last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize
