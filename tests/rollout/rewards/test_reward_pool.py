"""Rewards that hang, explode and crash, in real processes."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from rollout.rewards.pool import RewardPool, RewardWorkerError
from rollout.types import Prompt

REPOSITORY = Path(__file__).parents[3]

EVIL = """
import ctypes, os, subprocess, sys, time
from pathlib import Path
from rollout.rewards.math import UnparsableAnswerError

def score(prompt, text):
    if text == "hang":
        while True: pass
    if text == "hang in C":
        return sum(range(10**13))
    if text == "hang and resist":
        while True:
            try:
                while True: pass
            except BaseException: pass
    if text == "allocate at once":
        return len(bytearray(10**13))
    if text == "allocate on and on":
        blocks = []
        while True: blocks.append(bytes(10**8))
    if text == "recurse":
        return score(prompt, text)
    if text == "raise":
        raise KeyError("no such key")
    if text == "raise at length":
        raise KeyError("long " * 10**6 + "end")
    if text == "exit":
        sys.exit(3)
    if text == "exit now":
        os._exit(3)
    if text == "segfault":
        ctypes.string_at(0)
    if text == "nan":
        return float("nan")
    if text == "no number":
        return None
    if text == "unparsable":
        raise UnparsableAnswerError
    if text.endswith("pid"):
        time.sleep(0.05 * text.startswith("slow"))
        return os.getpid()
    if text.startswith("child "):
        _, file, then = text.split(" ", 2)
        Path(file).write_text(str(subprocess.Popen(["sleep", "60"]).pid))
        return score(prompt, then)
    return len(text)

