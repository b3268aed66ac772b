"""Turns of several senders of one weight push, and what they add up, through the store of the trainer's ranks.

A server handles one update at a time. Two servers that handled the updates of two senders in different orders would
wait for each other, so the senders take turns, bucket by bucket: while one sends, the others gather and convert.
A number in the store counts the turns that have ended, and so determines whose turn it is. A sender that fails writes
why, and the others raise the same at once. Nothing here is collective: a sender that has exited is named when the time
is over.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from core.weight_sync.calls import Deadline
from core.weight_sync.comparing import Sent
from core.weight_sync.errors import PushError

_POLL_SECONDS = 0.0002
_LOOK_FOR_FAILURES_SECONDS = 0.02
_SPARE_SECONDS, _SPARE_SHARE = 2.0, 0.1
"""With several senders, servers must answer this long before the end of a push, or this share of its time, whichever is
less: a sender names a late server before the other senders name it."""


class Turns:
    """The place of one sender among all of them; with one sender nothing waits."""

    def __init__(self, senders: Sequence[int], rank: int, connection: str) -> None:
        """`senders`: ranks of the trainer, in the order of their turns. `rank`: this one. `connection`: see
        SenderSettings."""
        self._senders, self._rank = senders, rank
        self._index = senders.index(rank) if rank in senders else -1
        self._store: dist.Store | None = None
        if len(senders) > 1 and self._index >= 0:
            self._store = dist.PrefixStore(f"weight-push-{connection}", c10d._get_default_store())
        self._next = self._index
        self._num_reductions = 0

    def deadline(self, seconds: float) -> Deadline:
        """Return the time limit of a push, which begins now."""
        several = len(self._senders) > 1
        return Deadline(seconds, spare=min(_SPARE_SECONDS, _SPARE_SHARE * seconds) if several else 0.0)

    def wait(self, deadline: Deadline) -> None:
        """Return when it is this sender's turn. Raises PushError where another one has failed or is late."""
        if self._store is not None:
            store = self._store
            self._wait(lambda: store.add("ended", 0) >= self._next, deadline, self._whose_turn)
            if deadline.is_over():  # not the servers that it would send to
                raise self._too_late(self._rank, deadline)

    def end(self) -> None:
        """Pass the turn on."""
        if self._store is not None:
            self._next += len(self._senders)
            self._store.add("ended", 1)

    def fail(self, error: BaseException) -> None:
        """Let the others raise this error too, unless one has failed before."""
        servers = error.servers if isinstance(error, PushError) else ()
        with suppress(dist.DistError):  # the process that serves the store is gone
            if self._store is not None and not self._store.check(["failed"]):
                self._store.set("failed", json.dumps([f"trainer rank {self._rank}: {error}", servers]))

    def reduce(self, sent: Sent, deadline: Deadline) -> bool:
        """Add up what all senders have sent, in a tree; return whether this is the first sender, whose `sent` has
        everything then. Raises as wait() does."""
        if self._store is None:
            return True
        store, number = self._store, self._num_reductions
        self._num_reductions += 1
        step = 1
        while step < len(self._senders):
            if self._index % (2 * step):
                store.set(f"sent-{number}-{self._index}", sent.to_text(self._rank))
                return False
            peer = self._index + step
            if peer < len(self._senders):
                key = f"sent-{number}-{peer}"
                self._wait(lambda key=key: store.check([key]), deadline, lambda peer=peer: self._senders[peer])  # type: ignore[misc]
                sent.include(store.get(key).decode(), self._rank)
                store.delete_key(key)
            step *= 2
        return True

    def _whose_turn(self) -> int:
        assert self._store is not None, "with one sender it is always its turn"
        return self._senders[self._store.add("ended", 0) % len(self._senders)]

    def _wait(self, done: Callable[[], bool], deadline: Deadline, late: Callable[[], int]) -> None:
        """Return when `done`. `late`: the rank that is waited for."""
        assert self._store is not None, "with one sender nothing is waited for"
        try:
            self._raise_failure_of_another()
            look_at = time.monotonic() + _LOOK_FOR_FAILURES_SECONDS
            while not done():
                if time.monotonic() >= look_at:
                    self._raise_failure_of_another()
                    look_at = time.monotonic() + _LOOK_FOR_FAILURES_SECONDS
                if deadline.is_over():
                    raise self._too_late(late(), deadline)
                time.sleep(_POLL_SECONDS)
        except dist.DistError as error:
            raise PushError(f"the store of the trainer's ranks does not answer: {error}") from error

    def _raise_failure_of_another(self) -> None:
        assert self._store is not None, "with one sender there is no other"
        if self._store.check(["failed"]):
            message, servers = json.loads(self._store.get("failed"))
            raise PushError(message, servers=servers)

    def _too_late(self, rank: int, deadline: Deadline) -> PushError:
        return PushError(
            f"trainer rank {rank}, one of {len(self._senders)} senders of the weight push, did not send its part "
            f"within push.timeout_seconds={deadline.seconds:g}"
        )
