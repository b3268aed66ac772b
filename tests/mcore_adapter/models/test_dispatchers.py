"""The gathering dispatcher of stacked experts: what it computes, when ranks use it, how often they exchange sizes, and
what they compute meanwhile."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from allocation import ParallelLayout
from helpers.engine_cases import MAX_TOKENS, actor_run, assert_same_steps, make_engine, policy_loss, random_batch, whole
from helpers.expert_layers import dispatched, make_dispatcher, plain_output, shared_output
from helpers.mcore_ranks import EXPERT_LAYOUTS, Rank, RankPool
from mcore_adapter.models.experts import experts_output, sorted_rows
from model_specs.config import gathers_tokens

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


@pytest.mark.parametrize("keep_halves", [True, False], ids=["kept", "computed again"])
@pytest.mark.parametrize("num_experts", [NUM_EXPERTS, K], ids=["all experts", "those of the first rank"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_ranks_compute_together_what_one_computes(
    ranks: RankPool, case: str, dtype: torch.dtype, num_experts: int, keep_halves: bool
) -> None:
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
def test_tokens_are_gathered_where_each_has_as_many_experts_as_there_are_ranks(
    num_ranks: int, top_k: int, gathers: bool
) -> None:
    assert gathers_tokens(num_ranks, top_k) is gathers


def counted(rank: Rank, layout: ParallelLayout, model: str, recompute: Any) -> dict[str, Any]:
    """Return the dispatchers of an engine with stacked experts, and how often it exchanges sizes."""
    from mcore_adapter.cpu.device import CpuDevice
    from mcore_adapter.models.router import GatheringDispatcher

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


class Recorded:
    """A collective under way."""

    def __init__(self, work: Any, name: str, events: list[str]) -> None:
        self._work, self._name, self._events = work, name, events

    def wait(self) -> None:
        self._events.append(f"has {self._name}")
        self._work.wait()


def record_events(patch: pytest.MonkeyPatch, group: Any, top_k: int) -> list[str]:
    """Record the collectives of `group`, real ones, and what is computed of experts."""
    import torch.distributed as dist

    from mcore_adapter.models import experts
    from mcore_adapter.models.router import Router

    events: list[str] = []

    def collective(function: Any, what: str) -> Any:
        def begin(output: Tensor, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            work = function(output, tensor, *args, **kwargs)
            if kwargs.get("group") is not group:
                return work
            width = {torch.int64: "sizes", torch.int32: "experts"}.get(tensor.dtype)
            name = width or ("weights" if tensor.shape[1] == top_k else "tokens")
            events.append(f"{what} {name}")
            return Recorded(work, name, events)

        return begin

    def noted(function: Any, name: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            events.append(name(*args))
            return function(*args, **kwargs)

        return call

    patch.setattr(dist, "all_gather_into_tensor", collective(dist.all_gather_into_tensor, "gather"))
    patch.setattr(dist, "reduce_scatter_tensor", collective(dist.reduce_scatter_tensor, "sum"))
    patch.setattr(Router, "forward", noted(Router.forward, lambda *_: "router"))
    patch.setattr(experts, "spread", noted(experts.spread, lambda *_: "copies"))
    of_weights = {2: "gradient of weights", 3: "product"}
    patch.setattr(experts, "_product", noted(experts._product, lambda a, b, rows: of_weights[b.dim()]))
    return events


def recorded(rank: Rank, model: str, recompute: Any) -> list[str]:
    """Record an update of one microbatch."""
    from megatron.core import parallel_state

    from mcore_adapter.cpu.device import CpuDevice

    with pytest.MonkeyPatch.context() as patch, rank.joined(EXPERT_LAYOUTS["dp2 ep2"]) as (parallel, device):
        patch.setattr(CpuDevice, "has_grouped_products", True)
        engine = make_engine(parallel, device, model, recompute=recompute)
        group = parallel_state.get_expert_model_parallel_group()
        events = record_events(patch, group, engine.model_config.moe.top_k)
        step = engine.train_step(random_batch(), policy_loss, max_tokens_per_mb=4096)
        assert step["num_microbatches"] == 1
        return events


FORWARD = [
    "gather tokens", "router", "gather experts", "has experts", "gather weights", "has tokens", "has weights",
    "copies", "product", "product", "sum tokens", "has tokens",
]  # fmt: skip
GRADIENTS = [
    "has tokens", "copies", "product", "sum weights", "gradient of weights", "product", "sum tokens",
    "gradient of weights", "has tokens", "has weights",
]  # fmt: skip
KEPT = ["gather tokens", "copies", *GRADIENTS]
UPDATES = {
    "none": 4 * FORWARD + 4 * KEPT,
    "linear": 4 * FORWARD + 4 * ["gather tokens", "copies", "product", *GRADIENTS],
    "full": 4 * FORWARD + 4 * [*FORWARD, *KEPT],
}
"""What the four layers of the model do."""


@pytest.mark.parametrize("recompute", UPDATES)
def test_what_needs_no_exchange_is_computed_beside_it(ranks: RankPool, model_folders: Any, recompute: str) -> None:
    """Tokens are gathered beside the router, the gradients of sums beside copies and what is computed again, and the
    gradients of tokens are summed beside those of the first weights."""
    for events in ranks.run(recorded, 2, str(model_folders["qwen3_moe"][0]), recompute):
        assert events == ["gather sizes", "has sizes", *UPDATES[recompute]]


def held_gradients(rank: Rank, keep_halves: bool) -> list[bool]:
    """Return for each product of the backward pass whether the gathered gradient is still in memory."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.multiprocessing.reductions import StorageWeakRef

    from mcore_adapter.models import experts

    gathered: list[StorageWeakRef] = []
    held: list[bool] = []
    gather, product = dist.all_gather_into_tensor, experts._product

    def watched_gather(output: Tensor, *args: Any, **kwargs: Any) -> Any:
        gathered.append(StorageWeakRef(output.untyped_storage()))
        return gather(output, *args, **kwargs)

    def watched_product(*args: Any) -> Tensor:
        # After wait() has returned, a thread of gloo may hold its own reference for a moment.
        deadline = time.monotonic() + 1.0
        while not gathered[0].expired() and time.monotonic() < deadline:
            time.sleep(0.001)
        held.append(not gathered[0].expired())
        return product(*args)

    with pytest.MonkeyPatch.context() as patch, rank.joined(EXPERT_LAYOUTS["dp2 ep2"]):
        leaves, (experts, grad) = own_part(rank, (7, 3), NUM_EXPERTS, torch.float32)
        dispatcher = make_dispatcher(parallel_state.get_expert_model_parallel_group(), NUM_EXPERTS, K)
        output = shared_output(dispatcher, leaves, experts, keep_halves=keep_halves)
        patch.setattr(dist, "all_gather_into_tensor", watched_gather)
        patch.setattr(experts, "_product", watched_product)
        torch.autograd.grad(output, leaves, grad)
    return held


@pytest.mark.parametrize(("keep_halves", "held"), [(True, [False] * 4), (False, [True] + [False] * 4)])
def test_the_gradients_of_all_ranks_are_dropped_when_they_are_copied(
    ranks: RankPool, keep_halves: bool, held: list[bool]
) -> None:
    assert ranks.run(held_gradients, 2, keep_halves) == [held, held]
