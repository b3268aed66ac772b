"""The trainer's side of an experience store: it leases the episodes of each step and acknowledges those it has trained.

Invariant: no token that a step trains on is older than max_staleness steps.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rollout.experience.base import Experience, Lease, Outstanding, Patience, Selection, StalenessError
from rollout.experience.episode import Episode, Tags, length_bias
from rollout.experience.rules import Replay, Rules
from rollout.trajectories import turns
from rollout.types import PROMPT_VERSION, Trajectory, lowest_right


class Lessee:
    """The one trainer of a store. For step i = 0, 1, ...: await take(i), train, trained(i + 1)."""

    def __init__(
        self, experience: Experience, rules: Rules, *,
        name: str = "trainer", until_saved: bool = False, keep_steps: int = 0,
        right_at: Mapping[str, float | None] | None = None, patience: Callable[[int], Patience] | None = None,
        counts_late: bool = False,
    ) -> None:  # fmt: skip
        """`name`: of this trainer, for the error of another one. `until_saved`: acknowledge leases when a recover
        checkpoint has their steps, for a store that is not part of checkpoints. `keep_steps`: steps whose episodes keep
        their values when they are trained. `right_at`: task sets with the reward from which an answer is right, for
        figures of each; None: there is one set. `patience`: with the episodes of a step, how long it waits for them.
        `counts_late`: report late episodes without it, too."""
        self._right_at, self._patience = right_at or {}, patience
        self._counts_late = counts_late or patience is not None
        self._experience, self._rules, self._name = experience, rules, name
        self._leases: list[Lease] = []
        self._until_saved = until_saved
        self._keep_steps = keep_steps if rules.replay is None else max(keep_steps, rules.replay.max_age)
        self._trained = self._saved = 0  # steps; the second: of the last checkpoint that state_dict() was called for
        self._masked: dict[int, int] = {}  # tokens by step, of leases that are not acknowledged
        self._num_masked = 0  # of acknowledged ones
        self._figures: dict[str, float] = {}

    async def take(self, step: int) -> list[Episode]:
        """Return the episodes that `step` trains on, new ones and then those that it replays; wait for them. Counts the
        steps before as trained.

        Raises ValueError on another step than the next, StalenessError, and the error of Experience.fail()."""
        if not self._rules.schedule.batch_of(step):
            raise ValueError(f"take({step}): the run has {self._rules.schedule.total_steps} steps")
        self.trained(step)
        clock = _Clock(self._rules.selection)
        size = self._rules.schedule.batch_of(step)
        limit = {} if self._patience is None else {"patience": self._patience(size)}
        lease = await self._experience.lease(clock, step, self._name, **limit)
        waits = clock.seconds()
        self._leases.append(lease)
        episodes = self._experience.values(lease.ids)
        if self._rules.over_age == "mask":
            episodes = [self._masked_episode(episode, step) for episode in episodes]
        self._figures = waits | self._ages(episodes, step) | self._of_task_sets(lease.tags)
        if self._counts_late:
            self._figures |= self._of_late(lease, size)
        reasons = Counter(tags.reason for tags in lease.dropped if tags.reason)
        self._figures |= {f"dropped/{reason}": float(number) for reason, number in reasons.items()}
        if self._rules.spread is not None:
            self._figures |= self._rules.spread.metrics(lease)
        return episodes if self._rules.replay is None else [*episodes, *self._replayed(self._rules.replay, lease)]

    def _replayed(self, replay: Replay, lease: Lease) -> list[Episode]:
        step, num_new = lease.step, len(lease.tags)
        again = self._experience.replay(step, partial(replay.choose, step=step, num_new=num_new))
        self._figures |= replay.metrics(again, step=step, num_new=num_new)
        values = self._experience.values([tags.id for tags in again])
        return [replace(episode, tags=tags) for episode, tags in zip(values, again, strict=True)]

    def _of_late(self, lease: Lease, size: int) -> dict[str, float]:
        """Return how many episodes of a batch are late or missing, and the bias of length."""
        late = [tags for tags in lease.dropped if tags.fate == "late"]
        return {
            "rollout/num_late": float(len(late)),
            "rollout/num_missing": float(size - len(lease.tags)),
            "rollout/length_bias": length_bias(lease.tags, late),
        }

    def trained(self, step: int) -> None:
        """Count all steps before `step` as trained."""
        self._trained = step
        if not self._until_saved:
            self._acknowledge(step)

    def end(self) -> None:
        """Acknowledge what was trained: the run is complete."""
        self._acknowledge(self._trained)

    def _acknowledge(self, step: int) -> None:
        done = [lease for lease in self._leases if lease.step < step]
        for lease in done:
            self._experience.ack(lease)
            self._num_masked += self._masked.pop(lease.step, 0)
            self._leases.remove(lease)
        if done:
            self._experience.prune(self._keep_steps)

    def _masked_episode(self, episode: Episode, step: int) -> Episode:
        oldest_allowed = step - self._rules.max_staleness
        if min(episode.tags.oldest) >= oldest_allowed:
            return episode
        parts = [mask_over_age(trajectory, oldest_allowed) for trajectory in episode.trajectories]
        self._masked[step] = self._masked.get(step, 0) + sum(number for _, number in parts)
        masked = [trajectory for trajectory, _ in parts]
        tags = replace(episode.tags, oldest=[t.oldest_version for t in masked])
        return Episode(tags=tags, trajectories=masked)

    def _ages(self, episodes: list[Episode], step: int) -> dict[str, float]:
        """Return the mean and the largest age of the trajectories that are trained."""
        oldest = [(v, e.tags.id) for e in episodes for v in e.tags.oldest if v != PROMPT_VERSION]
        version, id = min(oldest, default=(step, ""))
        if step - version > self._rules.max_staleness:
            raise StalenessError(
                f"step {step} got a trajectory of {id} sampled from version {version}: "
                f"its age is {step - version}, max_staleness is {self._rules.max_staleness}"
            )
        ages = [step - v for v, _ in oldest]
        return {"staleness/mean": sum(ages) / max(len(ages), 1), "staleness/max": float(max(ages, default=0))}

    def _of_task_sets(self, trained: Sequence[Tags]) -> dict[str, float]:
        """Return the number of prompts of each task set in a batch, and how its answers were judged."""
        figures = {}
        for name, right_at in self._right_at.items():
            rewards = [reward for tags in trained if tags.task_set == name for reward in tags.rewards]
            figures[f"task_set/{name}/prompts"] = float(sum(tags.task_set == name for tags in trained))
            if rewards:
                figures[f"task_set/{name}/reward"] = sum(rewards) / len(rewards)
            if rewards and right_at is not None:
                limit = lowest_right(right_at)
                figures[f"task_set/{name}/right"] = sum(reward >= limit for reward in rewards) / len(rewards)
        return figures

    def stats(self) -> dict[str, float]:
        """Return waits and ages of the last batch, and the tokens masked since the start."""
        return {"rollout/num_masked_tokens": float(self._num_masked + sum(self._masked.values()))} | self._figures

    def state_dict(self) -> dict[str, Any]:
        """Return what the store does not hold, of the steps that are trained. The checkpoint of the last call is on the
        disk, so its steps are acknowledged."""
        if self._until_saved:
            self._acknowledge(self._saved)
            self._saved = self._trained
        pending = sum(number for step, number in self._masked.items() if step < self._trained)
        return {"masked_tokens": self._num_masked + pending}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken."""
        self._num_masked = state.get("masked_tokens", 0)


