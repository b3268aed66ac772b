"""Episodes in a SQLite file, for processes of one host: WAL lets readers and the one writer work at the same time."""

import fcntl
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import IO, Any

from rollout.experience.base import StoreError
from rollout.experience.stores.sql import Rows, SQLExperience, check_versions

_BUSY_SECONDS = 60.0
"""Most seconds to wait for the transaction of another process."""


def check_file(path: str | Path) -> None:
    """Check, without opening the store, that this release can continue a file if there is one. Raises SchemaError, and
    StoreError for a file that is no database."""
    if not Path(path).is_file():
        return
    try:
        with closing(sqlite3.connect(f"{Path(path).absolute().as_uri()}?mode=ro", uri=True)) as db:
            tables = db.execute("SELECT name FROM sqlite_master WHERE name = 'meta'").fetchall()
            found = dict(db.execute("SELECT key, value FROM meta")) if tables else {}
    except sqlite3.Error as error:
        raise StoreError(f"{path}: {error}; name another file, or restore it") from error
    if found:
        versions = {key: json.loads(found.get(key, "null")) for key in ("layout", "schema")}
        check_versions(str(path), **versions)


class SQLiteExperience(SQLExperience):
    """A store in the file `path`. Locks are files beside it."""

    BLOB, VIEW, BEGIN = "BLOB", "VIEW IF NOT EXISTS", ("BEGIN IMMEDIATE",)

    def __init__(self, path: str | Path) -> None:
        self._path, self._locks = Path(path), dict[str, IO[str]]()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(self._path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"experience.path={path}: {error}; name a file that can be written") from error
        self._name = str(self._path)
        self._execute("PRAGMA page_size=8192")  # values are large; in a file that exists it has no effect
        self._execute("PRAGMA journal_mode=WAL")
        self._execute("PRAGMA synchronous=NORMAL")
        super().__init__(self._name)

    def _run(self, statement: str, values: Sequence[Any]) -> Rows:
        return self._db.execute(statement, values)

    def _failure(self, error: Exception) -> str | None:
        if not isinstance(error, sqlite3.Error):
            return None
        ways = {
            "locked": f"another process has kept it for {_BUSY_SECONDS:g} s; end that one",
            "full": "free space on its disk; every call before this one is in the file",
            "not a database": "name another file, or restore it",
        }
        return next((way for word, way in ways.items() if word in str(error)), "check the file and its disk")

    def _has_tables(self) -> bool:
        return self._execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone() is not None

    def _file_of(self, lock: str) -> Path:
        if lock == "lessee":
            return self._path.with_name(f"{self._path.name}.lessee")
        return self._path.with_name(f"{self._path.name}.explorers") / lock

    def _lock(self, name: str) -> bool:
        path = self._file_of(name)
        path.parent.mkdir(exist_ok=True)
        file = open(path, "a")  # noqa: SIM115 (held until close())
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        self._locks[name] = file
        return True

    def _is_locked(self, name: str) -> bool:
        """Return whether another process has the lock. Remove the file of one that has ended."""
        path = self._file_of(name)
        try:
            with open(path) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            pass
        return False

    def _changes(self) -> object:
        (by_others,) = self._execute("PRAGMA data_version").fetchone()
        return by_others, self._db.total_changes

    def close(self) -> None:
        """See SQLExperience."""
        self._write_rest()
        self._db.close()
        for lock in self._locks.values():
            lock.close()
        self._locks.clear()
