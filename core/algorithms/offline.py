"""Objectives of training on files: supervised fine-tuning, and direct preference optimization on pairs of answers to
one prompt, one of them chosen. No passes, no advantages.

With lp_c and lp_r the log-probabilities of the chosen and the rejected answer, summed over their tokens, and
D = (lp_c - ref_c) - (lp_r - ref_r):

    sigmoid:  -(1 - s) log sigmoid(beta D) - s log sigmoid(-beta D)     Rafailov et al. 2023, eq. 7; s: label smoothing
    ipo:      (D' - 1 / (2 beta))^2, D' from means over tokens          Azar et al. 2024, eq. 17, as in TRL

Invariant: a pair is never split over microbatches; its field is mcore_adapter.data.batch.PAIR.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from core.algorithms.base import Metrics, Objective
from core.algorithms.losses import trained_weights
from core.config.ppo import DPOHyperparameters
from mcore_adapter.data.batch import PAIR, ModelOutput, PackedBatch, Sequences, sequence_mean


class SFT(Objective):
    """Negative log-likelihood of the answer tokens, in nats."""

    def loss(self, output: ModelOutput, fields: Mapping[str, Tensor], sequences: Sequences) -> tuple[Tensor, Metrics]:
        assert output.logprobs is not None, "the model's engine returns log-probabilities"
        loss = -(output.logprobs * trained_weights(fields)).sum()
        return loss, {"nll": loss.detach()}


PreferenceLoss = Literal["sigmoid", "ipo"]


@dataclass(frozen=True, kw_only=True)
class DPO(Objective):
    """The mean over pairs. Needs the fields PAIR and "ref_logprobs"."""

    beta: float = 0.1
    kind: PreferenceLoss = "sigmoid"
    label_smoothing: float = 0.0

    @classmethod
    def of(cls, keys: DPOHyperparameters) -> Self:
        """Return the objective of the section `dpo`."""
        return cls(beta=keys.beta, kind=keys.loss, label_smoothing=keys.label_smoothing)

    def token_weights(self, minibatch: PackedBatch) -> Tensor:
        """Weigh sequences alike. Every token has the loss of its pair, so that the weights of the two make it one."""
        return sequence_mean(minibatch)

    def loss(self, output: ModelOutput, fields: Mapping[str, Tensor], sequences: Sequences) -> tuple[Tensor, Metrics]:
        assert output.logprobs is not None, "the model's engine returns log-probabilities"
        mask, weights = fields["loss_mask"], trained_weights(fields)
        signed = sequences.mean(fields[PAIR].double(), mask).round()  # [n] k or -k, on every context-parallel rank
        numbers, pair = signed.abs().unique(return_inverse=True)
        ref = torch.where(mask, fields["ref_logprobs"], 0.0)
        log_ratio = torch.where(mask, output.logprobs, 0.0) - ref
        of_sequence = sequences.sum(log_ratio)
        compared = sequences.mean(log_ratio, mask) if self.kind == "ipo" else of_sequence

        def difference(values: Tensor) -> Tensor:
            """Chosen minus rejected of each pair, for both of its sequences: [n] -> [n]."""
            zero = values.new_zeros(numbers.numel())
            return zero.index_add(0, pair, values * signed.sign().to(values.dtype))[pair]

        def mean(of_pairs: Tensor) -> Tensor:
            """Sum over this rank's tokens of the value of their pair [n]."""
            return (sequences.spread(of_pairs) * weights).sum()

        loss = mean(self.of_margin(difference(compared)))
        with torch.no_grad():
            margin = self.beta * difference(of_sequence)
            chosen = (signed > 0).to(margin.dtype)
            metrics = {
                "preference_loss": loss.detach(),
                "margin": mean(margin),
                "accuracy": mean((margin > 0).to(margin.dtype)),
                # Twice, as only one sequence of a pair has it.
                "chosen_reward": mean(2 * self.beta * of_sequence * chosen),
                "rejected_reward": mean(2 * self.beta * of_sequence * (1 - chosen)),
            }
        return loss, metrics

    def of_margin(self, margin: Tensor) -> Tensor:
        """Compute the loss of pairs from their D (sigmoid) or D' (ipo)."""
        if self.kind == "ipo":
            return (margin - 1.0 / (2.0 * self.beta)).square()
        s = self.label_smoothing
        return -(1.0 - s) * logsigmoid(self.beta * margin) - s * logsigmoid(-self.beta * margin)
