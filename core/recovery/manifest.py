"""What makes a folder a valid checkpoint: a manifest of all its files, and a marker that seals the manifest.

    manifest.json   every file of the folder with its size and checksum
    COMMITTED       size and checksum of manifest.json; appears last, by rename

Invariant: a folder that `verify` accepts holds, byte for byte, what was there when it was sealed.

Checksums are BLAKE2b: in the standard library, without Python's lock while it runs, and wide enough that no damage
passes by chance. Blocks of a file are hashed side by side.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from core.runs.checkpoints import MARKER
from core.runs.paths import sync
from model_specs.untrusted import UntrustedFileError, read_json_object

MANIFEST = "manifest.json"
_BLOCK_BYTES = 64 * 2**20
_READ_BYTES = 2**20
_DIGEST_BYTES = 16
_THREADS = min(16, os.cpu_count() or 1)


class DamagedError(ValueError):
    """A folder is not what was sealed; the message contains the file and the reason."""


@dataclass(frozen=True)
class Seal:
    """Size in bytes and checksum of one file."""

    size: int
    checksum: str


def seal(folder: Path) -> int:
    """Bring every file of `folder` to the disk, write the manifest, then the marker. Returns the bytes sealed."""
    with ThreadPoolExecutor(_THREADS) as pool:
        files = {}
        for path in _files(folder):
            sync(path)
            files[path.relative_to(folder).as_posix()] = _seal(path, pool)
        text = json.dumps({"files": {name: asdict(entry) for name, entry in files.items()}}, indent=1)
        (folder / MANIFEST).write_text(text)
        sync(folder / MANIFEST)
        unfinished = folder / f".{MARKER}"
        unfinished.write_text(json.dumps(asdict(_seal(folder / MANIFEST, pool))))
    sync(unfinished)
    for inner in {path.parent for path in _files(folder)}:
        sync(inner)
    os.rename(unfinished, folder / MARKER)
    sync(folder)
    return sum(entry.size for entry in files.values())


def move_into_place(folder: Path, target: Path) -> None:
    """Rename a sealed folder to `target`; what was there before goes."""
    os.rename(folder, target)
    sync(target.parent)


def verify(folder: Path, *, inside: str = "") -> None:
    """Raise DamagedError unless every file is present, whole and unchanged, the manifest and the marker included.
    `inside`: only those of this folder in it."""
    with ThreadPoolExecutor(_THREADS) as pool:
        _compare(folder / MANIFEST, _read_json(folder / MARKER), pool)
        files = _read_json(folder / MANIFEST).get("files")
        if not isinstance(files, dict) or not files:
            raise DamagedError(f"{MANIFEST} lists no files")
        for name, entry in files.items():
            if not inside or name.startswith(f"{inside}/"):
                _compare(folder / name, entry, pool)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in (MANIFEST, f".{MARKER}"))


def _seal(path: Path, pool: Executor) -> Seal:
    """Return the checksum of a file: that of the checksums of its blocks."""
    size = path.stat().st_size
    blocks = pool.map(lambda start: _hash_block(path, start), range(0, size, _BLOCK_BYTES))
    return Seal(size, hashlib.blake2b(b"".join(blocks), digest_size=_DIGEST_BYTES).hexdigest())


def _hash_block(path: Path, start: int) -> bytes:
    """Hash a block in small pieces: a thread does not hold a whole block."""
    checksum = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    with open(path, "rb") as f:
        f.seek(start)
        for _ in range(_BLOCK_BYTES // _READ_BYTES):
            checksum.update(f.read(_READ_BYTES))
    return checksum.digest()


def _compare(path: Path, expected: Mapping[str, object], pool: Executor) -> None:
    try:
        size, checksum = expected["size"], expected["checksum"]
        if path.stat().st_size != size:
            raise DamagedError(f"{path.name} has {path.stat().st_size} bytes instead of {size}")
        if _seal(path, pool).checksum != checksum:
            raise DamagedError(f"{path.name} is damaged: its checksum differs")
    except FileNotFoundError:
        raise DamagedError(f"{path.name} is missing") from None
    except (OSError, KeyError, TypeError) as error:
        raise DamagedError(f"{path.name} cannot be checked: {error!r}") from error


def _read_json(path: Path) -> dict[str, object]:
    try:
        return read_json_object(path)
    except FileNotFoundError:
        raise DamagedError(f"{path.name} is missing: it was never committed") from None
    except (OSError, UntrustedFileError) as error:
        raise DamagedError(f"{path.name} cannot be read: {error}") from error
