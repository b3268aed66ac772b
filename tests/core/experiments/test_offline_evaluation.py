"""Evaluations of sft and dpo are means over the whole validation set, however it is cut into batches."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from core.algorithms.offline import DPO, SFT
from core.data.datasets import AnswerDataset, EpochBatches, PreferenceDataset, _Pair
from core.data.stored_batch import InferencePass, StoredBatch
from core.experiments.sft import DPOTrainer, SFTTrainer
from core.monitoring.metrics import Row, SkippedUpdates
from core.monitoring.monitor import Monitor, StepTimer
from core.monitoring.screen import Screen
from core.train.recover import MemoryLimits
from core.trainer import EngineRef
from mcore_adapter.data.planner import Planner
from rollout.data.encoder import MaskedSequence
from rollout.experience import Schedule

NATS = {"default": -0.1, "ref": -0.05}
"""Log-probability of token n in each engine, over n."""


def answered(ids: Sequence[int]) -> MaskedSequence:
    return MaskedSequence([1, *ids], [False] + [True] * len(ids), "", 0)


class Rows(AnswerDataset):
    """Answers of these tokens to a prompt of one token."""

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        EpochBatches.__init__(self, list(map(answered, answers)), checksum=0, seed=1, shuffle=True)


class Pairs(PreferenceDataset):
    """(chosen, rejected) answers of these tokens to a prompt of one token."""

    def __init__(self, pairs: Sequence[tuple[list[int], list[int]]]) -> None:
        read = [_Pair(*map(answered, pair)) for pair in pairs]
        EpochBatches.__init__(self, read, checksum=0, seed=1, shuffle=True)


class Ranks:
    """Trainer ranks whose models assign log-probabilities by NATS. The object store keeps objects as they are."""

    name = "trainer"

    def planner(self, engine: str) -> Planner:
        return Planner(dp=1)

    def put(self, value: Any) -> Any:
        return value

    def place(self, arrays: Any) -> Any:
        return arrays

    def get(self, refs: Any) -> Any:
        return refs

    def open_batch(self, batch: StoredBatch) -> None:
        self.batch = batch

    def infer(self, inference: InferencePass) -> list[tuple[np.ndarray, np.ndarray]]:
        return [
            (piece.sequences, np.float32(NATS[inference.engine]) * arrays["token_ids"] * arrays["loss_mask"])
            for piece, arrays in zip(self.batch.pieces, self.batch.tokens, strict=True)
        ]


class Sink:
    """Keeps the metrics of the last step."""

    def write(self, step: int, metrics: Row) -> None:
        self.metrics = metrics

    def close(self) -> None: ...


def evaluated(trainer: type[SFTTrainer], objective: Any, valid: Any, *, batch_size: int) -> Row:
    """Return the metrics of an evaluation on `valid`."""
    sink = Sink()
    engine, reference = (
        EngineRef(
            group=Ranks(), name=name, train_role="allocation", inference_role="allocation",  # type: ignore[arg-type]
            train_tokens_per_mb=64, inference_tokens_per_mb=64,
        )
        for name in NATS
    )  # fmt: skip
    reference = EngineRef(**{**vars(reference), "group": engine.group})
    schedule = Schedule(num_prompts=1, batch_size=1)
    monitor = Monitor(
        screen=Screen(Console(file=io.StringIO()), compact=False),
        sinks=[sink],
        consumed=None,
        schedule=schedule,
        done_steps=0,
        elapsed=0.0,
    )
    trainer(
        engine=engine, reference=reference if trainer is DPOTrainer else None, objective=objective, train=valid,
        valid=valid, schedule=schedule, valid_batch_size=batch_size,
        monitor=monitor, timer=StepTimer(lambda phase: None), memory=MemoryLimits(),
        skipped_updates=SkippedUpdates(1),
    ).evaluate(1)  # fmt: skip
    return sink.metrics


@pytest.mark.parametrize("batch_size", [1, 2, 5, 8])
def test_the_validation_loss_is_the_mean_over_the_answer_tokens_of_all_batches(batch_size: int) -> None:
    answers = [[10, 20], [30], [5, 5, 5, 5], [40, 2], [7]]
    tokens = [token for answer in answers for token in answer]
    found = evaluated(SFTTrainer, SFT(), Rows(answers), batch_size=batch_size)
    assert found["eval/loss"] == pytest.approx(0.1 * sum(tokens) / len(tokens))
    assert found["eval/ppl"] == pytest.approx(np.exp(0.1 * sum(tokens) / len(tokens)))


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4])
def test_the_validation_metrics_of_preferences_are_means_over_the_pairs_of_all_batches(batch_size: int) -> None:
    pairs = [([4], [6, 2]), ([3, 1], [9]), ([20, 4, 2], [8])]
    margins = [0.1 * -0.05 * (sum(chosen) - sum(rejected)) for chosen, rejected in pairs]
    found = evaluated(DPOTrainer, DPO(beta=0.1), Pairs(pairs), batch_size=batch_size)
    assert found["eval/margin"] == pytest.approx(np.mean(margins), rel=1e-5)
    assert found["eval/accuracy"] == pytest.approx(2 / 3)
    assert found["eval/loss"] == pytest.approx(np.mean(np.log1p(np.exp(-np.array(margins)))))
