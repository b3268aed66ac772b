"""Where fp32 masters and Adam's moments lie: on the device, or in page-locked memory of the host.

Invariant: every tensor is in one place; its page of the host is taken at the first move and used again. An optimizer
sees parameters, gradients and moments of what it updates on the device. When a method returns, the current stream is
ordered behind every copy that it has queued.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

MASTER = ""
"""Beside the names of moments: the parameter of the optimizer itself, a fp32 copy of what the model computes with."""
PIECE_BYTES = 1 << 28
"""Most bytes of moments in one piece of step_in_pieces(), unless one parameter needs more."""
SLAB_BYTES = 4 << 30
"""The experts of Qwen3-30B-A3B over four ranks leave 2 % of each slab unused; of slabs of 1 GiB it would be 6 %."""
ALIGNMENT = 256
"""Every page begins at a multiple of so many bytes."""


class HostPages:
    """Memory for copies of tensors, cut out of page-locked slabs: torch takes a power of two for every allocation.

    Invariant: pages do not overlap and are not given back; slabs live at least as long as the object. torch records a
    copy from or to a page as a use of the whole slab, which matters only when the slab is freed."""

    def __init__(self, total_bytes: int, slab_bytes: int) -> None:
        """`total_bytes`: an estimate of all pages; no slab is much larger than what is left of it or than one page."""
        self._expected, self.slab_bytes = total_bytes, slab_bytes
        self._free: list[Tensor] = []
        """The unused end of each slab: [bytes] uint8."""
        self._reserved: SimpleQueue[Tensor | Exception] = SimpleQueue()
        self._num_reserved = 0

    def reserve(self, device: torch.device) -> None:
        """Begin to take the whole slabs that further pages, each at most a slab, will fill beside what is free, for
        copies from and to a GPU. Page-locking them takes seconds for every 10 GB, which a thread spends here instead of
        take()."""
        self._num_reserved = max(0, self._expected - sum(map(len, self._free))) // self.slab_bytes
        arguments = (weakref.ref(self), self._reserved, self._num_reserved, self.slab_bytes, device)
        threading.Thread(target=_take_slabs, args=arguments, name="reserve").start()

    def take(self, like: Tensor) -> Tensor:
        """Return a page of the shape and format of a contiguous tensor, from the first slab that has room for it; its
        content is undefined."""
        assert like.is_contiguous(), "Megatron's shards have one dimension"
        size = _aligned(like.nbytes)
        number = next((i for i, free in enumerate(self._free) if len(free) >= size), len(self._free))
        if number == len(self._free):
            self._free.append(self._slab(size))
        self._expected -= size
        free = self._free[number]
        self._free[number] = free[size:]
        return free[: like.nbytes].view(like.dtype).view(like.shape)

    def _slab(self, least: int) -> Tensor:
        """Return a slab of a power of two: the largest that the rest of all pages fills, unless one page takes more."""
        rest = max(1, min(self.slab_bytes, self._expected))
        size = max(1 << (least - 1).bit_length(), 1 << (rest.bit_length() - 1))
        if size != self.slab_bytes or not self._num_reserved:
            return _page_locked(size)
        self._num_reserved -= 1
        slab = self._reserved.get()
        if isinstance(slab, Exception):
            self._num_reserved = 0
            raise slab
        return slab


class _Piece(NamedTuple):
    """Parameters that one call of an optimizer's step updates."""

    group: dict[str, object]
    counter: dict[str, object]
    """The group's "step" before the update, where it has one."""
    params: list[Tensor]


