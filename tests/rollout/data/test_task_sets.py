"""Several sets of prompts as one stream: shares, places, curricula and recovery."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rollout.data.prompts import PromptDataset
from rollout.data.rows import Row, by_column
from rollout.data.source import DatasetError
from rollout.data.task_sets import Candidate, TaskSet, TaskSets
from rollout.experience import Episode, EveryEpisode, Experience, MemoryExperience, SQLiteExperience, Tags
from rollout.types import Prompt

TOKENS = np.arange(2, dtype=np.int32)


def rows(name: str, count: int) -> PromptDataset:
    prompts = [
        Prompt(query_id=f"q{i}", index=i, task="math", text=f"{name} {i}", token_ids=TOKENS, solutions=("1",))
        for i in range(count)
    ]
    return PromptDataset(prompts, seed=1)


def mixed(**weights: float) -> TaskSets:
    return TaskSets([TaskSet("few", rows("few", 4)), TaskSet("many", rows("many", 12))], weights=weights)


def drawn(stream: TaskSets, count: int, first: int = 0) -> list[tuple[str, str, int]]:
    prompts = [stream.at(k) for k in range(first, first + count)]
    return [(p.task_set, p.query_id, p.epoch) for p in prompts]


def test_without_weights_an_epoch_has_every_row_of_every_set_once() -> None:
    stream = mixed()
    for epoch in range(2):
        of_epoch = drawn(stream, 16, first=16 * epoch)
        assert len(set(of_epoch)) == 16 and {e for *_, e in of_epoch} == {epoch}
    unnamed = TaskSets([TaskSet("few", rows("few", 4)), TaskSet("", rows("many", 12))])
    for each in (stream, unnamed):
        assert len({each.at(k).index for k in range(16)}) == 16, "no two rows share the seeds of an index"


def test_weights_are_the_shares_of_any_stretch_of_the_stream_and_small_sets_begin_again() -> None:
    stream = mixed(few=3, many=1)
    names = [name for name, *_ in drawn(stream, 32)]
    assert Counter(names) == {"few": 24, "many": 8}
    for first in range(0, 28):
        assert names[first : first + 4].count("few") in (2, 3, 4), "a share is spread over the epoch"
    assert {epoch for name, _, epoch in drawn(stream, 16) if name == "few"} == {0, 1, 2}


def test_the_place_in_every_set_is_in_the_state_and_another_mixture_is_refused() -> None:
    stream = mixed(few=3, many=1)
    stream.seek(21)
    state = json.loads(json.dumps(stream.state_dict()))
    assert {name: one["position"] for name, one in state["sets"].items()} == stream.positions()
    assert stream.positions() == Counter(name for name, *_ in drawn(stream, 21))
    again = mixed(few=3, many=1)
    again.load_state_dict(state)
    assert drawn(again, 9, first=again.position) == drawn(stream, 9, first=21)
    for other in (mixed(few=2, many=1), TaskSets.of(rows("few", 4), "few")):
        with pytest.raises(DatasetError, match="task_sets and their weights"):
            other.load_state_dict(state)


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Experience:
    return MemoryExperience() if request.param == "memory" else SQLiteExperience(tmp_path / "experience.db")


def easiest_first(candidates: Sequence[Candidate]) -> list[float]:
    return [c.success if c.success is not None else -1.0 for c in candidates]


def finish(store: Experience, row: str, reward: float, epoch: int = 0) -> None:
    from rollout.types import Trajectory

    tags = Tags(id=f"a/{row}/{epoch}", group_id="g", task="math", row=row, epoch=epoch, task_set="a", version=0)
    store.open(tags, EveryEpisode())
    trajectory = Trajectory(
        query_id=row, token_ids=TOKENS, loss_mask=np.array([False, True]), rollout_logprobs=np.zeros(2, np.float32),
        versions=np.array([-1, 0], np.int32), reward=reward, finish_reason="stop",
    )  # fmt: skip
    from dataclasses import replace

    store.put(Episode(tags=replace(tags, rewards=[reward], lengths=[1]), trajectories=[trajectory]))


def test_a_curriculum_draws_by_success_rates_and_every_process_draws_the_same(store: Experience) -> None:
    def stream() -> TaskSets:
        made = TaskSets([TaskSet("a", rows("a", 6), curriculum=easiest_first)], batch_size=2)
        made.connect(store)
        return made

    for row, reward in (("q4", 1.0), ("q2", 0.0), ("q4", 0.0), ("q5", 0.25)):
        finish(store, row, reward, epoch=0 if row != "q4" or reward else 1)
    assert store.success("a") == {"q4": (2, 0.5), "q2": (1, 0.0), "q5": (1, 0.25)}
    first = stream()
    assert [row for _, row, _ in drawn(first, 2)] == ["q4", "q5"]
    finish(store, "q0", 0.9)
    assert [row for _, row, _ in drawn(first, 4)] == ["q4", "q5", "q0", "q2"], "a block that was drawn stays"
    finish(store, "q3", 1.0)
    assert drawn(stream(), 6) == drawn(first, 6), "another process reads what was settled"
    if isinstance(store, MemoryExperience):  # the state of a recover checkpoint
        again = MemoryExperience()
        again.load_state_dict(store.state_dict())
        assert again.success("a") == store.success("a")
        assert again.settle("a/0/1", lambda: []) == store.settle("a/0/1", lambda: [])
    assert {row for _, row, _ in drawn(first, 6)} == {f"q{i}" for i in range(6)}, "every row once an epoch"
    store.begin_at(0, num_opened=0)  # batches are cut in another way
    larger = TaskSets([TaskSet("a", rows("a", 6), curriculum=easiest_first)], batch_size=3)
    larger.connect(store)
    assert {row for _, row, _ in drawn(larger, 6)} == {f"q{i}" for i in range(6)}


def test_a_curriculum_with_a_wrong_number_of_scores_is_an_error(store: Experience) -> None:
    stream = TaskSets([TaskSet("a", rows("a", 6), curriculum=lambda candidates: [1.0])])
    stream.connect(store)
    with pytest.raises(DatasetError, match="returned 1 scores for 6 candidates"):
        stream.at(0)


def test_a_column_orders_rows_and_one_without_a_value_is_named() -> None:
    def row(level: object) -> Row:
        return Row(place=f"f:{level}", query_id=str(level), task="", prompt="?", solutions=(), meta={"level": level})

    assert [r.query_id for r in by_column([row(3), row(1), row(2)], "level", "f")] == ["1", "2", "3"]
    for levels, message in (([1, None], "f:None: curriculum='level'"), ([1, "2"], "numbers and texts")):
        with pytest.raises(DatasetError, match=message):
            by_column([row(level) for level in levels], "level", "f")
