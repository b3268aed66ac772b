"""The seam between the training loop and an algorithm.

The loop computes the passes that the algorithm names, takes advantages from it, deals minibatches by its unit, and
updates; the engine divides each loss once. Objectives are sent to the trainer ranks, so they can be pickled. What an
algorithm returns is checked here, where a mistake would otherwise show later or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor

from core.data.stored_batch import Unit
from mcore_adapter.data.batch import ModelOutput, PackedBatch, Sequences, TokenWeights, token_mean

if TYPE_CHECKING:
    from core.data.rollout_batch import RolloutBatch

Metrics = dict[str, Tensor]
Pass = Literal["old_logprobs", "ref_logprobs", "values", "entropy"]
FIELDS: Mapping[Pass, str] = {
    "old_logprobs": "old_logprobs",
    "ref_logprobs": "ref_logprobs",
    "values": "old_values",
    "entropy": "entropy",
}
"""The field of the batch that each pass fills."""


class Objective(Protocol):
    """The loss that the updates of one model minimise. Subclass it explicitly to have the defaults below."""

    @property
    def needs_entropy(self) -> bool:
        """True if `loss` reads output.entropy."""
        return False

    @property
    def weighs_alike(self) -> bool:
        """True if `token_weights` is the default: the weights follow from loss_mask and need not be sent."""
        return type(self).token_weights is Objective.token_weights

    def token_weights(self, minibatch: PackedBatch) -> Tensor:
        """Return the weight of every token of the minibatch, [T], 0 outside loss_mask; the loss is divided by their
        sum.

        mcore_adapter/data/batch.py has token_mean (the default), sequence_mean and token_sum."""
        return token_mean(minibatch)

    def loss(self, output: ModelOutput, fields: Mapping[str, Tensor], sequences: Sequences) -> tuple[Tensor, Metrics]:
        """Compute (loss, metrics) of one microbatch, all of them weighted sums over its trained tokens.

        `fields` holds "loss_mask", "token_weights" and per-token tensors [t] by name. `sequences` sums over the tokens
        of each sequence, on all context-parallel ranks."""
        raise NotImplementedError


class Algorithm(Objective, Protocol):
    """Computes advantages from a batch, and the loss of the policy; with a critic, its loss as well."""

    unit: Unit = "sequence"
    """What minibatches must not split: single sequences, the answers to one prompt, or pairs of them."""
    reads: frozenset[str] | None = None
    """Names of the AlgorithmSettings that it reads; other ones are reported at the start where they were given. None:
    nothing is reported."""

    @property
    def passes(self) -> frozenset[Pass]:
        """Passes that the loop computes first, as fields of the batch (FIELDS): "old_logprobs" (the policy before the
        update), "ref_logprobs" and "values". "entropy" is computed for steps that are saved, and not passed on."""
        return frozenset()

    @property
    def critic(self) -> Objective | None:
        """Objective of the critic; None: there is no critic."""
        return None

    def advantages(
        self, batch: RolloutBatch, fields: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Compute the fields to train on ([T] each, "advantages" among them), and metrics of the whole batch.

        Runs in the rollout process, on a copy of this object: what it changes and later calls need must be in
        state_dict().

        `fields` holds "loss_mask", "rollout_logprobs", "ages" (of tokens, in steps) and the results of `passes`, [T]
        each. The metrics include task_reward, kl_reward, final_reward and advantage, which every step reports."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, object]:
        """Return the state for a recover checkpoint, in the types of JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue from a state_dict() of this class. A run without a checkpoint does not call it at its start."""


def sent_weights(objective: Objective) -> TokenWeights | None:
    """Return what computes the token weights of an objective; None: they follow from the mask of each token."""
    return None if objective.weighs_alike else objective.token_weights


def check_fields(fields: Mapping[str, Tensor], num_tokens: int) -> None:
    """Raise ValueError unless `fields`, returned by `advantages`, has "advantages" and one value per token in each."""
    if "advantages" not in fields:
        got = ", ".join(map(repr, fields)) or "nothing"
        raise ValueError(f"advantages() must return the field 'advantages', got {got}")
    for name, values in fields.items():
        if not _is_vector(values, num_tokens):
            raise ValueError(
                f"advantages() must return tensors with one value per token, [T] = [{num_tokens}], got {_kind(values)} "
                f"for {name!r}; values per sequence [N] become [T] with repeat_interleave"
            )


def check_baseline(values: Tensor, num_sequences: int) -> None:
    """Raise ValueError unless `values`, returned by `baseline`, has one value per sequence."""
    if not _is_vector(values, num_sequences):
        raise ValueError(
            f"baseline() must return a tensor with one value per sequence, [N] = [{num_sequences}], got {_kind(values)}"
        )


def _is_vector(values: object, length: int) -> bool:
    return isinstance(values, Tensor) and tuple(values.shape) == (length,)


def _kind(values: object) -> str:
    return f"shape {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__


def plain_state(algorithm: Algorithm) -> dict[str, object]:
    """Return algorithm.state_dict(). Raises ValueError for values that a recover checkpoint cannot store."""
    state = algorithm.state_dict()
    for name, value in state.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"state_dict()[{name!r}] must consist of the types of JSON, got {value!r}; convert tensors and arrays "
                "with .tolist()"
            ) from error
    return state
