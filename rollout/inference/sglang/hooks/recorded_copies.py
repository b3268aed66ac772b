"""Copies of a bucket into a server's model: recorded when it loads the bucket for the first time, and repeated.

SGLang finds the parameter of every tensor by its name, in Python: for a model with experts that takes longer than to
send it. Where its models copy goes by names, formats and shapes, so a later bucket of the same ones needs the copies
alone. Invariant: copies are repeated only if loading was seen to copy every tensor of the bucket and to do nothing else
but fill with constants, each into a place of its own in the parameters and buffers of the model, which are still where
they were.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from rollout.bucket import FlatBucket

logger = logging.getLogger(__name__)

MOST_BUCKETS = 1024
"""Recorded at once: a sender makes the same ones in every push."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


Outcome = tuple[bool, str]
"""Whether a part of an update succeeded, and a message, as SGLang's own functions return them."""
_Layout = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]


class _ModelConfig(Protocol):
    dtype: torch.dtype


class WeightUpdater(Protocol):
    """SGLang's WeightUpdater, as far as it is used."""

    device: str
    model_config: _ModelConfig
    _model_update_group: dict[str, ProcessGroup]

    def get_model(self) -> nn.Module: ...


def outcome_of(update: Callable[[], None]) -> Outcome:
    """Run a part of an update, and return what came of it."""
    try:
        update()
    except Exception as error:  # noqa: BLE001  reported to the sender, as SGLang does
        logger.exception("a bucket of weights")
        return False, f"Failed to update parameter online: {error}. Weights are partially updated."
    return True, "Succeeded to update parameter online."


class RecordedCopies:
    """The recorded copies of one scheduler process."""

    def __init__(self, places_change: Callable[[], bool] = lambda: False) -> None:
        """`places_change`: whether the server moves parts of the model, such as experts; then nothing is recorded."""
        self._places_change = places_change
        self._recorded: dict[tuple[object, ...], _Copies | None] = {}
        """Copies by model, and names, formats and shapes of a bucket. None: the model loads the bucket itself."""
        self._reasons: set[str] = set()

    def load(self, model: nn.Module, bucket: FlatBucket) -> None:
        """Load a bucket as load_weights() of the model does."""
        key = (id(model), bucket.names, bucket.dtypes, bucket.shapes)
        copies = self._recorded.get(key)
        if copies is not None and copies.are_valid():
            copies.repeat(bucket.flat)
            return
        load_weights: Callable[[Sequence[tuple[str, Tensor]]], object] = model.load_weights  # type: ignore[assignment]
        tensors = list(bucket.tensors().items())
        if self._places_change() or (key in self._recorded and copies is None):
            load_weights(tensors)
            return
        if len(self._recorded) >= MOST_BUCKETS:
            self._recorded.clear()
        with _Recorder(model, bucket.flat) as recorder:
            load_weights(tensors)
        reason = recorder.why_not(tensors)
        self._recorded[key] = None if reason else recorder.copies(bucket.flat)
        if reason and reason not in self._reasons:
            self._reasons.add(reason)
            logger.info("weight updates: the model itself loads buckets such as this one: %s", reason)


