"""Several data sets as one stream of prompts, mixed by weight, each in an order of its own.

An epoch of the stream has as many prompts as all sets together. Each set has its share of them by weight, spread evenly
over the epoch; a set of fewer rows than its share begins again.
Invariant: rows, weights and seed determine the stream; where a function is the curriculum, so do its decisions, which
the store keeps. One integer is the position in every set.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np

from rollout.data.prompts import PromptDataset, check_same_stream
from rollout.data.source import DatasetError
from rollout.plugins import load_plugin
from rollout.types import Prompt


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A row that a curriculum may draw next in this epoch."""

    query_id: str
    task: str
    meta: Mapping[str, object]
    """Columns without a meaning of their own."""
    num_episodes: int
    """Finished ones of this row, in all epochs."""
    success: float | None
    """Mean reward of their completions. None: there is none."""


Curriculum = Callable[[Sequence[Candidate]], Sequence[float]]
"""Scores candidates; the highest scores are drawn next."""


class Record(Protocol):
    """What a curriculum needs of the store (rollout/experience/base.py)."""

    def settle(self, key: str, make: Callable[[], Sequence[int]]) -> Sequence[int]: ...

    def success(self, task_set: str) -> Mapping[str, tuple[int, float]]: ...


def load_curriculum(spec: str) -> Curriculum:
    """Return a user's function of candidates. Raises PluginError."""
    found: Curriculum = load_plugin(spec, kind="curriculum", arguments=("candidates",))
    return found


class TaskSet:
    """The rows of one set in the order in which they are drawn."""

    def __init__(self, name: str, dataset: PromptDataset, *, curriculum: Curriculum | None = None) -> None:
        """`curriculum`: decides each block of an epoch when its first prompt is drawn; None: the order of `dataset`."""
        self.name, self.dataset = name, dataset
        self._curriculum = curriculum
        self._blocks: dict[tuple[int, int], list[int]] = {}

    @property
    def decides(self) -> bool:
        """True if a function decides the order."""
        return self._curriculum is not None

    def at(self, place: int, record: Record | None, block: int) -> Prompt:
        """Return the prompt at a place of the set's own stream. `block`: prompts that a curriculum decides at once."""
        if self._curriculum is None:
            return self.dataset.at(place)
        assert record is not None, "TaskSets.connect() comes first"
        epoch, within = divmod(place, len(self.dataset))
        number, rest = divmod(within, block)
        for earlier in range(number + 1):
            if (epoch, earlier) not in self._blocks:
                self._blocks[epoch, earlier] = self._block(epoch, earlier, block, record)
        for old in [key for key in self._blocks if key[0] < epoch - 1]:
            del self._blocks[old]
        prompt = self.dataset.prompts[self._blocks[epoch, number][rest]]
        return replace(prompt, epoch=epoch) if epoch else prompt

    def _block(self, epoch: int, number: int, size: int, record: Record) -> list[int]:
        drawn = {row for earlier in range(number) for row in self._blocks[epoch, earlier]}
        rows = [row for row in range(len(self.dataset)) if row not in drawn]
        settled = record.settle(f"{self.name}/{epoch}/{number}", lambda: self._decide(rows, size, record))
        return [int(row) for row in settled]

    def _decide(self, rows: Sequence[int], size: int, record: Record) -> list[int]:
        assert self._curriculum is not None, "only a curriculum decides"
        success = record.success(self.name)
        candidates = []
        for row in rows:
            prompt = self.dataset.prompts[row]
            count, mean = success.get(prompt.query_id, (0, None))
            candidates.append(
                Candidate(
                    query_id=prompt.query_id, task=prompt.task, meta=prompt.meta, num_episodes=count, success=mean
                )
            )  # fmt: skip
        scores = [float(score) for score in self._curriculum(candidates)]
        if len(scores) != len(rows) or not np.isfinite(scores).all():
            raise DatasetError(
                f"the curriculum of task set {self.name} returned {len(scores)} scores for {len(rows)} candidates; "
                "return one finite number for each"
            )
        best = np.argsort(-np.array(scores), kind="stable")[:size]
        return [rows[i] for i in best]


