"""Activations and weights that visit the host: between forward and backward, and while generators have the device.

What a layer keeps lies in a few tensors that several operations hold. Their memory is copied to page-locked pages and
released behind the tensors' backs, as Megatron's CheckpointWithoutOutput does, and given back before the backward pass
of the layer begins. Invariants: a layer's tensors are complete when the gradient of its output is there; at most
_IN_FLIGHT layers wait for their copies. Between to_host() and to_device() the weights are in page-locked memory of the
host, where checkpoints and exports read them; the device memory behind them is free, although buffers still refer to
it. Afterwards every parameter is the view that it was, of the same buffer, with the same content.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SMALLEST_BYTES = 1 << 20
"""Smaller tensors stay: there are none among those that are copied, but in tests."""
_IN_FLIGHT = 2


class Pages:
    """Memory of the host, taken at first use and used again, and the one stream of all copies from and to it."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._stream: torch.Stream | None = None

    def stream(self, device: torch.device) -> torch.Stream | None:
        """Return the stream; None where copies are complete when they return."""
        if self._stream is None and device.type != "cpu":
            self._stream = torch.get_device_module(device).Stream(device)
        return self._stream

    def take(self, num_bytes: int, *, locked: bool) -> Tensor:
        """Return [at least num_bytes] uint8. A free page that is too small makes way for one that is not."""
        self._free.sort(key=len)
        for i, page in enumerate(self._free):
            if len(page) >= num_bytes:
                return self._free.pop(i)
        if self._free:
            self._free.pop()
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=locked)

    def give(self, page: Tensor) -> None:
        self._free.append(page)


class _Stay:
    """The tensors of one pass through a layer, on the host."""

    def __init__(self, tensors: Sequence[Tensor], before: _Stay | None, pages: Pages) -> None:
        self._before, self._pages = before, pages
        device = tensors[0].device
        self._module = torch.get_device_module(device)
        self._stream = stream = pages.stream(device)
        self._held: list[tuple[torch.UntypedStorage, int, Tensor]] = []
        self._ready: torch.Event | None = None
        self._fetched = False
        if stream is not None:
            stream.wait_stream(self._module.current_stream())
        for tensor in {t.untyped_storage().data_ptr(): t for t in tensors}.values():
            storage = tensor.untyped_storage()
            if storage.nbytes() < SMALLEST_BYTES:
                continue
            page = pages.take(storage.nbytes(), locked=stream is not None)
            self._held.append((storage, storage.nbytes(), page))
            with self._on_stream():
                page[: storage.nbytes()].copy_(_bytes(storage), non_blocking=True)
            if stream is not None:
                tensor.record_stream(stream)  # its memory is free when it is copied
            storage.resize_(0)
        self.copied = stream.record_event() if stream is not None else None

    def restore(self, *_: object) -> None:
        """Wait for the tensors, and begin to fetch those of the layer before: the hook of the output's gradient."""
        self.fetch()
        if self._ready is not None:
            self._module.current_stream().wait_event(self._ready)
        if self._before is not None:
            self._before.fetch()
            self._before = None

    def fetch(self) -> None:
        """Begin to copy the tensors to the device."""
        if self._fetched:
            return
        self._fetched = True
        for storage, size, _ in self._held:
            storage.resize_(size)
        if self._stream is not None:
            self._stream.wait_stream(self._module.current_stream())  # for the memory's last use
        with self._on_stream():
            for storage, size, page in self._held:
                _bytes(storage).copy_(page[:size], non_blocking=True)
        if self._stream is not None:
            self._ready = self._stream.record_event()
        for _, _, page in self._held:
            self._pages.give(page)  # the next copy into it is on the same stream
        self._held = []

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else self._module.stream(self._stream)


class HostActivations:
    """Moves what the layers of one chunk keep: their input, the output of the core attention, and what is before the
    MLP and, of experts, behind its norm and the dispatch or gathering of its tokens."""

    def __init__(self, layers: Sequence[Any], pages: Pages) -> None:
        self.moved: frozenset[int] = frozenset()
        """The layers whose tensors are moved."""
        self._pages = pages
        self._seen: list[Tensor] | None = None
        """Of the layer under way."""
        self._last: _Stay | None = None
        self._copying: deque[_Stay] = deque()
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._enterer(number), with_kwargs=True)
            experts = getattr(layer.mlp, "experts", None)
            for part in (layer.self_attention.linear_proj, layer.pre_mlp_layernorm, layer.mlp, experts):
                if part is not None:
                    part.register_forward_pre_hook(self._see)
            layer.register_forward_hook(self._leave)

    def _enterer(self, number: int) -> Callable[[nn.Module, tuple[Tensor, ...], dict[str, Tensor]], None]:
        def enter(layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            moves = number in self.moved and layer.training and torch.is_grad_enabled()
            self._seen = [kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]] if moves else None
            if number == 0:
                self._last = None

        return enter

    def _see(self, part: nn.Module, args: tuple[Tensor, ...]) -> None:
        if self._seen is not None:
            self._seen.append(args[0])

    def _leave(self, layer: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, object]) -> None:
        seen, self._seen = self._seen, None
        if seen is None:
            return
        self._last = _Stay(seen, self._last, self._pages)
        output[0].register_hook(self._last.restore)
        # The host must not run ahead of the device: what is not copied yet cannot be used again.
        self._copying.append(self._last)
        if len(self._copying) > _IN_FLIGHT:
            copied = self._copying.popleft().copied
            if copied is not None:
                copied.synchronize()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


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
