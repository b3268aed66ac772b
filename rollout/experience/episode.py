"""An episode: one run of a workflow on one prompt. Its tags are small, its value goes to the ranks that train on it.

Invariant: an id names the same prompt, in the same epoch, in every attempt of a run.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypedDict

import numpy as np

from rollout.plugins import load_plugin
from rollout.types import PROMPT_VERSION, Completion, Prompt, Trajectory

Fate = Literal["open", "ready", "leased", "trained", "dropped", "skipped", "late"]
"""open: it is sampled. ready: it is finished. leased: a trainer has it. trained: its lease is acknowledged. dropped: no
trainer gets it, as all its rewards are equal, or for its `reason`. skipped: its workflow kept failing. late: it was not
finished when its step had waited long enough, or with a `reason`, in time."""


SLOW = "slow"
"""The reason of a late episode that exceeded the dynamic time limit."""


def episode_id(prompt: Prompt) -> str:
    """Return the id of an episode: [task set/]row/epoch."""
    names = [prompt.task_set.replace("%", "%25").replace("/", "%2F")] if prompt.task_set else []
    return "/".join([*names, prompt.query_id, str(prompt.epoch)])


def without_epoch(id: str) -> str:
    """Return what the ids of a row have in common in all epochs."""
    return id.rpartition("/")[0]


@dataclass(frozen=True, kw_only=True)
class Tags:
    """What is known of an episode without its tokens. The sequences have one entry for each trajectory."""

    id: str
    group_id: str
    """Episodes of one group are compared with each other: advantages are within it."""
    task: str
    row: str
    """query_id of its prompt."""
    epoch: int
    task_set: str = ""
    """Name of the set that its prompt is a row of."""
    version: int
    """Of the weights at the start of its sampling: every token is sampled by them or by later ones."""
    rewards: Sequence[float] = ()
    lengths: Sequence[int] = ()
    """Tokens that a policy sampled."""
    trained: Sequence[int] = ()
    """Those of them to train on."""
    oldest: Sequence[int] = ()
    """Version that sampled the oldest token to train on, PROMPT_VERSION where there is none."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means of what the workflow reports."""
    priority: float = 0.0
    """For selections that weigh episodes; those of rollout/experience/selection.py do not."""
    uses: int = 0
    """Steps that train on it: that of its lease, and those that replay it."""
    fate: Fate = "open"
    reason: str = ""
    """Why a processor dropped it, or SLOW. Empty: neither."""
    step: int | None = None
    """Of its lease; in a SQL store also that of the first lease after it was dropped."""

    @property
    def due(self) -> int:
        """The step that leases it, as far as is known: the first one that may."""
        return self.version if self.step is None else self.step


@dataclass(frozen=True, kw_only=True)
class Episode:
    """A finished episode: tags, and as its value the trajectories of its group."""

    tags: Tags
    trajectories: Sequence[Trajectory]


@dataclass(frozen=True, kw_only=True)
class Event:
    """What one call of a workflow has brought so far. An event replaces the one before of the same key."""

    key: str
    """The call within its episode, see rollout/journal.py."""
    asked: str
    """Checksum of what was asked for: what an earlier attempt got answers the same question only."""
    value: object
    """A completion, with finish_reason "abort" while it is sampled, or the result of a tool as plain values."""


def sampled_lengths(events: Iterable[Event]) -> list[int]:
    """Return the tokens that each call of an episode has sampled so far."""
    return [len(event.value.token_ids) for event in events if isinstance(event.value, Completion)]


def length_bias(trained: Sequence[Tags], late: Sequence[Tags]) -> float:
    """Return an estimate of the bias of length: the mean length of trained episodes over that of trained and late ones.
    A late one counts as the longest answer that is trained, or as what it has sampled where that is more: it would have
    become longer still."""
    lengths = [float(np.mean(tags.lengths)) for tags in trained]
    longest = max(length for tags in trained for length in tags.lengths)
    every = lengths + [float(max(longest, *tags.lengths, 0)) for tags in late]
    return float(np.mean(lengths) / np.mean(every)) if sum(every) else 1.0


class Summary(TypedDict):
    """The tags that finished trajectories have."""

    rewards: list[float]
    lengths: list[int]
    trained: list[int]
    oldest: list[int]
    metrics: dict[str, float]


def summary(trajectories: Sequence[Trajectory]) -> Summary:
    """Return the tags of finished trajectories."""
    starts = np.cumsum([0, *(len(t.token_ids) for t in trajectories[:-1])])
    versions = np.concatenate([t.versions for t in trajectories])
    trained = np.concatenate([t.loss_mask for t in trajectories])
    newest = int(versions.max()) + 1
    oldest = np.minimum.reduceat(np.where(trained, versions, newest), starts)
    return {
        "rewards": [float(t.reward) for t in trajectories],
        "lengths": np.add.reduceat(versions != PROMPT_VERSION, starts, dtype=np.int64).tolist(),
        "trained": np.add.reduceat(trained, starts, dtype=np.int64).tolist(),
        "oldest": np.where(oldest == newest, PROMPT_VERSION, oldest).tolist(),
        "metrics": _means([t.metrics for t in trajectories if t.metrics]),
    }


def mean_reward(tags: Tags) -> float:
    """Return the mean reward of a finished episode."""
    return sum(tags.rewards) / len(tags.rewards)


def _means(reported: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: _mean(m[name] for m in reported if name in m) for name in {n: None for m in reported for n in m}}


def _mean(values: Iterable[float]) -> float:
    found = [float(value) for value in values]
    return sum(found) / len(found)


Processor = Callable[[Tags, list[Trajectory]], list[Trajectory] | str]
"""A function of the user that gets the tags and trajectories of every finished episode before it is stored. It returns
trajectories, with changed rewards or some of them removed, or the reason for which the episode is dropped. Processors
run in the order of experience.processors, each on what the one before returned. What they raise counts as a failure of
the workflow."""
Check = Callable[[list[Trajectory]], list[Trajectory]]


def load_processors(specs: Sequence[str]) -> list[Processor]:
    """Return the functions at these import paths. Raises PluginError."""
    return [load_plugin(spec, kind="processor", arguments=("tags", "trajectories")) for spec in specs]


def make_episode(tags: Tags, group: list[Trajectory], processors: Sequence[Processor], check: Check) -> Episode:
    """Return the finished episode of a group. `tags.reason`: that for which a processor drops it. `check`: returns what
    a processor returns, or raises TypeError or ValueError. Raises what a processor raises."""
    episode = Episode(tags=replace(tags, **summary(group)), trajectories=group)
    for processor in processors:
        found = processor(episode.tags, [*episode.trajectories])
        if isinstance(found, str):
            return replace(episode, tags=replace(episode.tags, reason=found or "no reason given"))
        try:
            group = check(found)
        except (TypeError, ValueError) as error:
            name = getattr(processor, "__qualname__", repr(processor))
            raise type(error)(f"processor {name}: {error}") from error
        episode = Episode(tags=replace(tags, **summary(group)), trajectories=group)
    return episode


def is_dropped(tags: Tags, ahead: int) -> bool:
    """Return whether a processor drops an episode."""
    return bool(tags.reason)
