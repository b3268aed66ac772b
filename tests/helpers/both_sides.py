"""A producer and the one trainer of its store in one event loop, as the rollout service has them."""

import inspect
from collections.abc import Mapping
from typing import Any

from rollout.data.task_sets import TaskSets
from rollout.experience import Experience, Lessee, MemoryExperience, Tags, make_rules
from rollout.producer import RolloutProducer
from rollout.types import Generator, Trajectory


class BothSides(RolloutProducer):
    """For step i: groups = await take(i), train, set_version(i + 1)."""

    def __init__(
        self,
        dataset: TaskSets,
        workflow: Any,
        generator: Generator | None,
        experience: Experience | None = None,
        **settings: Any,
    ) -> None:
        """`settings`: those of make_rules() and of RolloutProducer."""
        names = inspect.signature(make_rules).parameters.keys() & settings.keys()
        rules = make_rules(**{"num_prompts": len(dataset), **{name: settings.pop(name) for name in names}})
        self.experience = experience or MemoryExperience()
        self.lessee = Lessee(self.experience, rules)
        self.taken: list[str] = []
        self.dropped: list[Tags] = []
        super().__init__(dataset, workflow, generator, self.experience, rules, **settings)

    async def take(self, step: int) -> list[list[Trajectory]]:
        episodes = await self.lessee.take(step)
        self.dropped = [tags for lease in self.lessee._leases for tags in lease.dropped]
        self.taken = [short(episode.tags.id) for episode in episodes]
        return [list(episode.trajectories) for episode in episodes]

    def set_version(self, version: int) -> None:
        self.lessee.trained(version)
        super().set_version(version)

    def stats(self) -> dict[str, float]:
        return super().stats() | self.lessee.stats()

    async def save(self) -> dict[str, Any]:
        """What a recover checkpoint has of both sides and the store."""
        await self.record_partial()
        return {
            "producer": self.state_dict(), "lessee": self.lessee.state_dict(),
            "experience": self.experience.state_dict(),
        }  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        self.load_state_dict(state["producer"])
        self.lessee.load_state_dict(state["lessee"])
        self.experience.load_state_dict(state["experience"])


def short(id: str) -> str:
    """The row and the epoch of an episode, as "q3@0"."""
    *_, row, epoch = id.split("/")
    return f"{row}@{epoch}"


def in_flight(state: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """The journals of the episodes in flight in a state of save()."""
    return {short(tags["id"]): events for _, tags, events in state["experience"]["in_flight"]}
