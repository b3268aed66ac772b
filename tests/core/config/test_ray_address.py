"""Which Ray cluster a run joins: what is written, what runs on this node, or none."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.checks.rules import load_config
from core.placement import JoinedCluster, joined_cluster, not_joined_note, running_ray
from core.quickstart import main
from helpers.config_inputs import write_run


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A node on which `ray start` left its address, and where something listens."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(f"{address}\n")
        yield address


def joined(folder: Path, *overrides: str) -> JoinedCluster | None:
    return joined_cluster(load_config("ppo-math", write_run(folder), overrides).config)


def test_auto_is_the_cluster_of_this_node(tmp_path: Path, started: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = joined(tmp_path, "launch.ray_address=auto")
    assert found is not None and (found.address, str(found)) == (started, "launch.ray_address=auto")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    found = joined(tmp_path)
    assert found is not None and (found.address, str(found)) == (started, "RAY_ADDRESS=auto")
    assert joined(tmp_path, "launch.ray_address=local") is None, "the key wins"
    assert joined(tmp_path, "mode=local") is None


def test_auto_without_a_cluster_is_named_with_the_command_to_run(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert running_ray() is None
    found = joined(tmp_path)
    assert found is not None and found.address is None
    assert main(["ppo-math", "--config", str(write_run(tmp_path)), "allocation_mode=mock.d1+d1", "--preflight"]) == 2
    assert "RAY_ADDRESS=auto: no Ray cluster was started on this node with `ray start`" in capsys.readouterr().err


def test_a_cluster_that_does_not_listen_any_more_is_not_found(tmp_path: Path, started: str) -> None:
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:9\n")
    assert running_ray() is None


def test_several_nodes_join_the_cluster_of_this_node_and_one_node_says_how_to(tmp_path: Path, started: str) -> None:
    found = joined(tmp_path, "n_nodes=2", "allocation_mode=mock.d1+d1", "n_gpus_per_node=1")
    assert found is not None and str(found) == f"`ray start` on this node, {started}"
    config = load_config("ppo-math", write_run(tmp_path), []).config
    assert joined_cluster(config) is None
    assert not_joined_note(config) == (
        f"A Ray cluster runs on this node ({started}); this run starts one of its own. To join it: RAY_ADDRESS=auto"
    )
    alone = load_config("ppo-math", tmp_path / "run.yaml", ["launch.ray_address=local"]).config
    assert not_joined_note(alone) is None


@pytest.mark.parametrize(
    ("address", "place"),
    [("head:6379", ("head", 6379)), ("[::1]:6379", ("::1", 6379)), ("ray://head:10001", ("head", 10001)), ("x", None)],
)
def test_an_address_has_two_parts(address: str, place: tuple[str, int] | None) -> None:
    assert JoinedCluster(source="RAY_ADDRESS", given=address, address=address).host_and_port == place
