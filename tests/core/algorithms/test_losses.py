"""Losses against their formulas written out; gradients by autograd."""

import math
from types import SimpleNamespace

import pytest
import torch

from core.algorithms.offline import SFT
from core.algorithms.policy_gradient import Critic
from helpers.batches import ppo_loss, ppo_policy_loss


def tokens(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


ALL = torch.tensor([True, True, True])


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
    options = {"eps_clip": 0.2, "behave_imp_weight_cap": 5.0, "kl_ctl": 0.0, "kl_estimator": "k1", "entropy_coeff": 0.0}
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
    assert SFT().loss(output, fields, None)[0].item() == pytest.approx(sum(used))
    assert Critic(value_eps_clip=0.2).loss(output, fields, None)[0].item() == pytest.approx(0.5 * sum(used))
