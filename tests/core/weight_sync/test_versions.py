"""Who holds which version, and what a crash leaves of the folder."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from core.weight_sync import folder as weight_folder
from core.weight_sync.folder import LATEST, ReplicaLost, VersionFolder
from core.weight_sync.publisher import Publisher
from helpers.forks.calls import Inbox, call, end
from helpers.other_user import as_another_user, folder_for_all

LEASE = 12.0


@pytest.fixture
def folder(tmp_path: Path) -> VersionFolder:
    return VersionFolder(tmp_path / "versions", lease_seconds=LEASE)


def weights(version: int) -> dict[str, Tensor]:
    return {f"layer.{i}": torch.full((4,), float(version)) for i in range(3)}


def write(folder: VersionFolder, version: int, before_file: Callable[[int], None] = lambda number: None) -> Path:
    """Publish a folder with a file for each weight."""

    def fill(into: Path) -> None:
        for number, (name, tensor) in enumerate(weights(version).items()):
            before_file(number)
            save_file({name: tensor}, into / f"model-{number:05d}.safetensors")

    return Path(folder.write(version, fill).where)


def test_a_replica_is_given_what_is_newer_than_what_it_holds(folder: VersionFolder) -> None:
    replica = folder.subscribe("a")
    assert folder.latest() is None and replica.claim() is None and folder.holders() == {"a": None}
    folder.publish(3, "")
    claimed = replica.claim()
    assert claimed is not None and claimed.version == 3 and claimed == folder.latest()
    assert folder.holders() == {"a": None}, "claimed, and not yet loaded"
    replica.hold(3)
    assert replica.claim() is None and folder.holders() == {"a": 3}
    replica.close()
    assert folder.holders() == {} == folder.lost()


def test_versions_never_go_back(folder: VersionFolder) -> None:
    folder.publish(3, "")
    folder.publish(3, "")
    with pytest.raises(ValueError, match="version 2 cannot be published after version 3"):
        folder.publish(2, "")


def test_a_name_stands_for_one_living_replica(folder: VersionFolder) -> None:
    first = folder.subscribe("a")
    folder.subscribe("b")
    with pytest.raises(ValueError, match="'a' is subscribed already"):
        folder.subscribe("a")
    folder.lose("a", "killed")
    folder.lose("nobody", "killed")
    assert folder.lost() == {"a": "killed"} and folder.holders() == {"b": None}
    with pytest.raises(ReplicaLost, match="a: killed"):
        first.hold(1)
    folder.subscribe("a").hold(2)
    assert folder.lost() == {} and folder.holders() == {"a": 2, "b": None}


def test_an_older_version_stays_for_as_long_as_a_replica_needs_it(folder: VersionFolder) -> None:
    holding, claiming = folder.subscribe("holding"), folder.subscribe("claiming")
    first = write(folder, 1)
    holding.claim()
    holding.hold(1)
    second = write(folder, 2)
    assert claiming.claim() == folder.latest()
    third = write(folder, 3)
    assert all(path.is_dir() for path in (first, second, third))
    claiming.hold(2)
    claiming.claim()
    claiming.hold(3)
    holding.close()
    write(folder, 4)
    assert not first.exists() and not second.exists() and third.is_dir()
    assert load_file(third / "model-00001.safetensors")["layer.1"].tolist() == [3.0] * 4


def hold(folder: Path, held: Any) -> None:
    """Hold version 1 until this process is killed."""
    subscription = VersionFolder(folder, lease_seconds=LEASE).subscribe("a")
    subscription.claim()
    subscription.hold(1)
    held.put(None)
    time.sleep(600)


def test_a_replica_that_shows_no_sign_of_life_is_lost_and_what_it_held_is_removed(folder: VersionFolder) -> None:
    held, first = Inbox(), write(folder, 1)
    replica = call(hold, folder.path, held)
    held.get(60)
    file = folder.path / "replicas" / "a"
    os.utime(file, (1, 1))
    while file.stat().st_mtime == 1:
        time.sleep(0.05)
    write(folder, 2)
    assert folder.holders() == {"a": 1} and first.is_dir(), "its process touches its file"
    end(replica)
    os.utime(file, (1, 1))
    assert "no sign of life" in folder.lost()["a"]
    write(folder, 3)
    assert not first.exists()
    folder.subscribe("a").close()


def publish_until(where: str, folder: Path, here: Any) -> None:
    """Publish version 9, and stop at a place of it until this process is killed."""
    replace = weight_folder._replace

    def wait_at(place: str) -> None:
        if place == where:
            here.put(None)
            time.sleep(600)

    def waiting(path: Path, content: Any) -> None:
        wait_at("before LATEST")
        replace(path, content)
        wait_at("after LATEST")

    weight_folder._replace = waiting
    write(VersionFolder(folder, lease_seconds=LEASE), 9, lambda number: wait_at(f"file {number}"))


@pytest.mark.parametrize("where", ["file 0", "file 2", "before LATEST", "after LATEST"])
def test_a_publisher_that_is_killed_leaves_a_complete_version(folder: VersionFolder, where: str) -> None:
    before, here = write(folder, 8), Inbox()
    publisher = call(publish_until, where, folder.path, here)
    here.get(60)
    end(publisher)
    latest = folder.latest()
    assert latest is not None and latest.version == (9 if where == "after LATEST" else 8)
    assert len(list(Path(latest.where).glob("*.safetensors"))) == 3
    after = write(folder, 10)
    assert [path.name for path in folder.path.iterdir() if path.is_dir() and path.name != "replicas"] == [after.name]
    assert not before.exists()


def test_replicas_never_lose_what_they_claimed_while_versions_come_and_go(folder: VersionFolder) -> None:
    stop, failures = threading.Event(), []

    def read(name: str) -> None:
        try:
            with folder.subscribe(name) as replica:
                while not stop.is_set():
                    published = replica.claim()
                    if published is None:
                        continue
                    for i in range(3):
                        file = Path(published.where) / f"model-{i:05d}.safetensors"
                        assert load_file(file)[f"layer.{i}"].tolist() == [float(published.version)] * 4
                    replica.hold(published.version)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    write(folder, 0)
    readers = [threading.Thread(target=read, args=(f"replica-{i}",)) for i in range(3)]
    for reader in readers:
        reader.start()
    for version in range(1, 40):
        write(folder, version)
    stop.set()
    for reader in readers:
        reader.join()
    assert not failures


def test_a_folder_that_a_job_may_not_write_is_named_with_the_way_out() -> None:
    with folder_for_all() as folder:
        VersionFolder(folder)
        (folder / "replicas").chmod(0o555)
        with as_another_user(), pytest.raises(OSError, match="synchronizer.folder=.* name a folder that it may write"):
            VersionFolder(folder)
        (folder / "replicas").chmod(0o777)


def test_a_missing_folder_is_named(folder: VersionFolder) -> None:
    folder.publish(1, "/no/such/folder")
    with pytest.raises(FileNotFoundError, match=f"{LATEST} names /no/such/folder, which does not exist"):
        folder.subscribe("a").claim()


def save(folder: Path) -> None:
    save_file(weights(0), folder / "model.safetensors")


def test_a_train_job_publishes_every_interval_and_its_last_step(folder: VersionFolder) -> None:
    publisher = Publisher(save, folder, interval=2, last_step=5)
    published = [version for version in range(6) if publisher.push(version).num_bytes]
    assert published == [0, 2, 4, 5]
    again = Publisher(save, folder, interval=1, last_step=5)
    assert again.push(4).num_bytes == 0, "an attempt that was killed has published a newer one"


def test_on_request_a_train_job_publishes_the_first_version_what_is_asked_for_and_its_last_step(folder) -> None:
    publisher = Publisher(save, folder, interval=1, last_step=5, on_request=True)
    assert [version for version in range(3) if publisher.push(version).num_bytes] == [0]
    folder.request(newer_than=0)
    publisher.sync_rejoined()
    assert folder.latest().version == 2, "the trainer waits for the replica, between two steps"
    assert [version for version in range(3, 6) if publisher.push(version).num_bytes] == [5]


def test_a_request_of_a_replica_that_is_behind_hides_no_other(folder: VersionFolder) -> None:
    write(folder, 5)
    folder.request(newer_than=4)
    assert not folder.wanted(5)
    folder.request(newer_than=5)
    folder.request(newer_than=4)
    assert folder.wanted(5)
