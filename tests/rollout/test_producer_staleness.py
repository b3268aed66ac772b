"""The promise of the asynchronous design, on real producer, store and leases under a virtual clock."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from helpers.both_sides import BothSides
from helpers.simulated_sampling import LognormalWorkflow, Places, ToolWorkflow, make_dataset
from helpers.virtual_clock import run_virtual

NUM_PROMPTS, BATCH_SIZE, GROUP_SIZE, NUM_EPOCHS = 1250, 48, 16, 10  # 200,000 trajectories; 1250 = 26 * 48 + 2
NUM_PROMPT_TOKENS = 2
TRAIN_SECONDS, PUSH_SECONDS = 0.9, 0.1


@dataclass
class Run:
    ages: Counter[int] = field(default_factory=Counter)  # of trajectories, by age in steps
    oldest_token: int = 0  # largest age of a trained token, as the tokens tell
    consumed: Counter[str] = field(default_factory=Counter)
    batch_sizes: list[int] = field(default_factory=list)
    trained_lengths: list[int] = field(default_factory=list)
    halfway: tuple[np.ndarray, np.ndarray] | None = None  # lengths trained and lengths asked, at half of the steps
    masked_tokens: float = 0.0
    trained_tokens: int = 0
    seconds: float = 0.0


async def _train(
    max_staleness: int,
    over_age: str = "wait",
    num_epochs: int = NUM_EPOCHS,
    sigma: float = 1.0,
    max_in_flight: int | None = None,
) -> Run:
    run = Run()
    workflow = LognormalWorkflow(group_size=GROUP_SIZE, sigma=sigma)
    producer = BothSides(
        make_dataset(NUM_PROMPTS),
        workflow,
        generator=None,
        batch_size=BATCH_SIZE,
        max_staleness=max_staleness,
        over_age=over_age,
        num_epochs=num_epochs,
        max_in_flight=max_in_flight,
    )
    num_steps = num_epochs * -(-NUM_PROMPTS // BATCH_SIZE)
    async with producer:
        for step in range(num_steps):
            groups = await producer.take(step)
            run.batch_sizes.append(len(groups))
            starts = [group[0].versions[NUM_PROMPT_TOKENS] for group in groups]
            assert starts == sorted(starts), "oldest first"
            for group in groups:
                run.consumed[group[0].query_id] += 1
                run.trained_lengths.extend(len(t.versions) - NUM_PROMPT_TOKENS for t in group)
            masks = np.concatenate([t.loss_mask for group in groups for t in group])
            versions = np.concatenate([t.versions for group in groups for t in group])
            run.trained_tokens += int(masks.sum())
            run.oldest_token = max(run.oldest_token, step - int(versions[masks].min()))
            ages = [step - t.oldest_version for group in groups for t in group if t.loss_mask.any()]
            run.ages.update(ages)
            reported = producer.stats()
            assert (reported["staleness/max"], reported["staleness/mean"]) == (max(ages), np.mean(ages))
            if step == num_steps // 2:
                run.halfway = (np.array(run.trained_lengths), np.concatenate(list(workflow.asked.values())))
            await asyncio.sleep(TRAIN_SECONDS)
            workflow.push()
            await asyncio.sleep(PUSH_SECONDS)
            producer.set_version(step + 1)
        run.masked_tokens = producer.stats()["rollout/num_masked_tokens"]
        run.seconds = asyncio.get_running_loop().time()
    return run


@pytest.mark.parametrize(
    ("max_staleness", "max_in_flight", "num_epochs"),
    [
        *((bound, most, 2) for bound, most in ((0, None), (2, None), (8, 64))),
        *(
            pytest.param(bound, most, NUM_EPOCHS, marks=pytest.mark.nightly)
            for bound, most in ((0, None), (1, None), (2, None), (4, 64), (8, 64))
        ),
    ],
)
def test_trajectories_stay_within_the_bound_unbiased_and_each_prompt_once(
    max_staleness: int, max_in_flight: int | None, num_epochs: int
) -> None:
    from scipy.stats import ks_2samp  # here: it takes a second or two, in every test process

    run = run_virtual(_train(max_staleness, num_epochs=num_epochs, max_in_flight=max_in_flight))
    assert sum(run.ages.values()) == 20_000 * num_epochs
    assert run.oldest_token == max_staleness, "the bound holds, and is used: otherwise this test could not fail"
    assert all(run.ages[age] for age in range(max_staleness + 1)), "trajectories of every age up to the bound"
    assert len(run.consumed) == NUM_PROMPTS * num_epochs
    assert set(run.consumed.values()) == {1}
    assert run.batch_sizes == ([48] * 26 + [2]) * num_epochs
    trained, asked = run.halfway
    assert ks_2samp(trained, asked).pvalue > 0.05
    threshold = np.quantile(asked, 0.97)
    assert ks_2samp(trained[trained < threshold], asked).pvalue < 0.05, "the test would see the slowest 3 % missing"


def test_a_wider_bound_never_makes_the_trainer_wait_longer() -> None:
    seconds = [run_virtual(_train(max_staleness, num_epochs=1)).seconds for max_staleness in (0, 1, 4)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < 0.6 * seconds[0]


async def _train_with_tools(max_staleness: int, *, num_places: int, seconds: float) -> tuple[float, float]:
    """Steps of 256 turns of so many seconds. Return the share of the places that are busy, and the time of a step."""
    warm_up, steps, group_size, batch_size = 6, 18, 4, 16
    generator = Places(num_places, seconds)
    producer = BothSides(
        make_dataset(NUM_PROMPTS),
        ToolWorkflow(group_size=group_size),
        generator,
        batch_size=batch_size,
        max_staleness=max_staleness,
        num_epochs=1,
        max_in_flight=num_places * 5 // 4,
        group_size=group_size,
    )
    began = busy_before = 0.0
    async with producer:
        for step in range(warm_up + steps):
            if step == warm_up:
                began, busy_before = asyncio.get_running_loop().time(), generator.busy_seconds
            await producer.take(step)
            await asyncio.sleep(TRAIN_SECONDS)
            generator.version = step + 1
            producer.set_version(step + 1)
    passed = asyncio.get_running_loop().time() - began
    return (generator.busy_seconds - busy_before) / passed / num_places, passed / steps


def test_generators_stay_busy_while_tools_run() -> None:
    busy, _ = run_virtual(_train_with_tools(2, num_places=32, seconds=5.0))
    assert busy >= 0.9


@pytest.mark.nightly
def test_generators_are_busier_with_a_wider_bound_and_with_longer_steps() -> None:
    """Prints the table of docs/agents.md."""
    table = []
    for seconds in (0.85, 1.7, 3.4, 6.8):
        runs = [_train_with_tools(staleness, num_places=32, seconds=seconds) for staleness in (1, 2, 4, 8)]
        table.append([round(float(run_virtual(run)[0]), 2) for run in runs])
        print(f"\n{256 * seconds / 32:.0f} s of work in a step: {table[-1]}", end="")
    assert all(row == sorted(row) for row in table) and table == sorted(table)


def test_steps_that_are_short_beside_their_tools_take_as_long_as_the_bound_requires() -> None:
    """With places for all, a step waits for its slowest tools alone; with few places it takes hardly longer."""
    _, at_least = run_virtual(_train_with_tools(2, num_places=10_000, seconds=1.7))
    busy, step = run_virtual(_train_with_tools(2, num_places=32, seconds=1.7))
    assert at_least > 256 * 1.7 / 32 and busy < 0.9, "the tools are what steps wait for"
    assert step < 1.2 * at_least
