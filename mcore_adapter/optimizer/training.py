"""Megatron's data-parallel wrapper and distributed AdamW, with the learning-rate schedule and the check for
non-finite gradients.

Invariant: gradients are summed, never averaged, over ranks and microbatches: the engine divides the loss by the number
of trained tokens of the whole minibatch before the backward pass.
"""

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, cast

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from mcore_adapter.settings import OptimizerConfig

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


DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}
"""By lr_scheduler_type: share of (lr - min_lr) left at `progress` in [0, 1] through the decay."""


def learning_rate(
    step: int,
    *,
    lr: float,
    min_lr_ratio: float,
    lr_scheduler_type: str,
    warmup_steps_proportion: float,
    total_steps: int,
) -> float:
    """Return the learning rate of update number `step` (the first is 0).

    Rises linearly over the first warmup_steps_proportion * total_steps updates, the first of which is not zero, then
    decays to min_lr_ratio * lr at update total_steps and stays there. Raises ValueError on an unknown type.
    """
    if lr_scheduler_type not in DECAYS:
        raise ValueError(f"lr_scheduler_type={lr_scheduler_type!r} is unknown; use one of {', '.join(DECAYS)}")
    warmup_steps = round(warmup_steps_proportion * total_steps)
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    min_lr = lr * min_lr_ratio
    return min_lr + (lr - min_lr) * DECAYS[lr_scheduler_type](progress)


@dataclass(frozen=True, kw_only=True)
class Update:
    """What one optimizer step did, equal on all ranks."""

    grad_norm: float  # before clipping; not finite when the update was skipped
    lr: float
    applied: bool


class _Wrapper(DistributedDataParallel):
    """Megatron's wrapper, which autograd's nodes do not reference: the garbage collector does not see into them, and a
    graph of the last step that a layer still holds would keep model, buffers and process groups in memory. Its hook
    adds gradients with _add_gradient(), but for those that layers add to the buffer themselves."""

    def _make_backward_post_hook(self, param: torch.nn.Parameter) -> Callable[..., None]:
        held, make_hook = weakref.ref(self), super()._make_backward_post_hook.__func__

        def hook(*unused: object) -> None:
            wrapper = held()
            assert wrapper is not None, "an engine that trains is in use"
            parameter = cast(Any, param)
            added, shared = parameter.grad_added_to_main_grad, getattr(param, "zero_out_wgrad", False)
            if param.grad is not None and (shared or not added):  # as Megatron decides
                _add_gradient(parameter.main_grad, param.grad)
                parameter.grad_added_to_main_grad, parameter.zero_out_wgrad = True, False
            make_hook(wrapper, param)()
            parameter.grad_added_to_main_grad, parameter.zero_out_wgrad = added, shared

        return hook


def _add_gradient(total: Tensor, gradient: Tensor) -> None:
    addition(total, gradient.dtype)(total, gradient)


def addition(total: Tensor, dtype: torch.dtype) -> Callable[[Tensor, Tensor], object]:
    """Return what adds gradients of this format to `total`, in place."""
    if total.is_cuda and (total.dtype, dtype) == (torch.float32, torch.bfloat16):
        from mcore_adapter.cuda.elementwise import add_to

        return add_to
    return Tensor.add_


def wrap_for_training(
    chunks: list[GPTModel],
    *,
    overlap: bool = False,
    grad_reduce_in_fp32: bool = True,
    before_reduction: Callable[[], None] = lambda: None,
) -> list[DistributedDataParallel]:
    """Put the gradients of each chunk into one buffer, reduced over the data-parallel ranks once a step.

    `overlap`: gradients are reduced bucket by bucket while the backward pass of the last microbatch runs, and updated
    weights gathered while the next forward pass does; see TrainOptimizer.finish_param_gather(). The buffer is fp32, or
    without `grad_reduce_in_fp32` in the model's format. `before_reduction` is called when all gradients of this rank
    are there; without `overlap` that is before the ranks meet.
    """
    config = chunks[0].config
    assert config.calculate_per_token_loss, "otherwise DDP would average where the engine counts on sums"
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=grad_reduce_in_fp32,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
    )
    config.finalize_model_grads_func = partial(_finalize_sums, before_reduction)
    ddp = [_Wrapper(config, ddp_config, m, disable_bucketing=i > 0) for i, m in enumerate(chunks)]
    if overlap:
        config.no_sync_func = ddp[0].no_sync if len(ddp) == 1 else [chunk.no_sync for chunk in ddp]
    return ddp


def _finalize_sums(
    before_reduction: Callable[[], None],
    model: list[DistributedDataParallel],
    num_tokens: torch.Tensor | None,
    **kwargs: object,
) -> None:
    """Reduce gradients without Megatron's own division by a token count: it would cost two collectives a step to
    exchange what every rank has already."""
    before_reduction()
    finalize_model_grads(model, None, **kwargs)


