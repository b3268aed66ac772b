"""Advantages against the definitions written as plain loops."""

import pytest
import torch

from core.algorithms.advantages import gae
from core.algorithms.losses import token_rewards


def gae_by_definition(rewards, values, bootstrap, discount, lam):
    """One sequence, plain Python."""
    values = [*values, bootstrap]
    running, out = 0.0, []
    for t in reversed(range(len(rewards))):
        running = rewards[t] + discount * values[t + 1] - values[t] + discount * lam * running
        out.append(running)
    return out[::-1]


def two_turns(gap: int, *, trailing: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(cu_seqlens, loss_mask): a prompt of 2, a turn of 2, `gap` masked tokens, a turn of 3, `trailing` masked ones."""
    mask = [False] * 2 + [True] * 2 + [False] * gap + [True] * 3 + [False] * trailing
    return torch.tensor([0, len(mask)]), torch.tensor(mask)


@pytest.mark.parametrize(("discount", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_gae_runs_over_the_trained_tokens_of_each_sequence_whatever_lies_between_them(discount, lam) -> None:
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
