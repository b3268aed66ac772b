"""Metrics of an update from the sums of its microbatches, without ranks."""

from types import SimpleNamespace
from typing import Any

import torch

from mcore_adapter.data.batch import Divisors
from mcore_adapter.engine import MegatronEngine


def test_the_loss_has_the_divisor_that_is_minimised_and_metrics_that_of_the_trained_tokens() -> None:
    alone: Any = SimpleNamespace(
        _parallel=SimpleNamespace(
            is_last_stage=True, layout=SimpleNamespace(pp=1), dp_cp_group=SimpleNamespace(size=lambda: 1)
        )
    )
    sums = [{"loss": torch.tensor(4.0), "kl": torch.tensor(2.0)}, {"loss": torch.tensor(2.0), "kl": torch.tensor(1.0)}]
    metrics = MegatronEngine._reduce_metrics(alone, sums, Divisors(loss=12.0, metrics=6.0))
    assert metrics == {"loss": 0.5, "kl": 0.5}
