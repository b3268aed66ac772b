"""Which Ray cluster a run joins: the one that a key or a variable names, or the one that runs on this node.

Standard library only: a dry run uses it too, which does not import Ray.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from core.config.experiments import ExperimentConfig

RAY_ADDRESS = "RAY_ADDRESS"
"""Environment variable that Ray reads, too."""
AUTO, LOCAL = "auto", "local"
"""Ray's words for the cluster that runs on this node, and for a new one."""
CONNECT_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class JoinedCluster:
    """A Ray cluster that a run joins."""

    source: str
    """Where the address comes from: launch.ray_address, RAY_ADDRESS, or `ray start`."""
    given: str
    """As it was written."""
    address: str | None
    """host:port; None where `auto` finds no cluster on this node."""

    def __str__(self) -> str:
        return f"{self.source}={self.given}" if self.source != STARTED else f"{self.source}, {self.given}"

    @property
    def host_and_port(self) -> tuple[str, int] | None:
        """The address in two parts; None where it is not host:port."""
        host, _, port = (self.address or "").removeprefix("ray://").rpartition(":")
        return (host.strip("[]"), int(port)) if host and port.isdigit() else None


STARTED = "`ray start` on this node"


def joined_cluster(config: ExperimentConfig) -> JoinedCluster | None:
    """Return the Ray cluster that this run joins; None where the run starts its own on this machine.

    A run of several nodes joins the cluster of this node without a key: it cannot start one of several nodes."""
    for source, given in _given(config):
        if given == LOCAL:
            return None
        return JoinedCluster(source=source, given=given, address=running_ray() if given == AUTO else given)
    if config.n_nodes > 1 and config.mode != "local" and (address := running_ray()):
        return JoinedCluster(source=STARTED, given=address, address=address)
    return None


def _given(config: ExperimentConfig) -> Iterator[tuple[str, str]]:
    if config.launch.ray_address:
        yield "launch.ray_address", config.launch.ray_address
    inherited = None if config.mode == "local" else os.environ.get(RAY_ADDRESS)
    if given := inherited or config.external_configs.envs.get(RAY_ADDRESS):
        yield RAY_ADDRESS, given


def running_ray() -> str | None:
    """Return host:port of the Ray cluster that `ray start` made this node a part of, if it still listens."""
    try:
        address = (Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray" / "ray_current_cluster").read_text().strip()
    except OSError:
        return None
    found = JoinedCluster(source=STARTED, given=address, address=address)
    return address if connection_error(found) is None else None


def connection_error(cluster: JoinedCluster) -> str | None:
    """Return why no connection to the cluster's address can be made; None if one can, or if it is not host:port."""
    place = cluster.host_and_port
    if place is None:
        return None
    try:
        socket.create_connection(place, timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return f"nothing listens there ({type(error).__name__}: {error})"
    return None


def not_joined_note(config: ExperimentConfig) -> str | None:
    """Return a line about a Ray cluster on this node that the run does not join; None where there is none."""
    if joined_cluster(config) is not None or any(True for _ in _given(config)) or config.mode == "local":
        return None
    address = running_ray()
    return address and (
        f"A Ray cluster runs on this node ({address}); this run starts one of its own. To join it: RAY_ADDRESS=auto"
    )
