"""The one reader of files that a stranger may have written: JSON of models, checkpoints and data, within limits.

Invariant: reading ends, takes memory in proportion to `max_bytes`, and fails with an OSError or with a ValueError that
states the reason.

Single values of a config.json are read with the type and range of the function's name; every other value is a
ModelConfigError with key and value.
"""

import hmac
import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TypeGuard

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


def read_bytes(path: str | Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a file. Raises OSError, and UntrustedFileError with the path and the reason."""
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise UntrustedFileError(f"{path}: larger than {max_bytes / 1e6:.0f} MB, which is the limit here")
    return content


def read_json(path: str | Path, *, max_bytes: int = MAX_BYTES, max_depth: int = MAX_DEPTH) -> object:
    """Return the content of a JSON file. Raises as read_bytes()."""
    content = read_bytes(path, max_bytes=max_bytes)
    try:
        return parse_json(content, max_depth=max_depth)
    except ValueError as error:
        raise UntrustedFileError(f"{path}: not valid JSON: {error}") from None


def read_json_object(path: str | Path, *, max_bytes: int = MAX_BYTES, max_depth: int = MAX_DEPTH) -> dict[str, object]:
    """Return the JSON object of a file. Raises as read_json()."""
    content = read_json(path, max_bytes=max_bytes, max_depth=max_depth)
    if not isinstance(content, dict):
        raise UntrustedFileError(f"{path}: expected a json object, found {type(content).__name__}")
    return content


def parse_json(content: str | bytes, *, max_depth: int = MAX_DEPTH) -> object:
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


def is_secret(given: str, secret: str) -> bool:
    """Return whether text from a request, which may hold bytes that are no text, is this secret; how long it takes does
    not tell how much of it is right."""
    return hmac.compare_digest(given.encode(errors="surrogateescape"), secret.encode())


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


RawConfig = Mapping[str, object]
"""A decoded config.json, or an object in it: no value has been checked."""


class ModelConfigError(ValueError):
    """A config.json that cannot be read or that describes a model outside the supported families."""


def positive(raw: RawConfig, key: str, default: int | None = None, *, least: int = 1, most: int = 1 << 31) -> int:
    """Return an integer from `least` to `most`. `default`, if any, stands for a key that is absent or null."""
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or value < least:
        allowed = "a positive integer" if least == 1 else f"an integer from {least}"
        raise ModelConfigError(f"{key}={value!r} must be {allowed}")
    if value > most:
        raise ModelConfigError(f"{key}={value} must be at most {most}")
    return value


def optional(raw: RawConfig, key: str, default: int) -> int | None:
    """Return a positive integer, or None for null. `default` stands for a key that is absent."""
    value = raw.get(key, default)
    return None if value is None else positive({key: value}, key)


def num_layers(raw: RawConfig) -> int:
    """Return num_hidden_layers, up to what no model exceeds: lists of this length are made."""
    return positive(raw, "num_hidden_layers", most=1000)


def number(values: RawConfig, key: str, default: float) -> float:
    """Return a finite number. `default` stands for a key that is absent or null."""
    value = values.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelConfigError(f"{key}={value!r} must be a number")
    return float(value)


def boolean(raw: RawConfig, key: str, default: bool) -> bool:
    """Return true or false. `default` stands for a key that is absent."""
    value = raw.get(key, default)
    if type(value) is not bool:
        raise ModelConfigError(f"{key}={value!r} must be true or false")
    return value


def positive_number(values: RawConfig, key: str, default: float) -> float:
    """Return a number above 0. `default` stands for a key that is absent or null."""
    value = number(values, key, default)
    if value <= 0:
        raise ModelConfigError(f"{key}={value!r} must be a number above 0")
    return value


def json_object(raw: RawConfig, key: str) -> RawConfig:
    """Return the json object at `key`; empty where it is absent or null."""
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ModelConfigError(f"{key}={value!r} must be a json object")
    return value


def require(raw: RawConfig, expected: RawConfig) -> None:
    """Raise ModelConfigError unless every key of `expected` is absent, null, or has that value."""
    for key, value in expected.items():
        if raw.get(key, value) not in (value, None):
            raise ModelConfigError(f"{key}={raw[key]!r} is not supported; only {value!r}")