class OptimizerState:
    """Masters and moments of Adam optimizers whose state is exactly exp_avg and exp_avg_sq."""

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], device: torch.device, *, slab_bytes: int = SLAB_BYTES
    ) -> None:
        self._optimizers, self._device = optimizers, device
        self._module: Any = torch.get_device_module(device)  # torch.cpu's streams and events do nothing
        self._h2d, self._d2h = self._module.Stream(device), self._module.Stream(device)
        masters = sum(_aligned(param.nbytes) for optimizer in optimizers for param in _params(optimizer))
        self._memory = HostPages(3 * masters, slab_bytes)  # two moments of each
        self._pages: dict[tuple[Tensor, str], Tensor] = {}

    def to_host(self) -> None:
        """Move everything there; complete when it returns."""
        for optimizer in self._optimizers:
            self._move(optimizer, _params(optimizer), self._page)
        self._event(self._current_stream()).synchronize()

    def reserve(self) -> None:
        """Begin to take the host memory of what will move there for the first time."""
        params = [param for optimizer in self._optimizers for param in _params(optimizer)]
        if max((_aligned(param.nbytes) for param in params), default=0) <= self._memory.slab_bytes:
            self._memory.reserve(self._device)

    def to_device(self) -> None:
        for optimizer in self._optimizers:
            self._move(optimizer, _params(optimizer), self._on_device)

    def masters_to_device(self) -> None:
        """Copy the master weights to the device; the moments stay in host memory."""
        for optimizer in self._optimizers:
            self._move(optimizer, _params(optimizer), self._on_device, moments=False)

    def step_in_pieces(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        """Run one `step` of `optimizer`, whose masters are on the device: its moments are copied in pieces, updated,
        and copied back to the host. The device holds the moments of three consecutive pieces at most."""
        groups = optimizer.param_groups
        whole = [group["params"] for group in groups]
        pieces = [
            _Piece(group, {"step": group["step"]} if "step" in group else {}, piece)
            for group, params in zip(groups, whole, strict=True)
            for piece in _pieces(params)
        ]

        def update(piece: _Piece) -> None:
            piece.group.pop("step", None)  # every piece takes the same step
            piece.group.update(piece.counter, params=piece.params)
            step()
            piece.group["params"] = []

        try:
            for group in groups:
                group["params"] = []
            self._overlap(optimizer, pieces, update)
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params

    def _overlap(
        self, optimizer: torch.optim.Optimizer, pieces: Sequence[_Piece], update: Callable[[_Piece], None]
    ) -> None:
        """Call `update` for each piece while its moments are on the device. On a GPU the moments of the next piece are
        copied to the device meanwhile, and those of the piece before to the host, each in a stream of its own."""
        current, ahead = self._current_stream(), iter(pieces)
        stored: deque[tuple[torch.Event, list[Tensor]]] = deque()
        try:
            fetched = self._fetch(optimizer, next(ahead, None))
            for piece in pieces:
                if len(stored) > 1:
                    stored[0][0].synchronize()
                    stored.popleft()  # and with it the last reference to memory that is free now
                next_fetched = self._fetch(optimizer, next(ahead, None))
                current.wait_event(fetched)
                update(piece)
                stored.append(self._store(optimizer, piece))
                fetched = next_fetched
        finally:
            current.wait_stream(self._h2d)
            current.wait_stream(self._d2h)

    def _fetch(self, optimizer: torch.optim.Optimizer, piece: _Piece | None) -> torch.Event:
        """Begin to copy the moments of a piece to the device; return the event of their arrival."""
        # For earlier uses of the memory, which is the current stream's, and for the last step's writes to the pages.
        self._h2d.wait_stream(self._current_stream())
        params = piece.params if piece else []
        self._move(optimizer, params, partial(self._on_device, stream=self._h2d), masters=False)
        return self._event(self._h2d)

    def _store(self, optimizer: torch.optim.Optimizer, piece: _Piece) -> tuple[torch.Event, list[Tensor]]:
        """Begin to copy the moments of a piece to the host. Return the event of their arrival, and the tensors on the
        device, which the caller must keep until then: their memory would be used again."""
        moments: list[Tensor] = []

        def to_page(param: Tensor, name: str, tensor: Tensor) -> Tensor:
            moments.append(tensor)
            return self._page(param, name, tensor)

        self._d2h.wait_stream(self._current_stream())
        with self._module.stream(self._d2h):
            self._move(optimizer, piece.params, to_page, masters=False)
        return self._event(self._d2h), moments

    def _move(
        self,
        optimizer: torch.optim.Optimizer,
        params: Sequence[Tensor],
        to: Callable[[Tensor, str, Tensor], Tensor],
        *,
        masters: bool = True,
        moments: bool = True,
    ) -> None:
        for param in params:
            if masters:
                param.data = to(param, MASTER, param.data)
            state = optimizer.state.get(param, {}) if moments else {}
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    state[name] = to(param, name, value)

    def _on_device(self, _: Tensor, __: str, tensor: Tensor, *, stream: object = None) -> Tensor:
        """Return a copy in memory of the current stream, made in `stream` if one is given."""
        room = self._room(tensor)
        with self._module.stream(stream):
            return room if room is tensor else room.copy_(tensor, non_blocking=True)

    def _room(self, tensor: Tensor) -> Tensor:
        """Return memory on the device for a tensor, or the tensor itself where it is there already."""
        there = tensor.device.type == self._device.type
        return tensor if there else torch.empty_like(tensor, device=self._device)

    def _page(self, param: Tensor, name: str, tensor: Tensor) -> Tensor:
        page = self._pages.get((param, name))
        if page is None:
            page = self._pages[param, name] = self._memory.take(tensor)
        return page if page is tensor else page.copy_(tensor, non_blocking=True)

    def _current_stream(self) -> torch.Stream:
        return self._module.current_stream(self._device)

    def _event(self, stream: torch.Stream) -> torch.Event:
        """Return an event that comes when what is queued on the stream now is done."""
        event = self._module.Event()
        event.record(stream)
        return event


def _take_slabs(
    owner: Callable[[], object],
    slabs: SimpleQueue[Tensor | Exception],
    count: int,
    num_bytes: int,
    device: torch.device,
) -> None:
    """Put page-locked slabs into a queue, or the error that it ends with. Stop where the owner is gone, or the process
    is ending: the interpreter waits for one slab, as a daemon thread could abort it."""
    try:
        if device.type != "cpu":
            torch.accelerator.set_device_index(device)
        for _ in range(count):
            if owner() is None or not threading.main_thread().is_alive():
                return
            slabs.put(_page_locked(num_bytes))
    except Exception as error:  # noqa: BLE001  raised where the slab is taken
        slabs.put(error)


def _page_locked(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _pieces(params: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the parameters in order, cut where their two moments would exceed PIECE_BYTES."""
    piece: list[Tensor] = []
    size = 0
    for param in params:
        num_bytes = 2 * param.numel() * param.element_size()
        if piece and size + num_bytes > PIECE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(param)
        size += num_bytes
    if piece:
        yield piece
