"""Call functions in processes that are forks of the server, and get what they send."""

import contextlib
import itertools
import os
import pickle
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from helpers.forks import programs

_numbers = itertools.count()
_LARGEST_BYTES = 1 << 20


def call(function: Callable[..., None], *arguments: Any, fresh: bool = False) -> programs.Program:
    """Call function(*arguments), which must be picklable, in a process of its own; `fresh` as of programs.start()."""
    with tempfile.NamedTemporaryFile(prefix="call-", delete=False) as file:
        file.write(pickle.dumps((sys.path, pickle.dumps((function, arguments)))))
    words = ["-c", "from helpers.forks.calls import _main; _main()", file.name]
    return programs.start(words, output=sys.__stderr__, env=programs.with_tests(), fresh=fresh)


def end(program: programs.Program) -> None:
    """Kill the process, and wait until it is gone."""
    program.kill()
    program.wait()


@contextlib.contextmanager
def calling(function: Callable[..., None], *arguments: Any) -> Iterator[programs.Program]:
    """As call(); the process is killed at the end."""
    program = call(function, *arguments)
    try:
        yield program
    finally:
        end(program)


def _main() -> None:
    file = Path(sys.argv[1])
    content = file.read_bytes()
    file.unlink()
    sys.path[:], rest = pickle.loads(content)
    function, arguments = pickle.loads(rest)
    function(*arguments)


class Inbox:
    """What other processes put into it, as it arrives: they are given it as an argument of call()."""

    def __init__(self) -> None:
        self._address = f"\0slipstream-inbox-{os.getpid()}-{next(_numbers)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self._address)

    def __getstate__(self) -> dict[str, Any]:
        return {"_address": self._address}

    def put(self, value: Any) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
            sending.sendto(pickle.dumps(value), self._address)

    def get(self, timeout: float) -> Any:
        """Return the next value. Raises TimeoutError after `timeout` seconds."""
        self._socket.settimeout(timeout)
        return pickle.loads(self._socket.recv(_LARGEST_BYTES))
