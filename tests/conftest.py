"""Whole runs come first: a test process that got the longest file last would leave the others idle."""

import sys
from pathlib import Path

import pytest

# Helpers and the cases of other test modules are imported by their names, from every folder of tests.
TESTS = Path(__file__).parent
sys.path[:0] = sorted({str(path.parent) for path in TESTS.rglob("*.py")} - set(sys.path))

WHOLE_RUNS = (
    "test_attempts",
    "test_ppo_end_to_end",
    "test_chaos",
    "test_recover_run",
    "test_out_of_memory",
    "test_eval",
)


SLOW_MODULES = {
    *WHOLE_RUNS,
    "test_convert_limits",
    "test_examples",
    "test_full_disk",
    "test_mutants",
}
"""Modules of which `make quick` runs nothing."""
SLOW_FIXTURES = {"run_command", "ranks", "gpu_ranks"}
"""They start a whole run, or processes that import the trainer."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in WHOLE_RUNS)
    for item in items:
        if item.path.stem in SLOW_MODULES or SLOW_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker("slow")
