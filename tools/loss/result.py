"""Compute advantages, loss and gradients of a case with the code that trains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from core.algorithms.base import FIELDS
from core.algorithms.build import build_algorithm
from core.algorithms.corrections import correction_weights
from core.algorithms.losses import policy_terms
from core.algorithms.policy_gradient import PolicyGradient
from core.algorithms.returned import check_fields
from core.checks.algorithm import check_algorithm
from core.config.experiments import PPOMATHConfig
from core.config.presets import PRESETS
from mcore_adapter.data.batch import sequence_of_token
from mcore_adapter.data.sequences import Sequences
from mcore_adapter.data.weights import weigh_tokens
from mcore_adapter.models.forward import ModelOutput
from tools.loss.case import Tokens
from tools.loss.pairs import compute_pairs


def compute(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of a CASE, see tools/loss/. Raises ValueError that names the key, the rule and the value."""
    with _in_float64():
        return _compute(case)


def _compute(case: Mapping[str, Any]) -> dict[str, Any]:
    tokens = Tokens.read(case)
    if case.get("algorithm") == "dpo":
        return compute_pairs(case, tokens)
    sampled = tokens.sampled
    config = case_config(case, sampled)
    algorithm = build_algorithm(config)
    if "state" in case:
        algorithm.load_state_dict(case["state"])
    batch = sampled.batch()
    packed = batch.to_packed()
    needed = {FIELDS[name]: sampled.required(name) for name in sorted(algorithm.passes)}
    ages = batch.token_ages(int(case.get("version", batch.versions.max())))
    known = {**packed.fields, **needed, "loss_mask": packed.loss_mask, "ages": ages}
    trained_on, figures = algorithm.advantages(batch, known)
    check_fields(trained_on, packed.num_tokens)
    packed = packed.with_fields(**{**needed, **trained_on, **sampled.given_advantages()})
    packed = tokens.with_demonstrations(packed)
    weighed, divisors = weigh_tokens(packed, algorithm.token_weights)
    logprobs = tokens.required("logprobs").requires_grad_()
    entropy = tokens.required("entropy").requires_grad_() if algorithm.needs_entropy else None
    lens = packed.seq_lens
    sequences = Sequences(of_token=sequence_of_token(lens), count=len(lens))
    fields = {**weighed.fields, "loss_mask": weighed.loss_mask}
    loss, metrics = algorithm.loss(ModelOutput(logprobs=logprobs, entropy=entropy), fields, sequences)
    loss = loss / divisors.loss
    loss.backward()
    assert logprobs.grad is not None, "the loss depends on the log-probabilities"
    return {
        "algorithm": config.algorithm_name,
        "advantages": tokens.advantages(weighed.fields["advantages"]),
        "loss": loss.item(),
        "grads": tokens.cut(logprobs.grad),
        "metrics": figures | {name: float(value.detach()) / divisors.metrics for name, value in metrics.items()},
        "weights": tokens.cut(_correction(algorithm, logprobs.detach(), fields, sequences)),
        "token_weights": tokens.cut(weighed.fields["token_weights"] / divisors.loss),
    }


def case_config(case: Mapping[str, Any], tokens: Tokens) -> PPOMATHConfig:
    """Build the configuration that trains so. Raises ValueError for settings that a run would refuse."""
    given = case.get("settings", {})
    if not isinstance(given, dict):
        raise ValueError(f"settings: must be an object of keys and values, got {given!r}")
    tree: dict[str, Any] = {
        "experiment_name": "loss",
        "trial_name": "loss",
        "dataset": {"path": "none"},
        "demonstrations": {"path": "none"},
        "algorithm": {"name": case.get("algorithm")},
        "ppo": {
            "kl_ctl": 0.0,
            "disable_value": not tokens.has("values"),
            "ppo_n_minibatches": 2 if tokens.has("old_logprobs") else 1,
        },
        "group_size": min(Counter(tokens.groups).values()),
    }
    preset = PRESETS.get(str(case.get("algorithm")))
    if preset is None or "ppo.adv_norm" not in preset.values:
        tree["ppo"]["adv_norm"] = False
    for key, value in given.items():
        *path, last = key.split(".") if "." in key or key == "group_adv_norm" else ("algorithm", key)
        section = tree
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    try:
        config = PPOMATHConfig.model_validate(tree)
    except ValidationError as error:
        lines = [f"settings: {'.'.join(map(str, e['loc']))}: {e['msg']}, got {e['input']!r}" for e in error.errors()]
        raise ValueError("\n".join(lines)) from None
    if problems := [str(problem) for problem in check_algorithm(config)]:
        raise ValueError("\n".join(problems))
    return config


def _correction(algorithm: Any, logprobs: Tensor, fields: Mapping[str, Tensor], sequences: Sequences) -> Tensor:
    """Compute what corrections multiply the loss of each token by, 0 for tokens that they drop: [T]; 1 for other
    algorithms."""
    if not isinstance(algorithm, PolicyGradient):
        return fields["loss_mask"].double()
    terms = policy_terms(ModelOutput(logprobs=logprobs), fields, sequences, algorithm.settings)
    weight, kept = correction_weights(terms, fields, algorithm.settings)
    return weight * kept


@contextmanager
def _in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
