"""Direct preference optimization: supervised fine-tuning on pairs of answers, with a reference model beside the policy.

The reference has the policy's ranks and layout; its log-probabilities are computed for each batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from core.algorithms.offline import DPO
from core.experiments.sft import run_offline
from core.experiments.sft_trainer import SFTTrainer
from mcore_adapter.data.batch import sequence_of_token
from mcore_adapter.data.sequences import Sequences
from mcore_adapter.data.weights import weigh_tokens
from mcore_adapter.models.forward import ModelOutput

if TYPE_CHECKING:
    from rich.console import Console

    from core.config.experiments import DPOConfig
    from core.processes.supervise import Attempt
    from core.runs.paths import RunPaths
    from mcore_adapter.data.batch import PackedBatch


class DPOTrainer(SFTTrainer):
    """Take pairs, compute the reference's log-probabilities, update, report."""

    HEADLINE = "preference_loss"

    def sums(self, batch: PackedBatch, fields: dict[str, Tensor], logprobs: Tensor) -> tuple[dict[str, float], float]:
        """Return the sums of loss and metrics over the pairs of a validation batch, and the number of pairs."""
        weighed, divisors = weigh_tokens(batch.with_fields(**fields), self._objective.token_weights)
        lens = batch.seq_lens
        sequences = Sequences(of_token=sequence_of_token(lens), count=len(lens))
        known = {**weighed.fields, "loss_mask": batch.loss_mask}
        _, metrics = self._objective.loss(ModelOutput(logprobs=logprobs), known, sequences)
        count = float(batch.num_sequences // 2)
        return {name: float(value) / divisors.metrics * count for name, value in metrics.items()}, count

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        """Return the metrics of a step or an evaluation from means over pairs."""
        return {"loss": means["preference_loss"], **means}


def run_dpo(config: DPOConfig, paths: RunPaths, console: Console, attempt: Attempt) -> None:
    """Run one attempt: train from the beginning, or from the newest recover checkpoint."""
    dpo = config.dpo
    run_offline(
        config, paths, console, attempt,
        trainer_type=DPOTrainer,
        objective=DPO(beta=dpo.beta, kind=dpo.loss, label_smoothing=dpo.label_smoothing),
        reference=(config.ref, config.ref_path),
    )  # fmt: skip
