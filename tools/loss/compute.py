"""Compute advantages, loss and gradients of a case of `python -m tools.loss` with the code that trains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from core.algorithms.base import FIELDS, Objective, check_fields
from core.algorithms.build import build_algorithm, check_algorithm
from core.algorithms.losses import correction_weights, policy_terms
from core.algorithms.offline import DPO
from core.algorithms.policy_gradient import DEMONSTRATION, PolicyGradient
from core.config.experiments import PPOMATHConfig
from core.config.migrate import nested
from core.config.ppo import DPOHyperparameters
from core.config.presets import PRESETS
from core.data.rollout_batch import RolloutBatch
from mcore_adapter.data.batch import PAIR, ModelOutput, PackedBatch, Sequences, sequence_of_token, weigh_tokens
from rollout.trajectories import turns

Sampled = Mapping[str, Any]
"""One sequence of a case: lists with a value for each token, and values of the whole sequence."""


class Case(TypedDict, total=False):
    """The decoded JSON of a case."""

    algorithm: str
    settings: Mapping[str, object]
    sequences: Sequence[Sampled]
    state: Mapping[str, object]
    version: int


class Result(TypedDict, total=False):
    """What is printed as JSON; lists have a row for each sequence. dpo has no advantages."""

    algorithm: str
    advantages: list[float | list[float]]
    loss: float
    grads: list[list[float]]
    metrics: dict[str, float]
    weights: list[list[float]]
    token_weights: list[list[float]]


PER_TOKEN = ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "values", "entropy", "versions")
KEYS = (*PER_TOKEN, "mask", "reward", "group", "truncated", "advantage", "demonstration", "turn_rewards", "turn_states")


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The sequences of a case, each behind one prompt token, laid end to end."""

    sequences: Sequence[Sampled]
    lens: Sequence[int]

    @classmethod
    def read(cls, case: Case) -> Tokens:
        sequences = case.get("sequences")
        if not isinstance(sequences, list) or not sequences:
            raise ValueError(f"sequences: must be a list of at least one sequence, got {sequences!r}")
        for i, sequence in enumerate(sequences):
            check_sequence(f"sequences[{i}]", sequence)
        shown = [bool(sequence.get("demonstration")) for sequence in sequences]
        if shown != sorted(shown) or all(shown):
            raise ValueError("sequences: demonstrations come last, behind at least one other sequence")
        return cls(sequences=sequences, lens=[len(s["logprobs"]) for s in sequences])

    @property
    def num_sampled(self) -> int:
        """Sequences before the demonstrations."""
        return sum(not sequence.get("demonstration") for sequence in self.sequences)

    @property
    def sampled(self) -> Tokens:
        """The sequences that a policy sampled."""
        return Tokens(sequences=self.sequences[: self.num_sampled], lens=self.lens[: self.num_sampled])

    @property
    def shown(self) -> Tokens:
        """The demonstrations."""
        return Tokens(sequences=self.sequences[self.num_sampled :], lens=self.lens[self.num_sampled :])

    def with_demonstrations(self, packed: PackedBatch, *, pairs: bool) -> PackedBatch:
        """Add the demonstrations behind the sampled sequences, with fields of 0. `pairs`: they are pairs of answers."""
        added = sum(n + 1 for n in self.lens[self.num_sampled :])
        if not added:
            return packed
        ends = (torch.tensor(self.lens) + 1).cumsum(0)
        mask = torch.from_numpy(self.mask())
        fields = {name: torch.cat((value, value.new_zeros(added))) for name, value in packed.fields.items()}
        fields[DEMONSTRATION] = torch.arange(len(mask)) >= len(mask) - added
        if pairs:
            fields["ref_logprobs"] = self.required("ref_logprobs")
            signed = torch.tensor([0] * self.num_sampled + _signed_pairs(self.shown))
            fields[PAIR] = signed.repeat_interleave(torch.tensor(self.lens) + 1)
        return PackedBatch(
            token_ids=torch.zeros(len(mask), dtype=torch.int64),
            cu_seqlens=torch.cat((ends.new_zeros(1), ends)),
            loss_mask=mask,
            fields=fields,
        )

    @property
    def groups(self) -> list[str]:
        """The group of each sequence."""
        return [str(s.get("group", f"\0{i}")) for i, s in enumerate(self.sequences)]

    def has(self, name: str) -> bool:
        return all(name in s for s in self.sequences)

    def required(self, name: str) -> Tensor:
        """Return a value of every token, 0 for the prompts: [T]. Raises ValueError where a sequence has none."""
        if name == "old_logprobs" and not any(name in s for s in self.sequences):
            name = "logprobs"  # before the first update of a step they are the same
        for i, sequence in enumerate(self.sequences):
            if name not in sequence:
                raise ValueError(f"sequences[{i}].{name}: required by the algorithm with these settings; add it")
        return torch.from_numpy(self._column(name, 0.0))

    def _column(self, name: str, prompt: float) -> np.ndarray:
        return np.concatenate([[prompt, *map(float, s[name])] for s in self.sequences])

    def mask(self) -> np.ndarray:
        rows = zip(self.sequences, self.lens, strict=True)
        return np.concatenate([[False, *map(bool, s.get("mask", [True] * n))] for s, n in rows])

    def given_advantages(self) -> dict[str, Tensor]:
        """Return the field of advantages, where the case has them."""
        if not any("advantage" in s for s in self.sequences):
            return {}
        rows = []
        for i, (sequence, n) in enumerate(zip(self.sequences, self.lens, strict=True)):
            if "advantage" not in sequence:
                raise ValueError(f"sequences[{i}].advantage: missing; give one for every sequence, or for none")
            given = sequence["advantage"]
            rows.append([0.0, *(given if isinstance(given, list) else [given] * n)])
        return {"advantages": torch.from_numpy(np.concatenate(rows).astype(np.float64) * self.mask())}

    def batch(self) -> RolloutBatch:
        """Build what the training loop takes from the rollout service, in float64."""
        lens = np.array(self.lens, np.int64) + 1
        names = self.groups
        groups = list(dict.fromkeys(names))
        behaviour = next(n for n in ("rollout_logprobs", "old_logprobs", "logprobs") if self.has(n))
        mask = self.mask()
        versions = self._column("versions", -1).astype(np.int32) if self.has("versions") else np.where(mask, 0, -1)
        ends = lens.cumsum()
        sampled = [np.flatnonzero(versions[end - n : end] >= 0) for end, n in zip(ends, lens, strict=True)]
        return RolloutBatch(
            token_ids=np.zeros(int(lens.sum()), np.int32),
            cu_seqlens=np.concatenate((np.zeros(1, np.int64), ends)),
            loss_mask=mask,
            rollout_logprobs=self._column(behaviour, 0.0) * mask,
            versions=versions.astype(np.int32),
            rewards=np.array([float(s.get("reward", 0.0)) for s in self.sequences]),
            group_ids=np.array([groups.index(name) for name in names]),
            rollouts=np.arange(len(names)),
            prompt_lens=np.array([int(s[0]) if s.size else 1 for s in sampled]),
            no_eos=np.array([bool(s.get("truncated", False)) for s in self.sequences]),
            episodes=[str(i) for i in range(len(groups))],
            turn_rewards=self._of_turns("turn_rewards", 0.0),
            turn_states=self._of_turns("turn_states", -1),
        )

    def _of_turns(self, name: str, missing: float) -> np.ndarray | None:
        """Return a number of every turn. Raises ValueError where a sequence has another number of turns."""
        if not any(name in s for s in self.sequences):
            return None
        found: list[float] = []
        for i, (sequence, n) in enumerate(zip(self.sequences, self.lens, strict=True)):
            count = len(turns(np.array([bool(trained) for trained in sequence.get("mask", [True] * n)])))
            given = sequence.get(name, [missing] * count)
            if len(given) != count:
                raise ValueError(f"sequences[{i}].{name}: has {len(given)} values, mask has {count} runs of 1")
            found += given
        return np.array(found)

    def cut(self, values: Tensor) -> list[list[float]]:
        """Cut [T] into the values of each sequence without its prompt token."""
        return [part[1:].tolist() for part in values.double().split([n + 1 for n in self.lens])]

    def advantages(self, values: Tensor) -> list[float | list[float]]:
        """Cut [T] into the advantage of each sequence, a list per token where its trained tokens differ."""
        masks = self.cut(torch.from_numpy(self.mask()))
        out: list[float | list[float]] = []
        for advantages, mask in zip(self.cut(values), masks, strict=True):
            different = {a for a, trained in zip(advantages, mask, strict=True) if trained}
            out.append(different.pop() if len(different) == 1 else advantages if different else 0.0)
        return out


