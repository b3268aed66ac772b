"""GSPO against its formula in plain Python, and its gradients; test_layouts.py has it on trainer ranks."""

import math
from typing import Any

import pytest
import torch

from core.algorithms.advantages import centred
from core.algorithms.losses import policy_loss
from helpers.batches import algorithm, batch_of, by_answer, settings
from mcore_adapter.data.batch import ModelOutput
from mcore_adapter.data.sequences import Sequences, sequence_mean

CLIP = {"clip_low": 3e-4, "clip_high": 4e-4}


# ---- the loss as a pure function

LENS = [3, 2, 4, 2]
OF_TOKEN = torch.arange(4).repeat_interleave(torch.tensor(LENS))
SEQUENCES = Sequences(of_token=OF_TOKEN, count=4)
MASK = torch.tensor([0, 1, 1, 0, 1, 0, 1, 0, 1, 0, 0]).bool()
"""The last sequence has no trained token."""
ADVANTAGES = [1.0, -2.0, 0.5, 9.0]


def weights() -> list[float]:
    """1 / L of the trained tokens."""
    trained = [int(MASK[i == OF_TOKEN].sum()) for i in range(4)]
    return [1 / trained[i] if m else 0.0 for i, m in zip(OF_TOKEN.tolist(), MASK.tolist(), strict=True)]


def inputs(scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probabilities, old ones): they differ by about `scale`."""
    generator = torch.Generator().manual_seed(4)
    old = -torch.rand(len(MASK), generator=generator, dtype=torch.float64)
    return old + scale * torch.randn(len(MASK), generator=generator, dtype=torch.float64), old


def loss_of(logprobs: torch.Tensor, old: torch.Tensor, rollout: torch.Tensor | None = None, **options: Any) -> Any:
    chosen = settings(**{**CLIP, "ratio": "sequence", "correction": "decoupled", **options})
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)[OF_TOKEN]
    rollout = old if rollout is None else rollout
    weight = torch.tensor(weights(), dtype=torch.float64)
    fields = {
        "old_logprobs": old, "rollout_logprobs": rollout, "advantages": advantages, "loss_mask": MASK,
        "token_weights": weight,
    }  # fmt: skip
    return policy_loss(ModelOutput(logprobs=logprobs), fields, SEQUENCES, chosen)


def by_formula(logprobs: list[float], old: list[float], *, clip_low: float, clip_high: float) -> tuple[float, list]:
    """Sum over sequences of the mean over trained tokens, and its gradient: one ratio a sequence, plain Python."""
    total, gradient = 0.0, [0.0] * len(logprobs)
    for i, advantage in enumerate(ADVANTAGES):
        tokens = [t for t in range(len(logprobs)) if OF_TOKEN[t] == i and MASK[t]]
        if not tokens:
            continue
        s = math.exp(min(sum(logprobs[t] - old[t] for t in tokens) / len(tokens), 10.0))
        clipped = min(max(s, 1 - clip_low), 1 + clip_high)
        total += max(-advantage * s, -advantage * clipped)
        if -advantage * s >= -advantage * clipped and s < math.exp(10.0):
            for t in tokens:
                gradient[t] = -advantage * s / len(tokens)
    return total, gradient


@pytest.mark.parametrize("scale", [1e-4, 1e-3, 0.5])
def test_the_loss_and_its_gradient_are_those_of_the_formula(scale: float) -> None:
    logprobs, old = inputs(scale)
    logprobs.requires_grad_()
    loss, metrics = loss_of(logprobs, old)
    loss.backward()
    expected, gradient = by_formula(logprobs.tolist(), old.tolist(), **CLIP)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(gradient, rel=1e-12)
    assert metrics["actor_loss"].item() == loss.item()


def test_the_gradient_is_that_of_the_ratio_of_whole_sequences_by_finite_differences() -> None:
    """The token form holds the sequence's ratio fixed, yet its gradient is that of the formula without it."""
    logprobs, old = inputs(1e-4)
    logprobs.requires_grad_()
    loss_of(logprobs, old, clip_low=0.5, clip_high=0.5)[0].backward()
    assert logprobs.grad is not None
    for t in range(len(MASK)):
        moved = [logprobs.detach().clone() for _ in range(2)]
        moved[0][t] += 1e-6
        moved[1][t] -= 1e-6
        up, down = (by_formula(x.tolist(), old.tolist(), clip_low=0.5, clip_high=0.5)[0] for x in moved)
        assert logprobs.grad[t].item() == pytest.approx((up - down) / 2e-6, abs=1e-8)


