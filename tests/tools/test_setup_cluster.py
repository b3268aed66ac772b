"""Hosts of a cluster: what is checked before Ray starts, and how it starts. Hosts are home folders of this machine."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tools.setup_cluster import ClusterError, check, start

FAKE_PYTHON = """#!/bin/bash
if [ "$1" = -m ]; then
    echo "mode=$RAY_AUTH_MODE $*" >> "$HOME/ray.log"
    [ -e "$HOME/broken" ] && {{ echo "port taken" >&2; exit 1; }}
    exit 0
fi
exec {python} "$@"
"""


class Hosts:
    """Runs every command in this machine's shell, with a home folder for each host."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.names = names
        self.homes = {name: folder / name for name in names}
        for home in self.homes.values():
            home.mkdir()
        self.shared = folder / "shared"
        self.python = folder / "python"
        self.python.write_text(FAKE_PYTHON.format(python=sys.executable))
        self.python.chmod(0o755)
        self.commands: list[str] = []

    def __call__(self, host: str, command: str, given: str) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        env = os.environ | {"HOME": str(self.homes[host])}
        return subprocess.run(["bash", "-c", command], input=given, capture_output=True, text=True, env=env)

    def check(self) -> dict[str, dict[str, object]]:
        return check(self.names, self, python=str(self.python), shared=str(self.shared))

    def start(self) -> str:
        return start(self.names, self, python=str(self.python))


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path, "a", "b", "c")


def test_hosts_that_are_alike_pass_and_leave_the_shared_folder_as_it_was(hosts: Hosts) -> None:
    facts = hosts.check()
    assert list(facts) == ["a", "b", "c"] and facts["a"] == facts["c"] and facts["b"]["ray"] == "2.60.0"
    assert list(hosts.shared.iterdir()) == []


def test_every_difference_is_reported_at_once(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = hosts.__call__

    def differ(host: str, command: str, given: str) -> subprocess.CompletedProcess[str]:
        done = answer(host, command, given)
        if host == "b":
            done.stdout = done.stdout.replace('"ray": "2.60.0"', '"ray": "2.59.0"').replace(
                '_mark": true', '_mark": false'
            )
        if host == "c" and "import json" in command:
            return subprocess.CompletedProcess([], 255, "", "ssh: Could not resolve hostname c\n")
        return done

    with pytest.raises(ClusterError) as error:
        check(hosts.names, differ, python=str(hosts.python), shared=str(hosts.shared))
    problems = str(error.value).splitlines()
    assert problems[0] == "c: ssh: Could not resolve hostname c"
    assert problems[1].startswith("b: ") and "is not the folder of the first host" in problems[1]
    assert problems[2] == "ray differs: a 2.60.0, b 2.59.0; install the same everywhere"


def test_ray_starts_on_every_host_with_the_token_of_the_first(hosts: Hosts) -> None:
    address = hosts.start()
    assert address.endswith(":6379")
    (head, *others) = [(home / "ray.log").read_text().split() for home in hosts.homes.values()]
    assert head[0] == "mode=token" and "--head" in head and "--port=6379" in head
    assert all(words[0] == "mode=token" and f"--address={address}" in words for words in others)
    tokens = [(home / ".ray" / "auth_token") for home in hosts.homes.values()]
    assert len({token.read_text() for token in tokens}) == 1 and len(tokens[0].read_text()) == 64
    assert all(stat.S_IMODE(token.stat().st_mode) == 0o600 for token in tokens)
    assert all(tokens[0].read_text() not in command for command in hosts.commands)


def test_a_token_that_is_there_is_kept(hosts: Hosts) -> None:
    (hosts.homes["a"] / ".ray").mkdir()
    (hosts.homes["a"] / ".ray" / "auth_token").write_text("mine" * 16)
    hosts.start()
    assert (hosts.homes["c"] / ".ray" / "auth_token").read_text() == "mine" * 16


def test_a_host_where_ray_does_not_start_is_named(hosts: Hosts) -> None:
    (hosts.homes["c"] / "broken").touch()
    with pytest.raises(ClusterError, match="c: ray start failed: port taken"):
        hosts.start()
