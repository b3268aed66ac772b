"""What a run was started with, as its log folder has it, and what the terminal shows of it."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from core import quickstart
from core.checks.rules import load_config
from core.config.experiments import ExperimentConfig
from core.config.reference import recorded
from core.monitoring.screen import Screen
from core.processes.supervise import DONE, INTERRUPTED, Attempt
from core.runs.paths import RunPaths
from core.runs.record import (
    changes_since,
    how_to_continue,
    is_complete,
    is_own,
    write_complete,
    write_record,
)
from helpers.config_inputs import write_run

ROOT = Path(__file__).parents[3]


def loaded(folder: Path, *overrides: str) -> tuple[ExperimentConfig, RunPaths]:
    config = load_config("ppo-math", folder / "run.yaml", list(overrides)).config
    paths = RunPaths.for_trial(str(folder / "out"), config.experiment_name, config.trial_name)
    paths.logs.mkdir(parents=True, exist_ok=True)
    return config, paths


def saved(folder: Path, engine: str, name: str) -> None:
    (folder / engine / name).mkdir(parents=True)
    (folder / engine / name / "config.json").touch()


def test_the_recorded_configuration_starts_the_same_run(tmp_path: Path) -> None:
    write_run(tmp_path)
    config, paths = loaded(tmp_path, "group_size=2", "actor.optimizer.lr=1e-5", "staleness.max_staleness=3")
    write_record("ppo-math", recorded(config), paths, ["python"])
    assert changes_since(paths, recorded(config)) == []
    again = load_config("ppo-math", paths.logs / "config.yaml", []).config
    assert again.model_dump() == config.model_dump()


def test_the_recorded_configuration_is_known_as_that_of_this_user_until_it_is_changed(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    write_run(tmp_path)
    config, paths = loaded(tmp_path)
    write_record("ppo-math", recorded(config), paths, ["python"])
    file = paths.logs / "config.yaml"
    assert is_own(file)
    state = tmp_path / "state/slipstream"
    assert [oct(one.stat().st_mode & 0o777) for one in (state, state / "configs")] == ["0o700", "0o700"]
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user's"))
    assert not is_own(file)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    file.write_text(file.read_text().replace("ppo-math", "ppo_math"))
    assert not is_own(file)
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    write_record("ppo-math", recorded(config), paths, ["python"])
    assert not is_own(file), "nothing can be noted, and the run starts all the same"


def test_every_start_has_its_command_line_and_versions_and_no_secret(tmp_path, monkeypatch) -> None:
    run = write_run(tmp_path)
    overrides = ["external_configs.envs={MY_TOKEN: hunter2}", "external_configs.envs.MY_KEY=hunter2"]
    monkeypatch.setattr(quickstart, "run_attempts", lambda *args, **settings: DONE)
    for _ in range(2):
        assert quickstart.main(["ppo-math", "--config", str(run), *overrides]) == DONE
    (logs,) = (tmp_path / "out" / "logs").glob("*/*/one")
    starts = [json.loads(line) for line in (logs / "starts.jsonl").read_text().splitlines()]
    masked = "'external_configs.envs=***' 'external_configs.envs.MY_KEY=***'"
    assert [row["command"].partition("core.quickstart ")[2] for row in starts] == [
        f"ppo-math --config {run} {masked}"
    ] * 2
    assert {"torch", "ray", "numpy"} <= starts[0]["versions"].keys() and starts[0]["folder"] == str(Path.cwd())
    assert all("hunter2" not in file.read_text() for file in logs.iterdir())


def test_what_changed_since_the_last_start_is_known_and_earlier_configurations_stay(tmp_path: Path) -> None:
    write_run(tmp_path)
    for lr in ("1e-5", "1e-5", "1e-4", "1e-3"):
        config, paths = loaded(tmp_path, f"actor.optimizer.lr={lr}")
        changes = changes_since(paths, recorded(config))
        write_record("ppo-math", recorded(config), paths, ["python"])
    assert changes == ["actor.optimizer.lr: 0.0001 -> 0.001"]
    rates = [
        load_config("ppo-math", paths.logs / name, []).config.actor.optimizer.lr  # type: ignore[union-attr]
        for name in ("config.1.yaml", "config.2.yaml", "config.yaml")
    ]
    assert rates == [1e-5, 1e-4, 1e-3] and not (paths.logs / "config.3.yaml").exists()


WITHOUT_A_NAME = """
import logging, sys, time
from core import quickstart

def run(config, paths, console, attempt):
    if attempt.number == 1:
        time.sleep(1.1)  # another second, in which another name would be made
        raise RuntimeError("lost")
    logging.info("attempt 2 is %s", config.trial_name)
    raise KeyboardInterrupt