def check_sequence(name: str, sequence: object) -> None:
    """Raise ValueError for a sequence that has unknown keys, no log-probabilities, or lists of unequal length."""
    if not isinstance(sequence, dict) or not isinstance(sequence.get("logprobs"), list) or not sequence["logprobs"]:
        raise ValueError(f"{name}: must be an object with a list of at least one number under logprobs")
    for key in sequence:
        if key not in KEYS:
            raise ValueError(f"{name}.{key}: unknown key; use one of {', '.join(KEYS)}")
    count = len(sequence["logprobs"])
    for key in (*PER_TOKEN, "mask", "advantage"):
        value = sequence.get(key)
        if isinstance(value, list) and len(value) != count:
            raise ValueError(f"{name}.{key}: has {len(value)} values, logprobs has {count}; give one for each token")
        if value is not None and not isinstance(value, list) and key != "advantage":
            raise ValueError(f"{name}.{key}: must be a list of {count} values, got {value!r}")


def compute_pairs(case: Case, tokens: Tokens) -> Result:
    """Return loss, gradients, metrics and token weights of a case of dpo. Raises ValueError for groups that are no
    pairs, and for settings that a run would refuse."""
    try:
        settings = DPOHyperparameters.model_validate(case.get("settings", {}))
    except ValidationError as error:
        raise _refused(error) from None
    objective = DPO.of(settings)
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
    return {"algorithm": "dpo", **_differentiate(objective, packed, tokens)}


