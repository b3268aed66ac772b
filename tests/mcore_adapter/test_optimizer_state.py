"""Masters and moments that visit the host are what they would be on the device, in pages of a few large allocations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_adapter import optimizer_state
from mcore_adapter.cpu.adam import FusedAdam
from mcore_adapter.optimizer_state import ALIGNMENT, SLAB_BYTES, HostPages, OptimizerState

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

    def _on_device(self, _: Tensor, __: str, tensor: Tensor) -> Tensor:
        return tensor.clone()


def make_optimizer(sizes: Sequence[int]) -> FusedAdam:
    """Two groups of parameters with gradients."""
    generator = torch.Generator().manual_seed(1)
    params = [torch.randn(size, generator=generator, requires_grad=True) for size in sizes]
    for param in params:
        param.grad = torch.randn(len(param), generator=generator)
    half = len(params) // 2
    return FusedAdam([{"params": params[:half]}, {"params": params[half:], "weight_decay": 0.1}], lr=0.1)


def tensors(optimizer: FusedAdam) -> list[Tensor]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    moments = [optimizer.state[param][name] for param in params for name in optimizer.state[param]]
    return [*(param.data for param in params), *moments]


def update(state: OptimizerState, optimizer: FusedAdam) -> None:
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


def test_a_state_that_fills_no_slab_takes_powers_of_two_that_it_fills(allocated: list[int]) -> None:
    optimizer = make_optimizer([700, 300])
    state = Visiting([optimizer], torch.device("cpu"))
    state.to_host()
    update(state, optimizer)
    assert allocated == [8192, 4096], "12,288 bytes with their alignment; a single power of two is 16,384"


def test_no_two_pages_overlap(allocated: list[int]) -> None:
    memory = HostPages(0, SLAB)
    likes = [torch.empty(n, dtype=d) for n in SIZES for d in (torch.bfloat16, torch.float32)]
    pages = [memory.take(like).fill_(i) for i, like in enumerate(likes)]
    assert [(page.shape, page.dtype) for page in pages] == [(like.shape, like.dtype) for like in likes]
    assert all(bool((page == i).all()) for i, page in enumerate(pages))
    assert all(a[1] <= b[0] for a, b in pairwise(sorted(places(pages))))
    assert all(page.storage_offset() * page.itemsize % ALIGNMENT == 0 for page in pages)


def test_what_a_large_page_leaves_of_its_slab_is_used(allocated: list[int]) -> None:
    memory = HostPages(100 * SLAB, SLAB)
    sizes = [SLAB - ALIGNMENT, 2 * SLAB + SLAB // 2, SLAB, SLAB // 2, ALIGNMENT]  # the last ones fill both slabs
    pages = [memory.take(torch.empty(size, dtype=torch.uint8)) for size in sizes]
    assert allocated == [SLAB, 4 * SLAB]
    assert len(places(pages)) == 5 and all(a[1] <= b[0] for a, b in pairwise(sorted(places(pages))))
    memory.take(torch.empty(1))
    assert allocated == [SLAB, 4 * SLAB, SLAB]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_state, "PIECE_BYTES", 50_000)


def test_every_tensor_returns_to_its_page(allocated: list[int], small_pieces: None) -> None:
    optimizer = make_optimizer(SIZES)
    state = Visiting([optimizer], torch.device("cpu"), slab_bytes=SLAB)
    state.to_host()
    update(state, optimizer)
    first, taken = places(tensors(optimizer)), list(allocated)
    update(state, optimizer)
    assert places(tensors(optimizer)) == first
    state.to_device()
    assert not set(places(tensors(optimizer))) & set(first)
    state.to_host()
    assert places(tensors(optimizer)) == first and allocated == taken


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_pages_are_page_locked() -> None:
    memory = HostPages(0, SLAB)
    tensors = [torch.randn(size, device="cuda") for size in SIZES]
    pages = [memory.take(tensor) for tensor in tensors]
    assert all(page.is_pinned() for page in pages)
    for page, tensor in zip(pages, tensors, strict=True):
        page.copy_(tensor, non_blocking=True)
    torch.cuda.synchronize()
    assert all(torch.equal(page, tensor.cpu()) for page, tensor in zip(pages, tensors, strict=True))
