"""GSPO against its formula in plain Python, and its gradients; test_layouts.py has it on trainer ranks."""

import math
from typing import Any

import pytest
import torch

from core.algorithms.losses import policy_loss
from helpers.batches import algorithm, batch_of, settings
from mcore_adapter.data.batch import ModelOutput, Sequences, sequence_mean

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


# ---- advantages


def test_gspo_needs_no_critic_averages_over_sequences_and_keeps_groups_together() -> None:
    gspo = algorithm("gspo", correction="decoupled", ppo_n_minibatches=4)
    assert gspo.passes == {"old_logprobs"} and gspo.critic is None and gspo.unit == "group"
    packed = batch_of([1.0, 0.0], lens=[2, 5])[0].to_packed()
    assert torch.equal(gspo.token_weights(packed), sequence_mean(packed))
    assert not gspo.weighs_alike and algorithm("grpo").weighs_alike


def test_masked_tokens_change_nothing_even_when_their_inputs_are_far_off() -> None:
    logprobs, old = inputs(0.1)
    expected = loss_of(logprobs, old)[0]
    dirty = torch.where(MASK, logprobs, -900.0).requires_grad_()
    loss, _ = loss_of(dirty, old)
    loss.backward()
    assert loss.item() == expected.item() and dirty.grad is not None and not dirty.grad[~MASK].any()
