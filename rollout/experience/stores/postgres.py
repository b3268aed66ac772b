"""Episodes in a PostgreSQL database, for processes of several hosts.

One writer at a time, as an advisory lock begins each transaction; readers are never blocked. A connection has advisory
locks of its own as well, which end with it, whatever ends the process or the network.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from rollout.experience.base import StoreError
from rollout.experience.stores.sql import Rows, SQLExperience

if TYPE_CHECKING:
    import psycopg

_START_SECONDS = 60.0
"""Most seconds to wait for a server that starts."""
_END_SECONDS = 2.0
"""Most seconds until a server frees the locks of a process that has ended."""


class PostgresExperience(SQLExperience):
    """A store in the database of an address, postgresql://user@host/database, and in its schema."""

    BLOB, VIEW = "BYTEA", "OR REPLACE VIEW"

    def __init__(self, path: str) -> None:
        self._name = path.rpartition("@")[2]  # without a password
        try:
            import psycopg
        except ImportError as error:
            raise StoreError("experience.store=postgres needs psycopg: pip install 'slipstream[postgres]'") from error
        self._errors = psycopg.Error
        self._db = self._connected(path)
        (schema,) = self._execute("SELECT current_schema()").fetchone()
        self._locks = _number(schema)  # locks are those of the database: each schema has a class of its own
        self.BEGIN = ("BEGIN", f"SELECT pg_advisory_xact_lock({self._locks}, 0)")
        super().__init__(self._name)

    def _connected(self, path: str) -> psycopg.Connection[tuple[Any, ...]]:
        import psycopg

        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                return psycopg.connect(path, autocommit=True, application_name="slipstream")
            except psycopg.Error as error:
                starting = "refused" in str(error) or "starting up" in str(error)
                if not starting or time.monotonic() > deadline:
                    reason = str(error).strip().replace("\n", " ")
                    raise StoreError(f"experience.path={self._name}: {reason}; {_WAY_OUT}") from None
            time.sleep(0.5)

    def _run(self, statement: str, values: Sequence[Any]) -> Rows:
        return cast(Rows, self._db.execute(statement.replace("?", "%s"), values or None))

    def _failure(self, error: Exception) -> str | None:
        if not isinstance(error, self._errors):
            return None
        if "space" in str(error):
            return "free space on the disk of the server; every call before this one is in the database"
        return _WAY_OUT

    def _has_tables(self) -> bool:
        return self._execute("SELECT to_regclass('meta')").fetchone()[0] is not None

    def _lock(self, name: str) -> bool:
        """See SQLExperience. The server frees the lock of a process that has ended a moment later."""
        deadline = time.monotonic() + _END_SECONDS
        while not (is_taken := self._try_lock(name)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return is_taken

    def _try_lock(self, name: str) -> bool:
        statement = "SELECT pg_try_advisory_lock(?, ?)"
        return bool(self._execute(statement, (self._locks, _number(name))).fetchone()[0])

    def _is_locked(self, name: str) -> bool:
        if not self._try_lock(name):
            return True
        self._execute("SELECT pg_advisory_unlock(?, ?)", (self._locks, _number(name)))
        return False

    def _changes(self) -> object:
        return self._execute("SELECT txid_snapshot_xmax(txid_current_snapshot())").fetchone()[0]

    def close(self) -> None:
        """See SQLExperience."""
        self._write_rest()
        self._db.close()


_WAY_OUT = "start the server again or check the address, then start the job again: what was stored is in the database"


def _number(name: str) -> int:
    """Return the number of a lock, a positive int4; 0 is that of transactions."""
    return zlib.crc32(name.encode()) % (2**31 - 1) + 1
