"""A private folder for the temporary files of one attempt: those of Ray, wandb and any other library.

It is TMPDIR of all processes of the attempt. The command removes it after their end; the watchdog, if the command was
killed.
"""

from __future__ import annotations

import getpass
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from core.processes.watchdog import TEMPORARY

_RAY = "r"
_SOCKET = "/s12345678/r/session_2026-01-31_23-59-59_999999_4194304/sockets/plasma_store"
"""The longest socket of Ray below the folder for temporary files."""
_LONGEST_SOCKET = 107
"""Bytes of the path of a socket in Linux."""


def unusable_temporary() -> str | None:
    """Return why an attempt cannot have such a folder, or Ray its sockets in it; None: they can."""
    try:
        os.rmdir(make_temporary())
    except OSError as error:
        return f"no folder for temporary files: {error}; write a folder that you may write in, as /tmp"
    folder, most = _parent(), _LONGEST_SOCKET - len(_SOCKET)
    if (length := len(os.fsencode(folder))) <= most:
        return None
    return f"{folder}: the sockets of Ray need a path of at most {most} bytes, this one has {length}; write /tmp"


def make_temporary() -> str:
    """Return a new folder that this user alone can enter. Raises OSError."""
    return tempfile.mkdtemp(prefix="s", dir=_parent())


def use_temporary(folder: str) -> None:
    """Let this process, and those that it starts, write their temporary files there. What torch has compiled stays
    where it is found again."""
    with suppress(KeyError, OSError):  # a number without a name
        compiled = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    os.environ["TMPDIR"] = os.environ[TEMPORARY] = folder
    tempfile.tempdir = None


def ray_folder() -> str:
    """Return the folder of a Ray cluster that this process starts, which Ray opens to everybody."""
    return str(Path(tempfile.gettempdir()) / _RAY)


def _parent() -> str:
    return os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
