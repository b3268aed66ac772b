"""Episodes as rows of text, for people and other programs: tags, and trajectories with their arrays as lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from rollout.experience.episode import Tags
from rollout.types import Trajectory

_DTYPES = {
    "token_ids": np.int32, "loss_mask": np.bool_, "rollout_logprobs": np.float32, "versions": np.int32,
    "routed_experts": np.int16,
}  # fmt: skip


def to_row(tags: Tags, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Return an episode as plain values."""
    return {"tags": asdict(tags), "trajectories": [_plain(trajectory) for trajectory in trajectories]}


def from_row(row: Mapping[str, Any]) -> tuple[Tags, list[Trajectory]]:
    """Return the inverse of to_row(). Raises TypeError, LookupError or ValueError for another row."""
    return Tags(**row["tags"]), [_trajectory(plain) for plain in row["trajectories"]]


def _plain(trajectory: Trajectory) -> dict[str, Any]:
    values = {field.name: getattr(trajectory, field.name) for field in fields(trajectory)}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}


def _trajectory(plain: Mapping[str, Any]) -> Trajectory:
    arrays: dict[str, Any] = {
        name: np.array(plain[name], kind) for name, kind in _DTYPES.items() if plain.get(name) is not None
    }
    return Trajectory(**{**plain, **arrays})
