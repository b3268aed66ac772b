"""Tokens outside the loss mask (prompts, what a tool wrote) have no part in advantages, losses, metrics or statistics,
whatever policies and critic compute for them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from core.config.presets import PRESETS
from helpers.batches import algorithm, batch_of
from mcore_adapter.data.batch import ModelOutput, Sequences, sequence_of_token

EVERYTHING = {
    "kl_ctl": 0.1, "kl_in": "both", "kl_target": 0.05, "kl_horizon": 10.0, "ppo_n_minibatches": 2, "entropy_coeff": 0.1,
    "adv_norm": True, "max_new_tokens": 5,
}  # fmt: skip
"""What reads fields of every kind."""
CORRECTIONS: dict[str, dict[str, Any]] = {
    "bypass": {},
    "decoupled": {"behave_imp_weight_cap": 1.2},
    "tis of sequences": {"correction_level": "sequence", "correction_veto": 0.8},
    "mis of means": {"correction_level": "geometric", "correction_min": 0.9, "correction_max": 1.1},
    "icepop and thresholds": {"opsm_threshold": 0.01, "m2po_threshold": 0.02},
}


def results(name: str, changes: dict[str, Any], noise: float) -> tuple[dict[str, Tensor], dict[str, Any], object]:
    """What one step of an algorithm computes: trained values of fields and gradient, metrics, state. `noise`: standard
    deviation of all that is known of tokens outside the mask."""
    batch, known = batch_of([1.0, 0.0, 0.5], [3.0, 5.0], lens=[4, 2, 3, 5, 2])
    mask = known["loss_mask"].clone()
    mask[[2, 12, 13]] = False  # in the middle of an answer
    mask[9:11] = False  # at the beginning of one
    batch = replace(batch, loss_mask=mask.numpy(), no_eos=(torch.arange(5) % 2 == 0).numpy())
    generator = torch.Generator().manual_seed(7)

    def field(scale: float) -> Tensor:
        inside, outside = torch.randn(2, mask.numel(), generator=generator)
        return torch.where(mask, scale * inside, noise * outside)

    fields = {name: field(0.1) for name in ("rollout_logprobs", "old_logprobs", "ref_logprobs", "old_values")}
    fields |= {"loss_mask": mask, "ages": batch.token_ages(2)}
    chosen = algorithm(name, **{**EVERYTHING, **changes})
    trained_on, metrics = chosen.advantages(batch, fields)
    logprobs = field(0.1).requires_grad_()
    entropy = field(0.1).square()
    sequences = Sequences(of_token=sequence_of_token(torch.tensor(batch.cu_seqlens).diff()), count=5)
    loss, of_loss = chosen.loss(ModelOutput(logprobs=logprobs, entropy=entropy), {**fields, **trained_on}, sequences)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert not gradient[~mask].any(), "they are not trained"
    computed = {name: values[mask] for name, values in {**trained_on, "gradient": gradient}.items()}
    return computed, {**metrics, **{name: float(value) for name, value in of_loss.items()}}, chosen.state_dict()


def assert_alike(name: str, **changes: Any) -> None:
    (values, metrics, state), (noisy, noisy_metrics, noisy_state) = (results(name, changes, x) for x in (0.0, 3.0))
    for field, expected in values.items():
        assert torch.equal(noisy[field], expected), field
    assert noisy_metrics == metrics
    assert noisy_state == state


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_known_of_tokens_outside_the_loss_mask_changes_nothing(name: str) -> None:
    assert_alike(name, correction="decoupled", value_norm=name == "ppo")


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_corrections_do_not_read_tokens_outside_the_loss_mask(correction: str) -> None:
    assert_alike("grpo", correction=correction.partition(" ")[0], **CORRECTIONS[correction])
