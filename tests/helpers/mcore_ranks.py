"""Real trainer ranks for tests: a pool of processes that join one gloo world per call.

The processes stay for the whole session; each call makes and leaves its own process groups. A rank that raises, dies or
takes too long ends the call with every traceback there is, and the pool starts afresh for the next call.
"""

import contextlib
import gc
import os
import pickle
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import pytest
import torch

from allocation import ParallelLayout
from helpers.forks.calls import call, end
from helpers.forks.programs import Program
from helpers.tiny_models import EXPERT_MODELS

LAYOUTS = {
    "one process": ParallelLayout(),
    "tp2": ParallelLayout(tp=2),
    "pp2": ParallelLayout(pp=2),
    "cp2": ParallelLayout(cp=2),
    "tp2 pp2": ParallelLayout(tp=2, pp=2),
    "pp2 vpp2": ParallelLayout(pp=2, vpp=2),
}
EXPERT_LAYOUTS = {
    "dp2 ep2": ParallelLayout(dp=2, ep=2),
    "tp2 ep2": ParallelLayout(tp=2, ep=2),
    "cp2 ep2": ParallelLayout(cp=2, ep=2),
    "dp2 pp2 ep2": ParallelLayout(dp=2, pp=2, ep=2),
}
"""For models with experts."""
_MOST_GLOO_THREADS = 30
"""In a process between two calls. Around a model with experts, DistributedDataParallel is in a cycle with the hooks of
its parameters, which nothing collects (an engine's is): its groups stay, and their threads wake up all the time."""
_GRACE_SECONDS = 3.0  # after a first failure: time for the other ranks to report theirs


@dataclass(frozen=True)
class Rank:
    """What a function that runs on a rank is given first."""

    rank: int
    world_size: int
    init_method: str

    @contextlib.contextmanager
    def joined(self, layout: ParallelLayout, *, seed: int = 1, kind: Any = "cpu") -> Iterator[tuple[Any, Any]]:
        """(ParallelState, Device) of this rank in `layout`; its world must be the whole call. Each rank has the GPU of
        its number, where they run on GPUs."""

        from mcore_adapter.device import get_device
        from mcore_adapter.parallel import destroy_parallel, initialize_parallel

        os.environ["LOCAL_RANK"] = str(self.rank)
        device = get_device(kind)
        parallel = initialize_parallel(
            layout,
            rank=self.rank,
            world_size=self.world_size,
            init_method=self.init_method,
            device=device,
            seed=seed,
            timeout_seconds=120,
        )
        try:
            # Gloo reports a peer that leaves before this rank has connected all of its groups as a crash.
            if torch.distributed.get_backend() == "gloo":
                torch.distributed.barrier()
            with device.activate():
                yield parallel, device
        finally:
            destroy_parallel()


def build(folder: Path, parallel: Any, device: Any, **kwargs: Any) -> list[Any]:
    """On a rank: the chunks of the Hugging Face model in `folder`, loaded; kwargs of build_model()."""

    from mcore_adapter.hf.weights import load_hf_weights
    from mcore_adapter.models.gpt import build_model
    from model_specs.families import read_config

    kwargs.setdefault("dtype", torch.float32)
    chunks = build_model(read_config(folder), parallel=parallel, device=device, **kwargs)
    load_hf_weights(chunks, folder, parallel=parallel)
    return chunks