def _refused(error: ValidationError) -> ValueError:
    lines = [f"settings: {'.'.join(map(str, e['loc']))}: {e['msg']}, got {e['input']!r}" for e in error.errors()]
    return ValueError("\n".join(lines))


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


def compute(case: Case) -> Result:
    """Return the result of a CASE, see tools/loss/. Raises ValueError that names the key, the rule and the value."""
    with _in_float64():
        return _compute(case)


def _compute(case: Case) -> Result:
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
    packed = tokens.with_demonstrations(packed, pairs=config.algorithm.mixes_pairs)
    result = _differentiate(algorithm, packed, tokens)
    return {
        "algorithm": config.algorithm_name,
        "advantages": tokens.advantages(packed.fields["advantages"]),
        **result,
        "metrics": figures | result["metrics"],
    }


def _differentiate(objective: Objective, packed: PackedBatch, tokens: Tokens) -> Result:
    """Return loss, gradients, metrics, correction weights and token weights of a batch."""
    weighed, divisors = weigh_tokens(packed, objective.token_weights)
    logprobs = tokens.required("logprobs").requires_grad_()
    entropy = tokens.required("entropy").requires_grad_() if objective.needs_entropy else None
    lens = packed.seq_lens
    sequences = Sequences(of_token=sequence_of_token(lens), count=len(lens))
    fields = {**weighed.fields, "loss_mask": weighed.loss_mask}
    loss, metrics = objective.loss(ModelOutput(logprobs=logprobs, entropy=entropy), fields, sequences)
    loss = loss / divisors.loss
    loss.backward()
    assert logprobs.grad is not None, "the loss depends on the log-probabilities"
    return {
        "loss": loss.item(),
        "grads": tokens.cut(logprobs.grad),
        "metrics": {name: float(value.detach()) / divisors.metrics for name, value in metrics.items()},
        "weights": tokens.cut(_correction(objective, logprobs.detach(), fields, sequences)),
        "token_weights": tokens.cut(weighed.fields["token_weights"] / divisors.loss),
    }


def case_config(case: Case, tokens: Tokens) -> PPOMATHConfig:
    """Build the configuration that trains so. Raises ValueError for settings that a run would refuse."""
    given = case.get("settings", {})
    if not isinstance(given, dict):
        raise ValueError(f"settings: must be an object of keys and values, got {given!r}")
    values: dict[str, object] = {
        "experiment_name": "loss",
        "trial_name": "loss",
        "dataset.path": "none",
        "demonstrations.path": "none",
        "algorithm.name": case.get("algorithm"),
        "ppo.kl_ctl": 0.0,
        "ppo.disable_value": not tokens.has("values"),
        "ppo.ppo_n_minibatches": 2 if tokens.has("old_logprobs") else 1,
        "group_size": min(Counter(tokens.groups).values()),
    }
    preset = PRESETS.get(str(case.get("algorithm")))
    if preset is None or "ppo.adv_norm" not in preset.values:
        values["ppo.adv_norm"] = False
    for key, value in given.items():
        values[key if "." in key or key == "group_adv_norm" else f"algorithm.{key}"] = value
    try:
        config = PPOMATHConfig.model_validate(nested(values))
    except ValidationError as error:
        raise _refused(error) from None
    if problems := [str(problem) for problem in check_algorithm(config)]:
        raise ValueError("\n".join(problems))
    return config


def _correction(objective: Objective, logprobs: Tensor, fields: Mapping[str, Tensor], sequences: Sequences) -> Tensor:
    """Compute what corrections multiply the loss of each token by, 0 for tokens that they drop: [T]; 1 for other
    algorithms."""
    if not isinstance(objective, PolicyGradient):
        return fields["loss_mask"].double()
    terms = policy_terms(ModelOutput(logprobs=logprobs), fields, sequences, objective.settings)
    weight, kept = correction_weights(terms, fields, objective.settings)
    return weight * kept


@contextmanager
def _in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
