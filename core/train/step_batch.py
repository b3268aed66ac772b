"""The batch of a step where its tokens are: in the rollout process, which cuts it and computes advantages.

Advantages need every token of the batch at once (groups, whitening, moving statistics), in the order in which they were
sampled. They are computed here, beside the tokens, and only numbers per step go to the driver.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from core.algorithms.base import FIELDS, Algorithm, Objective, check_fields, plain_state, sent_weights
from core.algorithms.policy_gradient import DEMONSTRATION
from core.data.rollout_batch import RolloutBatch
from core.data.stored_batch import (
    Arrays,
    BatchWriter,
    Ref,
    StoredBatch,
    StoredFields,
    Unit,
    Use,
    assemble,
    deal_minibatches,
    units_of,
)
from core.runs.paths import step_file
from mcore_adapter.data.batch import PAIR, PackedBatch

Results = Mapping[str, Sequence[tuple[np.ndarray, np.ndarray]]]
"""By field: (sequences, values) of each rank that has results."""


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """How the loop will use its next batch."""

    unit: Unit
    num_minibatches: int
    seed: int
    version: int
    """Of the weights that train on it."""
    uses: Sequence[Use]


@dataclass(frozen=True, kw_only=True)
class BatchFacts:
    """What the driver gets of a batch: numbers per sequence and per step."""

    num_minibatches: int
    ages: np.ndarray  # [N] int64: see RolloutBatch.ages
    episodes: Sequence[str]
    """Ids of its episodes."""
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """What computes advantages, and what the updates minimise, by engine."""

    algorithm: Algorithm
    objectives: Mapping[str, Objective]
    saved: SavedSteps | None = None
    """Saves what advantages are computed from."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What the driver gets of the advantages."""

    metrics: dict[str, float]
    algorithm_state: dict[str, object]
    """State of the algorithm after this batch."""


