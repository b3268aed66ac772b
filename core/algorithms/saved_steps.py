"""Save what an algorithm computes each step from, as a case of `python -m tools.loss`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from core.algorithms.base import FIELDS, Algorithm, Metrics, Objective, Pass
from core.runs.paths import step_file

if TYPE_CHECKING:
    from core.data.rollout_batch import RolloutBatch
    from mcore_adapter.data.batch import ModelOutput, PackedBatch
    from mcore_adapter.data.sequences import Sequences


class SavedSteps(Algorithm):
    """An algorithm that writes every `every`-th batch to `folder`, and computes what the given one computes."""

    def __init__(
        self,
        algorithm: Algorithm,
        *,
        folder: Path,
        every: int,
        step: int,
        name: str | None,
        settings: Mapping[str, object],
    ) -> None:
        """`step`: the number of steps that are done. `name` and `settings` go into the cases."""
        self._algorithm, self._folder, self._every, self._step = algorithm, folder, every, step
        self._case = {"algorithm": name, "settings": dict(settings)}
        self.unit, self.reads = algorithm.unit, algorithm.reads

    @property
    def passes(self) -> frozenset[Pass]:
        return self._algorithm.passes

    @property
    def critic(self) -> Objective | None:
        return self._algorithm.critic

    @property
    def needs_entropy(self) -> bool:
        return self._algorithm.needs_entropy

    @property
    def weighs_alike(self) -> bool:
        return self._algorithm.weighs_alike

    def token_weights(self, minibatch: PackedBatch) -> Tensor:
        return self._algorithm.token_weights(minibatch)

    def loss(self, output: ModelOutput, fields: Mapping[str, Tensor], sequences: Sequences) -> tuple[Tensor, Metrics]:
        return self._algorithm.loss(output, fields, sequences)

    def advantages(
        self, batch: RolloutBatch, fields: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        self._step += 1
        if self._step % self._every == 0:
            case = {**self._case, "state": self._algorithm.state_dict(), **_sequences(batch, fields)}
            self._folder.mkdir(parents=True, exist_ok=True)
            path = step_file(self._folder, self._step)
            partial = path.with_suffix(".partial")
            with gzip.open(partial, "wt", compresslevel=1, encoding="utf-8") as file:
                json.dump(case, file)
            partial.rename(path)
        return self._algorithm.advantages(batch, fields)

    def state_dict(self) -> dict[str, object]:
        return {**self._algorithm.state_dict(), "saved_step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._algorithm.load_state_dict({key: value for key, value in state.items() if key != "saved_step"})
        self._step = state.get("saved_step", self._step)


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


def _demonstrations(batch: RolloutBatch) -> list[dict[str, object]]:
    """Return the demonstrations of a step. Their log-probabilities are known where the policy before the update was
    computed; elsewhere a case has none."""
    shown, policy = batch.demonstrations, FIELDS["old_logprobs"]
    if shown is None or policy not in shown.fields:
        return []
    lens = shown.seq_lens.tolist()
    parts = zip(shown.fields[policy].split(lens), shown.loss_mask.split(lens), strict=True)
    return [
        {"logprobs": logprobs.tolist(), "mask": mask.int().tolist(), "demonstration": True} for logprobs, mask in parts
    ]
