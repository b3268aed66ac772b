"""Which state of an algorithm a run continues from a recover checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from core.config.load import load_config
from core.experiments import context
from core.experiments.common import Start
from core.experiments.ppo import continued_state, kind_of_algorithm
from core.paths import RunPaths
from core.processes.supervise import Attempt
from core.recovery.recover import RunState
from helpers.config_inputs import write_run
from tracing import record_spans


def begin(tmp_path: Path, before: str | None, *words: str) -> tuple[Any, Start]:
    """(configuration, start) of a run whose checkpoint was written with algorithm.name=`before`."""
    path = write_run(tmp_path)
    config = load_config("ppo-math", path, words).config
    extra: dict[str, object] = {"algorithm": {"mean": 1.5}, "memory": {}}
    if before is not None:
        extra["kind_of_algorithm"] = kind_of_algorithm(
            load_config("ppo-math", path, [f"algorithm.name={before}"]).config
        )
    state = RunState(step=3, version=3, elapsed_seconds=1.0, extra=extra)
    return config, Start(state=state, rollout_state=None, checkpoint=tmp_path / "globalstep3")


OWN = "examples.custom_algorithm:Reinforce"


@pytest.mark.parametrize(("before", "now"), [("grpo", "grpo"), ("ppo", "rloo"), (OWN, OWN)])
def test_a_state_goes_on_with_its_own_algorithm_and_with_any_preset(tmp_path: Path, before: str, now: str) -> None:
    config, start = begin(tmp_path, before, f"algorithm.name={now}", "group_size=4")
    assert continued_state(config, start).extra["algorithm"] == {"mean": 1.5}


@pytest.mark.parametrize(("before", "now"), [("grpo", OWN), (OWN, "grpo"), (None, "grpo")])
def test_a_foreign_state_is_refused_and_on_request_dropped(tmp_path: Path, before: str | None, now: str) -> None:
    words = [f"algorithm.name={now}", "group_size=4"]
    config, start = begin(tmp_path, before, *words)
    with pytest.raises(ValueError, match=f"algorithm.name={now}: .*globalstep3 has the state of .*restore the name"):
        continued_state(config, start)
    config, start = begin(tmp_path, before, *words, "recover_ignore_changes=true")
    state = continued_state(config, start)
    assert "algorithm" not in state.extra and state.extra["memory"] == {} and state.step == 3


def test_the_beginning_has_no_state(tmp_path: Path) -> None:
    config, _ = begin(tmp_path, None)
    nothing = RunState(step=0, version=0, elapsed_seconds=0.0, extra={})
    assert continued_state(config, Start(state=nothing, rollout_state=None, checkpoint=None)) is nothing


def test_memory_limits_of_the_checkpoint_hold_in_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, start = begin(tmp_path, "grpo", "monitor.tensorboard=false")
    start = replace(start, state=replace(start.state, extra={"memory": {"actor_train": 100.0}}))
    monkeypatch.setattr(context, "find_start", lambda *_: start)
    cluster = config.external_configs.cluster_config
    paths = RunPaths.for_trial(cluster.fileroot, config.experiment_name, config.trial_name)
    opened = context.RunContext.open(config, paths, Console(quiet=True), Attempt(number=1, memory={"actor_inf": 50}))
    assert (opened.memory.tokens("actor_train", 200), opened.memory.tokens("actor_inf", 200)) == (100, 50)
    record_spans("nothing", tmp_path, limit_mib=0)
