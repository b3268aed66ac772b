"""Measurements side by side, one process for each rank."""

from __future__ import annotations

import time

from tools.bench.gpu.lanes import NO_TIME, Task, outcomes


def test_a_module_that_cannot_be_imported_is_an_outcome() -> None:
    (found,) = outcomes([Task(place="tools.nowhere:act", arguments=())], [], task_seconds=20.0)
    assert found.failure.startswith("ModuleNotFoundError: ")


def task(what: str, num_ranks: int = 1) -> Task:
    return Task(place="helpers.lane_ranks:act", arguments=(what,), num_ranks=num_ranks)


def test_a_rank_that_fails_ends_its_task_alone() -> None:
    tasks = [task("raise", 2), task("die", 2), task("hang", 2), task("report", 2), *[task("report")] * 3]
    found = list(outcomes(tasks, ["4", "5"], task_seconds=5.0))
    failures = [one.failure for one in found[:3]]
    assert failures == ["ValueError: out of memory", "rank 1 ended with -6", "took longer than 5 s"]
    assert found[3].values == ((0, "4"), (1, "5"))
    alone = {one.values[0] for one in found[4:]}
    assert len(found) == 7 and alone <= {(0, "4"), (0, "5")}


def test_nothing_begins_after_the_end() -> None:
    (found,) = outcomes([task("report")], [], task_seconds=5.0, end=time.monotonic() - 1)
    assert found.failure == NO_TIME
