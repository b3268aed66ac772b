"""Simulated runs: a conservation law, the staleness bound, and what faults do."""

import asyncio
from dataclasses import replace

import pytest

from core.planning.rates import Lengths
from core.planning.simulation import LAST_STEPS, World, run_virtual, simulate, simulate_with_faults

WORLD = World(
    num_servers=4, max_running=64, step_seconds=[0.005 + 1e-4 * n for n in range(65)], prefill_seconds=0.002,
    prompts=32, group_size=4, answers=Lengths(mean=500, longest=4000), prompt_tokens=100, max_staleness=2,
    train_token_seconds=1e-4, push_seconds=0.1,
)  # fmt: skip


def test_a_clock_goes_on_after_years() -> None:
    async def waits() -> float:
        await asyncio.sleep(1e8)
        await asyncio.sleep(0.1)
        return asyncio.get_running_loop().time()

    assert run_virtual(waits()) == pytest.approx(1e8 + 0.1, abs=1e-6)


def test_a_run_trains_every_answer_once_and_never_beyond_the_bound() -> None:
    run = simulate(WORLD, 40)
    assert [sum(step.staleness.values()) for step in run.steps] == [128] * 40
    assert max(run.staleness) <= 2
    mean = sum(step.tokens for step in run.steps) / 40 / 128
    assert mean == pytest.approx(600, rel=0.03)


def test_a_trainer_that_limits_is_busy_and_one_that_waits_is_not() -> None:
    slow = simulate(replace(WORLD, train_token_seconds=1e-3), 20)
    assert slow.trainer_share > 0.97
    seconds = 128 * 600 * 1e-3 + 0.1
    assert slow.seconds == pytest.approx(seconds, rel=0.03)
    fast = simulate(replace(WORLD, train_token_seconds=1e-6), 20)
    assert fast.trainer_share < 0.1


def test_a_server_with_one_request_at_a_time_takes_the_sum_of_its_answers() -> None:
    alone = replace(
        WORLD, num_servers=1, max_running=1, group_size=1, prompts=4, answers=Lengths(mean=100, longest=100),
        prefill_seconds=0.0, train_token_seconds=0.0, push_seconds=0.0,
    )  # fmt: skip
    run = simulate(alone, 12)
    assert run.seconds == pytest.approx(4 * (100 * 0.0051 + 2.5 * 0.005), rel=0.02)


def test_each_token_of_an_answer_makes_the_steps_after_it_longer() -> None:
    """Also while others begin and end: a request adds its tokens so far to each of its steps."""
    alone = replace(
        WORLD, num_servers=1, step_seconds=[0.005] * 65, train_token_seconds=0.0, push_seconds=0.0, max_staleness=0,
    )  # fmt: skip
    longer = replace(alone, token_seconds=1e-5)
    read = 32 * 4 * alone.answers.mean_square / 2 * 1e-5
    assert simulate(longer, 20).seconds - simulate(alone, 20).seconds == pytest.approx(read, rel=0.05)


def test_faults_cost_throughput() -> None:
    few = replace(WORLD, max_running=16)
    whole = simulate(few, 30).tokens_per_second
    for fault in (dict(dead_server_at=8), dict(straggler=4.0), dict(tool_seconds=20.0)):
        assert simulate(replace(few, **fault), 30).tokens_per_second < 0.97 * whole, fault  # type: ignore[arg-type]


def test_a_fault_says_what_it_is_with_answers_that_take_an_instant() -> None:
    fast = replace(WORLD, step_seconds=[seconds / 1000 for seconds in WORLD.step_seconds])
    names = [name for name in simulate_with_faults(fast, 8) if name.startswith("tools of ")]
    assert names == ["tools of 0.0011 s in each answer"]


def test_servers_on_the_trainers_gpus_stop_while_it_computes() -> None:
    """After the turn they take up what they had begun, each request at a cost."""
    beside = replace(WORLD, num_servers=1, max_staleness=1, answers=Lengths(mean=500, longest=500), prefill_seconds=0.0)
    slow = replace(beside, train_token_seconds=2e-3)
    update = 128 * 600 * 2e-3
    assert simulate(slow, 20).seconds == pytest.approx(update + 0.1, rel=0.01), "servers are the faster side"
    shared = simulate(replace(slow, shares_gpus=True), 20)
    sampling = simulate(replace(beside, train_token_seconds=0.0, push_seconds=0.0), 20).seconds
    assert shared.seconds == pytest.approx(update + 0.1 + sampling, rel=0.02)
    later = simulate(replace(slow, shares_gpus=True, turn_seconds=3.0, resume_seconds=0.05), 20)
    assert later.seconds - shared.seconds == pytest.approx(3.0 + 64 * 0.05, rel=0.001), "the server was full"
    assert later.trainer_share * later.seconds == pytest.approx(update, rel=0.001), "the turn is no computing"


def test_servers_are_as_full_in_the_groups_of_the_last_steps_as_on_average() -> None:
    """To the end of the run; more groups than that are not kept."""
    large = replace(WORLD, prompts=1000, group_size=1, num_servers=4, max_staleness=4, train_token_seconds=1e-6)
    run = simulate(large, 8)
    begin, end = run.steps[-LAST_STEPS].begin, run.steps[-1].end
    mean = sum(group.end - max(group.begin, begin) for group in run.groups) / (end - begin)
    for moment in (begin, (begin + end) / 2, end - 1e-6):
        under_way = sum(group.begin <= moment < group.end for group in run.groups)
        assert under_way == pytest.approx(mean, rel=0.3)
    assert all(group.begin <= end and begin < group.end <= end for group in run.groups)


def test_known_lengths_are_those_that_are_trained() -> None:
    run = simulate(replace(WORLD, max_staleness=0), 6, drawn=lambda number: [number + 1.0] * 4)
    assert [step.tokens for step in run.steps] == [
        4 * sum(number + 1 + 100 for number in range(32 * step, 32 * step + 32)) for step in range(6)
    ]


def test_a_prompt_begins_as_soon_as_an_answer_of_another_ends() -> None:
    """While the other answers of its group go on: 5 requests are sent to a server of 4."""
    lengths = [100.0, 100.0, 100.0, 1000.0]
    one = replace(WORLD, num_servers=1, max_running=4, prompts=4, prefill_seconds=0.0)
    begins = sorted(group.begin for group in simulate(one, 1, drawn=lambda number: lengths).groups)
    assert begins[:2] == [0.0, 0.0] and begins[2] < 300 * 0.006


def test_the_same_seed_gives_the_same_run() -> None:
    assert simulate(WORLD, 10, seed=3).as_json() == simulate(WORLD, 10, seed=3).as_json()
    assert simulate(WORLD, 10, seed=3).seconds != simulate(WORLD, 10, seed=4).seconds