class TrainOptimizer:
    """The optimizer of one engine. Its only state beside Megatron's is `num_updates`, which drives the schedule."""

    def __init__(
        self, chunks: list[DistributedDataParallel], config: OptimizerConfig, dtype: torch.dtype, *, total_updates: int
    ) -> None:
        self._chunks, self._config, self._total_updates = chunks, config, total_updates
        self._on_host = False
        self._gathered = True
        self.num_updates = 0
        self._lr()  # an unknown schedule is an error before the first step
        self.megatron = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                min_lr=config.lr * config.min_lr_ratio,
                weight_decay=config.weight_decay,
                adam_beta1=config.beta1,
                adam_beta2=config.beta2,
                adam_eps=config.eps,
                clip_grad=config.gradient_clipping,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=True,
            ),
            chunks,
        )
        inner = [optimizer.optimizer for optimizer in self.megatron.chained_optimizers]
        device = chunks[0].buffers[0].grad_data.device
        self._state = OptimizerState(inner, device)
        if config.offload:
            for optimizer in inner:
                optimizer.step = partial(self._state.step_in_pieces, optimizer, optimizer.step)
            self._state.to_host()
            if device.type != "cpu":
                self._state.reserve()  # for the moments, which the first step makes

    def pending_bytes(self) -> float:
        """Return the bytes of moments that the first step will allocate on the device and keep."""
        if self._config.offload:
            return 0.0
        inner = [optimizer.optimizer for optimizer in self.megatron.chained_optimizers]
        masters = [(o.state, p) for o in inner for group in o.param_groups for p in group["params"]]
        return sum(2.0 * p.nbytes for state, p in masters if p not in state)

    def held_bytes(self) -> dict[str, float]:
        """Return the bytes on the device by use: "weights", "gradients" and "optimizer" (masters and moments)."""
        inner = [optimizer.optimizer for optimizer in self.megatron.chained_optimizers]
        masters = [p for o in inner for group in o.param_groups for p in group["params"]]
        moments = [t for o in inner for state in o.state.values() for t in state.values() if torch.is_tensor(t)]
        buffers = [b.grad_data for chunk in self._chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        device = buffers[0].device
        return {
            "weights": float(sum(p.nbytes for chunk in self._chunks for p in chunk.parameters())),
            "gradients": float(sum(b.untyped_storage().nbytes() for b in buffers)),
            "optimizer": float(sum(t.nbytes for t in (*masters, *moments) if t.device == device)),
        }

    def zero_grad(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def step(self) -> Update:
        """Clip and apply the reduced gradients. Collective. A gradient norm that is not finite changes nothing: neither
        weights, nor moments, nor the schedule."""
        lr = self._lr()
        for group in self.megatron.param_groups:
            group["lr"] = lr
        if self._config.offload:
            self._state.masters_to_device()
        self.megatron.prepare_grads()
        grad_norm = float(self.megatron.get_grad_norm())
        if not math.isfinite(grad_norm):
            return Update(grad_norm=grad_norm, lr=lr, applied=False)
        if grad_norm > self._config.gradient_clipping > 0:
            for optimizer in self.megatron.chained_optimizers:
                clip_grad_by_total_norm_fp32(optimizer.get_parameters(), self._config.gradient_clipping, grad_norm)
        self.megatron.step_with_ready_grads()
        self._gathered = not self._chunks[0].ddp_config.overlap_param_gather
        self.num_updates += 1
        if self._config.offload:
            self._state.to_host()
        return Update(grad_norm=grad_norm, lr=lr, applied=True)

    def finish_param_gather(self) -> None:
        """Gather updated weights that the next forward pass of a training step would: before anything else reads them.
        Collective."""
        if not self._gathered:
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)
            self._gathered = True

    def offload(self) -> None:
        """Move masters and moments to the host and drop the gradients: nothing but the weights stays on the device."""
        for chunk in self._chunks:
            chunk.offload_grad_buffers(empty_cache=False)
        if not self._on_host:
            self._state.to_host()
            self._on_host = True

    def reload(self) -> None:
        """Reverse offload(); gradients are zero."""
        if self._on_host:
            if not self._config.offload:
                self._state.to_device()
            self._on_host = False
            for chunk in self._chunks:
                chunk.restore_grad_buffers()

    def _lr(self) -> float:
        s = self._config
        return learning_rate(
            self.num_updates,
            lr=s.lr,
            min_lr_ratio=s.min_lr_ratio,
            lr_scheduler_type=s.lr_scheduler_type,
            warmup_steps_proportion=s.warmup_steps_proportion,
            total_steps=self._total_updates,
        )
