"""The gathering dispatcher of stacked experts: what it computes, when ranks use it, how often they exchange sizes, and
what they compute meanwhile."""

from typing import Any

import pytest
import torch
from torch import Tensor

from allocation import ParallelLayout
from helpers.engine_cases import actor_run, assert_same_steps, whole
from helpers.expert_layers import dispatched, make_dispatcher, plain_output, shared_output
from helpers.mcore_ranks import EXPERT_LAYOUTS, Rank, RankPool
from mcore_adapter.models.experts import experts_output, sorted_rows
from model_specs.config import gathers_tokens

NUM_EXPERTS, K, HIDDEN, WIDTH = 6, 3, 16, 24
CASES = {"uneven": (7, 3), "one token": (1, 12), "even": (5, 5)}
"""Tokens of each rank."""


def layer_tensors(num_tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """tokens [t, h], weights [t, k], gate_up, down, and the gradient of the output."""
    generator = torch.Generator().manual_seed(num_tokens)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    tokens, weights = random(num_tokens, HIDDEN).to(dtype), random(num_tokens, K)
    gate_up, down = (
        random(NUM_EXPERTS, 2 * WIDTH, HIDDEN) / HIDDEN**0.5,
        random(NUM_EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5,
    )
    return [tokens, weights, gate_up.to(dtype), down.to(dtype), random(num_tokens, HIDDEN).to(dtype)]


def chosen(num_tokens: int, num_experts: int) -> Tensor:
    """[t, k] numbers of the first `num_experts` experts, different ones for each token."""
    scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(num_experts))
    return scores.topk(K).indices


def own_part(rank: Rank, sizes: tuple[int, int], num_experts: int, dtype: torch.dtype) -> tuple[list[Tensor], ...]:
    """(tokens, weights, gate_up, down) of this rank, and (its tokens' experts, the gradient of its output)."""
    tokens, weights, gate_up, down, grad = layer_tensors(sum(sizes), dtype)
    own = torch.arange(sum(sizes)).split(sizes)[rank.rank]
    held = torch.arange(NUM_EXPERTS).chunk(2)[rank.rank]
    leaves = [tokens[own], weights[own], gate_up[held], down[held]]
    for leaf in leaves:
        leaf.requires_grad_()
    return leaves, [chosen(sum(sizes), num_experts)[own], grad[own]]


def gathered_layer(
    rank: Rank, sizes: tuple[int, int], num_experts: int, dtype: torch.dtype, keep_halves: bool
) -> dict[str, Any]:
    """Compute this rank's tokens with its experts through the dispatcher: output and gradients."""
    from megatron.core import parallel_state

    with rank.joined(EXPERT_LAYOUTS["dp2 ep2"]):
        group = parallel_state.get_expert_model_parallel_group()
        leaves, (experts, grad) = own_part(rank, sizes, num_experts, dtype)
        dispatcher = make_dispatcher(group, NUM_EXPERTS, K)
        _, rows, probs = dispatched(dispatcher, leaves, experts)
        assert probs.dtype == torch.float32, "weights are not rounded to the format of the tokens"
        kept = (dispatcher._experts, dispatcher._tokens, dispatcher._weights, dispatcher._rows, dispatcher._num_rows)
        assert kept == (None,) * 5, "what was gathered is held no longer than needed"
        output = shared_output(dispatcher, leaves, experts, keep_halves=keep_halves)
        assert output.shape == grad.shape
        grads = torch.autograd.grad(output, leaves, grad)
        settings: dict[str, Any] = dict(num_experts=NUM_EXPERTS, most=max(sizes), keep_halves=keep_halves)
        expected = plain_output(group, leaves, experts, **settings)
        assert torch.equal(output, expected), "beside the computation as before and behind it"
        for one, other in zip(grads, torch.autograd.grad(expected, leaves, grad), strict=True):
            assert torch.equal(one, other)
        return {"output": output.detach(), "grads": grads, "num_rows": len(rows.rows.copies)}


def one_rank(sizes: tuple[int, int], num_experts: int, dtype: torch.dtype) -> list[Tensor]:
    *leaves, grad = layer_tensors(sum(sizes), dtype)
    for leaf in leaves:
        leaf.requires_grad_()
    output = experts_output(*leaves, sorted_rows(chosen(sum(sizes), num_experts), NUM_EXPERTS))
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


@pytest.mark.parametrize(
    ("case", "num_experts", "dtype", "keep_halves"),
    [
        ("uneven", NUM_EXPERTS, torch.float32, True),
        ("uneven", K, torch.bfloat16, False),
        ("one token", NUM_EXPERTS, torch.float32, False),
        ("even", K, torch.float32, True),
    ],
)
def test_ranks_compute_together_what_one_computes(ranks, case, dtype, num_experts, keep_halves) -> None:
    """Output, and gradients of tokens, weights and experts, whatever the ranks' numbers of tokens."""
    sizes = CASES[case]
    results = ranks.run(gathered_layer, 2, sizes, num_experts, dtype, keep_halves)
    parts = [
        torch.cat([r["output"] for r in results]),
        *map(torch.cat, zip(*(r["grads"] for r in results), strict=True)),
    ]
    close = dict(rtol=1e-6, atol=1e-6) if dtype == torch.float32 else dict(rtol=0.02, atol=0.05)
    for part, expected in zip(parts, one_rank(sizes, num_experts, dtype), strict=True):
        assert part.dtype == expected.dtype
        torch.testing.assert_close(part, expected, **close)
    num_rows = [result["num_rows"] for result in results]
    assert sum(num_rows) == K * sum(sizes), "padding has no row"
    assert (num_rows[1] == 0) == (num_experts == K)


@pytest.mark.parametrize(
    ("num_ranks", "top_k", "gathers"), [(1, 8, False), (2, 1, False), (2, 2, True), (8, 8, True), (9, 8, False)]
)
def test_tokens_are_gathered_where_each_has_as_many_experts_as_there_are_ranks(num_ranks, top_k, gathers) -> None:
    assert gathers_tokens(num_ranks, top_k) is gathers


def stacked_run(rank: Rank, layout: ParallelLayout, model: str) -> dict[str, Any]:
    """Train with stacked experts; fail where a rank gathers tokens."""
    from mcore_adapter.cpu.device import CpuDevice
    from mcore_adapter.models.router import GatheringDispatcher

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuDevice, "has_grouped_products", True)
        patch.setattr(GatheringDispatcher, "__init__", lambda *args, **options: pytest.fail("it gathers"))
        return actor_run(rank, layout, model)


def test_more_ranks_than_a_token_has_experts_use_the_dispatcher_of_megatron(ranks: RankPool, model_folders) -> None:
    folder, four = str(model_folders["qwen3_moe"][0]), ParallelLayout(dp=4, ep=4)
    results, expected = (ranks.run(stacked_run, n, layout, folder) for n, layout in ((4, four), (1, ParallelLayout())))
    assert_same_steps(results, expected)
    torch.testing.assert_close(whole(results), whole(expected), rtol=1e-5, atol=1e-5)
