"""The longest files come first: a test process that got one of them last would leave the others idle."""

import asyncio
import gc
import inspect
import logging
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Before torch is imported, here and in every process that tests start. torch.set_num_threads(1) holds for the thread
# that calls it: those of autograd would start a pool each, whose waiting costs more than the work of small models.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).parent
LONGEST = (
    "test_ppo_end_to_end",
    "test_engine",
    "test_lint",
    "test_rates",
    "test_layouts",
    "test_modes",
    "test_stacked_experts",
    "test_convert",
    "test_reward_math",
    "test_plan",
    "test_moe",
    "test_recompute",
    "test_checkpoint",
    "test_eval",
    "test_recover_run",
    "test_functions",
    "test_quickstart_cli",
    "test_sft_end_to_end",
    "test_producer_staleness",
    "test_router",
    "test_reward_pool",
    "test_shared_prompts",
    "test_store",
    "test_weights",
    "test_tracked_runs",
)
"""Modules by their processor time; those that are not listed take less."""
SLOW_MODULES = {
    "test_attempts",
    "test_convert_limits",
    "test_eval",
    "test_mutants",
    "test_ppo_end_to_end",
    "test_recover_run",
}
"""Modules of which `make quick` runs nothing."""
SLOW_FIXTURES = {"run_command", "ranks", "gpu_ranks"}
"""They start a whole run, or processes that import the trainer."""
RARE_COLLECTIONS = (10_000, 10, 50)
"""Arguments of gc.set_threshold()."""
SLOW_SECONDS = 1800
"""After which a slow test hangs: several runs, on a machine with other work."""


def pytest_configure(config: pytest.Config) -> None:
    """Let each test process begin to import at another folder: what one has compiled, the others only read."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and [Path(word).resolve() for word in config.args] == [ROOT]:
        parts = sorted(path for path in ROOT.iterdir() if path.is_dir() or path.name.startswith("test_"))
        first = int(worker.removeprefix("gw")) * len(parts) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        config.args = [str(path) for path in parts[first:] + parts[:first]]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Let the test processes be forks of one that has imported the libraries."""
    from helpers.forks import programs

    if programs.can_fork(os.environ):
        launcher = ROOT / "helpers" / "forks" / "launcher.py"
        for spec in specs:
            spec.python = shlex.join([sys.executable, str(launcher), programs.server()])


def pytest_collection_finish() -> None:
    """Look for no garbage among what is there for the whole session, and seldom among what test modules keep, such as
    the trees of all sources: that took a tenth of the processor time of some of them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*RARE_COLLECTIONS)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (place.get(item.path.stem, len(place)), item.path))
    for item in items:
        if item.path.stem in SLOW_MODULES or SLOW_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker("slow")
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(SLOW_SECONDS))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine: in a loop of its own, whose clock is virtual with the mark `virtual_clock`."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters})
    if pyfuncitem.get_closest_marker("virtual_clock") is None:
        asyncio.run(test)
    else:
        from core.planning.simulation import run_virtual

        run_virtual(test)
    return True


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    """Take away the log handlers that a command line leaves: they write to the streams of the test that called it."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
