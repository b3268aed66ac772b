"""What an algorithm returns is checked, so that a mistake of a user's class is reported where it is made."""

import re
from typing import Any

import pytest
import torch

from core.algorithms.base import Algorithm, check_fields, plain_state
from core.algorithms.policy_gradient import PolicyGradient
from core.config.algorithm import AlgorithmSettings
from core.train.step_batch import BatchRequest, Scoring, StepBatch
from helpers.batches import batch_of


class WithState(Algorithm):
    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "must return the field 'advantages', got nothing"),
        ({"advantage": torch.zeros(6)}, "must return the field 'advantages', got 'advantage'"),
        ({"advantages": torch.zeros(2)}, r"\[T\] = \[6\], got shape \[2\] for 'advantages'; .* repeat_interleave"),
        ({"advantages": torch.zeros(6, 6)}, r"got shape \[6, 6\] for 'advantages'"),
        ({"advantages": torch.tensor(1.0)}, r"got shape \[\] for 'advantages'"),
        ({"advantages": torch.zeros(6), "returns": [0.0] * 6}, "got list for 'returns'"),
    ],
)
def test_fields_that_are_not_one_value_per_token_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_fields(fields, 6)
    check_fields({"advantages": torch.zeros(6), "returns": torch.zeros(6)}, 6)


@pytest.mark.parametrize("wrong", [(2, 1), (6,), ()], ids=str)
def test_a_baseline_that_is_not_one_value_per_sequence_is_refused(wrong: tuple[int, ...]) -> None:
    class Mistaken(PolicyGradient):
        def baseline(self, scores: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
            return torch.zeros(wrong)

    batch, fields = batch_of([1.0, 0.0])
    mistaken = Mistaken(AlgorithmSettings(disable_value=True, kl_ctl=0.0))
    with pytest.raises(
        ValueError, match=rf"baseline\(\) must .* \[N\] = \[2\], got shape {re.escape(str(list(wrong)))}$"
    ):
        mistaken.advantages(batch, fields)


@pytest.mark.parametrize("value", [torch.tensor(1.0), {"mean": torch.zeros(2)}, {1, 2}])
def test_a_state_that_no_checkpoint_can_store_is_refused_with_its_name(value: Any) -> None:
    with pytest.raises(
        ValueError, match=r"state_dict\(\)\['average'\] must consist of the types of JSON, got .*tolist"
    ):
        plain_state(WithState({"kept": 1, "average": value}))
    assert plain_state(WithState({"average": None, "means": [1.0]})) == {"average": None, "means": [1.0]}


class OfSequences(WithState):
    """Returns one advantage per sequence, or per token with a state that is a tensor."""

    def advantages(self, batch: Any, fields: Any) -> Any:
        size = len(fields["loss_mask"]) if self._state else batch.num_sequences
        return {"advantages": torch.zeros(size)}, {}


@pytest.mark.parametrize(
    ("state", "message"), [({}, "one value per token"), ({"average": torch.zeros(1)}, "types of JSON")]
)
def test_a_step_refuses_what_its_algorithm_returned(state: dict[str, Any], message: str) -> None:
    batch, _ = batch_of([1.0, 0.0])
    request = BatchRequest(unit="sequence", num_minibatches=1, seed=0, version=0, uses=[])
    step = StepBatch(batch, request, put=lambda arrays: arrays)
    with pytest.raises(ValueError, match=message):
        step.score(Scoring(algorithm=OfSequences(state), objectives={}), {})