class RankPool:
    """run(function, world_size, *args) calls function(Rank, *args) on that many processes at once."""

    def __init__(self, *, fresh: bool = False) -> None:
        """`fresh`: let each process import the trainer itself."""
        self._fresh = fresh
        self._processes: list[tuple[Program, Connection]] = []

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 180.0) -> list[Any]:
        """The results by rank. `function` must be importable (module level); results must be picklable.

        Raises AssertionError with the ranks' tracebacks where one fails, and TimeoutError after `timeout` seconds.
        """
        for i in range(world_size):
            if i < len(self._processes) and _gloo_threads(self._processes[i][0].pid) > _MOST_GLOO_THREADS:
                _end(*self._processes[i])
                self._processes[i] = self._start()
        while len(self._processes) < world_size:
            self._processes.append(self._start())
        folder = tempfile.mkdtemp(prefix="ranks-")
        try:
            for rank, (_, connection) in enumerate(self._processes[:world_size]):
                task = function, Rank(rank, world_size, f"file://{folder}/store"), args
                connection.send_bytes(pickle.dumps(task))
            return self._collect(world_size, timeout)
        except BaseException:
            self.close()
            raise
        finally:
            shutil.rmtree(folder)

    def close(self) -> None:
        """Kill the processes; the next run() starts new ones."""
        while self._processes:
            _end(*self._processes.pop())

    def _start(self) -> tuple[Program, Connection]:
        with Listener(family="AF_UNIX") as listener:
            return call(work, listener.address, fresh=self._fresh), listener.accept()

    def _collect(self, world_size: int, timeout: float) -> list[Any]:
        silent = {connection: rank for rank, (_, connection) in enumerate(self._processes[:world_size])}
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while silent and (ready := wait(silent, deadline - time.monotonic())):
            for connection in ready:
                rank = silent.pop(connection)
                try:
                    ok, value = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    ok, value = False, f"the process died with exit code {self._processes[rank][0].wait()}"
                (results if ok else failures)[rank] = value
                if failures:
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if failures:
            raise AssertionError("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(failures.items())))
        if silent:
            raise TimeoutError(f"ranks {sorted(silent.values())} of {world_size} did not answer within {timeout} s")
        return [results[rank] for rank in range(world_size)]


def _end(program: Program, connection: Connection) -> None:
    connection.close()
    end(program)


def _gloo_threads(pid: int) -> int:
    """Return how many threads of gloo a process has; 0 on systems without /proc."""
    count = 0
    for file in Path(f"/proc/{pid}/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended
            count += "gloo" in file.read_text()
    return count


def work(address: str) -> None:
    """In a process of a pool: do what it sends, until it closes the connection."""
    torch.set_num_threads(1)
    connection = Client(address)
    with contextlib.suppress(EOFError):
        while True:
            function, rank, args = pickle.loads(connection.recv_bytes())
            gc.freeze()  # what is there now is no garbage: without this the collection below takes tenths of a second
            try:
                answer = pickle.dumps((True, function(rank, *args)))
            except BaseException:  # noqa: BLE001  whatever ends a rank is for the test to show
                answer = pickle.dumps((False, traceback.format_exc()))
            gc.collect()  # an engine is a cycle; its process groups have threads, which would slow what comes next
            connection.send_bytes(answer)


EVERY_TIME = {
    True: ("one process", "tp2 ep2", "cp2 ep2", "dp2 pp2 ep2"), False: ("one process", "cp2", "tp2 pp2", "pp2 vpp2"),
}  # fmt: skip
"""Layouts of the first model with experts, and of the first without, outside of the nightly tests."""
MIXED = ("tp2 pp2", "dp2 pp2 ep2")
"""Layouts of the other models, unless a test has its own."""


def cases(names: Any, layouts: dict[str, ParallelLayout], *, others: tuple[str, ...] = MIXED, also: Any = ()) -> Any:
    """(model, layout) for each of both; models with experts in their own layouts too. Models but the first of each kind
    have only the layouts `others` outside of the nightly tests, and those (model, layout) in `also`."""
    params, seen = [], set()
    for name in names:
        has_experts = name in EXPERT_MODELS
        every_time = others if has_experts in seen else EVERY_TIME[has_experts]
        seen.add(has_experts)
        for key, layout in {**layouts, **(EXPERT_LAYOUTS if has_experts else {})}.items():
            marks = [] if key in every_time or (name, key) in also else [pytest.mark.nightly]
            params.append(pytest.param(name, layout, id=f"{name}-{key}", marks=marks))
    return pytest.mark.parametrize(("name", "layout"), params)
