"""Supervised fine-tuning as an objective of the same seam: no passes, no advantages, the mean over answer tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from core.algorithms.base import Metrics, Objective
from core.algorithms.losses import sft_loss

if TYPE_CHECKING:
    from mcore_adapter.data.sequences import Sequences
    from mcore_adapter.models.forward import ModelOutput


class SFT(Objective):
    """Negative log-likelihood of the answers, per token."""

    def loss(self, output: ModelOutput, fields: Mapping[str, Tensor], sequences: Sequences) -> tuple[Tensor, Metrics]:
        return sft_loss(output, fields, sequences)
