"""What the driver puts into the environment of the actors that it starts."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from core.config.runtime import DeadlineConfig
from core.launch.cluster import Cluster
from core.monitoring.logs import LEVEL


class ActorClass:
    """Keeps the options of the actor that is made of it."""

    def options(self, **options: Any) -> ActorClass:
        self.environment = options["runtime_env"]["env_vars"]
        return self

    def remote(self, *args: object) -> ActorClass:
        return self


def environment_of_an_actor(folder: Path, envs: Mapping[str, str] = {}) -> dict[str, str]:
    """`envs`: external_configs.envs."""
    cluster = Cluster(
        joined=None, envs=envs, num_actors=1, startup_timeout_seconds=1.0, deadlines=DeadlineConfig(), log_folder=folder
    )
    cluster._groups.append(None)  # type: ignore[arg-type]
    actor_class = ActorClass()
    cluster.start_actor(actor_class, "rollout")
    return actor_class.environment


@pytest.mark.parametrize("level", ["debug", "info"])
def test_an_actor_gets_the_level_of_the_driver(tmp_path: Path, level: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(level.upper(), logger="core"):
        assert environment_of_an_actor(tmp_path)[LEVEL] == level


ALLOCATES = """
import ctypes, resource
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def use():
    blocks = [libc.malloc(2**22) for _ in range(8)]
    for block in blocks:
        ctypes.memset(block, 1, 2**22)
    for block in blocks:
        libc.free(block)
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
"""Twenty times 32 MiB in blocks of 4 MiB: 163,840 pages."""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="variables of glibc")
def test_memory_of_an_actor_is_kept_for_its_next_tensors(tmp_path: Path) -> None:
    variables = environment_of_an_actor(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", ALLOCATES], env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 1000


def test_the_users_own_setting_of_memory_that_is_kept_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "MALLOC_TRIM_THRESHOLD_"
    monkeypatch.delenv(name, raising=False)
    assert environment_of_an_actor(tmp_path, {name: "8192"})[name] == "8192"
    monkeypatch.setenv(name, "4096")
    assert environment_of_an_actor(tmp_path)[name] == "4096"
    assert environment_of_an_actor(tmp_path, {name: "8192"})[name] == "4096"
