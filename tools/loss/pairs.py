"""The part of `python -m tools.loss` for preference pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import ValidationError

from core.algorithms.dpo import DPO
from core.config.ppo import DPOHyperparameters
from mcore_adapter.data.batch import PAIR, PackedBatch, sequence_of_token
from mcore_adapter.data.sequences import Sequences
from mcore_adapter.data.weights import weigh_tokens
from mcore_adapter.models.forward import ModelOutput
from tools.loss.case import Tokens


def compute_pairs(case: Mapping[str, Any], tokens: Tokens) -> dict[str, Any]:
    """Return loss, gradients, metrics and token weights of a case of dpo. Raises ValueError for groups that are no
    pairs, and for settings that a run would refuse."""
    try:
        settings = DPOHyperparameters.model_validate(case.get("settings", {}))
    except ValidationError as error:
        lines = [f"settings: {'.'.join(map(str, e['loc']))}: {e['msg']}, got {e['input']!r}" for e in error.errors()]
        raise ValueError("\n".join(lines)) from None
    objective = DPO(beta=settings.beta, kind=settings.loss, label_smoothing=settings.label_smoothing)
    lens = torch.tensor(tokens.lens) + 1
    packed = PackedBatch(
        token_ids=torch.zeros(int(lens.sum()), dtype=torch.int64),
        cu_seqlens=torch.cat((lens.new_zeros(1), lens.cumsum(0))),
        loss_mask=torch.from_numpy(tokens.mask()),
        fields={
            PAIR: torch.tensor(_signed_pairs(tokens)).repeat_interleave(lens),
            "ref_logprobs": tokens.required("ref_logprobs"),
        },
    )
    for i in range(packed.num_sequences):
        if not packed.select([i]).loss_mask.any():
            raise ValueError(f"sequences[{i}].mask: no token of this answer counts; a pair compares two answers")
    weighed, divisors = weigh_tokens(packed, objective.token_weights)
    logprobs = tokens.required("logprobs").requires_grad_()
    sequences = Sequences(of_token=sequence_of_token(lens), count=len(lens))
    fields = {**weighed.fields, "loss_mask": weighed.loss_mask}
    loss, metrics = objective.loss(ModelOutput(logprobs=logprobs), fields, sequences)
    loss = loss / divisors.loss
    loss.backward()
    assert logprobs.grad is not None, "the loss depends on the log-probabilities"
    return {
        "algorithm": "dpo",
        "loss": loss.item(),
        "grads": tokens.cut(logprobs.grad),
        "metrics": {name: float(value.detach()) / divisors.metrics for name, value in metrics.items()},
        "token_weights": tokens.cut(weighed.fields["token_weights"] / divisors.loss),
    }


def _signed_pairs(tokens: Tokens) -> list[int]:
    """Return k for the chosen and -k for the rejected sequence of pair k, from 1 on."""
    names = tokens.groups
    signed = [0] * len(names)
    for number, name in enumerate(dict.fromkeys(names), start=1):
        members = [i for i, group in enumerate(names) if group == name]
        if len(members) != 2:
            raise ValueError(
                f"sequences[{members[0]}].group: a pair has two sequences of one group, got {len(members)}"
            )
        rewards = [float(tokens.sequences[i].get("reward", 0.0)) for i in members]
        if rewards[0] == rewards[1]:
            raise ValueError(
                f"sequences[{members[0]}].reward: the rewards of a pair must differ, got {rewards[0]} twice"
            )
        chosen, rejected = members if rewards[0] > rewards[1] else members[::-1]
        signed[chosen], signed[rejected] = number, -number
    return signed