class _Clock:
    """The selection of a run, and how long a step has waited: for as many episodes as it needs, and then for old
    ones."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._began = self._enough = time.perf_counter()
        self._is_enough = False

    def batch_of(self, step: int) -> int:
        return self._selection.batch_of(step)

    def is_ready(self, outstanding: Outstanding, step: int) -> bool:
        if not self._is_enough:
            self._is_enough, self._enough = True, time.perf_counter()
        return self._selection.is_ready(outstanding, step)

    def partial(self, outstanding: Outstanding, step: int) -> tuple[list[str], list[str]]:
        return self._selection.partial(outstanding, step)

    def choose(self, outstanding: Outstanding, step: int) -> list[str]:
        return self._selection.choose(outstanding, step)

    def seconds(self) -> dict[str, float]:
        now = time.perf_counter()
        return {"rollout/wait_seconds": now - self._began, "rollout/wait_for_oldest_seconds": now - self._enough}


def mask_over_age(trajectory: Trajectory, oldest_allowed: int) -> tuple[Trajectory, int]:
    """Mask the tokens that versions before `oldest_allowed` sampled; return the result and their number."""
    too_old = trajectory.loss_mask & (trajectory.versions < oldest_allowed)
    num_masked = int(too_old.sum())
    if not num_masked:
        return trajectory, 0
    return _with_mask(trajectory, trajectory.loss_mask & ~too_old), num_masked


def _with_mask(trajectory: Trajectory, mask: np.ndarray) -> Trajectory:
    """Return a trajectory of which fewer tokens are trained. What turns without such a token have earned is part of the
    next turn's reward."""
    if trajectory.turn_rewards is None:
        return replace(trajectory, loss_mask=mask)
    states = trajectory.turn_states or [None] * len(trajectory.turn_rewards)
    kept: list[tuple[float, str | None]] = []
    earned = 0.0
    for (first, end), reward, state in zip(turns(trajectory.loss_mask), trajectory.turn_rewards, states, strict=True):
        earned += reward
        if mask[first:end].any():
            kept.append((earned, state))
            earned = 0.0
    return replace(
        trajectory, loss_mask=mask, turn_rewards=[reward for reward, _ in kept], turn_states=[s for _, s in kept]
    )
