"""Stores through which the processes of a run form groups, closed to other processes.

torch's TCPStore listens on every address and serves every connection. Here it listens on the loopback address. For
other nodes a gate stands before it, which passes connections on after a check: that both sides have the key of the run,
or that they come from one of the nodes named. Source of the handshake: mutual challenge-response with HMAC (RFC 2104).
"""

import hashlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection

import torch.distributed as dist

LOOPBACK = "127.0.0.1"
_NONCE_BYTES = 32
_MAC_BYTES = 32
_HANDSHAKE_SECONDS = 10.0
_MOMENT_SECONDS = 0.1
_CHUNK_BYTES = 1 << 16

Check = Callable[[socket.socket], bool]
"""Returns whether a new connection may pass. Raises OSError where it ends."""


@dataclass(frozen=True, kw_only=True)
class MeetingPoint:
    """Where the store of a group is reached. Without a key it is on this node alone."""

    host: str
    port: int
    key: bytes | None = field(default=None, repr=False)


class Meeting:
    """The side of the first rank: a store on the loopback address, and for other nodes a gate before it."""

    def __init__(self, host: str, port: int, *, key: bytes | None = None) -> None:
        """`host`: the loopback address, or an address of this node, which needs a key. `port`: 0 for a free one. Raises
        OSError where it is in use."""
        at_home = host == LOOPBACK
        assert at_home or key, "other nodes need the key"
        self._store_listener = listen(LOOPBACK, port if at_home else 0)
        self._store_port = self._store_listener.getsockname()[1]
        self._gate = None if at_home else Gate(host, port, self._store_port, check=lambda s: _admit(s, key or b""))
        port = self._store_port if self._gate is None else self._gate.port
        self.point = MeetingPoint(host=host, port=port, key=None if at_home else key)

    def store(self, world_size: int, *, timeout_seconds: float) -> dist.Store:
        """Return the store; serves the others from now on. Call once."""
        return served_store(self._store_listener, world_size, timeout_seconds=timeout_seconds)


def served_store(listener: socket.socket, world_size: int, *, timeout_seconds: float) -> dist.Store:
    """Return a store that listens on this socket, which it takes over."""
    port = listener.getsockname()[1]
    return dist.TCPStore(
        LOOPBACK, port, world_size, is_master=True, wait_for_workers=False,
        timeout=timedelta(seconds=timeout_seconds), master_listen_fd=listener.detach(),
    )  # fmt: skip


def join_store(point: MeetingPoint, world_size: int, *, timeout_seconds: float) -> dist.Store:
    """Return the store of another process. Raises RuntimeError where it does not answer in time."""
    host, port = point.host, point.port
    if point.key is not None:
        host, port = LOOPBACK, _start_tunnel(point)
    return dist.TCPStore(
        host, port, world_size, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_seconds)
    )


