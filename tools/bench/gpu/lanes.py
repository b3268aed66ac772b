"""Measurements in processes of their own, side by side on the GPUs of a host.

Each task runs on as many ranks as it names, one process and one GPU each. A rank that raises, crashes or takes too long
ends its task, not the others. Invariant: the processes of a task begin without memory of another one; while a task
runs, those of the next one on the same GPUs import what they need.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any

NO_TIME = "no time was left"
_END_SECONDS = 10.0
"""A process that is killed while it uses a GPU can stay for minutes; it is not waited for longer."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A function of a module that every rank calls with its number and `arguments`."""

    place: str
    """module:function"""
    arguments: tuple[Any, ...]
    num_ranks: int = 1


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a task came to: the values of its ranks, or why there are none."""

    task: Task
    values: tuple[Any, ...] = ()
    failure: str = ""


class _Rank:
    """A process that imports `place` and waits for its arguments."""

    def __init__(self, place: str, gpu: str | None) -> None:
        context = get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, place, gpu), daemon=True)
        self.process.start()
        other.close()

    def end(self) -> None:
        self.process.kill()
        self.process.join(_END_SECONDS)


def _serve(connection: Connection, place: str, gpu: str | None) -> None:
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    module, _, name = place.partition(":")
    try:
        function = getattr(import_module(module), name)
        connection.send((True, function(*connection.recv())))
    except EOFError:  # no task came
        return
    except Exception as error:  # noqa: BLE001 - reported as the outcome of the task
        connection.send((False, f"{type(error).__name__}: {error}"))


def outcomes(
    tasks: Sequence[Task], gpus: Sequence[str], *, task_seconds: float, end: float = float("inf")
) -> Iterator[Outcome]:
    """Yield what each task came to, those of the same number of ranks side by side on `gpus` (as CUDA_VISIBLE_DEVICES
    names them; none: one task at a time on the CPU), in the order in which numbers of ranks first appear. A task has
    `task_seconds`, and none begins after `end` (time.monotonic())."""
    for num_ranks in dict.fromkeys(task.num_ranks for task in tasks):
        waiting, results = iter([t for t in tasks if t.num_ranks == num_ranks]), SimpleQueue[Outcome | None]()
        groups: list[list[str | None]] = [[None] * num_ranks]
        if gpus:
            groups = [list(gpus[i : i + num_ranks]) for i in range(0, len(gpus) - num_ranks + 1, num_ranks)]
        lock = threading.Lock()

        def following(waiting: Iterator[Task] = waiting, lock: threading.Lock = lock) -> Task | None:
            with lock:
                return next(waiting, None)

        lanes = [
            threading.Thread(target=_lane, args=(group, following, results, task_seconds, end), daemon=True)
            for group in groups
        ]
        for lane in lanes:
            lane.start()
        running = len(lanes)
        while running:
            found = results.get()
            if found is None:
                running -= 1
            else:
                yield found


def _lane(
    group: Sequence[str | None],
    following: Callable[[], Task | None],
    results: SimpleQueue[Outcome | None],
    task_seconds: float,
    end: float,
) -> None:
    """Run tasks on these GPUs until none is left."""

    def start(task: Task | None) -> list[_Rank]:
        return [_Rank(task.place, gpu) for gpu in group] if task is not None and time.monotonic() < end else []

    task = following()
    ahead = start(task)
    try:
        while task is not None:
            ranks, after = ahead, following()
            ahead = start(after)
            left = end - time.monotonic()
            try:
                ready = ranks and left > 0
                results.put(
                    _run(task, ranks, min(task_seconds, left)) if ready else Outcome(task=task, failure=NO_TIME)
                )
            finally:
                for rank in ranks:
                    rank.end()
            task = after
    finally:
        for rank in ahead:
            rank.end()
        results.put(None)


def _run(task: Task, ranks: Sequence[_Rank], seconds: float) -> Outcome:
    """Return what the ranks report, or the first failure of one."""
    for number, rank in enumerate(ranks):
        with suppress(OSError):  # it ended; what it reported, if anything, is read below
            rank.connection.send((number, *task.arguments))
    values: dict[int, Any] = {}
    end = time.monotonic() + seconds
    while len(values) < len(ranks):
        open_ranks: dict[Any, int] = {rank.connection: n for n, rank in enumerate(ranks) if n not in values}
        ready = wait(list(open_ranks), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            return Outcome(task=task, failure=f"took longer than {seconds:.0f} s")
        number = open_ranks[ready[0]]
        try:
            succeeded, value = ranks[number].connection.recv()
        except (EOFError, OSError):
            ranks[number].process.join(_END_SECONDS)
            succeeded, value = False, f"rank {number} ended with {ranks[number].process.exitcode}"
        if not succeeded:
            return Outcome(task=task, failure=value)
        values[number] = value
    return Outcome(task=task, values=tuple(values[n] for n in range(len(ranks))))
