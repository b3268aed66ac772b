"""Configurations in the studio: the same keys, checks and places as those of the command line."""

import json
import time
from pathlib import Path

import pytest

pytest.importorskip("ruamel.yaml", reason="slipstream[studio] is not installed")

from config_schema.section import all_keys
from core.config.experiments import EXPERIMENTS
from tools.studio.configure import Files, check, compare, migrate, schema, set_key, values_of
from tools.studio.folders import NotFound

TEXT = """\
# my run
experiment_name: sums   # of digits
trial_name: first
allocation_mode: sglang.d2m2p1+d4m1p1
n_gpus_per_node: 8
actor:
  path: /nowhere
  optimizer: {lr: 1e-6}
dataset:
  path: data.jsonl
"""


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_form_has_every_key_with_its_help(name: str) -> None:
    keys = [one for group in schema({"experiment": name})["groups"] for one in group["keys"]]
    named = {key.partition(".NAME.")[0] for key in all_keys(EXPERIMENTS[name])}
    assert {one["key"] for one in keys} == named
    assert all(one["help"] for one in keys)


def test_problems_have_their_key_and_line_and_the_allocation_is_drawn_all_the_same() -> None:
    answer = check({"experiment": "ppo-math", "text": TEXT.replace("lr: 1e-6", "lr: -1").replace("trial", "trail")})
    found = {one["key"]: one["line"] for one in answer["problems"]}
    assert found["trail_name"] == 3
    assert found["actor.optimizer.lr"] == 8
    slots = answer["allocation"]["slots"]
    assert len(slots) == 8
    assert slots["0/0"] == ["actor_gen 0"]
    assert "actor_train 0" in slots["0/4"]


def test_a_text_is_checked_without_a_download_and_a_file_beside_it_is_not_needed() -> None:
    answer = check({"experiment": "ppo-math", "text": TEXT})
    assert answer["values"]["actor.optimizer.lr"] == "1e-6"
    assert answer["allocation"]["text"].startswith("sglang.d2m2p1")


def test_a_key_is_changed_and_comments_and_order_stay() -> None:
    changed = set_key({"text": TEXT, "key": "actor.optimizer.lr", "value": "2e-6"})["text"]
    assert changed == TEXT.replace("1e-6", "2e-6")
    added = set_key({"text": changed, "key": "ppo.gen.max_new_tokens", "value": "64"})["text"]
    assert added == changed + "ppo:\n  gen:\n    max_new_tokens: 64\n"
    assert set_key({"text": added, "key": "ppo.gen.max_new_tokens", "value": None})["text"] == changed
    assert values_of(set_key({"text": "", "key": "a.b", "value": "[1, x]"})["text"]) == {"a.b": '[1, "x"]'}
    with pytest.raises(ValueError, match="not YAML"):
        set_key({"text": TEXT, "key": "actor.path", "value": "[1"})


def test_the_key_that_differs_between_two_texts_is_found() -> None:
    rows = compare({"first": TEXT, "second": TEXT.replace("1e-6", "2e-6")})["rows"]
    assert rows == [{"key": "actor.optimizer.lr", "first": "1e-6", "second": "2e-6"}]


def test_files_are_saved_in_the_folder_alone_and_not_replaced_unasked(tmp_path: Path) -> None:
    folder = tmp_path / "configs"
    folder.mkdir()
    (tmp_path / "secret.yaml").write_text("secret: 1")
    (folder / "link.yaml").symlink_to(tmp_path / "secret.yaml")
    files = Files(folder)
    files.save({"name": "mine.yaml", "text": TEXT})
    with pytest.raises(ValueError, match="is there already"):
        files.save({"name": "mine.yaml", "text": ""})
    files.save({"name": "mine.yaml", "text": TEXT + "seed: 2\n", "replace": True})
    assert files.text({"of": "file", "name": "mine.yaml"})["text"].endswith("seed: 2\n")
    for name in ("../out.yaml", "/tmp/out.yaml", "out.sh", ".yaml", "a/b.yaml"):
        with pytest.raises(ValueError, match="file name"):
            files.save({"name": name, "text": ""})
    with pytest.raises((ValueError, OSError)):
        files.save({"name": "link.yaml", "text": "", "replace": True})
    assert files.sources({})["files"] == ["mine.yaml"]
    for name in ("link.yaml", "../secret.yaml"):
        with pytest.raises(NotFound):
            files.text({"of": "file", "name": name})


def test_a_run_of_a_saved_file_is_started_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "$PWD $*"\n')
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    (tmp_path / "tiny.yaml").write_text(TEXT)
    answer = Files(tmp_path).start({"experiment": "ppo-math", "name": "tiny.yaml"})
    while not (said := Path(str(answer["output"])).read_text()):
        time.sleep(0.01)
    assert said == f"{tmp_path} -m core.quickstart ppo-math --config tiny.yaml\n"
    with pytest.raises(NotFound, match="save it first"):
        Files(tmp_path).start({"experiment": "ppo-math", "name": "other.yaml"})


def test_memory_and_seconds_are_those_of_the_planner(tmp_path: Path) -> None:
    shape = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 1024, "hidden_size": 256,
        "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 2048, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    own = (
        f"algorithm: {{name: grpo}}\nppo: {{gen: {{max_new_tokens: 512}}}}\ndataset: {{path: {tmp_path}/data.jsonl}}\n"
    )
    text = TEXT.partition("dataset:")[0].replace("/nowhere", str(tmp_path)) + own
    answer = check({"experiment": "ppo-math", "text": text, "gpu": "H100"})
    assert answer["problems"] == []
    plan = answer["plan"]
    assert plan["fits"] and plan["ranks"][0]["phases"] and plan["seconds"]["step"] > 0
    assert {role["device"] for role in answer["allocation"]["roles"]} == {"cuda"}


def test_a_recipe_of_another_system_is_recognised_and_migrated() -> None:
    text = (
        "data: {train_batch_size: 8, train_files: a.parquet}\nactor_rollout_ref: {model: {path: m}, rollout: {n: 4}}\n"
    )
    assert check({"experiment": "ppo-math", "text": text})["system"] == "verl"
    answer = migrate({"text": text, "name": "theirs.yaml"})
    assert values_of(answer["text"])["group_size"] == "4"
    assert {row["key"]: row["fate"] for row in answer["rows"]}["actor_rollout_ref.rollout.n"] == "renamed"
    assert check({"experiment": "ppo-math", "text": answer["text"]})["system"] is None
    with pytest.raises(ValueError, match="no recipe that can be migrated"):
        migrate({"text": "seed: 1"})
