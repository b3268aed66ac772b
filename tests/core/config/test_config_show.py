"""The listing at start-up has the tutorial's lines; --help and the schema know the same keys."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from config_schema.section import all_keys
from core.checks.rules import load_config
from core.config.areal_v02 import renamed_of, rows_of
from core.config.common import ModelFamily
from core.config.experiments import EXPERIMENTS
from core.config.presets import PRESETS
from core.config.reference import help_text, listing
from core.experiments import context as run
from core.runs.paths import RunPaths
from helpers.config_inputs import PPO_7B_128_GPUS, SFT_32B_128_GPUS
from model_specs.families import FAMILIES


def test_the_listing_reads_as_in_the_tutorial(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(PPO_7B_128_GPUS)
    lines = listing(load_config("ppo-math", path).config).splitlines()
    assert lines[:7] == [
        "╭─────────────────────────────────────────────────╮",
        "│ Setting PPOMATHConfig with the Following Values │",
        "╰─────────────────────────────────────────────────╯",
        "───────────────────────── Current Configuration Begin ──────────────────────────",
        "actor (ModelTrainEvalConfig)",
        "actor.type (ModelFamily)",
        "actor.type._class (str) - qwen2",
    ]
    assert lines[-1] == "────────────────────────── Current Configuration End ───────────────────────────"
    assert "actor.type.is_critic (bool) - False" in lines
    assert "actor.optimizer.lr (float) - 2e-05" in lines
    assert "exp_ctrl.total_train_epochs (int) - 5" in lines
    assert "exp_ctrl.save_freq_steps (int | None) - None" in lines
    assert "mode (str) - ray" in lines
    assert "allocation_mode (str) - sglang.d64p1m1+d32p2m1" in lines
    listed = {line.partition(" ")[0] for line in lines if " - " in line}
    assert listed == {key for key in all_keys(EXPERIMENTS["ppo-math"]) if ".NAME." not in key}


def test_secrets_are_neither_listed_nor_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(PPO_7B_128_GPUS)
    names = ["WANDB_API_KEY", "HF_TOKEN", "my_secret", "DB_PASSWORD"]
    config = load_config("ppo-math", path, [f"external_configs.envs.{name}=hidden" for name in names]).config
    uploaded: dict[str, Any] = {}
    monkeypatch.setattr(run, "WandbSink", lambda **options: uploaded.update(options) or SimpleNamespace(name="W&B"))
    config = config.model_copy(update={"wandb": config.wandb.model_copy(update={"mode": "offline"})})
    run.open_trackers(config, RunPaths.for_trial(str(tmp_path), "e", "t"))
    assert "{'WANDB_API_KEY': '***'" in listing(config)
    assert uploaded["config"]["external_configs"]["envs"]["HF_TOKEN"] == "***"
    assert "hidden" not in listing(config) + str(uploaded)
    assert config.external_configs.envs["HF_TOKEN"] == "hidden", "the processes have it"


def test_the_listing_of_sft_names_its_own_class(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(SFT_32B_128_GPUS)
    lines = listing(load_config("sft", path).config).splitlines()
    assert lines[1] == "│ Setting SFTConfig with the Following Values │"
    assert "model.type._class (str) - qwen2" in lines


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_help_has_every_key_with_type_default_and_meaning(experiment: str) -> None:
    text = help_text(experiment, EXPERIMENTS[experiment])
    for key in all_keys(EXPERIMENTS[experiment]):
        assert re.search(rf"^  {re.escape(key)} \([^)]+; (default .*|required)\)\n      \S.+$", text, re.MULTILINE), key


def test_help_has_every_preset_with_the_keys_that_it_sets() -> None:
    text = help_text("ppo-math", EXPERIMENTS["ppo-math"])
    for name, preset in PRESETS.items():
        values = preset.values
        lines = text.partition(f"  {name}: {preset.about} (")[2].splitlines()[:2]
        for key, value in values.items():
            assert f"{key}={str(value).lower() if isinstance(value, bool) else value}" in lines[1], (name, key)
    assert "dapo" not in help_text("sft", EXPERIMENTS["sft"])


def test_the_help_of_a_models_family_names_every_one_there_is() -> None:
    description = ModelFamily.model_fields["family"].description or ""
    assert f"({', '.join(FAMILIES)})" in description


def test_help_shows_choices_defaults_and_what_is_ignored() -> None:
    text = help_text("ppo-math", EXPERIMENTS["ppo-math"])
    assert "  ppo.eps_clip (float; default 0.2)\n" in text
    assert "  experiment_name (str; required)\n" in text
    assert "  critic.type.is_critic (bool; default true)\n" in text
    assert "One of: wait, mask. Needs staleness.max_staleness > 0\n" in text
    assert "  torch_cache_mysophobia: device memory is managed by the engine\n" in text
    assert "  ppo.gen.n (only 1): set group_size for the completions per prompt\n" in text


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_no_key_of_another_trainer_is_one_of_ours_or_in_two_rows(experiment: str) -> None:
    model = EXPERIMENTS[experiment]
    theirs = [path for row in rows_of(model) for path in row.paths] + list(renamed_of(model))
    assert len(set(theirs)) == len(theirs) and not set(theirs) & set(all_keys(model))
