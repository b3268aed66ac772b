"""Which state of an algorithm a run continues from a recover checkpoint."""

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from core.checks.rules import load_config
from core.experiments import context
from core.experiments.context import Start, find_start
from core.monitoring.screen import Screen
from core.processes.supervise import Attempt
from core.runs.checkpoints import seal
from core.runs.paths import RunPaths
from core.train.recover import RecoverStore, RunState, write_state
from helpers.config_inputs import write_run
from tracing import record_spans

OWN = "examples.custom_algorithm:Reinforce"


def configured(tmp_path: Path, *words: str) -> Any:
    return load_config("ppo-math", write_run(tmp_path), words).config


def loaded(tmp_path: Path, before: str | None, now: str, *words: str) -> RunState:
    """The state that a run of algorithm.name=`now` continues from, of a checkpoint of algorithm.name=`before`; None: of
    an earlier release."""
    identity = asdict(configured(tmp_path, "group_size=4", f"algorithm.name={before or 'grpo'}").identity)
    if before is None:
        del identity["algorithm"]
    state = {"step": 3, "version": 3, "elapsed_seconds": 1.0, "extra": {"algorithm": {"mean": 1.5}, "memory": {}}}
    checkpoint = tmp_path / "globalstep3"
    shutil.rmtree(checkpoint, ignore_errors=True)
    checkpoint.mkdir()
    (checkpoint / "run.json").write_text(json.dumps({"identity": identity, "state": state}))
    write_state(checkpoint, "rollout", None)
    seal(checkpoint)
    config = configured(tmp_path, "group_size=4", f"algorithm.name={now}", *words)
    store = RecoverStore(tmp_path, config.identity)
    return find_start(store, config, tmp_path).state


@pytest.mark.parametrize(("before", "now"), [("grpo", "grpo"), ("ppo", "rloo"), (OWN, OWN)])
def test_a_state_goes_on_with_its_own_algorithm_and_with_any_preset(tmp_path: Path, before: str, now: str) -> None:
    assert loaded(tmp_path, before, now).extra["algorithm"] == {"mean": 1.5}


@pytest.mark.parametrize(("before", "now"), [("grpo", OWN), (OWN, "grpo"), (None, "grpo")])
def test_a_foreign_state_is_refused_and_on_request_dropped(tmp_path, caplog, before: str | None, now: str) -> None:
    kind = {OWN: OWN, "grpo": "preset", None: "none"}
    changed = f"algorithm={kind[now]} (the checkpoint has {kind[before]})"
    with pytest.raises(ValueError, match=re.escape(changed) + ": .*globalstep3 cannot be continued .* Restore them"):
        loaded(tmp_path, before, now)
    state = loaded(tmp_path, before, now, "recover_ignore_changes=true")
    assert "algorithm" not in state.extra and state.extra["memory"] == {} and state.step == 3
    assert f"{changed}: the state of that algorithm is dropped" in caplog.text


def test_memory_limits_of_the_checkpoint_hold_in_the_next_start(tmp_path, monkeypatch) -> None:
    config = configured(tmp_path, "monitor.tensorboard=false")
    extra: dict[str, object] = {"memory": {"actor_train": 100.0}}
    state = RunState(step=3, version=3, elapsed_seconds=1.0, extra=extra)
    start = Start(state=state, rollout_state=None, checkpoint=tmp_path / "globalstep3")
    monkeypatch.setattr(context, "find_start", lambda *_: start)
    cluster = config.external_configs.cluster_config
    paths = RunPaths.for_trial(cluster.fileroot, config.experiment_name, config.trial_name)
    opened = context.RunContext.open(
        config, paths, Screen(Console(quiet=True), compact=False), Attempt(number=1, memory={"actor_inf": 50})
    )
    assert (opened.memory.tokens("actor_train", 200), opened.memory.tokens("actor_inf", 200)) == (100, 50)
    record_spans("nothing", tmp_path, limit_mib=0)