def test_without_old_logprobs_the_proximal_policy_is_the_current_one_and_has_no_gradient() -> None:
    gspo, (logprobs, rollout) = algorithm("gspo", correction="decoupled"), inputs(0.1)
    fields = {
        "loss_mask": MASK, "rollout_logprobs": rollout, "token_weights": torch.tensor(weights(), dtype=torch.float64),
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64)[OF_TOKEN],
    }  # fmt: skip
    gradients = []
    for old in ({}, {"old_logprobs": logprobs.clone()}):
        current = logprobs.clone().requires_grad_()
        gspo.loss(ModelOutput(logprobs=current), {**fields, **old}, SEQUENCES)[0].backward()
        gradients.append(current.grad)
    torch.testing.assert_close(*gradients)


def test_a_ratio_is_clipped_where_that_is_pessimistic_and_cut_off_at_exp_10() -> None:
    old = torch.zeros(len(MASK), dtype=torch.float64)
    logprobs = (0.01 * MASK).double().requires_grad_()
    loss, metrics = loss_of(logprobs, old)
    # Sequences 0 and 2 have positive advantages: clipped at 1 + 4e-4. Sequence 1 is not: 2 * exp(0.01).
    assert loss.item() == pytest.approx(-1.5 * (1 + 4e-4) + 2 * math.exp(0.01))
    assert metrics["actor_clip_ratio"].item() == pytest.approx(2)
    assert metrics["importance_weight"].item() == pytest.approx(3 * math.exp(0.01))
    far = (50.0 * MASK).double().requires_grad_()
    loss, _ = loss_of(far, old)
    loss.backward()
    assert loss.item() == pytest.approx(-1.5 * (1 + 4e-4) + 2 * math.exp(10.0))
    assert far.grad is not None and not far.grad.any()


def test_tokens_are_weighted_by_proximal_over_behaviour_and_dropped_over_the_cap() -> None:
    old = torch.full((len(MASK),), -1.0, dtype=torch.float64)
    rollout = old.clone()
    rollout[1], rollout[4] = old[1] - math.log(2.0), old[4] - math.log(8.0)
    loss, metrics = loss_of(old, old, rollout, behave_imp_weight_cap=5.0)
    # Ratios are 1. Sequence 0: tokens 1 and 2 of weight 2 and 1; sequence 1: its token is dropped; sequence 2: 1 and 1.
    assert loss.item() == pytest.approx(-1.0 * (2 + 1) / 2 + 0.0 - 0.5)
    assert metrics["behave_capped_ratio"].item() == pytest.approx(1)


def test_masked_tokens_change_nothing_even_when_their_inputs_are_far_off() -> None:
    logprobs, old = inputs(0.1)
    expected = loss_of(logprobs, old)[0]
    dirty = torch.where(MASK, logprobs, -900.0).requires_grad_()
    loss, _ = loss_of(dirty, old)
    loss.backward()
    assert loss.item() == expected.item() and dirty.grad is not None and not dirty.grad[~MASK].any()


# ---- advantages


def test_advantages_are_rewards_standardised_over_each_group_with_the_deviation_of_a_sample() -> None:
    batch, fields = batch_of([1.0, 0.0, 0.0, 0.0], [3.0, 5.0], [2.0], lens=[1, 2, 1, 1, 1, 2, 1])
    trained_on, _ = algorithm("gspo").advantages(batch, fields)
    half = 0.5**0.5
    expected = [[1.5], [-0.5] * 2, [-0.5], [-0.5], [-half], [half] * 2, [0.0]]
    for found, wanted in zip(by_answer(batch, trained_on["advantages"]), expected, strict=True):
        assert found == pytest.approx(wanted, abs=1e-5)
    assert centred(torch.tensor([7.0, 7.0]), torch.tensor([0, 0])).tolist() == [0.0, 0.0]


def test_gspo_needs_no_critic_averages_over_sequences_and_keeps_groups_together() -> None:
    gspo = algorithm("gspo", correction="decoupled", ppo_n_minibatches=4)
    assert gspo.passes == {"old_logprobs"} and gspo.critic is None and gspo.unit == "group"
    packed = batch_of([1.0, 0.0], lens=[2, 5])[0].to_packed()
    assert torch.equal(gspo.token_weights(packed), sequence_mean(packed))
    assert not gspo.weighs_alike and algorithm("grpo").weighs_alike
