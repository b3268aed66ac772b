"""Masters and moments that visit the host are what they would be on the device, in pages of a few large allocations."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_adapter.cpu.device import FusedAdam
from mcore_adapter.optimizer import training as optimizer_state
from mcore_adapter.optimizer.training import ALIGNMENT, SLAB_BYTES, HostPages, OptimizerState

SLAB = 1 << 14
SIZES = [5000, 3, 1, 777, 4096, 2048, 130, 6000]
"""Of masters that take several slabs, one of them more than a slab."""
FC1, FC2 = 32 * 2 * 768 * 2048, 32 * 768 * 2048
"""Parameters of a layer of Qwen3-30B-A3B on one of four expert-parallel ranks."""
SCALE = 1024


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of page-locked allocations, which need a GPU: here they are pageable, and rounded as torch does."""
    sizes: list[int] = []
    empty = torch.empty

    def pageable(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        tensor = empty(*shape, **options)
        if pin_memory:
            sizes.append(rounded(tensor.nbytes))
        return tensor

    monkeypatch.setattr(torch, "empty", pageable)
    return sizes


def rounded(num_bytes: int) -> int:
    return 1 << (num_bytes - 1).bit_length()


class Visiting(OptimizerState):
    """State whose device is the host: tensors that come back from a page are copies all the same."""

    def _room(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor)


def make_optimizer(sizes: Sequence[int], adam: Any = FusedAdam, *, device: str = "cpu", **options: Any) -> Any:
    """Two groups of parameters with gradients."""
    generator = torch.Generator().manual_seed(1)
    params = [torch.randn(size, generator=generator).to(device).requires_grad_() for size in sizes]
    for param in params:
        param.grad = torch.randn(len(param), generator=generator).to(device)
    half = len(params) // 2
    return adam([{"params": params[:half]}, {"params": params[half:], "weight_decay": 0.1}], lr=0.1, **options)


def tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    moments = [optimizer.state[param][name] for param in params for name in optimizer.state[param]]
    return [*(param.data for param in params), *moments]


def update(state: OptimizerState, optimizer: torch.optim.Optimizer) -> None:
    state.masters_to_device()
    state.step_in_pieces(optimizer, optimizer.step)
    state.to_host()


def places(pages: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(page.data_ptr(), page.data_ptr() + page.nbytes) for page in pages]


def test_pages_of_large_experts_take_a_few_per_cent_more_than_what_is_in_them(allocated: list[int]) -> None:
    dense = [n // SCALE for _ in range(48) for n in (2_097_152, 2_621_440, 65_536, 1024)]
    optimizer = make_optimizer([77_790_000 // SCALE, *dense, *[n // SCALE for _ in range(48) for n in (FC1, FC2)]])
    state = Visiting([optimizer], torch.device("cpu"), slab_bytes=SLAB_BYTES // SCALE)
    state.to_host()
    update(state, optimizer)
    exact = [tensor.nbytes for tensor in tensors(optimizer)]
    assert sum(exact) < sum(allocated) < 1.04 * sum(exact)
    assert sum(map(rounded, exact)) > 1.3 * sum(exact), "what it is for"


def test_no_two_pages_overlap(allocated: list[int]) -> None:
    memory = HostPages(0, SLAB)
    likes = [torch.empty(n, dtype=d) for n in SIZES for d in (torch.bfloat16, torch.float32)]
    pages = [memory.take(like).fill_(i) for i, like in enumerate(likes)]
    assert [(page.shape, page.dtype) for page in pages] == [(like.shape, like.dtype) for like in likes]
    assert all(bool((page == i).all()) for i, page in enumerate(pages))
    assert all(a[1] <= b[0] for a, b in pairwise(sorted(places(pages))))
    assert all(page.storage_offset() * page.itemsize % ALIGNMENT == 0 for page in pages)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_state, "PIECE_BYTES", 50_000)


def test_steps_with_visits_are_those_without(allocated: list[int], small_pieces: None) -> None:
    stays, visits = make_optimizer(SIZES), make_optimizer(SIZES)
    state = Visiting([visits], torch.device("cpu"), slab_bytes=SLAB)
    state.to_host()
    for _ in range(3):
        stays.step()
        update(state, visits)
        assert len(tensors(visits)) == 3 * len(SIZES)
        for moves in (lambda: None, state.to_device, state.to_host):
            moves()
            assert all(torch.equal(a, b) for a, b in zip(tensors(stays), tensors(visits), strict=True))
    assert len(allocated) > 3


def test_a_step_that_fails_leaves_groups_as_they_were_and_moments_that_can_be_moved(allocated, small_pieces) -> None:
    optimizer = make_optimizer(SIZES)
    state = Visiting([optimizer], torch.device("cpu"), slab_bytes=SLAB)
    state.to_host()
    update(state, optimizer)
    groups, pages = [list(group["params"]) for group in optimizer.param_groups], places(tensors(optimizer))
    with pytest.raises(RuntimeError, match="no room"):
        state.step_in_pieces(optimizer, partial(failing_step, optimizer, 2, []))
    assert [list(map(id, group["params"])) for group in optimizer.param_groups] == [list(map(id, g)) for g in groups]
    state.to_host()
    assert places(tensors(optimizer)) == pages


def failing_step(optimizer: torch.optim.Optimizer, good: int, calls: list[int]) -> None:
    """Step; raise an error once there are `good` calls."""
    if len(calls) == good:
        raise RuntimeError("no room")
    calls.append(1)
    optimizer.step()


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("slow", ["update", "_h2d", "_d2h"])
def test_steps_in_pieces_on_a_gpu_are_those_with_everything_on_it(small_pieces: None, slow: str) -> None:
    sizes = SIZES * 4
    stays, visits = (make_optimizer(sizes, torch.optim.AdamW, device="cuda", fused=True) for _ in range(2))
    state = OptimizerState([visits], torch.device("cuda"), slab_bytes=SLAB)
    state.to_host()

    def step() -> None:
        with torch.cuda.stream(getattr(state, slow, None)):
            torch.cuda._sleep(1_000_000)
        visits.step()

    for number in range(6):
        stays.step()
        state.masters_to_device()
        state.step_in_pieces(visits, step)
        if number % 3 == 2:
            state.to_host()
            assert {tensor.device.type for tensor in tensors(visits) if tensor.dim()} == {"cpu"}
            assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(tensors(stays), tensors(visits), strict=True))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("slow", ["_h2d", "_d2h"])
def test_a_step_that_fails_while_a_gpu_copies_loses_no_moments(small_pieces: None, slow: str) -> None:
    """Pieces before the failure have the moments of the step, those behind it what they had."""
    before, after, visits = (make_optimizer(SIZES * 4, torch.optim.AdamW, device="cuda", fused=True) for _ in range(3))
    for optimizer in (before, after, after):
        optimizer.step()
    state = OptimizerState([visits], torch.device("cuda"), slab_bytes=SLAB)
    state.to_host()
    update(state, visits)
    state.masters_to_device()
    with torch.cuda.stream(getattr(state, slow)):
        torch.cuda._sleep(1_000_000)
    with pytest.raises(RuntimeError, match="no room"):
        state.step_in_pieces(visits, partial(failing_step, visits, 2, []))
    state.to_host()
    first, last = len(SIZES) * 4, -1
    found, old, new = (tensors(optimizer) for optimizer in (visits, before, after))
    assert torch.equal(found[first + 1].cpu(), new[first + 1].cpu()), "the first piece was updated"
    assert torch.equal(found[last].cpu(), old[last].cpu()), "the last one was not"


@pytest.mark.gpu
@needs_gpu
def test_copies_of_a_gpu_overlap_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 1 << 22
    monkeypatch.setattr(optimizer_state, "PIECE_BYTES", 1)
    optimizer = make_optimizer([size] * 8, torch.optim.AdamW, device="cuda", fused=True)
    state = OptimizerState([optimizer], torch.device("cuda"))
    state.to_host()
    update(state, optimizer)  # which takes the pages
    state.masters_to_device()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        state.step_in_pieces(optimizer, optimizer.step)
        torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - held < 3 * 8 * size + (1 << 20), "three pieces of fp32 moments"
    to_device, to_host = (
        [(event.time_range.start, event.time_range.end) for event in profiled.events() if kind in event.name]
        for kind in ("HtoD", "DtoH")
    )
    if not to_device:
        pytest.skip("the profiler does not see what the GPU does")
    assert any(a < d and c < b for a, b in to_device for c, d in to_host)


def test_the_memory_of_moments_is_reserved_when_masters_have_left(allocated: list[int]) -> None:
    optimizer = make_optimizer([SLAB // 4] * 8)
    state = Visiting([optimizer], torch.device("cpu"), slab_bytes=SLAB)
    state.to_host()
    assert len(allocated) == 8
    state.reserve()
    wait_until(lambda: len(allocated) == 24)
    update(state, optimizer)
    assert len(allocated) == 24


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(500):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("it never held")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("reserved", [True, False])
def test_pages_are_page_locked(reserved: bool) -> None:
    memory = HostPages(2 * SLAB, SLAB)
    if reserved:
        memory.reserve(torch.device("cuda", torch.cuda.current_device()))
    tensors = [torch.randn(size, device="cuda") for size in SIZES]
    pages = [memory.take(tensor) for tensor in tensors]
    assert all(page.is_pinned() for page in pages)
    for page, tensor in zip(pages, tensors, strict=True):
        page.copy_(tensor, non_blocking=True)
    torch.cuda.synchronize()
    assert all(torch.equal(page, tensor.cpu()) for page, tensor in zip(pages, tensors, strict=True))