class StepBatch:
    """One batch, from its trajectories to the fields that updates train on. It computes with one thread, so that
    sums over tokens have the same order on every machine."""

    def __init__(self, rollout: RolloutBatch, request: BatchRequest, *, put: Callable[[Arrays], Ref]) -> None:
        """Deal minibatches, cut the batch and place its tokens. Raises ValueError where a pair is incomplete, or a
        sequence is longer than a microbatch."""
        torch.set_num_threads(1)  # counts for the calling thread only
        self._rollout, self._version = rollout, request.version
        units = units_of(rollout.group_ids, request.unit, rollout.rollouts)
        minibatches = deal_minibatches(units, request.num_minibatches, seed=request.seed)
        token_ids, loss_mask, experts = rollout.token_ids, rollout.loss_mask, rollout.routed_experts
        self._cu_seqlens = rollout.cu_seqlens
        together = units if request.unit == "pair" else None
        if (shown := rollout.demonstrations) is not None:
            of_shown = _units_of_shown(shown)
            minibatches = _beside(minibatches, of_shown, first=rollout.num_sequences, seed=request.seed)
            if together is None and PAIR in shown.fields:
                together = np.arange(rollout.num_sequences)
            together = None if together is None else np.concatenate((together, together.max() + 1 + of_shown))
            token_ids = np.concatenate((token_ids, shown.token_ids.numpy().astype(token_ids.dtype)))
            loss_mask = np.concatenate((loss_mask, shown.loss_mask.numpy()))
            self._cu_seqlens = np.concatenate((self._cu_seqlens, shown.cu_seqlens.numpy()[1:] + self._cu_seqlens[-1]))
            experts = None if experts is None else self._padded(experts, -1)
        self._writer = BatchWriter(
            put, token_ids=token_ids, cu_seqlens=self._cu_seqlens, loss_mask=loss_mask, routed_experts=experts,
            units=together, minibatches=minibatches, uses=request.uses,
            rollouts=self._rollouts() if rollout.has_branches else None,
        )  # fmt: skip

    def _rollouts(self) -> np.ndarray:
        """Return the rollout of each sequence, [N]; a demonstration is one by itself."""
        rollout = self._rollout
        num_shown = len(self._cu_seqlens) - 1 - rollout.num_sequences
        return np.concatenate((rollout.rollouts, rollout.num_rollouts + np.arange(num_shown)))

    @property
    def stored(self) -> StoredBatch:
        return self._writer.stored

    def facts(self) -> BatchFacts:
        """Return what the driver reports of this batch."""
        rollout = self._rollout
        lens = torch.from_numpy(np.diff(rollout.cu_seqlens))
        return BatchFacts(
            num_minibatches=len(self.stored.minibatches),
            ages=rollout.ages(self._version),
            episodes=rollout.episodes,
            metrics={
                "avg_seq_len": float(lens.float().mean()),
                "avg_prompt_len": float(rollout.prompt_lens.mean()),
                "n_tokens": float((rollout.versions >= 0).sum()),
                "n_valid_tokens": float(rollout.loss_mask.sum()),
                "n_seqs": float(rollout.num_sequences),
                "no_eos_ratio": float(rollout.no_eos.mean()),
                **_figures(rollout.demonstrations),
            },
        )

    def score(self, scoring: Scoring, results: Results) -> tuple[StoredFields, Scored]:
        """Compute advantages from the results of the passes, and place every field to train on."""
        torch.set_num_threads(1)
        rollout, algorithm = self._rollout, scoring.algorithm
        passes = {name: assemble(of, self._cu_seqlens) for name, of in results.items()}
        entropy = passes.pop("entropy", None)  # of a step that is saved
        sampled = {"rollout_logprobs": torch.from_numpy(rollout.rollout_logprobs)}
        known: dict[str, Tensor] = {**sampled, "loss_mask": torch.from_numpy(rollout.loss_mask)}
        known |= {name: value[: len(rollout.token_ids)] for name, value in passes.items()}
        known["ages"] = rollout.token_ages(self._version)
        batch = self._with_passes(rollout, passes)
        state = {} if scoring.saved is None else deepcopy(algorithm.state_dict())
        trained_on, metrics = algorithm.advantages(batch, known)
        check_fields(trained_on, len(rollout.token_ids))
        if scoring.saved is not None:
            shown = known if entropy is None else {**known, "entropy": entropy[: len(rollout.token_ids)]}
            scoring.saved.save(self._version + 1, state, batch, shown, trained_on["advantages"])
        fields = {name: self._padded(value.numpy(), 0) for name, value in {**sampled, **trained_on}.items()}
        fields = {**{name: value.numpy() for name, value in passes.items()}, **fields}
        if rollout.demonstrations is not None:
            fields[DEMONSTRATION] = np.arange(self._cu_seqlens[-1]) >= len(rollout.token_ids)
            if (pairs := rollout.demonstrations.fields.get(PAIR)) is not None:
                fields[PAIR] = np.concatenate((np.zeros(len(rollout.token_ids), np.int64), pairs.numpy()))
        weights = {engine: sent_weights(objective) for engine, objective in scoring.objectives.items()}
        stored = self._writer.put_fields(fields, weights)
        return stored, Scored(metrics=metrics, algorithm_state=plain_state(algorithm))

    def _with_passes(self, rollout: RolloutBatch, passes: Mapping[str, Tensor]) -> RolloutBatch:
        """Return the rollouts with what the passes computed of the demonstrations."""
        if (shown := rollout.demonstrations) is None:
            return rollout
        of_shown = {name: value[len(rollout.token_ids) :] for name, value in passes.items()}
        return replace(rollout, demonstrations=shown.with_fields(**of_shown))

    def _padded(self, values: np.ndarray, fill: int) -> np.ndarray:
        """Extend values of the rollouts' tokens by `fill` for those of demonstrations."""
        added = int(self._cu_seqlens[-1]) - len(values)
        return np.concatenate((values, np.full((added, *values.shape[1:]), fill, values.dtype))) if added else values


def _units_of_shown(demonstrations: PackedBatch) -> np.ndarray:
    """Return the unit of each demonstration, [N] int64 from 0 on: pairs, or single sequences."""
    if PAIR not in demonstrations.fields:
        return np.arange(demonstrations.num_sequences)
    return demonstrations.fields[PAIR][demonstrations.cu_seqlens[:-1]].abs().numpy() - 1


def _beside(minibatches: list[list[int]], units: np.ndarray, *, first: int, seed: int) -> list[list[int]]:
    """Deal demonstrations by their units, the sequences from `first` on, into minibatches of rollouts."""
    dealt = deal_minibatches(units, len(minibatches), seed=seed)
    dealt += [[] for _ in range(len(minibatches) - len(dealt))]
    return [[*rollouts, *(first + i for i in more)] for rollouts, more in zip(minibatches, dealt, strict=True)]


