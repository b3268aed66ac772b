"""Dynamic sampling: groups without spread are dropped and counted, others take their place, and no bound moves."""

import asyncio
import pickle
from collections import Counter

import numpy as np
import pytest

from helpers.both_sides import BothSides
from helpers.simulated_sampling import make_dataset, trajectory
from helpers.virtual_clock import run_virtual
from rollout.data.task_sets import TaskSets
from rollout.types import Completion, Generator, Prompt, Trajectory

pytestmark = pytest.mark.virtual_clock

NUM_PROMPTS = 30


class Judged:
    """Answers of lognormal length. Every third prompt is solved by all samples, every fifth by none."""

    def __init__(self, *, hopeless: bool = False) -> None:
        self.version, self.hopeless = 0, hopeless
        self.drawn: list[str] = []

    async def run(self, prompt: Prompt, generator: Generator) -> list[Trajectory]:
        rng = np.random.default_rng([prompt.epoch, prompt.index])
        self.drawn.append(f"{prompt.query_id}@{prompt.epoch}")
        versions = [self.version]
        await asyncio.sleep(float(rng.lognormal(0.0, 1.0)))
        versions += [self.version] * (1 + prompt.index % 4)
        rewards = [0.0, 0.0] if self.hopeless else self.rewards(prompt.index)
        made = trajectory(prompt, np.array(versions))
        return [Trajectory(**(vars(made) | {"reward": reward})) for reward in rewards]

    @staticmethod
    def rewards(index: int) -> list[float]:
        return [1.0, 1.0] if index % 3 == 0 else [0.0, 0.0] if index % 5 == 0 else [1.0, 0.0]


class NoRequests:
    async def partial(self) -> dict[str, Completion]:
        return {}


def make_producer(workflow: Judged, **settings: object) -> BothSides:
    settings = {"batch_size": 4, "max_staleness": 1, "num_epochs": 4, "dynamic_sampling_limit": 10} | settings
    return BothSides(make_dataset(NUM_PROMPTS), workflow, NoRequests(), **settings)


def places(dataset: TaskSets) -> dict[str, int]:
    """Where the prompts of ten epochs are in the stream, by query_id@epoch."""
    prompts = [dataset.at(k) for k in range(10 * NUM_PROMPTS)]
    return {f"{prompt.query_id}@{prompt.epoch}": k for k, prompt in enumerate(prompts)}


async def train(producer: BothSides, workflow: Judged, steps: range) -> list[dict[str, float]]:
    """Take these steps; return their metrics, with the episodes and the oldest version of each."""
    rows = []
    for step in steps:
        groups = await producer.take(step)
        oldest = min(t.oldest_version for group in groups for t in group)
        assert all(len({t.reward for t in group}) == 2 for group in groups) or workflow.hopeless
        rows.append({**producer.stats(), "taken": list(producer.taken), "age": step - oldest})
        await asyncio.sleep(1.0)
        workflow.version = step + 1
        producer.set_version(step + 1)
    return rows


@pytest.mark.parametrize(("max_staleness", "over_age"), [(0, "wait"), (1, "wait"), (3, "wait"), (2, "mask")])
def test_steps_keep_their_size_their_bound_and_every_prompt_is_trained_or_counted(max_staleness, over_age) -> None:
    async def main() -> tuple[Judged, list[dict[str, float]]]:
        workflow = Judged()
        async with make_producer(workflow, max_staleness=max_staleness, over_age=over_age) as producer:
            return workflow, await train(producer, workflow, range(30))

    workflow, rows = run_virtual(main())
    assert max(row["age"] for row in rows) == max_staleness
    assert [len(row["taken"]) for row in rows] == ([4] * 7 + [2]) * 3 + [4] * 6
    trained = [episode for row in rows for episode in row["taken"]]
    dropped = Counter()
    for row in rows:
        dropped["right"] += int(row["dynamic_sampling/dropped_all_right"])
        dropped["wrong"] += int(row["dynamic_sampling/dropped_all_wrong"])
        assert row["dynamic_sampling/drawn_prompts"] == len(row["taken"]) + sum(
            row[f"dynamic_sampling/dropped_{reason}"] for reason in ("all_right", "all_wrong")
        )
    assert len(trained) == len(set(trained)), "none is trained twice"
    assert len(set(workflow.drawn)) == len(workflow.drawn)
    unfinished = len(workflow.drawn) - len(trained) - dropped.total()
    assert 0 <= unfinished <= 4 * (max_staleness + 1), "every other prompt is in one of the counts"
    dataset = make_dataset(NUM_PROMPTS)
    place = places(dataset)
    passed = Counter(
        "right" if index % 3 == 0 else "wrong" if index % 5 == 0 else "trained"
        for index in (dataset.at(k).index for k in range(min(place[episode] for episode in trained[-4:])))
    )
    assert dropped["right"] >= passed["right"] > 0 and dropped["wrong"] >= passed["wrong"] > 0


