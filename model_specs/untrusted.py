"""The one reader of files that a stranger may have written: JSON of models, checkpoints and data, within limits.

Invariant: reading ends, takes memory in proportion to `max_bytes`, and fails with an OSError or with a ValueError that
states the reason.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import IO, Any, TypeGuard

MAX_BYTES = 100_000_000
"""Of a file: what the safetensors library accepts as a header. The largest tokenizers have a third of it."""
MAX_DEPTH = 100
"""Of lists and objects in each other. Python's own parser and most walks over its result end below 1000."""
_LFS_POINTER = b"version https://git-lfs.github.com/"


class UntrustedFileError(ValueError):
    """A file that is no regular file, too large, or not what its name promises; the message contains its path."""


def open_regular(path: str | Path) -> IO[bytes]:
    """Open a regular file for reading, without waiting at a pipe or a device. Raises OSError, and UntrustedFileError
    for another kind of file and for a pointer of git-lfs in place of the file."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115 (returned)
    mode = os.fstat(file.fileno()).st_mode
    reason = ""
    if not stat.S_ISREG(mode):
        reason = "a pipe or a device; expected a file"
    elif file.peek(len(_LFS_POINTER)).startswith(_LFS_POINTER):
        reason = "a git-lfs pointer in place of the file; install git-lfs and run `git lfs pull` in its folder"
    if reason:
        file.close()
        raise UntrustedFileError(f"{path}: {reason}")
    return file


def read_json(path: str | Path, *, max_bytes: int = MAX_BYTES, max_depth: int = MAX_DEPTH) -> Any:
    """Return the content of a JSON file. Raises OSError, and UntrustedFileError with the path and the reason."""
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise UntrustedFileError(f"{path}: larger than {max_bytes / 1e6:.0f} MB, which is the limit here")
    try:
        return parse_json(content, max_depth=max_depth)
    except ValueError as error:
        raise UntrustedFileError(f"{path}: not valid JSON: {error}") from None


def read_json_object(path: str | Path, *, max_bytes: int = MAX_BYTES, max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    """Return the JSON object of a file. Raises as read_json()."""
    content = read_json(path, max_bytes=max_bytes, max_depth=max_depth)
    if not isinstance(content, dict):
        raise UntrustedFileError(f"{path}: expected a json object, found {type(content).__name__}")
    return content


def parse_json(content: str | bytes, *, max_depth: int = MAX_DEPTH) -> Any:
    """Return the value of a JSON text; bytes are UTF-8. Raises ValueError: a UnicodeDecodeError, or a JSONDecodeError
    with the place for a text that is no JSON or nested more than `max_depth` deep."""
    text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
    brackets = text.count("[") + text.count("{")  # at least as many as the value is deep
    try:
        value = json.loads(text)
        deep = brackets > max_depth and _is_deeper(value, max_depth)
    except RecursionError:
        deep = True
    if deep:
        raise json.JSONDecodeError(f"nested more than {max_depth} deep", text, 0)
    return value


def is_inside(name: object) -> TypeGuard[str]:
    """Return whether a value that a file holds is the name of a file in the folder of that file, or below it."""
    if not isinstance(name, str) or not name.isprintable():
        return False
    parts = Path(name).parts
    return bool(parts) and ".." not in parts and not Path(name).is_absolute()


def _is_deeper(value: object, max_depth: int) -> bool:
    level = [value]
    for _ in range(max_depth + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, list | dict)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)
