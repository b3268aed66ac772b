"""Stores of every kind."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.postgres import PostgresServer
from helpers.stores import Stores


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    made = PostgresServer()
    yield made
    made.close()


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Stores:
    needed = request.getfixturevalue("server") if request.param == "postgres" else None
    return Stores(request.param, tmp_path, needed)