not_callable = 3
def wrong_signature(text): return 1.0
"""


async def scored(pool: RewardPool, text: str) -> float:
    """Score an answer of microseconds under a short limit, and again where a busy host let it take longer."""
    while (score := await pool.score(make_prompt(), text)) == -1.0:
        pass
    return score


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "evil_rewards.py").write_text(EVIL)
    monkeypatch.syspath_prepend(tmp_path)
    return "evil_rewards:score"


def make_prompt(solution: str = "\\boxed{1}") -> Prompt:
    token_ids = np.arange(3, dtype=np.int32)
    return Prompt(query_id="q", index=0, task="math", text="?", token_ids=token_ids, solutions=(solution,))


def with_pool(body: Callable[[RewardPool], Awaitable[None]], reward: str, **settings: float) -> None:
    async def main() -> None:
        async with RewardPool(reward, **settings) as pool:
            await body(pool)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("allocate at once", "memory"),
        ("recurse", "error"),
        ("raise", "error"),
        ("exit", "error"),
        ("exit now", "crash"),
        ("segfault", "crash"),
        ("nan", "error"),
        ("no number", "error"),
        ("unparsable", "unparsable"),
    ],
)
def test_whatever_an_answer_does_it_scores_as_wrong_is_counted_and_the_next_is_scored(
    evil: str, text: str, outcome: str
) -> None:
    async def body(pool: RewardPool) -> None:
        assert await pool.score_many(make_prompt(), ["four", text, "sixsix"]) == [4.0, -1.0, 6.0]
        stats = pool.stats()
        assert stats[f"reward/num_{outcome}"] == 1
        assert stats["reward/num_scored"] == 2

    with_pool(body, evil, num_workers=1, timeout_seconds=600)


@pytest.mark.parametrize("text", ["hang", "hang and resist"])
def test_an_answer_that_never_ends_scores_as_wrong_is_counted_and_the_next_is_scored(evil: str, text: str) -> None:
    async def body(pool: RewardPool) -> None:
        assert await pool.score(make_prompt(), text) == -1.0
        assert pool.stats()["reward/num_timeout"] == 1 and pool.stats()["reward/num_scored"] == 0
        assert await scored(pool, "four") == 4.0

    with_pool(body, evil, num_workers=1, timeout_seconds=0.5)


def test_an_answer_that_allocates_on_and_on_meets_the_memory_limit(evil: str) -> None:
    async def body(pool: RewardPool) -> None:
        assert await pool.score_many(make_prompt(), ["allocate on and on", "four"]) == [-1.0, 4.0]
        assert pool.stats()["reward/num_memory"] == 1

    with_pool(body, evil, num_workers=1, timeout_seconds=600, memory_limit_gib=0.5)


def test_answers_behind_a_hanging_one_are_scored_by_the_other_workers(evil: str) -> None:
    async def body(pool: RewardPool) -> None:
        hanging = asyncio.create_task(pool.score(make_prompt(), "hang in C"))
        for _ in range(10):
            await asyncio.sleep(0)  # until a worker has taken it
        assert await pool.score_many(make_prompt(), ["four"] * 100) == [4.0] * 100
        assert not hanging.done()
        hanging.cancel()

    with_pool(body, evil, num_workers=2, timeout_seconds=600)


def test_many_groups_at_once_get_their_own_scores_in_order() -> None:
    async def body(pool: RewardPool) -> None:
        texts = ["\\boxed{1}", "\\boxed{0.5}", "\\boxed{\\frac{2}{4}}", "\\boxed{x}", "nothing"]
        for solution, right in (("\\boxed{1}", [1, -1, -1, -1, -1]), ("\\boxed{\\frac{1}{2}}", [-1, 1, 1, -1, -1])):
            groups = await asyncio.gather(*(pool.score_many(make_prompt(solution), texts) for _ in range(20)))
            assert groups == [right] * 20
        assert pool.stats()["reward/num_unparsable"] == 40
        assert pool.stats()["reward/num_scored"] == 160, "with and without a worker"

    with_pool(body, "math", num_workers=2)


def test_an_explosive_answer_to_the_math_reward_is_wrong() -> None:
    async def body(pool: RewardPool) -> None:
        tower = "\\boxed{" + "9^{" * 8 + "9" + "}" * 8 + "}"
        assert await pool.score(make_prompt(), tower) == -1.0
        assert await scored(pool, "\\boxed{1.0}") == 1.0

    with_pool(body, "math", num_workers=1, timeout_seconds=0.5)


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("evil_rewards:not_callable", "its type is int; it must be callable as (prompt, text)"),
        ("broken_rewards:score", "ZeroDivisionError"),
    ],
)
def test_a_reward_function_that_cannot_be_loaded_is_an_error_at_the_start(
    evil: str, tmp_path: Path, reward: str, said: str
) -> None:
    (tmp_path / "broken_rewards.py").write_text("1 / 0")
    with pytest.raises(RewardWorkerError) as error:
        with_pool(lambda pool: asyncio.sleep(0), reward, num_workers=2)
    assert said in str(error.value)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not Path(f"/proc/{pid}/stat").exists() or " Z " not in Path(f"/proc/{pid}/stat").read_text()


def wait_until_gone(pids: list[int]) -> None:
    """Wait without end (a test that hangs is ended by its time limit) for processes that were killed."""
    while any(is_alive(pid) for pid in pids):
        time.sleep(0.05)


@pytest.mark.parametrize("then", ["hang in C", "four"])
def test_what_a_reward_function_has_started_ends_with_its_worker(evil: str, tmp_path: Path, then: str) -> None:
    """A worker is ended at the time limit, after a crash, and with its pool."""
    file = tmp_path / "pid"

    async def body(pool: RewardPool) -> None:
        while not file.exists() or not file.read_text():  # again where a busy host had no time for the child
            assert await pool.score(make_prompt(), f"child {file} {then}") == (4.0 if then == "four" else -1.0)
        assert bool(pool.stats()["reward/num_timeout"]) == (then == "hang in C")
        child = int(file.read_text())
        if then == "four":
            assert is_alive(child)
        else:
            wait_until_gone([child])

    with_pool(body, evil, num_workers=1, timeout_seconds=0.5 if then == "hang in C" else 600)
    wait_until_gone([int(file.read_text())])


def test_a_worker_that_is_idle_for_longer_than_the_limit_scores_the_next_answer(evil: str) -> None:
    async def body(pool: RewardPool) -> None:
        before = -1.0
        while pool.stats()["reward/num_timeout"] > before:  # again where an answer took too long on a busy host
            before = pool.stats()["reward/num_timeout"]
            worker = await scored(pool, "pid")
            await pool.score(make_prompt(), "raise")
            await asyncio.sleep(1.2)
            again = await scored(pool, "pid")
        assert again == worker

    with_pool(body, evil, num_workers=1, timeout_seconds=0.5)


async def test_closing_the_pool_ends_its_workers_and_cancels_what_waits(evil: str) -> None:
    pids = []

    async with RewardPool(evil, num_workers=1, timeout_seconds=600) as pool:
        pids.append(int(await pool.score(make_prompt(), "pid")))
        waiting = [asyncio.create_task(pool.score(make_prompt(), text)) for text in ("hang in C", "four")]
        await asyncio.sleep(0.2)
    for task in waiting:
        with pytest.raises(asyncio.CancelledError):
            await task
    with pytest.raises(RuntimeError, match="closed"):
        await pool.score(make_prompt(), "four")
    wait_until_gone(pids)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems end a hanging worker only when it comes back")
def test_no_worker_survives_a_killed_parent_even_while_it_hangs(evil: str, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, sys\n"
        f"sys.path[:0] = [{str(REPOSITORY)!r}, {str(tmp_path)!r}, {str(Path(__file__).parent)!r}]\n"
        "from test_reward_pool import RewardPool, make_prompt\n"
        "async def main():\n"
        f"    async with RewardPool({evil!r}, num_workers=2, timeout_seconds=600) as pool:\n"
        "        pids = await asyncio.gather(*(pool.score(make_prompt(), 'pid') for _ in range(50)))\n"
        "        print(*{int(pid) for pid in pids}, flush=True)\n"
        "        await asyncio.gather(*(pool.score(make_prompt(), 'hang in C') for _ in range(2)))\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert pids
    time.sleep(0.5)
    assert all(is_alive(pid) for pid in pids)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until_gone(pids)
