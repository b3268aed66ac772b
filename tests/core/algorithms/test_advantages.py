"""Advantages against the definitions written as plain loops."""

import pytest
import torch

from core.algorithms.advantages import (
    ValueNorm,
    centred,
    gae,
    whiten,
)
from core.algorithms.rewards import shape_scores, token_rewards


def gae_by_definition(rewards, values, bootstrap, discount, lam):
    """One sequence, plain Python."""
    values = [*values, bootstrap]
    running, out = 0.0, []
    for t in reversed(range(len(rewards))):
        running = rewards[t] + discount * values[t + 1] - values[t] + discount * lam * running
        out.append(running)
    return out[::-1]


@pytest.mark.parametrize(("discount", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_gae_of_packed_sequences_is_gae_of_each_sequence(discount: float, lam: float) -> None:
    generator = torch.Generator().manual_seed(1)
    lens = [1, 7, 3, 12]
    cu = torch.tensor([0, *lens]).cumsum(0)
    rewards, values = torch.randn(2, int(cu[-1]), generator=generator)
    bootstrap = torch.randn(len(lens), generator=generator)
    mask = torch.ones(int(cu[-1]), dtype=torch.bool)
    advantages, returns = gae(rewards, values, cu, mask, bootstrap, discount=discount, gae_lambda=lam)
    expected = [
        a
        for i, (start, end) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True))
        for a in gae_by_definition(
            rewards[start:end].tolist(), values[start:end].tolist(), bootstrap[i].item(), discount, lam
        )
    ]
    torch.testing.assert_close(advantages, torch.tensor(expected), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(returns, advantages + values)


def test_the_kl_penalty_counts_on_trained_tokens_only() -> None:
    mask = torch.tensor([False, True, True])
    rewards = token_rewards(torch.tensor([2.0]), torch.tensor([0, 3]), mask, kl_penalty=torch.tensor([9.0, 0.5, 0.25]))
    assert rewards.tolist() == [0.0, -0.5, 1.75]


def test_group_normalisation_centres_and_scales_each_group_by_itself() -> None:
    scores = torch.tensor([1.0, 0.0, 5.0, 5.0, 10.0, 20.0])
    groups = torch.tensor([0, 0, 1, 1, 2, 2])
    normalised = centred(scores, groups)
    assert normalised.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5), 0, 0, -(0.5**0.5), 0.5**0.5], abs=1e-4)


def test_cut_off_completions_score_zero_only_when_asked() -> None:
    scores, no_eos = torch.tensor([1.0, 1.0]), torch.tensor([False, True])
    kept = shape_scores(scores, no_eos, bias=0.5, scaling=4.0, mask_no_eos_with_zero=False)
    masked = shape_scores(scores, no_eos, bias=0.5, scaling=4.0, mask_no_eos_with_zero=True)
    assert kept.tolist() == [2.0, 2.0] and masked.tolist() == [2.0, 0.0]


def test_whitening_ignores_what_is_masked() -> None:
    x, mask = torch.tensor([1.0, 3.0, 100.0]), torch.tensor([True, True, False])
    assert whiten(x, mask).tolist() == pytest.approx([-1.0, 1.0, 0.0], abs=1e-4)


def test_value_norm_is_the_identity_at_first_and_inverts_itself_later() -> None:
    norm = ValueNorm(beta=0.9)
    x = torch.tensor([3.0, 5.0, 7.0])
    mask = torch.ones(3, dtype=torch.bool)
    torch.testing.assert_close(norm.normalize(x), x)
    norm.update(x, mask)
    assert norm.normalize(x).mean().item() == pytest.approx(0.0, abs=1e-5)
    torch.testing.assert_close(norm.denormalize(norm.normalize(x)), x)


def test_value_norm_takes_in_the_masked_entries_of_a_batch_only() -> None:
    norm = ValueNorm()
    norm.update(torch.tensor([2.0, 100.0, 8.0, -50.0]), torch.tensor([True, False, True, False]))
    # Mean 5, mean square 34, standard deviation 3.
    assert norm.normalize(torch.tensor([2.0, 5.0, 11.0])).tolist() == pytest.approx([-1.0, 0.0, 2.0])
    assert norm.denormalize(torch.tensor([-1.0, 0.0, 2.0])).tolist() == pytest.approx([2.0, 5.0, 11.0])
    before = norm.normalize(torch.tensor([2.0]))
    norm.update(torch.tensor([100.0]), torch.tensor([False]))
    assert norm.normalize(torch.tensor([2.0])) == before


