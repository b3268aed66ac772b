"""Weights that visit the host while generators have the device.

Invariant: between to_host() and to_device() the parameters are in page-locked memory of the host, where checkpoints and
exports read them; the device memory behind them is free, although buffers still refer to it. Afterwards every parameter
is the view that it was, of the same buffer, with the same content.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class _Storage:
    """Device memory of some parameters, its copy, and what they view of it."""

    whole: Tensor  # [bytes] uint8
    copy: Tensor  # [bytes] uint8, on the host
    views: list[tuple[nn.Parameter, Tensor]]


class HostWeights:
    """The parameters of model chunks, of those that are plain tensors: others (8-bit formats) stay on the device."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._chunks = chunks
        self._storages: list[_Storage] = []
        """Of the first to_host(): their pages are used again."""
        self._on_host = False

    def to_host(self) -> None:
        """Move everything there; complete when it returns."""
        if self._on_host:
            return
        self._storages = self._storages or list(_storages(self._chunks))
        for storage in self._storages:
            storage.copy.copy_(storage.whole)  # waits for the device
            for param, view in storage.views:
                like = torch.empty(0, dtype=view.dtype)
                copy = storage.copy.untyped_storage()
                param.data = _view(copy, like, int(view.storage_offset()), view.shape, view.stride())
        for storage in self._storages:
            storage.whole.untyped_storage().resize_(0)
        self._on_host = True

    def to_device(self) -> None:
        """Reverse to_host()."""
        if not self._on_host:
            return
        for storage in self._storages:
            storage.whole.untyped_storage().resize_(storage.copy.nbytes)
            storage.whole.copy_(storage.copy, non_blocking=True)
            for param, view in storage.views:
                param.data = view
        self._on_host = False


def _storages(chunks: Sequence[nn.Module]) -> Iterator[_Storage]:
    """Yield each piece of device memory that parameters are in, once."""
    views: dict[int, list[tuple[nn.Parameter, Tensor]]] = {}
    for chunk in chunks:
        for param in chunk.parameters():
            if type(param.data) is Tensor and param.numel():
                views.setdefault(param.data.untyped_storage().data_ptr(), []).append((param, param.data))
    for of_one in views.values():
        first = of_one[0][1]
        memory = first.untyped_storage()
        whole = _view(memory, torch.empty(0, dtype=torch.uint8, device=first.device), 0, (memory.nbytes(),), (1,))
        copy = torch.empty(whole.shape, dtype=torch.uint8, pin_memory=first.device.type != "cpu")
        yield _Storage(whole, copy, of_one)


def _view(
    memory: torch.UntypedStorage, like: Tensor, start: int, shape: Sequence[int], strides: Sequence[int]
) -> Tensor:
    """Return a view of `memory` in the format and on the device of `like`; `start` counts elements."""
    return like.set_(memory, start, shape, strides)  # type: ignore[call-overload]  # the stubs lack untyped storages
