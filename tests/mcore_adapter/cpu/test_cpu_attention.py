"""Packed attention and rotary embedding on CPU against plain attention, one sequence at a time."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_adapter.cpu.attention import packed_causal_attention, rotary_thd, zigzag_attention

PACKINGS = {
    "many short, every length": [3, 17, 1, 9, 30, 2, 17, 16, 8, 25, 11, 1, 29],
    "with empty sequences": [0, 5, 0, 7, 5],
    "equal lengths": [12] * 6,
    "runs of equal lengths": [12, 12, 5, 5, 5, 12],
    "one long among short": [4, 700, 9, 6],
    "a single token": [1],
}


def one_by_one(q: Tensor, k: Tensor, v: Tensor, lens: list[int], scale: float) -> Tensor:
    out = []
    for parts in zip(q.split(lens), k.split(lens), v.split(lens), strict=True):
        heads = (x.transpose(0, 1)[None] for x in parts)
        out.append(
            F.scaled_dot_product_attention(*heads, is_causal=True, scale=scale, enable_gqa=True)[0].transpose(0, 1)
        )
    return torch.cat(out)


def random_qkv(lens: list[int], heads: int, groups: int, dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (sum(lens), heads + 2 * groups, dim)
    # As the projection gives them: views into one tensor, not contiguous.
    return [x.detach() for x in torch.randn(shape, generator=generator).split((heads, groups, groups), dim=1)]


@pytest.mark.parametrize("lens", PACKINGS.values(), ids=PACKINGS)
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (3, 1)])
def test_packed_attention_and_its_gradients_are_those_of_each_sequence(lens, heads, groups) -> None:
    inputs = random_qkv(lens, heads, groups, 16)
    weights = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(2))
    results = []
    for attention in (one_by_one, packed_causal_attention):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = attention(*leaves, lens, scale=0.3)
        (out * weights).sum().backward()
        results.append((out.detach(), *(x.grad for x in leaves)))
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)


def test_a_sequence_does_not_notice_its_neighbours() -> None:
    lens = [5, 30, 7, 6, 120, 31]
    q, k, v = random_qkv(lens, 4, 2, 16)
    packed = packed_causal_attention(q, k, v, lens, scale=0.25).split(lens)
    for parts in zip(packed, q.split(lens), k.split(lens), v.split(lens), strict=True):
        alone = packed_causal_attention(*parts[1:], [len(parts[0])], scale=0.25)
        torch.testing.assert_close(parts[0], alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("cp", [2, 4])
def test_context_parallel_ranks_together_attend_like_one(cp: int) -> None:
    lens = [8, 24, 40, 16]
    q, k, v = random_qkv(lens, 4, 2, 16)
    order = [_own(lens, cp, rank) for rank in range(cp)]
    gathered_k, gathered_v = (torch.cat([x[own] for own in order]) for x in (k, v))
    expected = one_by_one(q, k, v, lens, 0.25)
    for rank, own in enumerate(order):
        got = zigzag_attention(q[own], gathered_k, gathered_v, lens, scale=0.25, cp=cp, rank=rank)
        torch.testing.assert_close(got, expected[own], rtol=0, atol=1e-6)


def _own(lens: list[int], cp: int, rank: int) -> Tensor:
    chunks = [s.chunk(2 * cp) for s in torch.arange(sum(lens)).split(lens)]
    return torch.cat([torch.cat((c[rank], c[2 * cp - 1 - rank])) for c in chunks])


@pytest.mark.parametrize("cp", [1, 2])
def test_rotation_restarts_with_every_sequence_and_its_gradient_rotates_back(cp: int) -> None:
    lens, dim = [8, 4, 12], 16
    cu_seqlens = torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
    inverse = 1.0 / 10_000 ** (torch.arange(0, dim, 2) / dim)
    angles = torch.outer(torch.arange(12.0), inverse)
    freqs = torch.cat((angles, angles), -1)[:, None, None]
    x = torch.randn(24, 3, dim, generator=torch.Generator().manual_seed(3))
    positions = torch.cat([torch.arange(n) for n in lens])
    cos, sin = freqs[positions, 0].cos(), freqs[positions, 0].sin()
    a, b = x.chunk(2, -1)
    expected = x * cos + torch.cat((-b, a), -1) * sin
    for rank in range(cp):
        own = _own(lens, cp, rank) if cp > 1 else torch.arange(24)
        leaf = x[own].clone().requires_grad_()
        got = rotary_thd(leaf, cu_seqlens, freqs, cp_size=cp, cp_rank=rank)
        torch.testing.assert_close(got.detach(), expected[own], rtol=0, atol=1e-6)
        got.backward(got.detach())  # rotating back what was rotated
        torch.testing.assert_close(leaf.grad, x[own], rtol=0, atol=2e-6)


def test_bfloat16_is_rotated_in_float32_and_its_gradient_is_bfloat16() -> None:
    x = torch.randn(6, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    angles = torch.arange(6.0)[:, None, None, None].expand(6, 1, 1, 8).contiguous()
    cu_seqlens = torch.tensor([0, 6], dtype=torch.int32)
    rotated = rotary_thd(x, cu_seqlens, angles)
    assert torch.equal(rotated, rotary_thd(x.detach().float(), cu_seqlens, angles))
    rotated.backward(rotated.detach())
    assert x.grad is not None and x.grad.dtype == torch.bfloat16
    torch.testing.assert_close(x.grad, x.detach(), rtol=0.01, atol=0)
