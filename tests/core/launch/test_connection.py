"""Joining a Ray cluster: one that does not respond, one that requires a token, one that refuses the token."""

import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from core.errors import LaunchError
from core.launch import cluster as connection
from core.launch.cluster import Options, OwnPackagesFirst, join
from core.placement import JoinedCluster
from rollout.plugins import ROOT


@pytest.fixture
def cluster() -> Iterator[JoinedCluster]:
    """A place where something listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        yield JoinedCluster(source="RAY_ADDRESS", given=address, address=address)


class Ray:
    """In place of Ray's own checks: a cluster that requires a token, or not, and a node that has one, or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, requires: list[bool], has_token: bool) -> None:
        self.joined: list[str] = []
        loader = SimpleNamespace(has_token=lambda ignore_auth_mode: has_token)
        raylet = SimpleNamespace(
            AuthenticationTokenLoader=SimpleNamespace(instance=lambda: loader),
            Config=SimpleNamespace(initialize=lambda text: None),
        )
        answers = iter(requires)
        monkeypatch.setattr(connection, "_raylet", raylet)
        monkeypatch.setattr(connection, "_requires_token", lambda cluster: next(answers))
        monkeypatch.setattr(connection.ray, "init", self._init)
        monkeypatch.setenv("RAY_AUTH_MODE", "")  # so that it is put back afterwards
        monkeypatch.delenv("RAY_AUTH_MODE")

    def _init(self, address: str, **options: object) -> None:
        self.joined.append(address)
        self.options = options


def test_workers_of_a_joined_cluster_import_this_checkout_first(cluster: JoinedCluster, monkeypatch) -> None:
    ray = Ray(monkeypatch, requires=[False], has_token=False)
    join(cluster, Options())
    job = ray.options["job_config"]
    assert isinstance(job, OwnPackagesFirst)
    job._py_driver_sys_path.append("/working/folder")  # as ray.init does
    for _ in range(2):
        job._serialize()
        assert job._py_driver_sys_path == ["/working/folder", str(ROOT)], "workers put the last one first"


@pytest.mark.parametrize(("requires", "mode"), [([False], None), ([True, False], "token")])
def test_the_cluster_decides_whether_the_token_is_used(cluster, monkeypatch, requires, mode) -> None:
    ray = Ray(monkeypatch, requires=requires, has_token=True)
    join(cluster, Options())
    assert ray.joined == [cluster.address] and os.environ.get("RAY_AUTH_MODE") == mode


@pytest.mark.parametrize(
    ("requires", "has_token", "given", "why"),
    [
        ([True], False, None, "there is none here"),
        ([True, True], True, None, "the one here (~/.ray/auth_token, RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH) is"),
        ([], False, "token", "there is none here"),
    ],
)
def test_a_cluster_that_refuses_this_node_is_not_called_silent(
    cluster: JoinedCluster, monkeypatch: pytest.MonkeyPatch, requires: list[bool], has_token: bool, given: str | None,
    why: str,
) -> None:  # fmt: skip
    ray = Ray(monkeypatch, requires=requires, has_token=has_token)
    if given is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", given)
    with pytest.raises(LaunchError) as error:
        join(cluster, Options())
    said = f"{cluster}: Ray responds, but requires its authentication token, and {why}"
    assert str(error.value).startswith(said) and "copy ~/.ray/auth_token" in str(error.value)
    assert not ray.joined


def test_a_place_where_nothing_listens_and_a_node_without_a_cluster_are_other_errors() -> None:
    closed = JoinedCluster(source="launch.ray_address", given="127.0.0.1:9", address="127.0.0.1:9")
    with pytest.raises(LaunchError, match=r"launch.ray_address=127.0.0.1:9: Ray does not respond: nothing listens"):
        join(closed, Options())
    with pytest.raises(LaunchError, match="RAY_ADDRESS=auto: no Ray cluster was started on this node"):
        join(JoinedCluster(source="RAY_ADDRESS", given="auto", address=None), Options())