def test_value_norm_gives_recent_batches_the_larger_weight() -> None:
    norm = ValueNorm(beta=0.5)
    for returns in ([0.0], [3.0]):
        norm.update(torch.tensor(returns), torch.tensor([True]))
    # Weights 1/3 and 2/3: mean 2, mean square 6, standard deviation sqrt(2).
    assert norm.normalize(torch.tensor([2.0, 2.0 + 2**0.5])).tolist() == pytest.approx([0.0, 1.0])


def two_turns(gap: int, *, trailing: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(cu_seqlens, loss_mask): a prompt of 2, a turn of 2, `gap` masked tokens, a turn of 3, `trailing` masked ones."""
    mask = [False] * 2 + [True] * 2 + [False] * gap + [True] * 3 + [False] * trailing
    return torch.tensor([0, len(mask)]), torch.tensor(mask)


def test_lambda_does_not_decay_through_the_tokens_between_two_turns() -> None:
    cu, mask = two_turns(200)
    rewards, values = token_rewards(torch.tensor([1.0]), cu, mask, kl_penalty=None), 0.4 * mask
    advantages, returns = gae(rewards, values, cu, mask, torch.zeros(1), discount=1.0, gae_lambda=0.95)
    # Every value is 0.4: the only step with a surprise is the last one, 1 - 0.4.
    expected = [0.6 * 0.95**k for k in (4, 3, 2, 1, 0)]
    assert advantages[mask].tolist() == pytest.approx(expected)
    assert advantages[3].item() == pytest.approx(0.51, abs=0.005)
    assert returns[mask].tolist() == pytest.approx([a + 0.4 for a in expected])
    assert not advantages[~mask].any() and not returns[~mask].any()


@pytest.mark.parametrize(("discount", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_gae_runs_over_the_trained_tokens_of_each_sequence_whatever_lies_between_them(
    discount: float, lam: float
) -> None:
    generator = torch.Generator().manual_seed(2)
    lens = [9, 1, 14, 6, 11]
    cu = torch.tensor([0, *lens]).cumsum(0)
    total = int(cu[-1])
    rewards, values = torch.randn(2, total, generator=generator)
    mask = torch.rand(total, generator=generator) < 0.5
    mask[cu[3] : cu[4]] = False  # a sequence without trained tokens
    bootstrap = torch.randn(len(lens), generator=generator)
    advantages, returns = gae(rewards, values, cu, mask, bootstrap, discount=discount, gae_lambda=lam)
    expected = [0.0] * total
    for i, (start, end) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
        steps = [t for t in range(start, end) if mask[t]]
        # What is earned from a trained token on, up to the next one.
        own = [rewards[t:u].sum().item() for t, u in zip(steps, [*steps, end][1:], strict=True)]
        found = gae_by_definition(own, values[steps].tolist(), bootstrap[i].item(), discount, lam)
        for t, advantage in zip(steps, found, strict=True):
            expected[t] = advantage
    torch.testing.assert_close(advantages, torch.tensor(expected), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(returns, (advantages + values) * mask)


def test_a_score_on_a_masked_last_token_reaches_the_last_trained_token() -> None:
    cu, mask = two_turns(3, trailing=4)
    rewards = token_rewards(torch.tensor([2.0]), cu, mask, kl_penalty=None)
    assert rewards[-1] == 2.0 and not mask[-1]
    advantages, _ = gae(rewards, torch.zeros(len(mask)), cu, mask, torch.zeros(1), discount=0.5, gae_lambda=1.0)
    assert advantages[mask].tolist() == [0.125, 0.25, 0.5, 1.0, 2.0]


def test_a_batch_without_trained_tokens_has_no_advantages() -> None:
    cu, mask = torch.tensor([0, 2, 5]), torch.zeros(5, dtype=torch.bool)
    advantages, returns = gae(torch.ones(5), torch.ones(5), cu, mask, torch.ones(2), discount=1.0, gae_lambda=1.0)
    assert not advantages.any() and not returns.any()
