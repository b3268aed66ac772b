"""A PostgreSQL server of the distribution's packages, in a folder of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

_WHY_NOT = "no PostgreSQL server is installed (apt-get install postgresql)"


class PostgresServer:
    """A server that can be stopped, killed and started again. Each database is new."""

    def __init__(self) -> None:
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
        if not found and shutil.which("initdb") is None:
            pytest.skip(_WHY_NOT)
        pytest.importorskip("psycopg", reason="psycopg is not installed")
        self._bin = str(found[-1]) if found else str(Path(shutil.which("initdb") or "").parent)
        self._folder = tempfile.mkdtemp(prefix="pg-")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        if os.geteuid() == 0:  # the server refuses to run as root
            shutil.chown(self._folder, "postgres", "postgres")
        self._run("initdb", "-D", f"{self._folder}/data", "-A", "trust", "-U", "slipstream", "--no-sync")
        self.start()
        self._count = 0

    def _run(self, program: str, *arguments: str) -> None:
        user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        command = [*user, f"{self._bin}/{program}", *arguments]
        subprocess.run(
            command,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self._folder,
            timeout=120,
        )

    def start(self) -> None:
        options = f"-p {self.port} -k {self._folder} -c listen_addresses=127.0.0.1 -c fsync=off -c max_connections=500"
        self._run("pg_ctl", "-D", f"{self._folder}/data", "-l", f"{self._folder}/log", "-o", options, "-w", "start")

    def stop(self, mode: str = "immediate") -> None:
        """End the server; immediate: without any clean-up, as after a crash."""
        self._run("pg_ctl", "-D", f"{self._folder}/data", "-m", mode, "-w", "stop")

    def database(self) -> str:
        """The address of a store that does not exist: a schema of its own."""
        import psycopg

        self._count += 1
        address = f"postgresql://slipstream@127.0.0.1:{self.port}/postgres"
        with psycopg.connect(address, autocommit=True) as db:
            db.execute(f"CREATE SCHEMA store{self._count}")
        return f"{address}?options=-csearch_path%3Dstore{self._count}"

    def close(self) -> None:
        with suppress(subprocess.CalledProcessError):  # it is stopped
            self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)
