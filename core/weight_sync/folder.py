"""Weights in a folder that processes share which know nothing else of each other: a train and an explore process.

    FOLDER/LATEST              {"version": 12, "where": "FOLDER/version-12-..."}, replaced as a whole
    FOLDER/version-12-.../     a Hugging Face folder
    FOLDER/WANTED              {"newer_than": 11}: a replica asks for newer weights
    FOLDER/TRAINER             where the publisher listens, if it also sends weights itself (jobs.py)
    FOLDER/replicas/NAME       the version that a replica holds, and the folders that it needs; touched while it lives

One process publishes. A folder gets its name when it is complete and on the disk, and LATEST names it after that, so a
crash at any moment leaves LATEST at a complete version. A version other than the latest is removed when no living
replica holds or has claimed it: the publisher first takes its name away and then reads the claims once more, a replica
claims first and then looks whether the name is there.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, cast

from core.runs.checkpoints import sync

logger = logging.getLogger(__name__)


LATEST = "LATEST"
_WANTED, _TRAINER = "WANTED", "TRAINER"
_PREFIX, _WRITING, _REMOVED = "version-", "writing-", "removed-"
LEASE_SECONDS = 60.0
"""A replica whose file was not touched for so long is lost."""
_TOUCHES_PER_LEASE = 6


@dataclass(frozen=True, kw_only=True)
class Published:
    """One version of the weights."""

    version: int
    where: str
    """What it is loaded from: a Hugging Face folder. Empty: the trainer sends it to the replicas itself."""


class Meeting(TypedDict):
    """Where a publisher listens for the jobs that it sends weights to itself."""

    id: str
    """Of the publishing process."""
    node: str
    """Name of its host."""
    host: str
    port: int
    key: str
    """In hexadecimal. Empty: all weights come through the folder."""


FOLDER_ALONE = Meeting(id="", node="", host="", port=0, key="")
"""Of a publisher that sends nothing itself."""
OF_ANOTHER_USER = Meeting(id="of another user", node="", host="", port=0, key="")


class ReplicaLost(RuntimeError):
    """A replica that was marked as dead used its subscription."""


class _Entry(TypedDict):
    """Content of the file of a replica."""

    held: int | None
    folders: list[str]
    """Names of the folders that it needs."""
    why: str
    """Reason why it is lost; empty where it is not."""


class VersionFolder:
    """The register of weight versions: what is published, and which version each living replica holds. Many processes
    may open it; one of them publishes. The version of latest() never decreases; a replica that was lost holds nothing
    until it subscribes again.

    Times are compared on the clock of the file system, so the clocks of hosts may differ.
    """

    def __init__(self, folder: str | Path, *, lease_seconds: float = LEASE_SECONDS) -> None:
        """Make the folder if it does not exist. Raises OSError where this process cannot write there."""
        self.path, self._lease = Path(folder).resolve(), lease_seconds
        self._replicas = self.path / "replicas"
        try:
            self._replicas.mkdir(parents=True, exist_ok=True)
            self._entries()
        except OSError as error:
            raise OSError(
                f"synchronizer.folder={self.path}: {error}; every job writes there: name a folder that it may write"
            ) from error

    def write(self, version: int, fill: Callable[[Path], None]) -> Published:
        """Publish the Hugging Face folder that `fill(folder)` writes; return what latest() returns then. Raises
        OSError; latest() is as before then."""
        self._check_newer(version)
        name = f"{_PREFIX}{version}-{uuid.uuid4().hex[:8]}"
        writing, target = self.path / f"{_WRITING}{name}", self.path / name
        writing.mkdir()
        fill(writing)
        for file in writing.iterdir():
            sync(file)
        sync(writing)
        writing.rename(target)
        sync(self.path)
        self.publish(version, str(target))
        return Published(version=version, where=str(target))

    def publish(self, version: int, where: str) -> None:
        """Make a complete version the latest one, and remove what no replica needs. Raises ValueError for an older
        one."""
        self._check_newer(version)
        _replace(self.path / LATEST, {"version": version, "where": where})
        sync(self.path)
        self._remove_unneeded()

    def _check_newer(self, version: int) -> None:
        latest = self.latest()
        if latest is not None and version < latest.version:
            raise ValueError(f"version {version} cannot be published after version {latest.version}")

    def request(self, newer_than: int) -> None:
        """Ask the publisher for weights newer than this version, unless a replica has."""
        found = _read(self.path / _WANTED)
        if found is None or found["newer_than"] < newer_than:
            _replace(self.path / _WANTED, {"newer_than": newer_than})

    def wanted(self, newest: int | None) -> bool:
        """Return whether a replica has asked for newer weights than those of version `newest`."""
        found = _read(self.path / _WANTED)
        return found is not None and (newest is None or found["newer_than"] >= newest)

    def announce(self, meeting: Meeting) -> None:
        """Let replicas know where the publisher listens. Only this user can read a key."""
        _replace(self.path / _TRAINER, meeting, mode=0o600 if meeting["key"] else 0o666)

    def meeting(self) -> Meeting | None:
        """Return where the last publisher listens, or has listened; OF_ANOTHER_USER where only that user may know."""
        try:
            found = _read(self.path / _TRAINER)
        except PermissionError:
            return OF_ANOTHER_USER
        return None if found is None else cast(Meeting, found)

    def latest(self) -> Published | None:
        """Return the newest version; None before the first."""
        found = _read(self.path / LATEST)
        return None if found is None else Published(**found)

    def holders(self) -> dict[str, int | None]:
        """Return the version that every living replica samples with, by its name; None: it has none yet."""
        return {name: entry["held"] for name, entry in self._entries().items() if not entry["why"]}

    def lost(self) -> dict[str, str]:
        """Return why each replica that is lost, and has not subscribed again, was marked as dead."""
        return {name: entry["why"] for name, entry in self._entries().items() if entry["why"]}

    def lose(self, replica: str, why: str) -> None:
        """Mark a replica as dead. Nothing happens where it is not subscribed."""
        entry = _read(self._replicas / replica)
        if entry is not None and not entry["why"]:
            _replace(self._replicas / replica, entry | {"why": why})

    def subscribe(self, replica: str) -> FolderSubscription:
        """Enter a replica, or one of that name again after it was lost. Raises ValueError while another one of that
        name lives."""
        if "/" in replica or replica.startswith("."):
            raise ValueError(f"replica={replica!r} must be the name of a file")
        if replica in self.holders():
            raise ValueError(f"{self.path}: a replica named {replica!r} is subscribed already; names must differ")
        return FolderSubscription(self, self._replicas / replica, touch_seconds=self._lease / _TOUCHES_PER_LEASE)

    def _entries(self) -> dict[str, _Entry]:
        """Return what every replica has written, by name, with `why` it is lost or an empty string."""
        clock = self._replicas / f".clock-{uuid.uuid4().hex}"
        clock.touch()
        now = clock.stat().st_mtime
        clock.unlink()
        entries: dict[str, _Entry] = {}
        for path in self._replicas.iterdir():
            with suppress(FileNotFoundError):  # it has left
                if path.name.startswith(".") or (entry := _read(path)) is None:
                    continue
                silent = now - path.stat().st_mtime
                if not entry["why"] and silent > self._lease:
                    entry["why"] = f"no sign of life for {silent:.0f} s"
                entries[path.name] = cast(_Entry, entry)
        return entries

    def _needed(self) -> set[str]:
        """Return the names of the folders that must stay."""
        latest = self.latest()
        needed = set() if latest is None else {Path(latest.where).name}
        return needed.union(*(entry["folders"] for entry in self._entries().values() if not entry["why"]))

    def _remove_unneeded(self) -> None:
        for replica, why in self.lost().items():  # for good: it may wake up and find its version gone
            self.lose(replica, why)
        for left in self.path.glob(f"{_WRITING}*"):
            shutil.rmtree(left, ignore_errors=True)
        needed = self._needed()
        for version in self.path.glob(f"{_PREFIX}*"):
            if version.name not in needed:
                version.rename(self.path / f"{_REMOVED}{version.name}")
        needed = self._needed()
        for removed in self.path.glob(f"{_REMOVED}*"):
            if (name := removed.name.removeprefix(_REMOVED)) in needed:
                removed.rename(self.path / name)
            else:
                shutil.rmtree(removed, ignore_errors=True)


def name_of_process(trial: str) -> str:
    """Return the name of this process, of a trial, among replicas: no other one has it."""
    return f"{trial}-{socket.gethostname()}-{os.getpid()}"


class FolderSubscription:
    """The place of one replica in the register, until close() or until it is lost. A thread touches its file while this
    process lives."""

    def __init__(self, versions: VersionFolder, path: Path, *, touch_seconds: float) -> None:
        self._versions, self._path = versions, path
        self._held: Published | None = None
        self._claimed: Published | None = None
        self._closed = threading.Event()
        self._write()
        threading.Thread(target=self._touch, args=(touch_seconds,), name=f"touch {path.name}", daemon=True).start()

    @property
    def replica(self) -> str:
        return self._path.name

    def claim(self) -> Published | None:
        """Return the latest version if it is newer than the one held: it can be loaded until the next claim(), hold()
        or close(). Raises ReplicaLost, and FileNotFoundError where the folder of the latest version is missing."""
        self._check()
        latest = self._versions.latest()
        while latest is not None and (self._held is None or latest.version > self._held.version):
            self._claimed = latest
            self._write()
            if Path(latest.where).is_dir():
                return latest
            missing, latest = latest, self._versions.latest()
            if latest == missing:
                raise FileNotFoundError(f"{self._versions.path / LATEST} names {missing.where}, which does not exist")
        return None

    def hold(self, version: int) -> None:
        """Report that the replica samples with this version from now on. Raises ReplicaLost."""
        self._check()
        claimed = self._claimed
        same = claimed is not None and claimed.version == version
        self._held = claimed if same else Published(version=version, where="")
        self._claimed = None
        self._write()

    def close(self) -> None:
        """Leave: nothing is kept for the replica any more."""
        self._closed.set()
        self._path.unlink(missing_ok=True)

    def __enter__(self) -> FolderSubscription:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check(self) -> None:
        if self._closed.is_set():
            raise ReplicaLost(f"{self.replica}: it has left")
        if why := self._versions.lost().get(self.replica):
            raise ReplicaLost(f"{self.replica}: {why}")

    def _write(self) -> None:
        kept = [Path(one.where).name for one in (self._held, self._claimed) if one is not None and one.where]
        held = None if self._held is None else self._held.version
        _replace(self._path, {"held": held, "folders": kept, "why": ""})

    def _touch(self, every_seconds: float) -> None:
        while not self._closed.wait(every_seconds):
            with suppress(OSError):
                os.utime(self._path)


def _replace(path: Path, content: Mapping[str, object], *, mode: int = 0o666) -> None:
    """Write a file whole or not at all."""
    new = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
