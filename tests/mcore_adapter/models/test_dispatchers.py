"""The gathering dispatcher of stacked experts: what it computes, when ranks use it, and how often they exchange
sizes."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from allocation import ParallelLayout
from helpers.engine_cases import MAX_TOKENS, actor_run, assert_same_steps, make_engine, policy_loss, random_batch, whole
from helpers.mcore_ranks import EXPERT_LAYOUTS, Rank, RankPool
from mcore_adapter.data.routing_inputs import gathers_tokens
from mcore_adapter.models.experts.products import experts_output, sorted_rows

NUM_EXPERTS, K, HIDDEN, WIDTH = 6, 3, 16, 24
CASES = {
    "uneven": (7, 3),
    "one token": (1, 12),
    "even": (5, 5),
}
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


def gathered_layer(rank: Rank, sizes: tuple[int, int], num_experts: int, dtype: torch.dtype) -> dict[str, Any]:
    """Compute this rank's tokens with its experts through the dispatcher: output and gradients."""
    from megatron.core import parallel_state

    from mcore_adapter.models.experts.dispatchers import GatheringDispatcher, dispatcher_for

    with rank.joined(EXPERT_LAYOUTS["dp2 ep2"]):
        group = parallel_state.get_expert_model_parallel_group()
        config: Any = SimpleNamespace(num_moe_experts=NUM_EXPERTS, moe_router_topk=K)
        dispatcher = dispatcher_for(config, group, lambda: None)
        assert isinstance(dispatcher, GatheringDispatcher)
        tokens, weights, gate_up, down, grad = layer_tensors(sum(sizes), dtype)
        own = torch.arange(sum(sizes)).split(sizes)[rank.rank]
        held = torch.arange(NUM_EXPERTS).chunk(2)[rank.rank]
        leaves = [tokens[own], weights[own], gate_up[held], down[held]]
        for leaf in leaves:
            leaf.requires_grad_()
        experts = chosen(sum(sizes), num_experts)[own]
        given = dispatcher.dispatch_preprocess(leaves[0].unsqueeze(1), experts, leaves[1])
        hidden, rows, probs = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(*given))
        assert probs.dtype == torch.float32, "weights are not rounded to the format of the tokens"
        kept = (dispatcher._experts, dispatcher._rows, dispatcher._num_rows)
        assert kept == (None,) * 3, "numbers of all gathered copies are held no longer than needed"
        summed = experts_output(hidden, probs, *leaves[2:], rows)
        output = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(summed)))
        assert output.shape == (len(own), 1, HIDDEN)
        grads = torch.autograd.grad(output, leaves, grad[own].unsqueeze(1))
        return {"output": output.detach().squeeze(1), "grads": grads, "num_rows": len(rows.copies)}


def one_rank(sizes: tuple[int, int], num_experts: int, dtype: torch.dtype) -> list[Tensor]:
    *leaves, grad = layer_tensors(sum(sizes), dtype)
    for leaf in leaves:
        leaf.requires_grad_()
    output = experts_output(*leaves, sorted_rows(chosen(sum(sizes), num_experts), NUM_EXPERTS))
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


@pytest.mark.parametrize("num_experts", [NUM_EXPERTS, K], ids=["all experts", "those of the first rank"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_ranks_compute_together_what_one_computes(
    ranks: RankPool, case: str, dtype: torch.dtype, num_experts: int
) -> None:
    """Output, and gradients of tokens, weights and experts, whatever the ranks' numbers of tokens."""
    sizes = CASES[case]
    results = ranks.run(gathered_layer, 2, sizes, num_experts, dtype)
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
def test_tokens_are_gathered_where_each_has_as_many_experts_as_there_are_ranks(
    num_ranks: int, top_k: int, gathers: bool
) -> None:
    assert gathers_tokens(num_ranks, top_k) is gathers


def counted(rank: Rank, layout: ParallelLayout, model: str, recompute: Any) -> dict[str, Any]:
    """Return the dispatchers of an engine with stacked experts, and how often it exchanges sizes."""
    from mcore_adapter.cpu.device import CpuDevice
    from mcore_adapter.models.experts.dispatchers import GatheringDispatcher

    calls = {"exchanges": 0}
    exchange = GatheringDispatcher._exchanged

    def count(self: GatheringDispatcher, *args: Any) -> list[int]:
        calls["exchanges"] += 1
        return exchange(self, *args)

    with pytest.MonkeyPatch.context() as patch, rank.joined(layout) as (parallel, device):
        patch.setattr(CpuDevice, "has_grouped_products", True)
        patch.setattr(GatheringDispatcher, "_exchanged", count)
        engine = make_engine(parallel, device, model, recompute=recompute)
        step = engine.train_step(random_batch(), policy_loss, max_tokens_per_mb=MAX_TOKENS // 2)
        layers = [layer for chunk in engine._model for layer in chunk.decoder.layers if hasattr(layer.mlp, "experts")]
        names = {type(layer.mlp.token_dispatcher).__name__ for layer in layers}
        return {**calls, "names": names, "microbatches": step["num_microbatches"], "layers": len(layers)}


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_ranks_exchange_the_number_of_their_tokens_once_per_microbatch(
    ranks: RankPool, model_folders: Any, recompute: str
) -> None:
    for result in ranks.run(counted, 2, EXPERT_LAYOUTS["dp2 ep2"], str(model_folders["qwen3_moe"][0]), recompute):
        assert result["names"] == {"GatheringDispatcher"} and result["layers"] == 4
        assert result["exchanges"] == result["microbatches"] > 1


def stacked_run(rank: Rank, layout: ParallelLayout, model: str) -> dict[str, Any]:
    from mcore_adapter.cpu.device import CpuDevice

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuDevice, "has_grouped_products", True)
        return actor_run(rank, layout, model)


def test_more_ranks_than_a_token_has_experts_use_the_dispatcher_of_megatron(
    ranks: RankPool, model_folders: Any
) -> None:
    folder, four = str(model_folders["qwen3_moe"][0]), ParallelLayout(dp=4, ep=4)
    for result in ranks.run(partial(counted, recompute="none"), 4, four, folder):
        assert result["names"] == {"MoEAlltoAllTokenDispatcher"} and not result["exchanges"]
    results, expected = (ranks.run(stacked_run, n, layout, folder) for n, layout in ((4, four), (1, ParallelLayout())))
    assert_same_steps(results, expected)
    torch.testing.assert_close(whole(results), whole(expected), rtol=1e-5, atol=1e-5)
