"""Experience stores of every kind, and small episodes for them."""

import pickle
from itertools import count
from pathlib import Path

import numpy as np

from helpers.postgres import PostgresServer
from helpers.simulated_sampling import make_prompts, trajectory
from rollout.experience import Episode, EveryEpisode, Experience, MemoryExperience, SQLiteExperience, Tags
from rollout.experience.episode import summary
from rollout.experience.stores.postgres import PostgresExperience
from rollout.types import Trajectory


class Stores:
    """Makes stores of one kind, and continues one after the end of its process."""

    def __init__(self, kind: str, folder: Path, server: PostgresServer | None = None) -> None:
        self.server = server
        self.kind, self._folder, self._numbers = kind, folder, count()

    def new(self) -> Experience:
        if self.kind == "memory":
            return MemoryExperience()
        if self.server is not None:
            return PostgresExperience(self.server.database())
        return SQLiteExperience(self._folder / f"{next(self._numbers)}.db")

    @property
    def are_durable(self) -> bool:
        """Whether the stores survive their process without a checkpoint."""
        return self.kind != "memory"

    def state_of(self, store: Experience) -> object:
        """What a checkpoint of now has of the store."""
        return pickle.loads(pickle.dumps(store.state_dict()))

    def continued(self, store: Experience, state: object = None) -> Experience:
        """The store as the next process has it, from a checkpoint, by default of now."""
        state = self.state_of(store) if state is None else state
        store.close()
        again = type(store)(path_of(store)) if self.are_durable else MemoryExperience()
        again.load_state_dict(state)
        return again


def path_of(store: Experience) -> str:
    if isinstance(store, PostgresExperience):
        return f"postgresql://slipstream@{store._name}"
    return str(store._path)


def begin(store: Experience, number: int, version: int) -> None:
    assert store.open(tags(number, version), EveryEpisode()) == "open"


def tags(number: int, version: int = 0) -> Tags:
    id = f"q{number}"
    return Tags(id=id, group_id=id, task="math", row=id, epoch=0, version=version)


def episode(number: int, *versions: int, rewards: tuple[float, ...] = (1.0,)) -> Episode:
    (prompt,) = make_prompts(1)
    made = vars(trajectory(prompt, np.array(versions, dtype=np.int32)))
    group = [Trajectory(**(made | {"query_id": f"q{number}", "reward": reward})) for reward in rewards]
    return Episode(tags=Tags(**(vars(tags(number)) | summary(group))), trajectories=group)


def finish(store: Experience, number: int, *versions: int) -> None:
    store.put(episode(number, *versions))


def fill(store: Experience, count: int, *, finished: bool = True) -> None:
    """Begin the episodes 0 to count - 1 at version 0, and finish them."""
    for number in range(count):
        begin(store, number, 0)
        if finished:
            finish(store, number, 0)


def names(episodes: list[Episode]) -> list[str]:
    return [e.tags.id for e in episodes]
