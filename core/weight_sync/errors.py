"""The error of a weight push."""

from __future__ import annotations

from collections.abc import Iterable


class PushError(RuntimeError):
    """A weight push failed; the generators hold old and new weights mixed and must not continue. The message names the
    server, or the trainer's rank, and the cause."""

    servers: tuple[str, ...] = ()
    """Names of the servers that did not take what was sent; empty where the trainer failed."""

    def __init__(self, message: str, *, servers: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.servers = tuple(servers)