@dataclass(frozen=True, kw_only=True)
class _Owner:
    """A parameter or a buffer of the model, and where it was."""

    module: nn.Module
    name: str
    tensor: Tensor
    layout: _Layout

    @staticmethod
    def of(module: nn.Module, name: str, tensor: Tensor) -> _Owner:
        return _Owner(module=module, name=name, tensor=tensor, layout=_layout(tensor))

    def is_valid(self) -> bool:
        return getattr(self.module, self.name, None) is self.tensor and _layout(self.tensor) == self.layout


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A view of a bucket."""

    dtype: torch.dtype
    offset: int
    """Number of elements from the beginning of the bucket."""
    shape: torch.Size
    stride: tuple[int, ...]


class _Parts:
    """The parts of one bucket."""

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat
        self._typed: dict[torch.dtype, Tensor] = {}

    def __getitem__(self, part: _Part) -> Tensor:
        typed = self._typed.get(part.dtype)
        if typed is None:
            whole = self._flat.numel() // part.dtype.itemsize * part.dtype.itemsize
            typed = self._typed[part.dtype] = self._flat[:whole].view(part.dtype)
        return typed.as_strided(part.shape, part.stride, typed.storage_offset() + part.offset)


@dataclass(kw_only=True)
class _Copies:
    """The copies of one bucket."""

    owners: list[_Owner]
    together: list[tuple[list[Tensor], list[_Part]]] = field(default_factory=list)
    """Contiguous ones of equal formats, which a few kernels copy."""
    alone: list[tuple[Tensor, _Part]] = field(default_factory=list)
    constants: list[tuple[Tensor, float]] = field(default_factory=list)
    """Places that are filled with a constant, such as the padding of an embedding."""

    def are_valid(self) -> bool:
        """Return whether the model still has its parameters where they were."""
        return all(owner.is_valid() for owner in self.owners)

    @torch.no_grad()
    def repeat(self, flat: Tensor) -> None:
        parts_of = _Parts(flat)
        for targets, parts in self.together:
            torch._foreach_copy_(targets, [parts_of[part] for part in parts])
        for target, part in self.alone:
            target.copy_(parts_of[part])
        for target, value in self.constants:
            target.fill_(value)


class _Recorder(TorchDispatchMode):
    """Records what runs inside it."""

    def __init__(self, model: nn.Module, flat: Tensor) -> None:
        super().__init__()
        self._source = _address(flat)
        self._owners: dict[int, list[_Owner]] = defaultdict(list)
        """Parameters and buffers by address; several where weights are tied."""
        for module in model.modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    self._owners[_address(tensor)].append(_Owner.of(module, name, tensor))
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._constants: list[tuple[Tensor, float]] = []
        self._other = ""
        """The first operation that is neither a copy nor a view."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and self._is_copy(*args[:2]):
            self._copies.append((args[0], args[1]))
        elif func is torch.ops.aten.fill_.Scalar and self._is_owned(args[0]):
            self._constants.append((args[0], args[1]))
        elif not (func.is_view and _are_views(result, args[0])) and not self._other:
            self._other = str(func)
        return result

    def _is_copy(self, target: Tensor, source: Tensor) -> bool:
        return _address(source) == self._source and self._is_owned(target) and source.shape == target.shape

    def _is_owned(self, target: Tensor) -> bool:
        return _address(target) in self._owners

    def why_not(self, tensors: Sequence[tuple[str, Tensor]]) -> str:
        """Return why the copies of these tensors cannot be repeated; empty where they can."""
        if self._other:
            return f"it runs {self._other}"
        if _overlap(self._targets()):
            return "it writes one place twice"
        # In another thread, or not at all.
        names = {tensor.data_ptr(): name for name, tensor in tensors if tensor.numel()}
        begins = sorted(names)
        copied = {begins[bisect_right(begins, source.data_ptr()) - 1] for _, source in self._copies if source.numel()}
        unseen = [name for begin, name in names.items() if begin not in copied]
        return f"{unseen[0]} was not seen to be copied" if unseen else ""

    def _targets(self) -> list[Tensor]:
        return [target for target, _ in (*self._copies, *self._constants) if target.numel()]

    def copies(self, flat: Tensor) -> _Copies:
        """Return what was recorded, with the places of sources in `flat`."""
        used = {_address(target) for target in self._targets()}
        owners = [owner for address in used for owner in self._owners[address]]
        recorded = _Copies(owners=owners, constants=self._constants)
        together: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[_Part]]] = {}
        for target, source in self._copies:
            contiguous = target.is_contiguous() and source.is_contiguous()
            if contiguous and target.dtype == source.dtype:  # any kernel copies integers
                bits = _BITS[target.itemsize]
                target, source = target.view(bits), source.view(bits)
            offset = (source.data_ptr() - flat.data_ptr()) // source.itemsize
            part = _Part(dtype=source.dtype, offset=offset, shape=source.shape, stride=source.stride())
            if contiguous:
                targets, parts = together.setdefault((target.dtype, source.dtype), ([], []))
                targets.append(target)
                parts.append(part)
            else:
                recorded.alone.append((target, part))
        recorded.together = list(together.values())
        return recorded


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _layout(tensor: Tensor) -> _Layout:
    return _address(tensor), int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype


def _are_views(result: Tensor | Sequence[Tensor], of: Tensor) -> bool:
    """Return whether results of what may copy, as reshape() may, are views."""
    results = [result] if isinstance(result, Tensor) else result
    return all(_address(one) == _address(of) for one in results)


def _overlap(tensors: Sequence[Tensor]) -> bool:
    """Return whether two of the tensors may have an element in common: interleaved ones count as such."""
    spans = sorted(map(_span, tensors))
    return any(end > begin for (_, end), (begin, _) in pairwise(spans))


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of the first element and after the last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize
