"""Losses against their formulas written out; gradients by autograd."""

import math
from types import SimpleNamespace

import pytest
import torch

from core.algorithms.losses import sft_loss, value_loss
from core.algorithms.rewards import kl_estimate
from helpers.batches import ppo_loss, ppo_policy_loss


def tokens(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


ALL = torch.tensor([True, True, True])


def test_on_policy_loss_is_minus_the_advantage_and_its_gradient_is_the_policy_gradient() -> None:
    logprobs = tokens(-1.0, -2.0, -3.0).requires_grad_()
    advantages = tokens(0.5, -1.0, 2.0)
    loss, metrics = ppo_policy_loss(
        logprobs, logprobs.detach(), logprobs.detach(), advantages, ALL, eps_clip=0.2, behave_imp_weight_cap=None
    )
    loss.backward()
    assert loss.item() == pytest.approx(-1.5)
    torch.testing.assert_close(logprobs.grad, -advantages)
    assert metrics["importance_weight"].item() == 3.0 and metrics["actor_clip_ratio"].item() == 0


def test_a_ratio_outside_the_clip_range_has_no_gradient_where_clipping_is_pessimistic() -> None:
    old = tokens(-1.0, -1.0, -1.0)
    logprobs = (old + tokens(math.log(1.5), math.log(1.5), math.log(0.5))).requires_grad_()
    advantages = tokens(1.0, -1.0, -1.0)
    loss, metrics = ppo_policy_loss(logprobs, old, old, advantages, ALL, eps_clip=0.2, behave_imp_weight_cap=None)
    loss.backward()
    assert loss.item() == pytest.approx(-1.2 + 1.5 + 0.8)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, 1.5, 0.0])
    assert metrics["actor_clip_ratio"].item() == 2


def test_the_decoupled_loss_weighs_each_token_by_proximal_over_behaviour_and_drops_those_over_the_cap() -> None:
    old = tokens(-1.0, -1.0, -1.0)
    rollout = old - tokens(math.log(2.0), math.log(0.5), math.log(8.0))
    advantages = tokens(1.0, 1.0, 1.0)
    loss, metrics = ppo_policy_loss(old, old, rollout, advantages, ALL, eps_clip=0.2, behave_imp_weight_cap=5.0)
    assert loss.item() == pytest.approx(-2.5)
    assert metrics["behave_capped_ratio"].item() == 1
    assert metrics["behave_imp_weight"].item() == pytest.approx(10.5)
    assert metrics["behave_approx_kl"].item() == pytest.approx(math.log(2.0) + math.log(0.5) + math.log(8.0))


@pytest.mark.parametrize("value", [-900.0, -math.inf, math.nan])
def test_masked_tokens_change_nothing_even_when_their_inputs_are_not_finite(value: float) -> None:
    mask = torch.tensor([True, False, True])
    advantages = tokens(1.0, 5.0, 1.0)
    clean = tokens(-1.0, 0.0, -1.0)
    dirty = tokens(-1.0, value, -1.0).requires_grad_()
    expected, _ = ppo_policy_loss(clean, clean, clean, advantages, mask, eps_clip=0.2, behave_imp_weight_cap=None)
    loss, _ = ppo_policy_loss(dirty, clean, clean, advantages, mask, eps_clip=0.2, behave_imp_weight_cap=None)
    loss.backward()
    assert loss.item() == expected.item()
    assert dirty.grad is not None and dirty.grad[1].item() == 0.0


def test_without_old_logprobs_the_proximal_policy_is_the_current_one() -> None:
    fields = {"loss_mask": ALL, "rollout_logprobs": tokens(-1.5, -2.0, -3.0), "advantages": tokens(1.0, 2.0, 3.0)}
    options = {
        "eps_clip": 0.2,
        "behave_imp_weight_cap": 5.0,
        "kl_ctl": 0.0,
        "kl_estimator": "k1",
        "entropy_coeff": 0.0,
    }
    current = tokens(-1.0, -2.0, -3.0).requires_grad_()
    implicit, _ = ppo_loss(SimpleNamespace(logprobs=current, entropy=None), fields, **options)
    implicit.backward()
    explicit_input = current.detach().clone().requires_grad_()
    explicit, _ = ppo_loss(
        SimpleNamespace(logprobs=explicit_input, entropy=None), {**fields, "old_logprobs": current.detach()}, **options
    )
    explicit.backward()
    assert implicit.item() == explicit.item()
    torch.testing.assert_close(current.grad, explicit_input.grad)


