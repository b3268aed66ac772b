"""Secrets are shown nowhere: listings, logs, error lines, uploads."""

import os
import stat
from pathlib import Path

import pytest

from core.checks.rules import load_config
from core.config.parsing.problems import ConfigError, is_secret, masked_override, masked_urls
from core.config.reference import listing
from core.runs.paths import RunPaths, private_files, sole_run
from helpers.config_inputs import PPO_7B_128_GPUS


@pytest.mark.parametrize(
    "name", ["WANDB_API_KEY", "HF_TOKEN", "my_secret", "DB_PASSWORD", "DB_PASS", "HF_AUTH", "GOOGLE_CREDENTIALS"]
)
def test_a_secret_is_known_by_its_name(name: str) -> None:
    assert is_secret(name)
    for word in (f"external_configs.envs.{name}=hunter2", f"external_configs.envs={{{name}: hunter2}}"):
        assert masked_override(word) == f"{word.partition('=')[0]}=***"
    assert masked_override(f"external_configs={{envs: {{{name}: hunter2}}}}") == "external_configs=***"


@pytest.mark.parametrize(
    "word",
    [
        "actor_train.mb_spec.max_tokens_per_mb=30720",
        "ppo.gen.max_new_tokens=8",
        "ppo.gen.max_new_token=8",
        "data.num_token=8",
        "--dry-run",
        "buffer.explorer_input.taskset.format.prompt_key=question",
        "dataset.format.prompt_key=question",
        "data.prompt_key=question",
    ],
)
def test_keys_that_only_sound_like_a_secret_are_shown(word: str) -> None:
    assert masked_override(word) == word


@pytest.mark.parametrize(
    "word", ["x.API_KEY=hunter2", "actor.sglang.api_key=hunter2", "hf_token=hunter2", "x.token=hunter2"]
)
def test_a_secret_under_a_wrong_key_is_masked(word: str) -> None:
    assert masked_override(word) == f"{word.partition('=')[0]}=***"


def test_user_and_password_of_a_url_are_masked() -> None:
    assert masked_urls("see https://me:hunter2@mlflow.org:5000/a, http://b/c@d") == (
        "see https://***@mlflow.org:5000/a, http://b/c@d"
    )
    assert masked_override("monitor.mlflow_uri=http://me:hunter2@host") == "monitor.mlflow_uri=http://***@host"


def test_neither_the_listing_nor_an_upload_has_the_password_of_a_url(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(PPO_7B_128_GPUS)
    words = ["monitor.mlflow_uri=http://me:hunter2@host", "external_configs.envs.PROXY=http://me:hunter2@proxy"]
    config = load_config("ppo-math", tmp_path / "x.yaml", words).config
    assert "hunter2" not in listing(config) + config.masked().model_dump_json()
    assert config.monitor.mlflow_uri == "http://me:hunter2@host", "the tracker has it"


@pytest.mark.parametrize(
    "word",
    [
        "external_configs.envs.HF_TOKEN.x=hunter2",
        "external_configs.env.HF_TOKEN=hunter2",
        "external_configs.envs={HF_TOKEN: hunter2, X: [1]}",
        "monitor.mlflow_url=http://me:hunter2@host",
    ],
)
def test_an_error_line_does_not_repeat_the_secret_of_an_override(tmp_path: Path, word: str) -> None:
    (tmp_path / "x.yaml").write_text(PPO_7B_128_GPUS)
    with pytest.raises(ConfigError) as error:
        load_config("ppo-math", tmp_path / "x.yaml", [word])
    assert "hunter2" not in str(error.value)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_of_a_trial_are_their_owners_alone(tmp_path: Path) -> None:
    paths = RunPaths.for_trial(str(tmp_path / "root"), "experiment", "trial")
    before = os.umask(0o022)
    try:
        with private_files(paths), sole_run(paths.logs):
            (paths.logs / "samples.jsonl").write_text("{}")
            paths.recover.mkdir(parents=True)
        assert mode(paths.logs) == mode(paths.recover) == 0o700
        assert mode(paths.logs / "samples.jsonl") == 0o600
        assert mode(tmp_path / "root") == mode(tmp_path / "root" / "logs") == 0o755, "others may have trials there"
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