class TaskSets:
    """The stream of prompts of a run, with a cursor."""

    def __init__(
        self, sets: Sequence[TaskSet], *, weights: Mapping[str, float] | None = None, batch_size: int = 1
    ) -> None:
        """`weights`: of sets by name; one without a weight has the number of its rows. `batch_size`: prompts of a step,
        a set's share of which a curriculum decides at once."""
        self._sets = {one.name: one for one in sets}
        sizes = np.array([len(one.dataset) for one in sets])
        given = [(weights or {}).get(one.name) for one in sets]
        wanted = np.array([size if weight is None else weight for size, weight in zip(sizes, given, strict=True)])
        self._quotas = _quotas(wanted, int(sizes.sum()))
        self._set_of, self._rank = _spread(self._quotas)
        self._first_index = dict(zip(self._sets, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True))
        self._blocks = {
            one.name: max(1, round(int(quota) * batch_size / len(self)))
            for one, quota in zip(sets, self._quotas, strict=True)
        }
        self._record: Record | None = None
        self._cursor = 0

    @classmethod
    def of(cls, dataset: PromptDataset, name: str = "") -> Self:
        """Return the stream of one data set."""
        return cls([TaskSet(name, dataset)])

    def connect(self, record: Record) -> None:
        """Let curricula read success rates from a store, and settle their decisions in it."""
        self._record = record

    @property
    def _is_plain(self) -> bool:
        """True for the set of dataset.path."""
        return len(self._sets) == 1 and self.is_fixed

    @property
    def is_fixed(self) -> bool:
        """True if no curriculum of a function decides what comes next."""
        return not any(one.decides for one in self._sets.values())

    def __len__(self) -> int:
        """Return the number of prompts per epoch."""
        return len(self._set_of)

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """Every row once, set by set, `task_set` filled in."""
        return tuple(self._named(one, prompt) for one in self._sets.values() for prompt in one.dataset.prompts)

    @property
    def position(self) -> int:
        """Position in the stream of the next prompt."""
        return self._cursor

    def seek(self, position: int) -> None:
        """Continue at `position`."""
        self._cursor = position

    def at(self, position: int) -> Prompt:
        """Return the prompt at `position` of the endless stream, `epoch` and `task_set` filled in."""
        epoch, offset = divmod(position, len(self))
        number = int(self._set_of[offset])
        one = list(self._sets.values())[number]
        place = epoch * int(self._quotas[number]) + int(self._rank[offset])
        return self._named(one, one.at(place, self._record, self._blocks[one.name]))

    def find(self, task_set: str, query_id: str, epoch: int) -> Prompt:
        """Return a row of a set by its query_id, as of an epoch. Raises KeyError."""
        one = self._sets[task_set]
        return self._named(one, one.dataset.find(query_id, epoch))

    def _named(self, one: TaskSet, prompt: Prompt) -> Prompt:
        """Return a prompt with the name of its set. Indices, and so seeds, differ between sets."""
        first = self._first_index[one.name]
        if not first and prompt.task_set == one.name:
            return prompt
        return replace(prompt, task_set=one.name, index=prompt.index + first)

    def positions(self) -> dict[str, int]:
        """Return how many prompts of each set are before the cursor."""
        epoch, offset = divmod(self._cursor, len(self))
        within = np.bincount(self._set_of[:offset], minlength=len(self._sets))
        places = epoch * self._quotas + within
        return {name: int(place) for name, place in zip(self._sets, places, strict=True)}

    def state_dict(self) -> dict[str, object]:
        """Return the cursor, the place in every set, and what identifies this stream."""
        states = {name: one.dataset.identity() for name, one in self._sets.items()}
        first = next(iter(states.values()))
        if self._is_plain:
            return {**first, "position": self._cursor}
        sets = {name: {**states[name], "position": place} for name, place in self.positions().items()}
        checksum = zlib.crc32(repr([(name, state["checksum"]) for name, state in states.items()]).encode())
        return {
            "position": self._cursor, "num_prompts": len(self), "seed": first["seed"], "checksum": checksum,
            "shuffle": first["shuffle"], "sets": sets, "quotas": self._quotas_by_name(),
        }  # fmt: skip

    def _quotas_by_name(self) -> dict[str, int]:
        return {name: int(quota) for name, quota in zip(self._sets, self._quotas, strict=True)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. Raises DatasetError when sets, weights, rows or seed are others."""
        if self._is_plain and "sets" not in state:
            next(iter(self._sets.values())).dataset.check_same(state)
        else:
            now = {} if self._is_plain else self._quotas_by_name()
            setting = {"quotas": "task_sets and their weights"}
            check_same_stream({"quotas": state.get("quotas", {})}, {"quotas": now}, setting)
            for name, one in self._sets.items():
                one.dataset.check_same(state["sets"][name])
        self._cursor = state["position"]

    def stats(self) -> dict[str, float]:
        left_out = [one.dataset.left_out for one in self._sets.values()]
        return {
            "dataset/num_prompts": float(sum(len(one.dataset) for one in self._sets.values())),
            "dataset/num_filtered": float(sum(left.num_left_out for left in left_out if left)),
            "dataset/epoch": self._cursor / len(self),
        }


def _quotas(weights: np.ndarray, total: int) -> np.ndarray:
    """Return the prompts of an epoch that each set has, [sets] int64: by largest remainder, at least 1."""
    exact = weights / weights.sum() * total
    quotas = np.maximum(np.floor(exact).astype(np.int64), 1)
    for number in np.argsort(-(exact - np.floor(exact)), kind="stable"):
        if quotas.sum() < total:
            quotas[number] += 1
    return quotas


def _spread(quotas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each prompt of an epoch its set and its rank within the set, both [sum of quotas]."""
    sets = np.repeat(np.arange(len(quotas)), quotas)
    ranks = np.concatenate([np.arange(quota) for quota in quotas])
    order = np.lexsort((sets, (ranks + 0.5) / quotas[sets]))
    return sets[order], ranks[order]
