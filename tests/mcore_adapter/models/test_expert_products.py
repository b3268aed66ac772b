"""Grouped products of experts against each expert on its own, differentiated by autograd."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_adapter.models.experts import Rows, experts_output, sorted_rows

TOKENS, K, NUM_EXPERTS, HIDDEN, WIDTH = 19, 2, 6, 16, 12


def uneven_experts() -> Tensor:
    """[t, k]: expert 0 for every token, experts 3 and 5 for none."""
    others = torch.randint(3, (TOKENS, 1), generator=torch.Generator().manual_seed(1))
    return torch.cat((torch.tensor([1, 2, 4])[others], torch.zeros(TOKENS, 1, dtype=torch.int64)), 1)


def tensors(*, given: bool) -> list[Tensor]:
    """x, weights, gate_up, down, and a gradient of x's shape."""
    torch.manual_seed(0)
    num = TOKENS * K if given else TOKENS
    shapes = [(num, HIDDEN), (num,) if given else (num, K), (NUM_EXPERTS, 2 * WIDTH, HIDDEN)]
    values = [torch.randn(*shape) for shape in [*shapes, (NUM_EXPERTS, HIDDEN, WIDTH)]]
    # Matrices divided so that every result is about 1.
    leaves = [(v / v.shape[-1] ** 0.5 if v.dim() == 3 else v).requires_grad_() for v in values]
    return [*leaves, torch.randn(num, HIDDEN)]


def one_expert(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ gate_up.t()).chunk(2, -1)
    return (F.silu(gate) * up) @ down.t()


def assert_same(output: Tensor, expected: Tensor, leaves: list[Tensor], grad: Tensor) -> None:
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    ours, theirs = (torch.autograd.grad(result, leaves, grad) for result in (output, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("keep_halves", [True, False], ids=["kept", "computed again"])
def test_tokens_get_the_weighted_sum_of_their_experts_and_every_gradient(keep_halves: bool) -> None:
    *leaves, grad = tensors(given=False)
    x, weights, gate_up, down = leaves
    experts = uneven_experts()
    output = experts_output(x, weights, gate_up, down, sorted_rows(experts, NUM_EXPERTS), keep_halves=keep_halves)
    expected = torch.stack([
        sum((w * one_expert(row[None], gate_up[e], down[e])[0] for w, e in zip(ws, es, strict=True)), torch.zeros(()))
        for row, ws, es in zip(x, weights, experts.tolist(), strict=True)
    ])  # fmt: skip
    assert_same(output, expected, leaves, grad)


PARTS = {"even": (3, 3), "one": (6,), "without any row": (1, 1, 1, 1, 1, 1)}


@pytest.mark.parametrize("keep_halves", [True, False], ids=["kept", "computed again"])
@pytest.mark.parametrize("sizes", PARTS.values(), ids=PARTS)
def test_parts_of_the_experts_compute_parts_of_the_sum_and_of_every_gradient(sizes, keep_halves) -> None:
    """The last tokens have no expert: their outputs and gradients are 0."""
    *leaves, grad = tensors(given=False)
    x, weights, gate_up, down = leaves
    experts, none = uneven_experts(), 3
    expected = experts_output(x, weights, gate_up, down, sorted_rows(experts, NUM_EXPERTS))[:-none]
    experts[-none:] = NUM_EXPERTS
    summed, start = torch.zeros(TOKENS, HIDDEN), 0
    for size in sizes:
        part = range(start, start + size)
        rows = sorted_rows(experts, NUM_EXPERTS, part=part)
        rows = rows.first(int(rows.ends[-1]))
        held = slice(start, start + size)
        summed = summed + experts_output(x, weights, gate_up[held], down[held], rows, keep_halves=keep_halves)
        start += size
    assert torch.equal(summed[-none:], torch.zeros(none, HIDDEN))
    grad[-none:] = 0.0
    assert_same(F.pad(summed[:-none], (0, 0, 0, none)), F.pad(expected, (0, 0, 0, none)), leaves, grad)


def test_a_rank_without_any_rows_has_gradients_of_zero() -> None:
    *leaves, _ = tensors(given=True)
    x, weights, gate_up, down = leaves[0][:0], leaves[1][:0], *leaves[2:]
    output = experts_output(x, weights, gate_up, down, Rows(torch.zeros(NUM_EXPERTS, dtype=torch.int32)))
    assert output.shape == (0, HIDDEN)
    for grad, leaf in zip(torch.autograd.grad(output.sum(), (gate_up, down)), (gate_up, down), strict=True):
        assert torch.equal(grad, torch.zeros_like(leaf))
