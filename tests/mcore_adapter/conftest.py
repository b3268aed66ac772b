"""Fixtures of the trainer's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mcore_ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Real processes to run trainer ranks on; see mcore_ranks."""
    pool = RankPool()
    yield pool
    pool.close()