def test_kl_and_entropy_enter_the_loss_with_their_coefficients() -> None:
    logprobs = tokens(-1.0, -2.0, -3.0)
    fields = {
        "loss_mask": torch.tensor([True, True, False]),
        "rollout_logprobs": logprobs,
        "advantages": tokens(0.0, 0.0, 0.0),
        "ref_logprobs": tokens(-1.5, -1.0, 0.0),
    }
    loss, metrics = ppo_loss(
        SimpleNamespace(logprobs=logprobs, entropy=tokens(0.3, 0.4, 9.0)), fields,
        eps_clip=0.2, behave_imp_weight_cap=None, kl_ctl=0.1, kl_estimator="k1", entropy_coeff=0.01,
    )  # fmt: skip
    assert loss.item() == pytest.approx(0.1 * (0.5 - 1.0) - 0.01 * 0.7)
    assert metrics["ref_kl"].item() == pytest.approx(-0.5) and metrics["entropy"].item() == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [1.0, -2.0]),
        ("k2", [0.5, 2.0]),
        # e^-x - 1 + x; with policy and reference exchanged it would be e^x - 1 - x: 0.718 and 1.135
        ("k3", [math.exp(-1), math.exp(2) - 3]),
    ],
)
def test_kl_estimators_of_tokens_have_the_sign_and_size_of_their_formulas(
    estimator: str, expected: list[float]
) -> None:
    estimate = kl_estimate(tokens(-1.0, -3.0), tokens(-2.0, -1.0), estimator)  # type: ignore[arg-type]
    assert estimate.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # KL(p || q) = 0.9 ln 9 - 0.1 ln 9, which k1 and k3 estimate without bias at any distance
        ("k1", 0.8 * math.log(9)),
        ("k2", 0.5 * math.log(9) ** 2),
        ("k3", 0.8 * math.log(9)),
    ],
)
def test_kl_estimators_have_their_expectation_for_two_distributions_far_apart(estimator: str, expected: float) -> None:
    p, q = tokens(0.9, 0.1), tokens(0.1, 0.9)
    estimate = (p * kl_estimate(p.log(), q.log(), estimator)).sum()  # type: ignore[arg-type]
    assert estimate.item() == pytest.approx(expected)


def test_value_loss_takes_the_worse_of_clipped_and_unclipped() -> None:
    fields = {"loss_mask": ALL, "returns": tokens(1.0, 1.0, 1.0), "old_values": tokens(0.0, 0.0, 0.9)}
    output = SimpleNamespace(values=tokens(0.5, 0.1, 0.95))
    loss, metrics = value_loss(output, fields, value_eps_clip=0.2)
    assert loss.item() == pytest.approx(0.5 * (0.8**2 + 0.9**2 + 0.05**2))
    assert metrics["value_clip_ratio"].item() == 1


def test_sft_loss_is_the_negative_log_likelihood_of_the_answer_tokens() -> None:
    loss, metrics = sft_loss(
        SimpleNamespace(logprobs=tokens(-1.0, -2.0, -4.0)), {"loss_mask": torch.tensor([False, True, True])}
    )
    assert loss.item() == 6.0 and metrics["nll"].item() == 6.0


@pytest.mark.parametrize("weights", [(0.5, 0.0, 2.0), (7.0, 1.0, 2.0)], ids=["zero where masked", "not zero"])
def test_losses_and_their_metrics_are_sums_weighted_by_the_token_weights_of_trained_tokens(weights: tuple) -> None:
    """An untrained token may have a weight (of a constant divisor) and still adds nothing."""
    mask = torch.tensor([weights[0] < 1, weights[1] > 0, True])
    fields = {
        "loss_mask": mask, "token_weights": tokens(*weights), "rollout_logprobs": tokens(-1.0, -1.0, -1.0),
        "old_logprobs": tokens(-1.0, -1.0, -1.0), "ref_logprobs": tokens(-2.0, -2.0, -2.0),
        "advantages": tokens(1.0, 10.0, 100.0), "returns": tokens(1.0, 1.0, 1.0), "old_values": tokens(0.0, 0.0, 0.0),
    }  # fmt: skip
    used = [w if m else 0.0 for w, m in zip(weights, mask.tolist(), strict=True)]
    output = SimpleNamespace(
        logprobs=tokens(-1.0, -1.0, -1.0), entropy=tokens(3.0, 3.0, 3.0), values=tokens(0.0, 0.0, 0.0)
    )
    loss, metrics = ppo_loss(
        output, fields, eps_clip=0.2, behave_imp_weight_cap=None, kl_ctl=0.5, kl_estimator="k1", entropy_coeff=0.1
    )
    policy = -sum(w * a for w, a in zip(used, (1.0, 10.0, 100.0), strict=True))
    assert metrics["actor_loss"].item() == pytest.approx(policy)
    assert loss.item() == pytest.approx(policy + (0.5 * 1.0 - 0.1 * 3.0) * sum(used))
    for name, of_token in {"importance_weight": 1.0, "behave_imp_weight": 1.0, "ref_kl": 1.0, "entropy": 3.0}.items():
        assert metrics[name].item() == pytest.approx(of_token * sum(used)), name
    assert sft_loss(output, fields)[0].item() == pytest.approx(sum(used))
    assert value_loss(output, fields, value_eps_clip=0.2)[0].item() == pytest.approx(0.5 * sum(used))
