"""PPO in the training seam, where tests of the loop do not reach; GRPO by name is the same with whole groups."""

from dataclasses import replace

import pytest
import torch

from helpers.batches import algorithm, batch_of, by_answer


def test_a_cut_off_answer_whose_last_tokens_are_masked_continues_from_its_last_trained_token() -> None:
    batch, fields = batch_of([1.0, 1.0], lens=[4, 4])
    mask = fields["loss_mask"].clone()
    mask[[3, 4, 8, 9]] = False  # the last two tokens of each answer
    batch = replace(batch, loss_mask=mask.numpy(), no_eos=torch.tensor([True, False]).numpy())
    fields = {**fields, "loss_mask": mask, "old_values": 0.5 * mask}
    trained_on, _ = algorithm("ppo", discount=0.5, gae_lambda=0.0).advantages(batch, fields)
    # delta of the last trained token: 1 + 0.5 * 0.5 - 0.5 where the answer was cut off, else 1 - 0.5.
    assert by_answer(batch, trained_on["advantages"]) == [[-0.25, 0.75], [-0.25, 0.5]]
    assert by_answer(batch, trained_on["returns"]) == [[0.25, 1.25], [0.25, 1.0]]


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({}, {"values"}),
        ({"disable_value": True}, set()),
        ({"kl_ctl": 0.1}, {"values", "ref_logprobs"}),
        ({"correction": "decoupled"}, {"values"}),
        ({"correction": "decoupled", "ppo_n_minibatches": 2}, {"values", "old_logprobs"}),
        ({"correction": "decoupled", "kl_ctl": 0.1}, {"values", "old_logprobs", "ref_logprobs"}),
        ({"correction": "decoupled", "kl_ctl": 0.1, "kl_in": "loss"}, {"values", "ref_logprobs"}),
        ({"ppo_n_minibatches": 2}, {"values"}),
    ],
)
def test_only_passes_that_something_needs_are_named(changes: dict, passes: set[str]) -> None:
    assert algorithm("ppo", **changes).passes == passes
