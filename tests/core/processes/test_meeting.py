"""Stores of process groups: on the loopback address, or behind a gate that lets in nobody without the key."""

import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress

import psutil
import pytest
import torch.distributed as dist

from core.processes.meeting import (
    LOOPBACK,
    Door,
    Gate,
    Meeting,
    MeetingPoint,
    _introduce,
    from_hosts,
    join_store,
    listen,
)

ELSEWHERE = "127.0.0.2"
"""Another address of this machine, which a listener on 127.0.0.1 does not have."""
KEY = bytes(range(32))


def addresses(port: int) -> set[str]:
    """Addresses where this process listens on the port; another process may have the same port of another address."""
    return {
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    }


def reply(host: str, port: int, sent: bytes) -> bytes:
    """Everything that comes back after `sent`, until the other side closes."""
    with socket.create_connection((host, port), timeout=60) as connection:
        connection.settimeout(20)
        connection.sendall(sent)
        received = b""
        try:
            while chunk := connection.recv(1 << 16):
                received += chunk
        except ConnectionError:
            pass
        return received


def test_ranks_of_one_node_meet_where_no_other_node_comes() -> None:
    meeting = Meeting(LOOPBACK, 0)
    store = meeting.store(2, timeout_seconds=60)
    other = join_store(meeting.point, 2, timeout_seconds=60)
    store.set("who", "rank 0")
    assert other.get("who") == b"rank 0"
    assert addresses(meeting.point.port) == {LOOPBACK}


def test_ranks_of_several_nodes_meet_with_the_key_of_the_run() -> None:
    meeting = Meeting(ELSEWHERE, 0, key=KEY)
    store = meeting.store(2, timeout_seconds=60)
    others = [join_store(meeting.point, 2, timeout_seconds=60) for _ in range(3)]
    store.set("big", os.urandom(1 << 20))
    for other in others:
        assert other.get("big") == store.get("big")
        other.add("count", 1)
    assert store.add("count", 0) == 3
    assert addresses(meeting.point.port) == {ELSEWHERE}


@pytest.mark.parametrize("key", [bytes(32), KEY[::-1]])
def test_with_another_key_no_store_is_reached(key: bytes) -> None:
    meeting = Meeting(ELSEWHERE, 0, key=KEY)
    meeting.store(2, timeout_seconds=60)
    stranger = MeetingPoint(host=meeting.point.host, port=meeting.point.port, key=key)
    with pytest.raises(dist.DistError):
        join_store(stranger, 2, timeout_seconds=1).get("anything")


def test_a_gate_says_nothing_to_whoever_cannot_prove_the_key() -> None:
    meeting = Meeting(ELSEWHERE, 0, key=KEY)
    meeting.store(2, timeout_seconds=60)
    for sent in (bytes(64), b"\x00" * 32 + bytes(32) + b"GET", os.urandom(4096)):
        assert len(reply(ELSEWHERE, meeting.point.port, sent)) == 32, "the challenge and no more"


def test_a_proof_that_was_overheard_does_not_open_the_gate_again() -> None:
    said: list[bytes] = []
    meeting = Meeting(ELSEWHERE, 0, key=KEY)
    meeting.store(2, timeout_seconds=60)
    with closing(listen(LOOPBACK, 0)) as between, socket.socket() as gate:
        gate.connect((ELSEWHERE, meeting.point.port))

        def client() -> None:
            with socket.create_connection(between.getsockname()) as connection:
                _introduce(connection, KEY)

        thread = threading.Thread(target=client)
        thread.start()
        inside, _ = between.accept()
        inside.sendall(gate.recv(32))
        said.append(inside.recv(64))
        gate.sendall(said[0])
        inside.sendall(gate.recv(32))
        thread.join()
        inside.close()
    assert len(reply(ELSEWHERE, meeting.point.port, said[0])) == 32


def test_a_rank_leaves_a_gate_that_does_not_have_the_key() -> None:
    with closing(listen(LOOPBACK, 0)) as impostor:
        port = impostor.getsockname()[1]
        client = join_in_background(MeetingPoint(host=LOOPBACK, port=port, key=KEY))
        connection, _ = impostor.accept()
        impostor.close()  # the rank tries again
        with connection:
            connection.sendall(bytes(32))
            assert len(connection.recv(64)) == 64
            connection.sendall(bytes(32))
            assert connection.recv(1 << 16) == b"", "it says nothing of the run"
        client.join()


def join_in_background(point: MeetingPoint) -> threading.Thread:
    def join() -> None:
        with suppress(dist.DistError):
            join_store(point, 2, timeout_seconds=1)

    thread = threading.Thread(target=join)
    thread.start()
    return thread


@pytest.fixture
def greeter() -> Iterator[int]:
    """Port of a server that greets and closes."""
    with closing(listen(LOOPBACK, 0)) as listener:

        def serve() -> None:
            try:
                while True:
                    connection, _ = listener.accept()
                    connection.sendall(b"hello")
                    connection.close()
            except OSError:
                pass

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]


def test_servers_of_the_run_pass_and_other_hosts_do_not(greeter: int) -> None:
    ours, theirs = (Gate(LOOPBACK, 0, greeter, check=from_hosts(hosts)) for hosts in (["localhost"], [ELSEWHERE]))
    assert reply(LOOPBACK, ours.port, b"") == b"hello"
    assert reply(LOOPBACK, theirs.port, b"") == b""
    ours.close()
    assert addresses(ours.port) == set()


def test_a_port_that_is_in_use_is_named_with_its_key() -> None:
    with (
        closing(listen(LOOPBACK, 0)) as taken,
        pytest.raises(OSError, match=r"launch.master_port=\d+: Address already"),
    ):
        Meeting(LOOPBACK, taken.getsockname()[1])


def test_a_door_opens_again_after_more_connections_than_files_that_may_be_open() -> None:
    came = threading.Semaphore(0)
    door = Door(LOOPBACK, 0, check=lambda connection: True, admitted=lambda connection: came.release())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with closing(door), socket.socket() as first, socket.socket() as second:
        files = [os.dup(first.fileno())]
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files[0] + 10, hard))
            with suppress(OSError):  # no file is left
                while True:
                    files.append(os.dup(files[0]))
            for client in (first, second):
                client.connect((LOOPBACK, door.port))
            at_once = came.acquire(timeout=0.2)  # accept() may have had a file before
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for file in files:
                os.close(file)
        for _ in range(1 if at_once else 2):
            assert came.acquire(timeout=20)


def test_the_key_is_not_shown() -> None:
    assert "key" not in repr(MeetingPoint(host="a", port=1, key=KEY))
