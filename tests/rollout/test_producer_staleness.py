"""The promise of the asynchronous design, on real producer, store and leases under a virtual clock."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from helpers.both_sides import BothSides
from helpers.simulated_sampling import LognormalWorkflow, make_dataset
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


@pytest.mark.parametrize("num_epochs", [2, pytest.param(NUM_EPOCHS, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("max_staleness", "max_in_flight"), [(0, None), (1, None), (2, None), (4, 64), (8, 64)])
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
    seconds = [run_virtual(_train(max_staleness, num_epochs=1)).seconds for max_staleness in (0, 1, 2, 4)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < 0.6 * seconds[0]


def test_masking_waits_for_nobody_drops_no_prompt_and_trains_no_token_that_is_too_old() -> None:
    waiting = run_virtual(_train(1, "wait", num_epochs=2, sigma=1.5))
    masking = run_virtual(_train(1, "mask", num_epochs=2, sigma=1.5))
    assert masking.oldest_token == 1
    assert len(masking.consumed) == 2 * NUM_PROMPTS
    assert set(masking.consumed.values()) == {1}
    assert masking.masked_tokens > 0
    assert masking.masked_tokens + masking.trained_tokens == sum(masking.trained_lengths)
    assert masking.seconds < waiting.seconds
    assert waiting.masked_tokens == 0
