"""A benchmark that is ended from outside ends what it has started."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from tools.bench.__main__ import end_on_sigterm
from tools.bench.figure import Figure
from tools.bench.gpu_push import drive


@pytest.fixture
def restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_sigterm_ends_the_servers_of_a_measurement(restored: None) -> None:
    ended = []

    async def measured() -> AsyncIterator[Figure]:
        try:
            asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
            yield Figure(name="never", value=0.0, unit="", baseline=None, target="")
        finally:
            await asyncio.sleep(0)  # as the end of a server takes time
            ended.append(True)

    end_on_sigterm()
    with pytest.raises(SystemExit) as exit_code:
        list(drive(measured()))
    assert ended == [True] and exit_code.value.code == 143
