"""A PostgreSQL server for tests, which are skipped where none is installed."""

from itertools import count

import pytest

from tools.chaos import postgres


class PostgresServer(postgres.PostgresServer):
    """A server whose databases are new."""

    def __init__(self) -> None:
        pytest.importorskip("psycopg", reason="psycopg is not installed")
        try:
            super().__init__()
        except postgres.NoServerError as error:
            pytest.skip(str(error))
        self._numbers = count(1)

    def database(self) -> str:
        """The address of a store that does not exist."""
        return self.make_schema(f"store{next(self._numbers)}")
