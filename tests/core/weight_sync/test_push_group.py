"""The places of servers in the process group of the weight push."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from core.weight_sync.nccl import NcclSender
from helpers.push_doubles import sender_of
from rollout.inference.backend import GroupMembership


@dataclass
class Server:
    """An endpoint that joins at once."""

    name: str
    tp: int
    pp: int = 1
    host: str = "127.0.0.1"
    joined: list[GroupMembership] = field(default_factory=list)

    def join_group(self, group: GroupMembership, *, timeout_seconds: float) -> None:
        self.joined.append(group)


@pytest.mark.parametrize("sizes", [(1,), (2,), (1, 1), (2, 1, 4)])
def test_every_rank_of_the_push_group_belongs_to_one_server_or_the_trainer(
    sizes: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worlds: list[int] = []

    def make_group(self: NcclSender, backend: str, store: Any, world: int, timeout_seconds: float) -> None:
        worlds.append(world)

    monkeypatch.setattr(NcclSender, "_make_group", make_group)
    servers = [Server(f"generator-{i}", tp) for i, tp in enumerate(sizes)]
    sender: Any = sender_of("nccl", tmp_path)
    sender.connect(servers)
    places = [place for server in servers for place in server.joined]
    ranks = [place.first_rank + i for server, place in zip(servers, places, strict=True) for i in range(server.tp)]
    assert ranks == [*range(1, 1 + sum(sizes))], "rank 0 is the trainer's"
    assert worlds == [1 + sum(sizes)] and {place.world_size for place in places} == {1 + sum(sizes)}
    assert len({(place.name, place.host, place.port) for place in places}) == 1, "all join the same group"
    sender.close()
