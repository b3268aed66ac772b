"""A run that begins anew keeps what an earlier run of its trial has left; a wrong name is met with similar ones."""

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from core.experiments.context import Start, find_start
from core.runs.checkpoints import RunIdentity, near_trials
from core.runs.paths import RunningError, RunPaths, begins_anew, set_aside, sole_run
from core.train.recover import RecoverStore
from helpers.fake_training import Answer, Step, recover_store, train

WHEN = 1_700_000_000.0


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """Of a trial that has never run."""
    return RunPaths.for_trial(str(tmp_path), "sums", "first")


def write(path: Path, content: str = "x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    os.utime(path, (WHEN, WHEN))


def commit(recover: Path) -> None:
    write(recover / "globalstep4" / "COMMITTED")


def files(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def begins(mode: str, paths: RunPaths) -> bool:
    return begins_anew(SimpleNamespace(recovers=mode != "disabled", must_recover=mode == "resume"), paths)


@pytest.mark.parametrize("mode", ["disabled", "auto", "resume"])
def test_a_trial_without_results_is_no_earlier_run(paths: RunPaths, mode: str) -> None:
    assert not begins(mode, paths)
    write(paths.logs / "metrics.jsonl", "")
    write(paths.logs / "master_worker.log", "an attempt that came to nothing")
    write(paths.recover / ".writing-globalstep2" / "run.json")
    write(paths.checkpoints / "push" / "weights.safetensors")
    assert not begins(mode, paths)


@pytest.mark.parametrize("left", ["metrics", "model"])
def test_a_run_begins_anew_unless_it_continues_from_a_checkpoint(paths: RunPaths, left: str) -> None:
    if left == "metrics":
        write(paths.logs / "metrics.jsonl")
    else:
        write(paths.checkpoints / "actor" / "epoch1epochstep2globalstep2" / "config.json")
    found = {mode: begins(mode, paths) for mode in ("disabled", "auto", "resume")}
    assert found == {"disabled": True, "auto": True, "resume": False}
    commit(paths.recover)
    found = {mode: begins(mode, paths) for mode in ("disabled", "auto", "resume")}
    assert found == {"disabled": True, "auto": False, "resume": False}


def test_logs_models_and_checkpoints_get_a_dated_name_under_which_the_run_can_continue(paths: RunPaths) -> None:
    write(paths.logs / "metrics.jsonl", "rows")
    write(paths.logs / "tensorboard" / "events", "events")
    write(paths.checkpoints / "actor" / "step2" / "config.json", "model")
    commit(paths.recover)
    for model in paths.checkpoints.glob("*/*"):
        os.utime(model, (WHEN, WHEN))
    with sole_run(paths.logs):
        aside = set_aside(paths)
        with pytest.raises(RunningError), sole_run(paths.logs, patience_seconds=0.0):
            pass
    assert aside == RunPaths.for_trial(str(paths.logs.parents[3]), "sums", aside.logs.name)
    assert aside.logs.name.startswith("first.20231114-2") or aside.logs.name.startswith("first.20231115-")
    assert files(aside.logs) == {"metrics.jsonl": "rows", "tensorboard/events": "events"}
    assert files(aside.checkpoints) == {"actor/step2/config.json": "model"}
    assert begins("disabled", aside) and not begins("auto", aside)
    assert not begins("disabled", paths) and not paths.checkpoints.exists() and not paths.recover.exists()

    write(paths.logs / "metrics.jsonl", "of another run that ended in the same second")
    again = set_aside(paths)
    assert again.logs.name == f"{aside.logs.name}-2" and files(aside.logs)["metrics.jsonl"] == "rows"


def test_a_mistyped_name_is_met_with_the_names_of_trials_that_have_checkpoints(paths: RunPaths, caplog) -> None:
    user = paths.recover.parent.parent
    for trial in ("sums/frist", "sums/other-thing", "zebra/crossing"):
        commit(user / trial)
    (user / "sums" / "firsd").mkdir()
    assert near_trials(paths.recover) == " (trials with one: sums/frist)"
    store = RecoverStore(paths.recover, RunIdentity(train_bs_n_seqs=1, group_size=1, n_nodes=1))

    def start(mode: str) -> Start:
        config = SimpleNamespace(
            recovers=mode != "disabled", must_recover=mode == "resume", recover_setting=f"recover_mode={mode}",
            recover_ignore_changes=False, earlier_checkpoint=None,
        )  # fmt: skip
        return find_start(store, config, paths.recover)  # type: ignore[arg-type]

    with caplog.at_level(logging.INFO):
        assert start("auto").state.step == 0
    where = f"there is no valid recover checkpoint in {paths.recover} (trials with one: sums/frist)"
    assert [r.getMessage() for r in caplog.records] == [
        f"recover_mode=auto: {where}; training starts from the beginning."
    ]
    with pytest.raises(ValueError, match="trials with one: sums/frist.; check experiment_name and trial_name"):
        start("resume")
    caplog.clear()
    start("disabled")
    assert not caplog.records


IDENTITY = {"train_bs_n_seqs": 1, "group_size": 1, "n_nodes": 1}


def start_of(folder: Path, *, resume_from: Path | None = None, ignore_changes: bool = False, **identity: int) -> Start:
    config = SimpleNamespace(
        recovers=True,
        batch_key="dataset.train_bs_n_seqs",
        must_recover=False,
        recover_setting="recover_mode=auto",
        recover_ignore_changes=ignore_changes,
        earlier_checkpoint=resume_from,
        identity=RunIdentity(**{**IDENTITY, **identity}),
        exp_ctrl=SimpleNamespace(length=(1, None)),
    )
    return find_start(RecoverStore(folder, config.identity), config, folder)  # type: ignore[arg-type]


def test_a_trial_without_a_checkpoint_continues_from_that_of_another_one(tmp_path: Path) -> None:
    step = Step(groups=[[Answer(sampled=[-1.0], reward=1.0)]])
    train(step, step, step, checkpoints=recover_store(tmp_path / "other"))
    other = tmp_path / "other" / "globalstep2"
    mine = tmp_path / "mine"
    assert start_of(mine).state.step == 0
    start = start_of(mine, resume_from=other)
    assert (start.state.step, start.checkpoint) == (2, other)
    train(step, step, step, checkpoints=recover_store(mine))
    assert start_of(mine, resume_from=other).state.step == 3, "the trial's own checkpoint wins"
    for wrong in (tmp_path / "none", tmp_path / "other"):
        with pytest.raises(ValueError, match=f"resume_from={wrong}: no recover checkpoint"):
            start_of(tmp_path / "third", resume_from=wrong)


@pytest.mark.parametrize("key", ["train_bs_n_seqs", "group_size", "n_nodes"])
def test_a_changed_setting_is_refused_with_both_values_and_let_go_on_request(tmp_path: Path, key: str) -> None:
    step = Step(groups=[[Answer(sampled=[-1.0], reward=1.0)]])
    train(step, step, checkpoints=recover_store(tmp_path))
    with pytest.raises(ValueError, match=rf"{key}=99 \(the checkpoint has 1\).*recover_ignore_changes=true"):
        start_of(tmp_path, **{key: 99})
    start = start_of(tmp_path, ignore_changes=True, **{key: 99})
    assert start.changes == (f"{key}=99 (the checkpoint has 1)",)
    assert start.identity == RunIdentity(**IDENTITY)
