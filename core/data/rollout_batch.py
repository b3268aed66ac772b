"""One training step's data in the rollout process: trajectories laid end to end, with what is known per sequence
beside them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from mcore_adapter.data.batch import PackedBatch, leading_prompt_lens
from rollout.trajectories import turns
from rollout.types import REWARD_PART, Trajectory, lowest_right


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """N trajectories of T tokens; the trajectories of a group are adjacent."""

    token_ids: np.ndarray  # [T] int32
    cu_seqlens: np.ndarray  # [N + 1] int64
    loss_mask: np.ndarray  # [T] bool
    rollout_logprobs: np.ndarray  # [T] float32
    versions: np.ndarray  # [T] int32
    rewards: np.ndarray  # [N] float32
    group_ids: np.ndarray  # [N] int64, 0 .. number of groups - 1
    rollouts: np.ndarray  # [N] int64, 0 .. R - 1: the rollout that each is a branch of, almost always the only one
    prompt_lens: np.ndarray  # [N] int64
    no_eos: np.ndarray  # [N] bool
    episodes: Sequence[str]
    """Ids of the groups' episodes (rollout/experience/episode.py)."""
    routed_experts: np.ndarray | None = None
    """[T, layers, k] int16: the experts that the generators used; negative: not known."""
    turn_rewards: np.ndarray | None = None
    """[K] float32: what each turn, a run of trained tokens, has earned by itself. None: no workflow reports it."""
    turn_states: np.ndarray | None = None
    """[K] int64: equal for turns that began in the same state; -1: not known. None: no workflow reports it."""
    workflow_metrics: Mapping[str, np.ndarray] = field(default_factory=dict)
    """[N] float64 each: what the workflow reports of its trajectories; NaN: not reported."""
    demonstrations: PackedBatch | None = None
    """Sequences that no policy sampled, which the step trains on as well."""

    @property
    def num_sequences(self) -> int:
        return len(self.rewards)

    @property
    def num_rollouts(self) -> int:
        return int(self.rollouts.max()) + 1

    @property
    def has_branches(self) -> bool:
        """Whether a rollout has several trajectories."""
        return self.num_rollouts < self.num_sequences

    def of_rollouts(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean of the values [N] of its branches for each rollout: [R]."""
        if not self.has_branches:
            return values
        rollouts = torch.from_numpy(self.rollouts)
        counts = torch.bincount(rollouts).to(values.dtype)
        return torch.zeros(self.num_rollouts, dtype=values.dtype).index_add_(0, rollouts, values) / counts

    @property
    def group_ids_of_rollouts(self) -> np.ndarray:
        """Group of each rollout: [R]."""
        return self.group_ids[np.unique(self.rollouts, return_index=True)[1]]

    def to_packed(self) -> PackedBatch:
        """Return the part that the engines see, with rollout_logprobs as its first field."""
        return PackedBatch(
            token_ids=torch.from_numpy(self.token_ids.astype(np.int64)),
            cu_seqlens=torch.from_numpy(self.cu_seqlens.copy()),
            loss_mask=torch.from_numpy(self.loss_mask.copy()),
            fields={"rollout_logprobs": torch.from_numpy(self.rollout_logprobs.copy())},
        )

    def reward_figures(self, right_at: float | None = None) -> dict[str, float]:
        """Return mean, std, min and max of the rewards of rollouts as the reward function gave them; the share of
        groups that are equal (all rewards the same, so that advantages within the group are 0), and with `right_at`,
        the reward of a right answer, the shares of right answers and of groups that are solved (all right) and
        unsolved (none is); mean and max of the sampled tokens of a completion; the mean of -log p of the trained
        tokens, in nats, which estimates the entropy of the distributions that they were sampled from."""
        rewards = self.of_rollouts(torch.from_numpy(self.rewards)).numpy()
        starts = np.flatnonzero(np.r_[True, np.diff(self.group_ids_of_rollouts) != 0])
        lowest = np.minimum.reduceat(rewards, starts)
        highest = np.maximum.reduceat(rewards, starts)
        lengths = np.add.reduceat((self.versions >= 0).astype(np.int64), self.cu_seqlens[:-1])
        figures = {f"reward/{name}": float(getattr(rewards, name)()) for name in ("mean", "std", "min", "max")}
        figures["groups/equal"] = float((lowest == highest).mean())
        if right_at is not None:
            right_at = lowest_right(right_at)
            figures |= {
                "reward/right": float((rewards >= right_at).mean()),
                "groups/solved": float((lowest >= right_at).mean()),
                "groups/unsolved": float((highest < right_at).mean()),
            }
        num_trained = max(1, int(self.loss_mask.sum()))
        return figures | {
            "sampled_entropy": float(-(self.rollout_logprobs * self.loss_mask).sum() / num_trained),
            "answer_length/mean": float(lengths.mean()),
            "answer_length/max": float(lengths.max()),
        }

    def workflow_figures(self) -> dict[str, float]:
        """Return workflow/{name}/mean, min and max of each workflow metric over the trajectories that report it; of a
        part of the reward as reward/{name}/..."""
        figures: dict[str, float] = {}
        for name, values in self.workflow_metrics.items():
            reported = values[~np.isnan(values)]
            if reported.size:
                key = name if name.startswith(REWARD_PART) else f"workflow/{name}"
                figures |= {f"{key}/{kind}": float(getattr(reported, kind)()) for kind in ("mean", "min", "max")}
        return figures

    def token_ages(self, version: int) -> torch.Tensor:
        """Return version minus the version that sampled each token, 0 outside loss_mask: [T] int64."""
        return torch.from_numpy(np.where(self.loss_mask, version - self.versions, 0).astype(np.int64))

    def ages(self, version: int) -> np.ndarray:
        """Return the version minus the version of each trajectory's oldest trained token: [N] int64."""
        trained = np.where(self.loss_mask, self.versions, version)
        return version - np.minimum.reduceat(trained, self.cu_seqlens[:-1]).astype(np.int64)


def pack_trajectories(groups: Sequence[Sequence[Trajectory]], episodes: Sequence[str]) -> RolloutBatch:
    """Lay groups of trajectories end to end; `episodes` are their ids. Every trajectory has at least one prompt token
    and one sampled token."""
    flat = [t for group in groups for t in group]
    lens = np.fromiter((len(t.token_ids) for t in flat), np.int64, len(flat))
    cu_seqlens = np.concatenate((np.zeros(1, np.int64), lens.cumsum()))
    versions = np.concatenate([t.versions for t in flat])
    return RolloutBatch(
        token_ids=np.concatenate([t.token_ids for t in flat]),
        cu_seqlens=cu_seqlens,
        loss_mask=np.concatenate([t.loss_mask for t in flat]),
        rollout_logprobs=np.concatenate([t.rollout_logprobs for t in flat]),
        versions=versions,
        rewards=np.fromiter((t.reward for t in flat), np.float32, len(flat)),
        group_ids=np.repeat(np.arange(len(groups)), [len(g) for g in groups]),
        rollouts=_number_rollouts(groups),
        prompt_lens=leading_prompt_lens(cu_seqlens, versions >= 0),
        no_eos=np.fromiter((t.finish_reason == "length" for t in flat), np.bool_, len(flat)),
        episodes=list(episodes),
        routed_experts=_pack_experts(flat),
        turn_rewards=_pack_turns(flat, "turn_rewards", np.float32, missing=0.0),
        turn_states=_pack_states(flat),
        workflow_metrics={
            name: np.array([float(t.metrics.get(name, np.nan)) for t in flat])
            for name in sorted({name for t in flat for name in t.metrics})
        },
    )


def _pack_turns(trajectories: Sequence[Trajectory], name: str, dtype: type, *, missing: object) -> np.ndarray | None:
    """Return what every turn has under this name, [K]; `missing` for trajectories without it."""
    if all(getattr(t, name) is None for t in trajectories):
        return None
    rows = [getattr(t, name) for t in trajectories]
    rows = [[missing] * len(turns(t.loss_mask)) if of is None else of for of, t in zip(rows, trajectories, strict=True)]
    return np.array([value for of in rows for value in of], dtype)


def _pack_states(trajectories: Sequence[Trajectory]) -> np.ndarray | None:
    """Return a number for the state of every turn, [K] int64; -1 where it is not known."""
    states = _pack_turns(trajectories, "turn_states", object, missing=None)
    if states is None:
        return None
    numbers: dict[str, int] = {}
    return np.array([-1 if s is None else numbers.setdefault(s, len(numbers)) for s in states], np.int64)


def _number_rollouts(groups: Sequence[Sequence[Trajectory]]) -> np.ndarray:
    """Return the number of the rollout of each trajectory, [N] int64, from 0 on in the order of their first ones."""
    numbers: dict[tuple[int, int | None, int], int] = {}
    names = (
        (group, t.rollout, i if t.rollout is None else 0) for group, of in enumerate(groups) for i, t in enumerate(of)
    )
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)


def _pack_experts(trajectories: Sequence[Trajectory]) -> np.ndarray | None:
    """Return the experts of all tokens, [T, layers, k]; -1 for trajectories without them."""
    reported = next((t.routed_experts for t in trajectories if t.routed_experts is not None), None)
    if reported is None:
        return None

    def of(trajectory: Trajectory) -> np.ndarray:
        if trajectory.routed_experts is not None:
            return trajectory.routed_experts
        return np.full((len(trajectory.token_ids), *reported.shape[1:]), -1, reported.dtype)

    return np.concatenate([of(t) for t in trajectories])