def _figures(demonstrations: PackedBatch | None) -> dict[str, float]:
    if demonstrations is None:
        return {}
    return {
        "n_demonstrations": float(demonstrations.num_sequences),
        "n_demonstrated_tokens": float(demonstrations.loss_mask.sum()),
    }


@dataclass(frozen=True, kw_only=True)
class SavedSteps:
    """Writes what every `every`-th step is computed from into `folder`."""

    folder: Path
    every: int
    name: str | None
    """Of the algorithm."""
    settings: Mapping[str, object]

    def is_due(self, step: int) -> bool:
        """Return whether a step, counted from 1, is saved."""
        return step % self.every == 0

    def save(
        self,
        step: int,
        state: Mapping[str, object],
        batch: RolloutBatch,
        fields: Mapping[str, Tensor],
        advantages: Tensor,
    ) -> None:
        """Write the case of a step, counted from 1, if it is due. `state`: of the algorithm before the step; `fields`:
        as Algorithm.advantages() gets them, and "entropy" [T] where it is known; `advantages`: [T]."""
        if not self.is_due(step):
            return
        case = {"algorithm": self.name, "settings": dict(self.settings), "state": state}
        self.folder.mkdir(parents=True, exist_ok=True)
        path = step_file(self.folder, step)
        partial = path.with_suffix(".partial")
        with gzip.open(partial, "wt", compresslevel=1, encoding="utf-8") as file:
            json.dump({**case, **_sequences(batch, fields), "tokens": _tokens(batch, advantages)}, file)
        partial.rename(path)


def _sequences(batch: RolloutBatch, fields: Mapping[str, Tensor]) -> dict[str, object]:
    """Return the sequences of a case, and the version that trains on them. The current policy is that of the start of
    the step: old_logprobs where they were computed, otherwise those of the generators."""
    columns: dict[str, np.ndarray] = {"rollout_logprobs": batch.rollout_logprobs, "versions": batch.versions}
    columns |= {key: fields[name].numpy() for key, name in FIELDS.items() if name in fields}
    columns |= {"mask": batch.loss_mask.astype(int), "logprobs": columns.get("old_logprobs", batch.rollout_logprobs)}
    sequences = []
    for i, (start, end) in enumerate(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)):
        row: dict[str, object] = {key: values[start:end].tolist() for key, values in columns.items()}
        row |= {"reward": float(batch.rewards[i]), "group": int(batch.group_ids[i]), "truncated": bool(batch.no_eos[i])}
        sequences.append(row)
    sequences += _demonstrations(batch)
    version = int((fields["ages"].numpy() + batch.versions)[batch.loss_mask].max(initial=0))
    return {"version": version, "sequences": sequences}


def _tokens(batch: RolloutBatch, advantages: Tensor) -> list[dict[str, object]]:
    """Return which answer each sequence is, its tokens, and the advantages that were trained on."""
    firsts = np.searchsorted(batch.group_ids, batch.group_ids)  # sequences of a group are adjacent
    values = advantages.double().numpy()
    return [
        {
            "episode": batch.episodes[int(batch.group_ids[i])],
            "index": i - int(firsts[i]),
            "ids": batch.token_ids[start:end].tolist(),
            "advantages": values[start:end].tolist(),
        }
        for i, (start, end) in enumerate(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True))
    ]


def _demonstrations(batch: RolloutBatch) -> list[dict[str, object]]:
    """Return the demonstrations of a step. Their log-probabilities are known where the policy before the update was
    computed; elsewhere a case has none."""
    shown, policy, reference = batch.demonstrations, FIELDS["old_logprobs"], FIELDS["ref_logprobs"]
    if shown is None or policy not in shown.fields:
        return []
    rows = []
    for i in range(shown.num_sequences):
        one = shown.select([i])
        row = {"logprobs": one.fields[policy].tolist(), "mask": one.loss_mask.int().tolist(), "demonstration": True}
        if PAIR in one.fields:
            number = int(one.fields[PAIR][0])
            row |= {"group": f"pair {abs(number)}", "reward": float(number > 0)}
            row |= {"ref_logprobs": one.fields[reference].tolist()}
        rows.append(row)
    return rows
