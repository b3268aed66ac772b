"""Spans of a process: what is on the disk, by whom, and how much of it."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tracing import (
    EARLIER,
    FOLDER,
    FREQUENT,
    add_span,
    frequent_span,
    record_spans,
    record_worker,
    span,
    spanned,
    worker_environment,
)


@pytest.fixture(autouse=True)
def nothing_recorded(tmp_path: Path) -> Iterator[None]:
    yield
    record_spans("nothing", tmp_path, limit_mib=0)


def written(folder: Path, name: str) -> list[list[Any]]:
    rows = [json.loads(line) for line in (folder / FOLDER / f"{name}.jsonl").read_text().splitlines()]
    return [row for row in rows if isinstance(row, list)]


def test_a_span_is_on_the_disk_when_it_ends_with_its_lane_details_and_error(tmp_path: Path) -> None:
    with span("before the recording"):
        pass
    record_spans("rollout", tmp_path, limit_mib=1)
    with span("outer"), span("request", lane="generator-0", given=1) as inner:
        inner.note(tokens=3)
        assert written(tmp_path, "rollout") == []
    with pytest.raises(KeyError), span("push"):
        raise KeyError("lost")
    add_span("step", 2.5, lane="steps", step=7)
    inner_row, outer, push, step = written(tmp_path, "rollout")
    assert (inner_row[:2], inner_row[4]) == (["request", "generator-0"], {"given": 1, "tokens": 3})
    assert outer[:2] == ["outer", ""] and outer[2] <= inner_row[2] and outer[3] >= inner_row[3]
    assert push[4] == {"error": "KeyError"}
    assert step[:2] == ["step", "steps"] and step[3] == 2_500_000 and step[4] == {"step": 7}
    assert push[2] - 60_000_000 < step[2] + step[3] < push[2] + 60_000_000  # one clock, in microseconds


async def test_spans_that_wait_are_written_at_the_end_of_the_process_and_of_the_recording(tmp_path: Path) -> None:
    program = (
        "import asyncio, pathlib, tracing\n"
        "tracing.record_spans('p', pathlib.Path('.'), limit_mib=1)\n"
        "async def main():\n"
        "    with tracing.span('x'):\n"
        "        pass\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True)
    assert [row[0] for row in written(tmp_path, "p")] == ["x"]

    record_spans("rollout", tmp_path, limit_mib=1)

    with span("y", number=np.int64(3)):
        pass
    record_spans("other", tmp_path, limit_mib=1)
    assert [row[0] for row in written(tmp_path, "rollout")] == ["y"]


def begun(folder: Path, monkeypatch: pytest.MonkeyPatch, *bursts: tuple[int, float]) -> list[list[int]]:
    """For each burst of spans that begin at once, and the seconds after it: how many each recorded one stands for."""
    now = [0]
    monkeypatch.setattr("tracing.time.monotonic_ns", lambda: now[0])
    record_spans("rollout", folder, limit_mib=4)
    recorded = []
    for number, seconds in bursts:
        before = len(written(folder, "rollout"))
        for _ in range(number):
            with frequent_span("request", "generator-0") as one:
                one.note(tokens=3)
        recorded.append([row[4].get("of", 1) for row in written(folder, "rollout")[before:]])
        now[0] += int(seconds * 1e9)
    return recorded


def test_frequent_spans_are_sampled_and_stand_for_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = begun(tmp_path, monkeypatch, *[(512, 0.07)] * 100)  # 7,300 a second
    spans = sum(map(len, steps))
    assert 0.8 * FREQUENT * 7 < spans < 1.2 * FREQUENT * 7 + 500, (
        "as many a second as are recorded, and the first burst"
    )
    assert 512 * 100 - 64 < sum(map(sum, steps)) <= 512 * 100
    assert steps[-1][-1] == pytest.approx(7300 / FREQUENT, rel=0.1)


def test_the_oldest_half_is_dropped_beyond_the_limit_and_the_newest_is_kept(tmp_path: Path) -> None:
    record_spans("p", tmp_path, limit_mib=1 / 64)
    for number in range(2000):
        with span("x", number=number):
            pass
    files = sorted((tmp_path / FOLDER).iterdir())
    assert [file.name for file in files] == [f"p{EARLIER}", "p.jsonl"]
    assert sum(file.stat().st_size for file in files) <= 2**14 + 200
    kept = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    numbers = [row[4]["number"] for row in kept if isinstance(row, list)]
    assert numbers == list(range(numbers[0], 2000)) and len(numbers) >= 100


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    record_spans("p", tmp_path, limit_mib=1 / 32)

    def record() -> None:
        for _ in range(200):
            with span("x" * 40):
                pass

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for file in (tmp_path / FOLDER).iterdir():
        for line in file.read_text().splitlines():
            json.loads(line)


def test_workers_record_with_the_limit_of_the_driver_and_children_by_fork_do_not(tmp_path, monkeypatch) -> None:
    record_spans("driver", tmp_path, limit_mib=0.5)
    environment = worker_environment()
    child = os.fork()
    if child == 0:
        with span("in the child"):
            pass
        os._exit(0)
    os.waitpid(child, 0)
    assert written(tmp_path, "driver") == []
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    record_worker("worker", tmp_path)
    with span("x"):
        pass
    assert len(written(tmp_path, "worker")) == 1
    assert float(worker_environment().popitem()[1]) == 0.5
    record_spans("driver", tmp_path, limit_mib=0)
    record_worker_environment = worker_environment()
    for name, value in record_worker_environment.items():
        monkeypatch.setenv(name, value)
    record_worker("silent", tmp_path)
    with span("x"):
        pass
    assert not (tmp_path / FOLDER / "silent.jsonl").exists()


def test_a_disk_that_takes_nothing_ends_the_recording_and_not_the_run(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("a file where the folder should be")
    record_spans("p", tmp_path, limit_mib=1)
    with span("x"):
        pass
    (tmp_path / FOLDER).unlink()
    record_spans("p", tmp_path, limit_mib=1 / 1024)
    (tmp_path / FOLDER / "p.jsonl").unlink()
    for _ in range(100):  # the file cannot be put aside any more
        with span("x"):
            pass


def test_every_public_method_of_a_spanned_class_is_recorded_once_it_has_ended(tmp_path: Path) -> None:
    @spanned(leave_out=("ping",))
    class Worker:
        def __init__(self) -> None:
            self._private()

        def _private(self) -> None: ...

        def ping(self) -> None: ...

        def train_step(self, n: int, *, factor: int = 2) -> int:
            """Train."""
            return n * factor

        async def take(self) -> list[list[Any]]:
            while not (rows := written(tmp_path, "p")):
                await asyncio.sleep(0.01)
            return rows

    record_spans("p", tmp_path, limit_mib=1)
    worker = Worker()
    worker.ping()
    assert worker.train_step(2, factor=3) == 6 and Worker.train_step.__doc__ == "Train."
    assert asyncio.iscoroutinefunction(Worker.take)
    during = asyncio.run(worker.take())
    assert [row[0] for row in during] == ["train step"]
    record_spans("p", tmp_path, limit_mib=0)
    assert [row[0] for row in written(tmp_path, "p")] == ["train step", "take"]