def test_metrics_compare_what_was_trained_with_what_was_drawn() -> None:
    async def main() -> list[dict[str, float]]:
        workflow = Judged()
        async with make_producer(workflow, max_staleness=0, in_order=True) as producer:
            return await train(producer, workflow, range(5))

    dataset, first = make_dataset(NUM_PROMPTS), 0
    place = places(dataset)
    for row in run_virtual(main()):
        taken = [place[episode] for episode in row["taken"]]
        drawn = [dataset.at(k).index for k in range(first, max(taken) + 1)]
        first = max(taken) + 1
        rewards = [sum(Judged.rewards(i)) / 2 for i in drawn]
        assert taken == [k for k in range(first - len(drawn), first) if dataset.at(k).index in
                                    [i for i, r in zip(drawn, rewards, strict=True) if r == 0.5]]  # fmt: skip
        assert row["dynamic_sampling/drawn_prompts"] == len(drawn)
        assert row["dynamic_sampling/drawn_reward"] == pytest.approx(np.mean(rewards))
        assert row["dynamic_sampling/trained_reward"] == 0.5
        lengths = np.array([2 + i % 4 for i in drawn])
        assert row["dynamic_sampling/drawn_length"] == pytest.approx(lengths.mean())
        assert row["dynamic_sampling/trained_length"] == pytest.approx(lengths[np.array(rewards) == 0.5].mean())


def test_beyond_the_limit_groups_are_kept_so_that_a_solved_task_ends_its_run(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> list[dict[str, float]]:
        workflow = Judged(hopeless=True)
        async with make_producer(workflow, max_staleness=0, dynamic_sampling_limit=3) as producer:
            return await train(producer, workflow, range(3))

    for row in run_virtual(main()):
        assert row["dynamic_sampling/dropped_all_wrong"] == 12
        assert row["dynamic_sampling/kept_without_spread"] == len(row["taken"]) == 4
    assert caplog.text.count("algorithm.dynamic_sampling_limit") == 3


@pytest.mark.parametrize(("acknowledged", "hopeless"), [(True, False), (False, False), (False, True)])
async def test_a_recovered_run_continues_the_stream_and_the_counts(acknowledged: bool, hopeless: bool) -> None:
    workflow = Judged(hopeless=hopeless)
    settings: dict[str, object] = {"max_staleness": 0, "in_order": True}
    async with make_producer(workflow, **settings) as producer:
        first = await train(producer, workflow, range(3))
        if not acknowledged:  # the fourth batch is taken and, in the state, not yet trained
            await producer.take(3)
        state = pickle.loads(pickle.dumps(await producer.save()))
        if not acknowledged:
            await asyncio.sleep(1.0)
            workflow.version = 4
            producer.set_version(4)
        rest = await train(producer, workflow, range(3 if acknowledged else 4, 8))
    again = Judged(hopeless=hopeless)
    again.version = 3
    recovered = make_producer(again, **settings)
    recovered.restore(state)
    async with recovered:
        rows = await train(recovered, again, range(3, 8))
    kept = [name for name in rows[0] if name.startswith("dynamic_sampling/")] + ["taken", "age"]
    expected = rest if acknowledged else rest[-4:]
    assert len(first) == 3 and len(kept) == 10
    assert rows[0]["dynamic_sampling/kept_without_spread"] == 4 * hopeless
    assert [{k: row[k] for k in kept} for row in rows[-len(expected) :]] == [
        {k: row[k] for k in kept} for row in expected
    ]
    if not acknowledged:
        assert rows[0]["dynamic_sampling/drawn_prompts"] > 4, "what the batch reported is reported again"


async def test_dynamic_sampling_cannot_be_switched_off_by_a_restart() -> None:
    workflow = Judged()
    async with make_producer(workflow) as producer:
        await train(producer, workflow, range(2))
        state = producer.state_dict()
    with pytest.raises(ValueError, match="dynamic_sampling=False, but the recover checkpoint"):
        make_producer(workflow, dynamic_sampling_limit=None).load_state_dict(state)
