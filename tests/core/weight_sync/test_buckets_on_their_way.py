"""Several buckets of one push at a time, into servers that answer before they receive, as on GPUs."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from core.weight_sync.push import PushError, in_background
from helpers.push_doubles import buckets, connected, holds, limit, paused
from helpers.sglang_double import model
from helpers.sglang_double.server import SGLangDouble
from helpers.sglang_double.updates import BROADCAST

SOON = 0.3
"""In this many seconds a sender that did not wait would have gone on."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model.write(tmp_path / "model")


def sending_later(doubles: Sequence[SGLangDouble], servers: Sequence[Any], folder: Path, **settings: Any) -> Any:
    """Return a sender that has prepared a push to servers which receive when they are told to."""
    for double in doubles:
        double.receives_later = True
    sender: Any = connected("nccl", folder, servers, **settings)
    sender.prepare(buckets(1), verify=False)
    return sender


def announced(double: SGLangDouble) -> int:
    return len(double.bodies(BROADCAST))


async def receive(doubles: Sequence[SGLangDouble]) -> None:
    """Receive a broadcast in every server, once all have answered it."""
    for double in doubles:
        await double.until(lambda double: double.num_announced)
    await asyncio.gather(*(double.receive_next() for double in doubles))


@pytest.mark.parametrize(
    ("staged_bytes", "at_once"),
    [(None, 2), (2 << 20, 1), (0, 1)],
    ids=["all made ahead", "two made ahead beside a third", "made one by one"],
)
async def test_a_bucket_is_announced_while_the_one_before_it_is_being_sent_and_no_third(
    staged_bytes: int | None, at_once: int, folder: Path
) -> None:
    with paused(1, 2) as (doubles, servers):
        sender = sending_later(doubles, servers, folder, staged_bytes=staged_bytes)
        sending = in_background(sender.send)
        for received in range(3):
            expected = min(3, received + at_once)
            for double in doubles:
                await double.until(lambda double, n=expected: announced(double) >= n)
            await asyncio.sleep(SOON)
            assert [announced(double) for double in doubles] == [expected, expected] and not sending.done()
            await receive(doubles)
        report = await asyncio.wrap_future(sending)
        assert report.num_buckets == 3 and all(holds(double, 1) for double in doubles)
        sender.close()


async def test_no_bucket_is_announced_before_every_server_has_answered_for_the_one_before_it(folder: Path) -> None:
    """Servers that received two buckets in different orders would wait for each other."""
    with paused(1, 1) as (doubles, servers):
        hold = doubles[1].faults.hold_answer(BROADCAST)
        sender = sending_later(doubles, servers, folder)
        sending = in_background(sender.send)
        await hold.reached()
        await asyncio.sleep(SOON)
        assert [announced(double) for double in doubles] == [1, 1]
        hold.release()
        for _ in range(3):
            await receive(doubles)
        await asyncio.wrap_future(sending)
        sender.close()


def test_a_server_that_answers_and_does_not_receive_is_not_waited_for_beyond_the_deadline(folder: Path) -> None:
    with paused(1) as (doubles, servers):
        sender = sending_later(doubles, servers, folder)
        limit(sender, 2.0)
        with pytest.raises(PushError, match="the sender, although every server responded"):
            sender.send()
        sender.close()


def test_a_server_that_ends_after_its_answer_makes_the_push_fail_at_once(folder: Path) -> None:
    with paused(1) as (doubles, servers):
        sender = sending_later(doubles, servers, folder)
        sending = in_background(sender.send)
        asyncio.run(doubles[0].until(lambda double: double.num_announced))
        doubles[0].groups.clear()  # closes its connections
        with pytest.raises(PushError, match="bucket 1 of the weight push: .*[Cc]onnection"):
            sending.result(60)
        sender.close()
