"""The sequences of a case of `python -m tools.loss`, checked and laid end to end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.algorithms.mix import DEMONSTRATION
from core.data.rollout_batch import RolloutBatch
from mcore_adapter.data.batch import PackedBatch

PER_TOKEN = ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "values", "entropy", "versions")
KEYS = (*PER_TOKEN, "mask", "reward", "group", "truncated", "advantage", "demonstration")


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The sequences of a case, each behind one prompt token, laid end to end."""

    sequences: Sequence[Mapping[str, Any]]
    lens: Sequence[int]

    @classmethod
    def read(cls, case: Mapping[str, Any]) -> Tokens:
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

    def with_demonstrations(self, packed: PackedBatch) -> PackedBatch:
        """Add the demonstrations behind the sampled sequences, with fields of 0."""
        added = sum(n + 1 for n in self.lens[self.num_sampled :])
        if not added:
            return packed
        ends = (torch.tensor(self.lens) + 1).cumsum(0)
        mask = torch.from_numpy(self.mask())
        fields = {name: torch.cat((value, value.new_zeros(added))) for name, value in packed.fields.items()}
        fields[DEMONSTRATION] = torch.arange(len(mask)) >= len(mask) - added
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
            prompt_lens=np.array([int(s[0]) if s.size else 1 for s in sampled]),
            no_eos=np.array([bool(s.get("truncated", False)) for s in self.sequences]),
            episodes=[str(i) for i in range(len(groups))],
        )

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


def check_sequence(name: str, sequence: Any) -> None:
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