quickstart._run = run
sys.exit(quickstart.main(sys.argv[1:]))
"""


def test_a_trial_without_a_name_has_the_same_one_in_every_attempt_and_where_it_continues(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    run.write_text(re.sub("trial_name: .*\n", "", run.read_text()))
    command = [sys.executable, "-c", WITHOUT_A_NAME, "ppo-math", "--config", str(run), "--verbose"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == INTERRUPTED, done.stdout + done.stderr
    (logs,) = (tmp_path / "out" / "logs").glob("*/small/*")
    assert re.fullmatch(r"\d{8}-\d{6}", logs.name)
    assert f"attempt 2 is {logs.name}" in done.stdout
    assert re.search(f"Continue with: .*--config {run} --verbose trial_name={logs.name}$", done.stdout, re.MULTILINE)


def attempt(
    config: ExperimentConfig, paths: RunPaths, monkeypatch: pytest.MonkeyPatch, error: type[BaseException] | None
) -> int:
    def run(*args: Any) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(quickstart, "_run", run)
    words = ["python", "-m", "core.quickstart", "ppo-math", "--config", "my run.yaml", "seed=3", "x.API_KEY=***"]
    return quickstart._attempt(config, paths, Screen(Console(quiet=True), compact=True), Attempt(), words)


def test_complete_names_the_folder_of_the_newest_model(tmp_path, monkeypatch, caplog) -> None:
    write_run(tmp_path)
    config, paths = loaded(tmp_path)
    caplog.set_level("INFO")
    assert attempt(config, paths, monkeypatch, None) == DONE
    assert caplog.messages[-1] == f"Training is complete. No model was saved below {paths.checkpoints}."
    for engine in ("actor", "critic"):
        for name in ("epoch1epochstep9globalstep9", "epoch1epochstep10globalstep10"):
            saved(paths.checkpoints, engine, name)
    (paths.checkpoints / "actor" / "epoch1epochstep11globalstep11").mkdir()  # was killed while it wrote
    attempt(config, paths, monkeypatch, None)
    newest = paths.checkpoints / "actor" / "epoch1epochstep10globalstep10"
    assert caplog.messages[-1] == f"Training is complete. The model is in {newest}"


def test_a_trial_is_complete_only_while_it_has_its_last_recover_checkpoint(tmp_path: Path) -> None:
    paths, end = RunPaths.for_trial(str(tmp_path), "experiment", "trial"), {"total_train_steps": 6}
    paths.logs.mkdir(parents=True)
    for step in (5, 6):
        folder = paths.recover / f"globalstep{step}"
        folder.mkdir(parents=True)
        (folder / "COMMITTED").touch()
    write_complete(paths, end)
    assert is_complete(paths, end) and not is_complete(paths, {"total_train_steps": 7})
    (paths.recover / "globalstep6" / "COMMITTED").unlink()
    assert not is_complete(paths, end), "the run continues from globalstep5"


def test_interrupted_names_the_command_that_continues(tmp_path, monkeypatch, caplog) -> None:
    write_run(tmp_path)
    config, paths = loaded(tmp_path)
    assert attempt(config, paths, monkeypatch, KeyboardInterrupt) == INTERRUPTED
    command = "python -m core.quickstart ppo-math --config 'my run.yaml' seed=3 'x.API_KEY=***'"
    assert caplog.messages[-1] == f"Interrupted. Continue with: {command}"
    config, paths = loaded(tmp_path, "recover_mode=disabled")
    saved(paths.checkpoints, "actor", "epoch1epochstep4globalstep4")
    attempt(config, paths, monkeypatch, KeyboardInterrupt)
    assert caplog.messages[-1].endswith(f"The model is in {paths.checkpoints}/actor/epoch1epochstep4globalstep4")


def test_a_temporary_configuration_file_is_replaced_by_the_recorded_one(tmp_path: Path) -> None:
    write_run(tmp_path)
    config, paths = loaded(tmp_path)
    file = Path("/tmp/slipstream-abc/config.yaml")  # an attempt has another folder for temporary files
    said = how_to_continue(config, paths, ["python", "--config", str(file)])
    assert said == f"Continue with: python --config {paths.logs}/config.yaml"


def test_a_run_without_recover_mode_continues_from_its_checkpoints(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert loaded(tmp_path)[0].recovers
    assert not loaded(tmp_path, "recover_mode=disabled")[0].recovers
    assert not loaded(tmp_path, "exp_ctrl.benchmark_steps=3")[0].recovers
