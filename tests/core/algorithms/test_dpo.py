"""DPO and IPO: golden values, gradients, and metrics over pairs, whatever the order of their sequences."""

import math

import pytest
import torch

from core.algorithms.offline import DPO
from mcore_adapter.data.batch import PAIR, ModelOutput, PackedBatch, Sequences, sequence_of_token, weigh_tokens

LENS = (4, 3, 6, 5)
PAIRS = (1, -1, -2, 2)
"""Tokens and numbers of the sequences; the first two tokens of each are the prompt. The second pair has its rejected
answer first."""


def batch() -> PackedBatch:
    lens = torch.tensor(LENS)
    starts = lens.cumsum(0) - lens
    mask = torch.ones(int(lens.sum()), dtype=torch.bool)
    mask[torch.cat((starts, starts + 1))] = False
    ref = torch.linspace(-3.0, -1.0, len(mask), dtype=torch.float64)
    return PackedBatch(
        token_ids=torch.arange(len(mask)),
        cu_seqlens=torch.cat((lens.new_zeros(1), lens.cumsum(0))),
        loss_mask=mask,
        fields={PAIR: torch.tensor(PAIRS).repeat_interleave(lens), "ref_logprobs": ref},
    )


CHANGES = torch.tensor([9, 9, 0.5, 0.25, 9, 9, -0.5, 9, 9, -1.0, 0.5, 0.25, 0.5, 9, 9, 0.75, -0.5, 0.5]).double()
"""lp - ref of each token, the prompts' (9) not to be counted. Sums: 0.75, -0.5; 0.25 (rejected), 0.75 (chosen)."""


def loss_of(objective: DPO, given: PackedBatch, changes: torch.Tensor) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss, its gradient by the log-probabilities [T], and metrics."""
    weighed, divisors = weigh_tokens(given, objective.token_weights)
    logprobs = (given.fields["ref_logprobs"] + changes).requires_grad_()
    sequences = Sequences(of_token=sequence_of_token(given.seq_lens), count=given.num_sequences)
    fields = {**weighed.fields, "loss_mask": given.loss_mask}
    loss, metrics = objective.loss(ModelOutput(logprobs=logprobs), fields, sequences)
    (loss / divisors.loss).backward()
    assert logprobs.grad is not None
    means = {name: float(value) / divisors.metrics for name, value in metrics.items()}
    return loss.item() / divisors.loss, logprobs.grad, means


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


MARGINS = (1.25, 0.5)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo_is_the_logistic_loss_of_the_difference_of_sums(smoothing: float) -> None:
    loss, grad, metrics = loss_of(DPO(beta=0.4, label_smoothing=smoothing), batch(), CHANGES)
    kept, swapped = 1 - smoothing, smoothing
    each = [-kept * math.log(sigmoid(0.4 * d)) - swapped * math.log(sigmoid(-0.4 * d)) for d in MARGINS]
    assert loss == pytest.approx(sum(each) / 2, abs=1e-6)
    slopes = [0.4 * (swapped * sigmoid(0.4 * d) - kept * sigmoid(-0.4 * d)) / 2 for d in MARGINS]
    expected = torch.zeros(18).double()
    for (start, end), slope in zip(((0, 4), (4, 7), (7, 13), (13, 18)), (1, -1, -1j, 1j), strict=True):
        expected[start + 2 : end] = slopes[0] * slope.real + slopes[1] * slope.imag
    assert torch.allclose(grad, expected, atol=1e-6)
    assert metrics == pytest.approx(
        {
            "preference_loss": loss, "margin": 0.4 * sum(MARGINS) / 2, "accuracy": 1.0,
            "chosen_reward": 0.4 * 0.75, "rejected_reward": 0.4 * (-0.5 + 0.25) / 2,
        },
        abs=1e-6,
    )  # fmt: skip


def test_an_empty_microbatch_has_no_loss() -> None:
    nothing = torch.zeros(0)
    fields = {"loss_mask": nothing.bool(), PAIR: nothing.long(), "ref_logprobs": nothing, "token_weights": nothing}
    output = ModelOutput(logprobs=nothing.clone().requires_grad_())
    loss, metrics = DPO().loss(output, fields, Sequences(of_token=nothing.long(), count=0))
    assert loss.item() == 0.0 and all(value.item() == 0.0 for value in metrics.values())
