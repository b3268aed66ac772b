"""Signature of the configurations that runs of this user wrote: one that came with a downloaded folder has none.

A run ends its config.yaml with a code of the text under a key that only this user can read. Invariant: a file that
is_own() accepts was written with that key.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import tempfile
from pathlib import Path

from rollout.plugins import state_folder

_MARK = "# Written by a run of this user: "


def signed(text: str) -> str:
    """Return `text` with its code in a comment; unchanged where this user has no folder for a key."""
    try:
        return f"{text}{_MARK}{_code(_key(), text)}\n"
    except (OSError, RuntimeError):  # no home, or none that can be written
        return text


def is_own(file: Path) -> bool:
    """Return whether a run of this user wrote `file`, and it was not changed since."""
    try:
        text, mark, code = file.read_text(encoding="utf-8").rpartition(_MARK)
        return bool(mark) and hmac.compare_digest(code.strip().encode(), _code(_key(), text).encode())
    except (OSError, RuntimeError, UnicodeDecodeError):
        return False


def _code(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _key() -> bytes:
    """Return this user's key, made at its first use. Raises OSError and RuntimeError."""
    file = state_folder() / "key"
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not file.exists():
        descriptor, new = tempfile.mkstemp(dir=file.parent)  # readable by this user only
        with open(descriptor, "wb") as key:
            key.write(secrets.token_bytes(32))
        with contextlib.suppress(FileExistsError):  # another process was first
            os.link(new, file)
        os.unlink(new)
    return file.read_bytes()
