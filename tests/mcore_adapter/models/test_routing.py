"""Choice and weights of experts against a loop over tokens in float64: torch operators, and the kernels on a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.engine_cases import ON_A_GPU
from mcore_adapter.models.router import routing_for
from model_specs.config import MoEConfig


def moe(num_experts: int, top_k: int, **changes: Any) -> MoEConfig:
    """A softmax over all experts, divided by the sum of the chosen ones, and `changes`."""
    values: dict[str, Any] = dict(
        num_experts=num_experts, top_k=top_k, intermediate_size=1, shared_intermediate_size=0, sparse_layers=(True,),
        score_function="softmax", normalize=True, scaling=1.0, num_groups=1, top_k_groups=1, group_score="max",
        correction_bias=False,
    )  # fmt: skip
    return MoEConfig(**values | changes)


SIGMOID = dict(score_function="sigmoid", correction_bias=True)
CASES = {
    "qwen3": moe(128, 8),
    "not normalized": moe(60, 4, normalize=False, scaling=0.5),
    "one expert": moe(4, 1),
    "all experts": moe(6, 6),
    "many experts": moe(520, 5),
    "deepseek_v2": moe(160, 6, normalize=False, scaling=16.0, num_groups=8, top_k_groups=3),
    "deepseek_v3": moe(256, 8, scaling=2.5, num_groups=8, top_k_groups=4, group_score="top2", **SIGMOID),
    "odd groups": moe(42, 4, scaling=1.5, num_groups=6, top_k_groups=5, group_score="top2", **SIGMOID),
    "three groups": moe(12, 3, num_groups=3, top_k_groups=1, group_score="top2"),
    "sixteen of a sigmoid": moe(384, 16, scaling=2.0, **SIGMOID),
    "sigmoid, not normalized": moe(100, 10, normalize=False, num_groups=5, top_k_groups=2, **SIGMOID),
}
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
EVERY_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
TOKENS = 37  # no multiple of any kernel's rows


def drawn(case: MoEConfig) -> tuple[Tensor, Tensor | None, Tensor]:
    """Logits, bias, and a gradient of the weights. Steps of 1/4 make ties; other keys differ by more than rounding."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(TOKENS, case.num_experts, generator=generator).mul(8).round().div(4)
    bias = torch.randn(case.num_experts, generator=generator).round().div(8) if case.correction_bias else None
    return logits, bias, torch.randn(TOKENS, case.top_k, generator=generator)


def best(keys: dict[int, float], num: int) -> list[int]:
    return sorted(keys, key=lambda i: (-keys[i], i))[:num]


def best_experts(keys: list[float], case: MoEConfig) -> list[int]:
    size = case.num_experts // case.num_groups
    groups = {g: sorted(keys[g * size : (g + 1) * size], reverse=True) for g in range(case.num_groups)}
    num = 1 if case.group_score == "max" else 2
    kept = best({g: sum(values[:num]) for g, values in groups.items()}, case.top_k_groups)
    return best({i: key for i, key in enumerate(keys) if i // size in kept}, case.top_k)


def expected(logits: Tensor, bias: Tensor | None, case: MoEConfig, forced: Tensor | None) -> tuple[Tensor, Tensor]:
    """Token by token, in the logits' format."""
    weights, experts = [], []
    for t, row in enumerate(logits):
        scores = row.softmax(0) if case.score_function == "softmax" else row.sigmoid()
        keys = scores.detach() if bias is None else scores.detach() + bias
        chosen = best_experts(keys.tolist(), case)
        if forced is not None and min(forced[t].tolist()) >= 0:
            chosen = forced[t].tolist()
        own = scores[chosen]
        weights.append(case.scaling * (own / own.sum() if case.normalize else own))
        experts.append(chosen)
    return torch.stack(weights), torch.tensor(experts)


def assert_routed(case: MoEConfig, device: str, forced: Tensor | None = None) -> None:
    """Experts, weights and gradient of the logits are the expected ones."""
    logits, bias, grad = drawn(case)
    exact = logits.double().requires_grad_()
    expected_weights, expected_experts = expected(exact, bias, case, forced)
    leaf = logits.to(device).requires_grad_()
    weights, experts = routing_for(leaf)(
        leaf, case, bias=None if bias is None else bias.to(device), forced=None if forced is None else forced.to(device)
    )
    assert (weights.dtype, experts.dtype) == (torch.float32, torch.int64)
    assert torch.equal(experts.cpu(), expected_experts)
    torch.testing.assert_close(weights.cpu().double(), expected_weights, rtol=1e-5, atol=1e-6)
    (ours,) = torch.autograd.grad(weights, leaf, grad.to(device))
    (theirs,) = torch.autograd.grad(expected_weights, exact, grad.double())
    torch.testing.assert_close(ours.cpu().double(), theirs, rtol=1e-4, atol=1e-6 * max(1.0, case.scaling))


@EVERY_CASE
@EVERY_DEVICE
def test_tokens_go_to_the_best_experts_of_the_best_groups_and_to_the_first_of_equal_ones(case, device) -> None:
    assert_routed(case, device)


@EVERY_CASE
@EVERY_DEVICE
def test_tokens_go_to_the_experts_that_are_given_unless_one_is_negative(case: MoEConfig, device: str) -> None:
    """Given as a batch has them: int16, one layer of several."""
    layers = torch.rand(TOKENS, 3, case.num_experts, generator=torch.Generator().manual_seed(5))
    given = layers.topk(case.top_k).indices.to(torch.int16)
    given[::3, 1, -1] = -1
    given[1::6, 1] = -1
    assert_routed(case, device, given[:, 1])


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3", "odd groups"])
@EVERY_DEVICE
def test_logits_that_are_not_finite_change_no_other_token_and_choose_different_experts(name: str, device: str) -> None:
    case = CASES[name]
    logits, bias, grad = (None if t is None else t.to(device) for t in drawn(case))
    assert logits is not None and grad is not None
    broken = logits.clone()
    broken[3, 1], broken[11], broken[19], broken[20, 2] = torch.nan, torch.nan, -torch.inf, torch.inf
    results = []
    for leaf in (logits.requires_grad_(), broken.requires_grad_()):
        weights, experts = routing_for(leaf)(leaf, case, bias=bias)
        results.append((weights, experts, *torch.autograd.grad(weights, leaf, grad)))
    others = [t for t in range(TOKENS) if t not in (3, 11, 19, 20)]
    for whole, part in zip(*results, strict=True):
        assert torch.equal(whole[others], part[others])
    weights, experts, by_logits = results[1]
    assert weights[3].isnan().any() and by_logits[3].isnan().any(), "a NaN must reach the loss and the gradient norm"
    assert ((experts >= 0) & (experts < case.num_experts)).all()
    assert (experts.sort(-1).values.diff(dim=-1) > 0).all()
