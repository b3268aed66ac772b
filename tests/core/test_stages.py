"""What the stages of a file are: their configurations, and what is wrong with them."""

from pathlib import Path

import pytest
import yaml

from core import quickstart
from core.checks.rules import load_config
from core.config.experiments import ExperimentConfig
from core.config.parsing.problems import ConfigError
from core.stages import Stage, stages_of
from helpers.config_inputs import write_model

SHARED = """\
experiment_name: several
trial_name: run
recover_mode: resume
seed: 7
actor:
  path: base
  optimizer: {lr: 1e-4}
"""
SFT = """\
  - sft:
      dataset: {path: pairs.jsonl, max_seqlen: 16, train_bs_n_seqs: 8}
      actor: {optimizer: {lr: 1e-3}}
"""
GRPO = """\
  - GRPO:
      dataset: {path: sums.jsonl, max_prompt_len: 8, train_bs_n_seqs: 8}
      group_size: 4
      ppo: {gen: {max_new_tokens: 8}, ppo_n_minibatches: 1}
"""
DPO = """\
  - dpo:
      model: {path: other}
      dataset: {path: pairs.jsonl, max_seqlen: 16, train_bs_n_seqs: 8}
"""


def config_of(stage: Stage) -> ExperimentConfig:
    return load_config(stage.experiment, stage.tree).config


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "stages.yaml"
    path.write_text(f"{SHARED}stages:\n{SFT}{GRPO}")
    return path


def test_a_stage_is_its_section_over_the_shared_keys_in_a_trial_of_its_own(file: Path) -> None:
    sft, grpo = stages_of(file, ["seed=9"])
    configs = [config_of(stage) for stage in (sft, grpo)]
    assert [c.NAME for c in configs] == ["sft", "ppo-math"] and configs[1].algorithm_name == "grpo"
    assert [c.trial_name for c in configs] == ["run.1-sft", "run.2-grpo"] and [c.seed for c in configs] == [9, 9]
    assert [c.summary.optimizer for c in configs] == ["lr 0.001", "lr 0.0001"] and [
        c.summary.model for c in configs
    ] == ["base", "base"]
    assert [c.recover_mode for c in configs] == ["resume", "auto"]


@pytest.mark.parametrize("override", ["actor.path=given", "model.path=given", "actor={path: given}"])
def test_a_stage_begins_from_the_one_before_unless_it_names_a_model(tmp_path: Path, override: str) -> None:
    path = tmp_path / "stages.yaml"
    path.write_text(f"{SHARED}stages:\n{SFT}{GRPO}")
    if override.startswith("model"):
        path.write_text(f"{SHARED}stages:\n{SFT}".replace("actor", "model") + SFT.replace("actor", "model"))
    _, second = stages_of(path, [override])
    assert second.follows
    assert config_of(second).summary.model == "given"  # what the stage before begins from, until that has ended
    second.begins_from(Path("saved"))
    assert config_of(second).summary.model == "saved"


def test_a_stage_that_names_a_model_does_not_follow(tmp_path: Path) -> None:
    path = tmp_path / "stages.yaml"
    path.write_text(f"{SHARED.replace('actor', 'model')}stages:\n{SFT.replace('actor', 'model')}{DPO}")
    first, second = stages_of(path, [])
    assert config_of(first).summary.model == "base" and config_of(second).summary.model == "other"
    assert not second.follows


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ("[]", "stages.yaml:8: stages: must be a list such as"),
        ("{sft: {}}", "stages.yaml:8: stages: must be a list such as"),
        ("[sft]", "stages.yaml:8: stages: a stage is one key with its section"),
        ("[{sft: {}, dpo: {}}]", "stages.yaml:8: stages: a stage is one key with its section"),
        ("[{sft: 1}]", "stages.yaml:8: stages.sft: must be a section"),
        ("[{grop: {}}]", "stages.yaml:8: stages.grop: unknown stage; did you mean 'grpo'?"),
    ],
)
def test_a_list_that_is_none_is_refused_with_its_line(tmp_path: Path, stages: str, said: str) -> None:
    path = tmp_path / "stages.yaml"
    path.write_text(f"{SHARED}stages: {stages}\n")
    with pytest.raises(ConfigError) as refused:
        stages_of(path, [])
    assert said in str(refused.value)


def test_a_dry_run_tells_the_problems_of_all_stages_once_each(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(file.parent / "base")
    text = file.read_text().replace("seed: 7", "seed: x").replace("max_seqlen: 16", "max_seqlen: 0")
    file.write_text(text.replace("group_size", "group_siz").replace("path: base", f"path: {file.parent}/base"))
    assert quickstart.main(["train", "--config", str(file), "--dry-run"]) == quickstart.BAD_INPUT
    *lines, end = capsys.readouterr().err.split("\n")
    assert not end and lines[0].startswith("error: ")
    for line, key in ((4, "seed"), (10, "dataset.max_seqlen"), (14, "group_siz")):
        assert len([said for said in lines if said.startswith(f"{file}:{line}: {key}: ")]) == 1, lines


def test_a_stage_is_started_with_the_model_that_the_one_before_has_saved(tmp_path, monkeypatch) -> None:
    write_model(tmp_path / "base")
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 8)
    path = tmp_path / "stages.yaml"
    text = f"{SHARED}external_configs: {{cluster_config: {{fileroot: {tmp_path}/root}}}}\nstages:\n{SFT}{SFT}"
    path.write_text(text.replace("resume", "disabled").replace("pairs.jsonl", f"{tmp_path}/pairs.jsonl"))
    started = []

    def attempts(*_: object, log_folder: Path, **__: object) -> int:
        """Stands for the processes of a run: saves a model."""
        started.append(yaml.safe_load((log_folder / "config.yaml").read_text())["model"]["path"])
        name = "epoch1epochstep1globalstep1"
        write_model(Path(str(log_folder).replace("/logs/", "/checkpoints/")) / "default" / name)
        return quickstart.DONE

    monkeypatch.setattr(quickstart, "run_attempts", attempts)
    assert quickstart.main(["train", "--config", str(path), f"actor.path={tmp_path}/base"]) == quickstart.DONE
    first, second = started
    assert first == f"{tmp_path}/base" and second.endswith("/run.1-sft/default/epoch1epochstep1globalstep1")
