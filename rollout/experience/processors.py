"""Functions of the user that get every finished episode before it is stored: they change rewards, remove trajectories
of the group, or drop the episode for a reason.

They run in the order of experience.processors, each on what the one before returned. What they raise counts as a
failure of the workflow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rollout.experience.episode import Episode, Tags, summary
from rollout.plugins import load_plugin
from rollout.types import Trajectory

Processor = Callable[[Tags, list[Trajectory]], list[Trajectory] | str]
"""Gets an episode's tags and trajectories; returns trajectories, or the reason for which the episode is dropped."""
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
