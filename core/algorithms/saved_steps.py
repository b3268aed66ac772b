"""What steps are computed from, saved as cases of `python -m tools.loss`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from core.algorithms.base import FIELDS
from core.runs.paths import step_file
from mcore_adapter.data.batch import PAIR

if TYPE_CHECKING:
    from core.data.rollout_batch import RolloutBatch


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
