"""The log level of the driver in the environment of the actors that it starts."""

from __future__ import annotations

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


@pytest.mark.parametrize("level", ["debug", "info"])
def test_an_actor_gets_the_level_of_the_driver(tmp_path: Path, level: str, caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(
        joined=None,
        envs={},
        num_actors=1,
        startup_timeout_seconds=1.0,
        deadlines=DeadlineConfig(),
        log_folder=tmp_path,
    )
    cluster._groups.append(None)  # type: ignore[arg-type]
    actor_class = ActorClass()
    with caplog.at_level(level.upper(), logger="core"):
        cluster.start_actor(actor_class, "rollout")
    assert actor_class.environment[LEVEL] == level
