"""A PostgreSQL server of the distribution's packages, in a folder of its own."""

import os
import shutil
import socket
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil


class NoServerError(RuntimeError):
    """No PostgreSQL server is installed."""


class PostgresServer:
    """A server that can be stopped, killed and started again; it has one database."""

    def __init__(self) -> None:
        """Start it. Raises NoServerError where none is installed."""
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
        program = shutil.which("initdb")
        if not found and program is None:
            raise NoServerError("no PostgreSQL server is installed (apt-get install postgresql)")
        self._bin = found[-1] if found else Path(program or "").parent
        self._folder = Path(tempfile.mkdtemp(prefix="pg-"))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"postgresql://slipstream@127.0.0.1:{port}/postgres"
        self._options = f"-p {port} -k {self._folder} -c listen_addresses=127.0.0.1 -c fsync=off -c max_connections=500"
        if os.geteuid() == 0:  # the server refuses to run as root
            shutil.chown(self._folder, "postgres", "postgres")
        self._run("initdb", "-A", "trust", "-U", "slipstream", "--no-sync")
        self.start()

    def _run(self, program: str, *arguments: str) -> None:
        user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        command = [*user, str(self._bin / program), "-D", str(self._folder / "data"), *arguments]
        none = subprocess.DEVNULL
        subprocess.run(command, check=True, stdin=none, stdout=none, stderr=none, cwd=self._folder, timeout=300)

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        self._run("pg_ctl", "-l", str(self._folder / "log"), "-o", self._options, "-t", "240", "-w", "start")

    def stop(self) -> None:
        """Let it end at once, without any clean-up."""
        self._run("pg_ctl", "-m", "immediate", "-w", "stop")

    def kill(self) -> None:
        """Kill all its processes (SIGKILL), and wait until they have ended."""
        server = psutil.Process(int((self._folder / "data" / "postmaster.pid").read_text().split()[0]))
        processes = [server, *server.children(recursive=True)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=60)

    def make_schema(self, name: str) -> str:
        """Make an empty schema; return the address of a store in it."""
        return make_schema(self.address, name)

    def close(self) -> None:
        """End it, and remove its folder."""
        with suppress(subprocess.CalledProcessError):  # it is stopped
            self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


def make_schema(address: str, name: str) -> str:
    """Make an empty schema on a server; return the address of a store in it."""
    import psycopg

    with psycopg.connect(address, autocommit=True) as server:
        server.execute(f"DROP SCHEMA IF EXISTS {name} CASCADE".encode())
        server.execute(f"CREATE SCHEMA {name}".encode())
    return f"{address}?options=-csearch_path%3D{name}"