class Door:
    """Listens, and hands over the connections that the check admits."""

    def __init__(self, host: str, port: int, *, check: Check, admitted: Callable[[socket.socket], None]) -> None:
        """`port`: 0 for a free one. `admitted`: is called in a thread of each connection; what it raises as OSError
        closes the connection. Raises OSError where the port is in use."""
        self._listener, self._check, self._admitted = listen(host, port), check, admitted
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, name="door", daemon=True).start()

    def close(self) -> None:
        """Admit no further connections; those that passed stay."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
        self._listener.close()

    def _serve(self) -> None:
        while self._listener.fileno() >= 0:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or this process has too many open files for the moment
                time.sleep(_MOMENT_SECONDS)
                continue
            threading.Thread(target=self._look_at, args=(connection,), name="door", daemon=True).start()

    def _look_at(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_HANDSHAKE_SECONDS)
            if not self._check(connection):
                raise ConnectionError("refused")
            self._admitted(connection)
        except OSError:
            connection.close()


class Gate(Door):
    """Listens for other nodes and passes on what the check admits, to a port of the loopback address."""

    def __init__(self, host: str, port: int, target_port: int, *, check: Check) -> None:
        """`port`: 0 for a free one. Raises OSError where it is in use."""
        self._target = target_port
        super().__init__(host, port, check=check, admitted=self._pass_on)

    def _pass_on(self, connection: socket.socket) -> None:
        inside = socket.create_connection((LOOPBACK, self._target), timeout=_HANDSHAKE_SECONDS)
        _splice(connection, inside)


def open_door(host: str, key: bytes, admitted: Callable[[Connection], None]) -> MeetingPoint:
    """Hand over the connections of processes that have the key, for as long as this one lives; return where they
    knock()."""
    door = Door(host, 0, check=lambda s: _admit(s, key), admitted=lambda s: admitted(_messages(s)))
    return MeetingPoint(host=host, port=door.port, key=key)


def knock(point: MeetingPoint) -> Connection:
    """Return a connection to the process that has opened this door. Raises OSError where it does not answer, or has
    another key."""
    outside = socket.create_connection((point.host, point.port), timeout=_HANDSHAKE_SECONDS)
    _introduce(outside, point.key or b"")
    return _messages(outside)


def _messages(connection: socket.socket) -> Connection:
    """Return a connection for whole objects, which are pickled: of processes that have the key alone."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(connection.detach())


def from_hosts(hosts: Collection[str]) -> Check:
    """Return a check that admits connections from these addresses or names of nodes."""
    admitted = {info[4][0] for host in hosts for info in socket.getaddrinfo(host, None)}
    return lambda connection: connection.getpeername()[0] in admitted


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises OSError with the port."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"launch.master_port={port}: {error.strerror} on {host}") from error
    listener.listen(1024)
    return listener


def _start_tunnel(point: MeetingPoint) -> int:
    """Return a port of the loopback address that leads through the gate of `point`."""
    listener = listen(LOOPBACK, 0)

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_through_gate, args=(connection, point), name="tunnel", daemon=True).start()

    threading.Thread(target=serve, name="tunnel", daemon=True).start()
    return listener.getsockname()[1]


def _through_gate(connection: socket.socket, point: MeetingPoint) -> None:
    try:
        outside = socket.create_connection((point.host, point.port), timeout=_HANDSHAKE_SECONDS)
        _introduce(outside, point.key or b"")
    except OSError:
        connection.close()
        return
    _splice(connection, outside)


def _admit(connection: socket.socket, key: bytes) -> bool:
    """Return whether the other side has the key; prove then that this one has it."""
    challenge = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(challenge)
    answer = _read(connection, _NONCE_BYTES + _MAC_BYTES)
    nonces = challenge + answer[:_NONCE_BYTES]
    if not hmac.compare_digest(answer[_NONCE_BYTES:], _mac(key, b"from", nonces)):
        return False
    connection.sendall(_mac(key, b"gate", nonces))
    return True


def _introduce(connection: socket.socket, key: bytes) -> None:
    """Prove to a gate that this side has the key. Raises ConnectionError where the gate has not."""
    nonces = _read(connection, _NONCE_BYTES) + secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(nonces[_NONCE_BYTES:] + _mac(key, b"from", nonces))
    if not hmac.compare_digest(_read(connection, _MAC_BYTES), _mac(key, b"gate", nonces)):
        raise ConnectionError("the gate does not have the key of the run")


def _mac(key: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.new(key, side + nonces, hashlib.sha256).digest()


def _read(connection: socket.socket, count: int) -> bytes:
    read = b""
    while len(read) < count:
        chunk = connection.recv(count - len(read))
        if not chunk:
            raise ConnectionError("closed in the handshake")
        read += chunk
    return read


def _splice(one: socket.socket, other: socket.socket) -> None:
    """Copy bytes both ways until both sides have closed."""
    for end in (one, other):
        end.settimeout(None)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    back = threading.Thread(target=_copy, args=(other, one), name="splice", daemon=True)
    back.start()
    _copy(one, other)
    back.join()
    one.close()
    other.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while chunk := source.recv(_CHUNK_BYTES):
            target.sendall(chunk)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
