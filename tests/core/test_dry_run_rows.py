"""Dry runs of sft and dpo: rows are read, tokenised and counted as the run does at its start."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from core.checks import run_checks
from core.checks.rules import load_config
from core.data import datasets
from core.data.datasets import opener
from core.quickstart import main
from core.runs.paths import RunPaths
from core.train.periodic import schedule_from_control
from core.train.recover import write_state
from rollout.data.source import DatasetError

ANSWERS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(1, 31)]
PAIRS = [{"prompt": f"{i}+{i}=", "chosen": str(2 * i), "rejected": str(2 * i + 1)} for i in range(1, 31)]
ROWS = {"sft": ANSWERS, "dpo": PAIRS}


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class DryRun:
    """A dry run of `experiment` with the data set `train.jsonl` of a folder."""

    def __init__(self, experiment: str, model: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.experiment, self.data, self._capsys = experiment, folder / "train.jsonl", capsys
        self.words = [
            "experiment_name=e", "trial_name=t", f"model.path={model}", f"dataset.train_path={self.data}",
            "dataset.max_seqlen=16", "dataset.train_bs_n_seqs=8",
            f"external_configs.cluster_config.fileroot={folder / 'out'}",
        ]  # fmt: skip

    def config(self, *words: str) -> Any:
        return load_config(self.experiment, None, [*self.words, *words]).config

    def __call__(self, *words: str, code: int = 0) -> tuple[list[str], str]:
        """The log lines about data, without time and process, and stderr."""
        assert main([self.experiment, *self.words, *words, "--dry-run"]) == code
        shown = self._capsys.readouterr()
        lines = [line.split(" master worker ")[-1] for line in shown.out.splitlines() if " master worker " in line]
        return [line.replace(f"{self.data.parent}/", "") for line in lines], shown.err


@pytest.fixture(params=sorted(ROWS))
def dry_run(request, assets, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> DryRun:
    return DryRun(request.param, assets.model, tmp_path, capsys)


@pytest.fixture
def sft(assets, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> DryRun:
    return DryRun("sft", assets.model, tmp_path, capsys)


@pytest.fixture
def dpo(assets, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> DryRun:
    return DryRun("dpo", assets.model, tmp_path, capsys)


def test_rows_that_are_too_long_are_counted_with_the_steps_of_the_rest(sft: DryRun) -> None:
    write(sft.data, [*ANSWERS, *({"prompt": "1+1=", "answer": "9" * n} for n in (11, 12, 40))])
    lines, _ = sft("exp_ctrl.total_train_epochs=3")
    assert lines[1:] == [
        "INFO: First row (2 of 6 tokens trained, in [[ ]]): 1+1=[[2<eos>]]",
        "INFO: train.jsonl: 33 rows, 31 sequences, 2 left out: 2 longer than max_seqlen=16 (the longest has 45 "
        "tokens), 0 without prompt or answer",
        "INFO: train.jsonl: 31 sequences of 8.5 tokens on average: 4 steps per epoch with dataset.train_bs_n_seqs=8, "
        "12 steps in all",
    ]
    lines, _ = sft("dataset.max_seqlen=6")
    assert [line for line in lines if line.startswith("WARNING")] == [lines[2]], "more than a tenth"


def test_pairs_that_are_too_long_or_have_equal_answers_are_counted(dpo: DryRun) -> None:
    bad = [{"prompt": "1+1=", "chosen": "2", "rejected": rejected} for rejected in ("2", "9" * 12, "9" * 40)]
    write(dpo.data, [*PAIRS, *bad])
    lines, _ = dpo("exp_ctrl.total_train_steps=5", "exp_ctrl.total_train_epochs=2")
    assert lines == [
        "INFO: First row (2 of 6 tokens trained, in [[ ]]): 1+1=[[2<eos>]]",
        "INFO: First row (2 of 6 tokens trained, in [[ ]]): 1+1=[[3<eos>]]",
        "INFO: train.jsonl: 33 pairs, 3 left out: 1 with equal answers, 2 longer than max_seqlen=16 (the longest has "
        "45 tokens), 0 without a prompt",
        "INFO: train.jsonl: 30 pairs of 16.5 tokens on average: 4 steps per epoch with dataset.train_bs_n_seqs=8, 5 "
        "steps in all",
    ]


def test_the_steps_are_those_of_the_run(dry_run: DryRun) -> None:
    write(dry_run.data, ROWS[dry_run.experiment])
    words = ["dataset.train_bs_n_seqs=7", "dataset.max_seqlen=7", "exp_ctrl.total_train_epochs=3"]
    lines, _ = dry_run(*words)
    config = dry_run.config(*words)
    train = opener(config)(config.data_sources[0][1])
    schedule = schedule_from_control(config.exp_ctrl, num_prompts=len(train), batch_size=7)
    assert 0 < len(train) < 30
    assert (
        f"{schedule.steps_per_epoch} steps per epoch" in lines[-1] and f"{schedule.total_steps} steps in" in lines[-1]
    )


def test_a_data_set_of_which_nothing_is_left_is_refused_with_the_error_of_the_run(dry_run: DryRun) -> None:
    write(dry_run.data, ROWS[dry_run.experiment])
    _, error = dry_run("dataset.max_seqlen=4", code=2)
    config = dry_run.config("dataset.max_seqlen=4")
    with pytest.raises(DatasetError, match="none of 30 .* is left: ") as raised:
        opener(config)(config.data_sources[0][1])
    assert "dataset.train_path: " in error and str(raised.value) in error
    assert "30 " in str(raised.value) and "than dataset.max_seqlen=4 tokens (the shortest has 6), 0 have no" in error


def test_the_validation_set_is_measured_too_and_each_error_has_its_key(dry_run: DryRun) -> None:
    rows = ROWS[dry_run.experiment]
    valid = write(dry_run.data.with_name("valid.jsonl"), rows[:5])
    write(dry_run.data, rows)
    lines, _ = dry_run(f"dataset.valid_path={valid}")
    assert sum("left out" in line for line in lines) == 2
    assert [line.split(": ")[1] for line in lines if "steps per epoch" in line] == ["train.jsonl"]
    write(valid, [row | {"prompt": "1" * 20} for row in rows[:2]])
    _, error = dry_run(f"dataset.valid_path={valid}", code=2)
    assert "dataset.valid_path: " in error and "none of 2 " in error and "dataset.train_path: " not in error
    dry_run.data.write_text("[]\n")
    lines, error = dry_run(f"dataset.valid_path={valid}", code=2)
    assert "2 problems" in error and not any("steps per epoch" in line for line in lines)


def test_of_many_rows_a_sample_is_measured_and_the_rest_where_none_of_it_is_left(dry_run: DryRun, monkeypatch) -> None:
    monkeypatch.setattr(datasets, "SAMPLE", 10)
    rows = [dict(row) for row in ROWS[dry_run.experiment]]
    long = {name: "9" * 20 for name in rows[0] if name != "prompt"}
    rows[3] |= long  # every third is in the sample
    write(dry_run.data, rows)
    lines, _ = dry_run()
    counted, steps = lines[-2:]
    assert ": a sample of 10 " in counted and "(the data set has 30), " in counted and " 1 left out: " in counted
    assert ": about 27 " in steps and "4 steps per epoch" in steps
    for row in rows[::3]:
        row |= long
    write(dry_run.data, rows)
    lines, _ = dry_run()
    assert ": 30 " in lines[-2] and " 10 left out: " in lines[-2]
    assert ": 20 " in lines[-1] and "3 steps per epoch" in lines[-1]


def saved_with(dry_run: DryRun, *words: str) -> None:
    """A recover checkpoint of a run with the rows that are there."""
    config = dry_run.config(*words)
    fileroot = config.external_configs.cluster_config.fileroot
    recover = RunPaths.for_trial(fileroot, config.experiment_name, config.trial_name).recover / "globalstep10"
    shutil.rmtree(recover, ignore_errors=True)
    recover.mkdir(parents=True)
    (recover / "run.json").write_text(json.dumps({"identity": asdict(config.identity), "state": {}}))
    write_state(recover, "rollout", opener(config)(config.data_sources[0][1]).state_dict())


def test_rows_that_are_not_those_of_the_newest_checkpoint_are_refused(dry_run: DryRun, monkeypatch) -> None:
    rows, auto = ROWS[dry_run.experiment], "recover_mode=auto"
    write(dry_run.data, rows)
    saved_with(dry_run, auto)
    dry_run(auto)
    write(dry_run.data, rows[:-1])
    _, error = dry_run(auto, code=2)
    assert "dataset.train_path: the checkpoint's data set has num_" in error and "=30, this one 29: restore" in error
    dry_run(auto, "recover_ignore_changes=true")
    dry_run("recover_mode=disabled")
    write(dry_run.data, [rows[1], rows[0], *rows[2:]])
    _, error = dry_run(auto, code=2)
    assert "dataset.train_path: the checkpoint's data set has checksum=" in error
    write(dry_run.data, rows)
    _, error = dry_run(auto, "seed=7", code=2)
    assert error.startswith("error: override 'seed=7': seed: 7 (the checkpoint has 1): "), "one problem, not two"
    write(dry_run.data, rows[:-1])
    monkeypatch.setattr(datasets, "SAMPLE", 10)
    dry_run(auto)  # the run compares all rows


def test_a_start_leaves_the_tokens_to_the_run(dry_run: DryRun) -> None:
    write(dry_run.data, ROWS[dry_run.experiment])
    loaded = load_config(dry_run.experiment, None, [*dry_run.words, "dataset.max_seqlen=4"])
    assert run_checks(loaded) == []
    (problem,) = run_checks(loaded, connections=True)
    assert problem.key == "dataset.train_path"


def test_a_chat_template_that_cannot_be_read_is_blamed_on_its_key(dry_run: DryRun) -> None:
    write(dry_run.data, ROWS[dry_run.experiment])
    _, error = dry_run("prompt.chat_template=none.jinja", code=2)
    assert "prompt.chat_template: none.jinja: cannot read the chat template" in error and "train_path" not in error
    _, error = dry_run("prompt.chat_template=~nobody99/none.jinja", code=2)
    assert "prompt.chat_template: ~nobody99/none.jinja: cannot read the chat template" in error


def test_a_chat_template_that_fails_is_blamed_on_its_key_or_the_model(dry_run: DryRun, tmp_path: Path, assets) -> None:
    write(dry_run.data, ROWS[dry_run.experiment])
    for template in ("'{{ messages[0].content '", "'{{ 1 }}'"):
        _, error = dry_run(f"prompt.chat_template={template}", code=2)
        assert ": prompt.chat_template: " in error and "train_path" not in error
    model = shutil.copytree(assets.model, tmp_path / "broken")
    (model / "chat_template.jinja").write_text("{{ messages[0].content ")
    _, error = dry_run(f"model.path={model}", code=2)
    assert ": model.path: tried on a short conversation: the chat template does not take it" in error
