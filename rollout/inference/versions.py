"""The register of weight versions: what is published, who samples with which version, and which replicas respond.

A trainer publishes; replicas, known by name, subscribe, claim what is newer than what they hold, and report what they
sample with. `MemoryVersions` is the register of one process; core/weight_sync/folder.py is one for processes that share
only a file system. Invariants: the version of latest() never decreases; a version that a living replica holds or has
claimed can be loaded; a replica that was lost holds nothing until it subscribes again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Published:
    """One version of the weights."""

    version: int
    where: str
    """What it is loaded from: a Hugging Face folder. Empty: the trainer sends it to the replicas itself."""


class Subscription(Protocol):
    """The place of one replica in the register, until close() or until it is lost."""

    @property
    def replica(self) -> str:
        """Name of the replica."""
        ...

    def claim(self) -> Published | None:
        """Return the latest version if it is newer than the one held: it can be loaded until the next claim(), hold()
        or close(). Raises ReplicaLost."""
        ...

    def hold(self, version: int) -> None:
        """Report that the replica samples with this version from now on. Raises ReplicaLost."""
        ...

    def close(self) -> None:
        """Leave: nothing is kept for the replica any more."""
        ...


class Versions(Protocol):
    """See the file."""

    def publish(self, version: int, where: str) -> None:
        """Make a complete version the latest one. Raises ValueError for an older one."""
        ...

    def latest(self) -> Published | None:
        """Return the newest version; None before the first."""
        ...

    def holders(self) -> Mapping[str, int | None]:
        """Return the version that every living replica samples with, by its name; None: it has none yet."""
        ...

    def subscribe(self, replica: str) -> Subscription:
        """Enter a replica, or one of that name again after it was lost. Raises ValueError while another one of that
        name lives."""
        ...

    def lose(self, replica: str, why: str) -> None:
        """Mark a replica as dead. Nothing happens where it is not subscribed."""
        ...

    def lost(self) -> Mapping[str, str]:
        """Return why each replica that is lost, and has not subscribed again, was marked as dead."""
        ...


class ReplicaLost(RuntimeError):
    """A replica that was marked as dead used its subscription."""


def check_newer(latest: Published | None, version: int) -> None:
    """Raise ValueError where a version is older than the latest one."""
    if latest is not None and version < latest.version:
        raise ValueError(f"version {version} cannot be published after version {latest.version}")


@dataclass(eq=False)
class _Place:
    """The subscription of one replica in MemoryVersions."""

    replica: str
    versions: MemoryVersions
    held: int | None = None
    claimed: int | None = None

    def claim(self) -> Published | None:
        self._check()
        latest = self.versions.latest()
        if latest is None or (self.held is not None and latest.version <= self.held):
            return None
        self.claimed = latest.version
        return latest

    def hold(self, version: int) -> None:
        self._check()
        self.held, self.claimed = version, None

    def close(self) -> None:
        self.versions.leave(self)

    def _check(self) -> None:
        if not self.versions.has(self):
            raise ReplicaLost(f"{self.replica}: {self.versions.lost().get(self.replica, 'it has left')}")


@dataclass(eq=False)
class MemoryVersions:
    """`Versions` of one process."""

    _latest: Published | None = None
    _places: dict[str, _Place] = field(default_factory=dict)
    _lost: dict[str, str] = field(default_factory=dict)

    def publish(self, version: int, where: str = "") -> None:
        """See Versions."""
        check_newer(self._latest, version)
        self._latest = Published(version=version, where=where)

    def latest(self) -> Published | None:
        """See Versions."""
        return self._latest

    def holders(self) -> dict[str, int | None]:
        """See Versions."""
        return {name: place.held for name, place in self._places.items()}

    def subscribe(self, replica: str) -> _Place:
        """See Versions."""
        if replica in self._places:
            raise ValueError(f"a replica named {replica!r} is subscribed already; names must differ")
        self._lost.pop(replica, None)
        self._places[replica] = _Place(replica, self)
        return self._places[replica]

    def lose(self, replica: str, why: str) -> None:
        """See Versions."""
        if self._places.pop(replica, None) is not None:
            self._lost[replica] = why

    def lost(self) -> dict[str, str]:
        """See Versions."""
        return dict(self._lost)

    def places(self) -> list[_Place]:
        """Return the subscriptions of the living replicas."""
        return list(self._places.values())

    def has(self, place: _Place) -> bool:
        """Return whether this subscription still counts."""
        return self._places.get(place.replica) is place

    def leave(self, place: _Place) -> None:
        """Remove a subscription."""
        if self.has(place):
            del self._places[place.replica]
