"""What --dry-run finds before anything starts: real folders, files, ports."""

import json
import os
import shutil
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

from core import placement, quickstart
from core.checks.rules import load_config
from core.config.parsing.problems import ConfigError
from helpers.config_inputs import (
    TINY_CONFIG,
    TOKENIZER,
    fake_gpus,
    problems,
    tensors_of,
    write_model,
    write_run,
    write_safetensors,
)
from rollout.experience import SQLiteExperience


def test_a_run_that_can_start_has_no_problem(tmp_path: Path) -> None:
    assert problems(write_run(tmp_path)) == []
    assert not (tmp_path / "out").exists(), "a check writes nothing"


def test_a_missing_model_folder_is_named_with_a_way_to_get_it(tmp_path: Path) -> None:
    (message,) = problems(write_run(tmp_path), "actor.path=Qwen/Qwen2.5-0.5B")
    assert message.startswith("override 'actor.path=Qwen/Qwen2.5-0.5B': actor.path: Qwen/Qwen2.5-0.5B: no such folder")
    assert "`hf download Qwen/Qwen2.5-0.5B --local-dir FOLDER`" in message


def test_what_is_missing_in_a_model_folder_is_named(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    (tmp_path / "model" / "tokenizer.json").unlink()
    (message,) = problems(path)
    assert message.startswith("run.yaml:3: actor.path: model: no tokenizer")
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (tmp_path / "model" / "model.safetensors").unlink()
    (message,) = problems(path)
    assert "model: no weights: neither model.safetensors nor model.safetensors.index.json" in message
    assert problems(path, "actor.init_from_scratch=true") == []
    (tmp_path / "model" / "config.json").unlink()
    (message,) = problems(path)
    assert "model/config.json: no such file" in message


LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"


def with_vocab(text: str, *, kind: str = "WordLevel") -> str:
    """The content of a tokenizer.json."""
    return f'{{"added_tokens": [], "model": {{"type": "{kind}", "unk_token": "a", "vocab": {text}}}}}'


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", "{}", "not a tokenizer: Model missing"),
        ("tokenizer.json", '{"model": {"vocab": {"a": ', "not valid JSON: Expecting value"),
        ("tokenizer.json", b"\xff" * 64, "not valid JSON"),
        ("tokenizer.json", LFS_POINTER, "a git-lfs pointer in place of the file"),
        ("tokenizer.json", with_vocab("{}"), "not a tokenizer: its vocabulary is empty"),
        ("tokenizer.json", with_vocab('{"a": 64}'), "its largest token id is 64, but vocab_size=64 in config.json"),
        ("tokenizer.json", with_vocab('{"a": Infinity}'), "not a tokenizer: expected value"),
        ("tokenizer.json", with_vocab('{"a": "0"}'), 'not a tokenizer: invalid type: string "0", expected u32'),
        ("tokenizer.json", with_vocab('{"a": -1}'), "not a tokenizer: invalid value: integer `-1`, expected u32"),
        ("tokenizer.json", with_vocab('{"a": 0}, "merges": ["aa"]', kind="BPE"), "Merges text file invalid"),
        ("tokenizer.json", with_vocab('{"a": 0}, "merges": [["a", "b"]]', kind="BPE"), "Token `b` out of vocabulary"),
        ("tokenizer.json", '{"model": {"vocab": [["a", 0.1]]}}', ""),
        ("tokenizer_config.json", "[" * 10_000, "nested more than 100 deep"),
        ("tokenizer_config.json", '{"chat_template": {}}', "chat_template={} must be text, or a list of templates"),
        ("tokenizer_config.json", '{"add_bos_token": "no"}', "add_bos_token='no' must be true or false"),
        ("tokenizer_config.json", '{"clean_up_tokenization_spaces": []}', "spaces=[] must be true or false"),
        ("tokenizer_config.json", '{"add_bos_token": null, "chat_template": null}', ""),
        ("special_tokens_map.json", "[]", "expected a json object, found list"),
        ("tokenizer.model", LFS_POINTER, "run `git lfs pull` in its folder"),
        ("merges.txt", LFS_POINTER, "run `git lfs pull` in its folder"),
        ("generation_config.json", '{"eos_token_id": [0, 1]}', ""),
        ("generation_config.json", "{}", ""),
        ("generation_config.json", '{"eos_token_id": ', "not valid JSON"),
        ("generation_config.json", "[]", "expected a json object, found list"),
        ("generation_config.json", '{"eos_token_id": [0, null]}', "[0, None] must be a token id or a list of them"),
        ("generation_config.json", '{"eos_token_id": [0, 64]}', "eos_token_id=64, but vocab_size=64 in config.json"),
        ("model.safetensors", "", "not a safetensors file"),
        ("model.safetensors", b"\xff" * 64, "not a safetensors file"),
        ("model.safetensors", LFS_POINTER, "a git-lfs pointer in place of the file"),
    ],
)
def test_a_file_of_a_model_that_does_not_load_or_fit_is_named(tmp_path, name: str, content: Any, said: str) -> None:
    path = write_run(tmp_path)
    (tmp_path / "model" / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert [f"model/{name}: " in message and said in message for message in problems(path)] == [True] * bool(said)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 64}, "model.embed_tokens.weight has the shape [64, 32], config.json requires [64, 64]"),
        ({"intermediate_size": 48}, "layers.0.mlp.gate_proj.weight has the shape [64, 32], config.json requires [48,"),
        ({"rope_theta": -1}, "rope_theta=-1.0 must be a number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be a number"),
        ({"num_hidden_layers": 99}, "num_hidden_layers=99 in config.json, the weight files have 2 layers"),
        ({"num_hidden_layers": 1}, "model.layers.1.input_layernorm.weight has no place in a qwen2 model: num_hidden"),
    ],
)
def test_a_config_of_another_model_than_the_weights_is_named(tmp_path, changes: dict[str, Any], said: str) -> None:
    path = write_run(tmp_path)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | changes))
    (message,) = problems(path)
    assert said in message


def test_a_critic_needs_a_value_head_and_no_other_model_has_one(tmp_path: Path) -> None:
    path, model = write_run(tmp_path), tmp_path / "model"
    critic = write_model(tmp_path / "critic")
    with_critic = ("ppo.disable_value=false", f"critic.path={model}")
    (message,) = problems(path, *with_critic)
    assert "critic.path: model: holds no critic (score.weight is missing); set critic.init_critic_from_actor" in message
    assert problems(path, *with_critic, "critic.init_critic_from_actor=true") == []
    assert problems(path, *with_critic, "critic.init_from_scratch=true") == []
    write_safetensors(critic / "model.safetensors", tensors_of(TINY_CONFIG, is_critic=True))
    assert problems(path, "ppo.disable_value=false", f"critic.path={critic}") == []
    (message,) = problems(path, f"actor.path={critic}")
    assert "actor.path: critic: holds a critic (score.weight is a value head)" in message


def _renamed(old: str, new: str) -> dict[str, tuple[int, ...]]:
    return {name.replace(old, new): shape for name, shape in tensors_of(TINY_CONFIG).items()}


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (_renamed("model.", "module.model."), "names begin with 'module.model.' in place of 'model.'"),
        (_renamed("model.", ""), "names begin with '' in place of 'model.'"),
        (_renamed("model.", "base_model.model.model."), "a LoRA adapter is in the folder; merge it"),
        (tensors_of(TINY_CONFIG) | {"model.layers.0.self_attn.q_proj.lora_A.weight": (2, 32)}, "a LoRA adapter"),
        (tensors_of(TINY_CONFIG) | {"model.layers.0.mlp.up_proj.weight_scale_inv": (1, 1)}, "weights are quantized"),
        (_renamed("proj.weight", "proj.qweight"), "the weights are quantized, and only"),
        (_renamed("1.mlp.up_proj.weight", "1.mlp.up.weight"), "model.layers.1.mlp.up_proj.weight is missing"),
        (_renamed("model.norm", "model.final_norm"), "model.norm.weight is missing"),
    ],
)
def test_a_folder_that_is_not_what_it_says_is_refused_with_the_reason(tmp_path, tensors, said) -> None:
    path = write_run(tmp_path)
    write_safetensors(tmp_path / "model" / "model.safetensors", tensors)
    (message,) = problems(path)
    assert "actor.path: " in message and said in message


def test_an_unsupported_model_and_a_wrong_family_are_named(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    (message,) = problems(path, "actor.type._class=llama")
    assert "actor.type._class: 'llama', but config.json of model has 'qwen2'; write that, or auto" in message
    write_model(tmp_path / "model", model_type="gpt2")
    (message,) = problems(path)
    assert "actor.path: model/config.json: model_type='gpt2' is not supported; supported: deepseek_v2, " in message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mlp_only_layers": [0]}, "mlp_only_layers, decoder_sparse_step"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ],
)
def test_what_servers_ignore_of_a_model_with_experts_is_refused(tmp_path, changes: dict[str, Any], named: str) -> None:
    path = write_run(tmp_path)
    servers = ["allocation_mode=sglang.d1m1p1+d1m1p1", "actor.sglang.device=cpu"]
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    experts |= {"model_type": "qwen3_moe", "tie_word_embeddings": False}
    write_model(tmp_path / "model", **experts)
    assert problems(path, *servers) == []
    write_model(tmp_path / "model", **experts | changes)
    (message,) = problems(path, *servers)
    assert f"actor.path: model is a qwen3_moe whose config.json uses {named}, which SGLang servers ignore" in message


def test_a_model_that_the_embedded_generator_cannot_sample_is_named(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    write_model(tmp_path / "model", model_type="qwen3_moe", **experts)
    (message,) = problems(path)
    assert "allocation_mode: the embedded generator samples dense models, and model is of type 'qwen3_moe'" in message


@pytest.mark.parametrize("cut", [1, 4, 8, 60, 200])
def test_a_truncated_weight_file_is_found_by_its_header(tmp_path: Path, cut: int) -> None:
    path = write_run(tmp_path)
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-cut])
    (message,) = problems(path)
    assert message.startswith("run.yaml:3: actor.path: model/model.safetensors: ")
    assert "truncated" in message or "header cannot be read" in message


def test_every_shard_of_the_index_is_looked_at(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    model, tensors = tmp_path / "model", tensors_of(TINY_CONFIG)
    (model / "model.safetensors").unlink()
    first, second = dict(list(tensors.items())[:5]), dict(list(tensors.items())[5:])
    index = {"weight_map": dict.fromkeys(first, "s1.safetensors") | dict.fromkeys(second, "s2.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    write_safetensors(model / "s1.safetensors", first)
    assert "model/s2.safetensors: no such file, though model.safetensors.index.json lists it" in problems(path)[0]
    write_safetensors(model / "s2.safetensors", {"x": (3,)})
    assert f"model/s2.safetensors: has no {min(second)}, which model.safetensors.index.json lists" in problems(path)[0]
    write_safetensors(model / "s2.safetensors", tensors)
    assert "is in s1.safetensors too" in problems(path)[0]
    write_safetensors(model / "s2.safetensors", second)
    assert problems(path) == []
    (model / "model.safetensors.index.json").write_text("[]")
    assert "not an index of safetensors files" in problems(path)[0]
    for name in ("../../other.safetensors", "/other.safetensors", "", ".", "a\0b", "\ud800"):
        index["weight_map"]["model.norm.weight"] = name
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        assert f"model.norm.weight is in {name!r}, which is no file of the folder" in problems(path)[0]


def test_a_layout_that_the_model_cannot_take_says_what_works(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    (message,) = problems(path, "allocation_mode=embedded.d1m1p1+d1m1p3", "n_gpus_per_node=4")
    assert "allocation_mode: " in message
    assert "p3: each needs a layer, and num_hidden_layers=2" in message
    found = problems(path, "allocation_mode=embedded.d1m1p1+d1m3p1", "n_gpus_per_node=4")
    assert any("m3 must divide num_attention_heads=4" in line for line in found)
    assert any("m3 must divide vocab_size=64" in line for line in found)


def test_a_sequence_longer_than_the_models_positions_is_named(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    (message,) = problems(path, "ppo.gen.max_new_tokens=113")
    assert (
        "ppo.gen.max_new_tokens: 113 + dataset.max_prompt_len=16 is 129, more than max_position_embeddings=128"
        in message
    )
    (message,) = problems(path, "evaluation.max_new_tokens=113")
    assert "evaluation.max_new_tokens: 113 + dataset.max_prompt_len=16 is 129" in message
    hard = f"{{path: {tmp_path / 'prompts.jsonl'}, max_new_tokens: 113}}"
    (message,) = problems(path, f"evaluation.sets.hard={hard}")
    assert "evaluation.sets.hard.max_new_tokens: 113 + dataset.max_prompt_len=16 is 129" in message


def test_models_of_different_vocabularies_do_not_go_together(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    write_model(tmp_path / "other", vocab_size=128)
    (message,) = problems(path, f"ref.path={tmp_path / 'other'}", "ppo.kl_ctl=0.1")
    assert "the models must share one vocabulary; vocab_size of actor 64, ref 128" in message


def test_the_line_of_a_malformed_row_is_named(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write('{"prompt": "1 + 1')
    (message,) = problems(path)
    assert message.startswith("run.yaml:4: dataset.path: prompts.jsonl:5: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "prompts.jsonl: no rows"), ('{"text": "x"}\n', "prompts.jsonl:1: "), ("[1]\n", "prompts.jsonl:1: ")],
)
def test_an_unusable_data_set_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = write_run(tmp_path)
    (tmp_path / "prompts.jsonl").write_text(content)
    (found,) = problems(path)
    assert f"dataset.path: {message}" in found


def test_rows_that_the_maths_reward_cannot_score_need_a_reward_of_their_own(tmp_path, monkeypatch) -> None:
    path = write_run(tmp_path)
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write('{"prompt": "sort a list", "task": "code"}\n')
    (message,) = problems(path)
    assert "dataset.path: prompts.jsonl:5: no solution among the columns ['prompt', 'task'] of task 'code'" in message
    (tmp_path / "judge.py").write_text("def score(prompt, text):\n    return 0.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert problems(path, "reward.function=judge:score") == []


REWARDS_OF_A_USER = """
def score(prompt, text):
    return 0.0

async def ask(prompt, text):
    return 0.0

class Judge:
    async def __call__(self, prompt, text):
        return 0.0

judge = Judge()

def of_trl(completions, answer, level, hint=None, **columns):
    return [0.0]
"""


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("reward.function=mine:scored", "mine:scored: module mine has no 'scored'; did you mean 'score'?"),
        ("reward.function=maths", "use one of math, or package.module:function; did you mean 'math'?"),
        ("algorithm.name=gspoo", "or package.module:Class; did you mean 'gspo'?"),
        ("reward.function=mine.py:score", "a module is written without .py: did you mean 'mine:score'?"),
        ("reward.function=./rewards/mine.py:score", "as package.module:Name; did you mean 'rewards.mine:score'?"),
        (
            "reward.function=mine:ask",
            "is `async def`, and what it returns would not be awaited; write `def`, with asyncio.run(",
        ),
        ("reward.function=mine:judge", "reward function mine:judge: is `async def`"),
        (
            "workflow.type=dialogue",
            "unknown workflow 'dialogue'; use one of endpoint, environment, math, tools, or",
        ),
        ("workflow.type=mine.Dialogue", "or package.module:Class; did you mean 'mine:Dialogue'?"),
        ("workflow.type=mine:score", "workflow mine:score: is called as (tokenizer=, reward_pool=, sampling="),
    ],
)
def test_a_reward_or_workflow_that_is_not_there_is_named(tmp_path, monkeypatch, override: str, said: str) -> None:
    path = write_run(tmp_path)
    (tmp_path / "mine.py").write_text(REWARDS_OF_A_USER)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("mine", None)
    assert problems(path, "reward.function=mine:score") == []
    (message,) = problems(path, override, "group_size=4")
    assert said in message and f"{override.partition('=')[0]}: " in message


def test_a_store_that_this_release_cannot_continue_is_named(tmp_path: Path) -> None:
    path, file = write_run(tmp_path), tmp_path / "store.db"
    words = ["experience.store=sqlite", f"experience.path={file}", "mode=explore"]
    SQLiteExperience(file).close()
    assert problems(path, *words) == []
    with sqlite3.connect(file) as db:
        db.execute("UPDATE meta SET value = 2 WHERE key = 'layout'")
    (message,) = problems(path, *words)
    assert "experience.path: store.db has tables of version 2, this release has version " in message
    assert problems(path, *words, "mode=serve") == [], "it opens no store"
    file.write_text("not a store" * 100)
    (message,) = problems(path, *words)
    assert "experience.path: store.db: file is not a database; name another file, or restore it" in message


@pytest.mark.parametrize(
    ("workflow", "said"),
    [
        ("workflow.type=tools", "reward math"),
        ("workflow.type=environment", "reward by environment"),
        ("workflow.type=endpoint", "reward by endpoint or math"),
        ("workflow.by_task={game: environment}", "reward by environment or math"),
    ],
)
def test_the_start_names_a_workflow_that_gives_the_reward(tmp_path: Path, workflow: str, said: str) -> None:
    assert load_config("ppo-math", write_run(tmp_path), [workflow]).config.summary.sampled[-1] == said


def test_a_reward_of_trl_names_the_column_that_no_row_has(tmp_path, monkeypatch) -> None:
    path = write_run(tmp_path)
    (tmp_path / "mine.py").write_text(REWARDS_OF_A_USER)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("mine", None)
    (message,) = problems(path, "reward.function=mine:of_trl")
    assert (
        "reward.function: " in message
        and "prompts.jsonl: mine:of_trl: the reward asks for level; the data set " in message
    )
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write('{"prompt": "1+1=", "answer": "2", "level": 3}\n')
    assert problems(path, "reward.function=mine:of_trl") == []


def test_plugins_that_end_the_process_are_reported_with_the_other_problems(tmp_path, monkeypatch) -> None:
    path = write_run(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "script.py").write_text("import sys\nsys.exit(0)\n")
    found = problems(path, "reward.function=script:score", "workflow.type=script:Flow", "actor.path=/no/model")
    assert [message.split(": ")[1] for message in found] == ["actor.path", "reward.function", "workflow.type"]
    assert all("ends the process with sys.exit(0)" in message for message in found[1:])


def test_metrics_that_cannot_go_where_they_should_are_named_before_the_run(tmp_path, monkeypatch) -> None:
    path = write_run(tmp_path)
    for extra, override in (("wandb", "wandb.mode=offline"), ("mlflow", "monitor.mlflow_uri=runs")):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, extra, None)  # Python's way to say that it cannot be imported
            (message,) = problems(path, override)
        assert message.endswith(f"{extra} is not installed: pip install -e '.[{extra}]'")


def test_weights_and_biases_without_a_key_is_named_before_the_run(tmp_path, monkeypatch) -> None:
    path = write_run(tmp_path)
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "wandb.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert problems(path, "wandb.mode=offline") == []
    (message,) = problems(path, "wandb.mode=online")
    assert "wandb.mode: no API key: export WANDB_API_KEY=..., or run `wandb login`" in message
    assert problems(path, "wandb.mode=online", "external_configs.envs.WANDB_API_KEY=k") == []
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password k\n")
    assert problems(path, "wandb.mode=online") == []


def test_an_output_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    for root in ("/proc/slipstream", str(path)):
        (message,) = problems(path, f"external_configs.cluster_config.fileroot={root}")
        assert "external_configs.cluster_config.fileroot: " in message
        assert "cannot write in" in message


def test_a_disk_without_room_for_one_recover_checkpoint_is_named(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    weights, large = tmp_path / "model" / "model.safetensors", shutil.disk_usage(tmp_path).free // 10
    header = json.dumps({"embedding": {"dtype": "F32", "shape": [large], "data_offsets": [0, 4 * large]}}).encode()
    with weights.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 4 * large)  # a sparse file
    (message,) = (line for line in problems(path) if "GiB free" in line)
    assert "cluster_config.fileroot: one recover checkpoint has " in message and "recover_mode=disabled" in message
    assert not any("GiB free" in line for line in problems(path, "recover_mode=disabled"))


def test_the_gpus_of_the_trainer_are_looked_at_as_those_of_the_servers(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(placement, "_num_gpus", placement._num_gpus.__wrapped__)  # not those of an earlier test
    monkeypatch.setattr("rollout.inference.gpus._PATIENCE_SECONDS", 0.0)
    fake_gpus(
        tmp_path,
        monkeypatch,
        "0, GPU-aa, H, 4, 141000",
        "1, GPU-bb, H, 91000, 141000",
        apps="GPU-bb, 77, python, 90990",
    )
    path = write_run(tmp_path)
    apart = ["allocation_mode=sglang.d1m1p1+d1m1p1", "n_gpus_per_node=2"]
    (message,) = problems(path, *apart)
    assert (
        "allocation_mode: GPU 1: 91000 of its 141000 MiB are in use by other processes: process 77 (python)" in message
    )
    sql = ["experience.store=sqlite", f"experience.path={tmp_path / 'x.db'}"]
    (again,) = problems(path, *apart, *sql, "mode=train")
    assert "GPU 1: 91000 of its" in again
    assert problems(path, *apart, *sql, "mode=explore") == [], "the trainer of another job has that GPU"
    assert problems(path, "allocation_mode=sglang.d1m1p1", "n_gpus_per_node=1") == []
    (message,) = problems(path, "allocation_mode=sglang.d1m1p1+d1m2p1", "n_gpus_per_node=3")
    assert "allocation_mode requires GPU 2, this machine has 2 (0 to 1)" in message
    assert problems(path, *apart, "actor.sglang.device=cpu") == []
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    words = [f"model.path={tmp_path / 'model'}", f"dataset.train_path={tmp_path / 'pairs.jsonl'}", "n_gpus_per_node=2"]
    words += ["allocation_mode=d2m1p1", f"external_configs.cluster_config.fileroot={tmp_path / 'out'}"]
    words += ["experiment_name=x", "trial_name=y"]
    (tmp_path / "empty.yaml").write_text("{}\n")
    assert quickstart.main(["sft", "--config", str(tmp_path / "empty.yaml"), "--preflight", *words]) == 2
    assert "allocation_mode: GPU 1: 91000 of its" in capsys.readouterr().err


def test_several_nodes_with_gpus_need_a_ray_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    path = write_run(tmp_path)
    nodes = ["n_nodes=2", "n_gpus_per_node=1"]
    assert problems(path, *nodes) == [], "processes without GPUs find room on one machine"
    (message,) = problems(path, *nodes, "allocation_mode=sglang.d1+d1")
    assert message.startswith("launch.ray_address: needed with n_nodes=2, or Ray is started on this machine alone; run")
    assert problems(path, *nodes, "allocation_mode=sglang.d1+d1", "launch.ray_address=head:6379") == []
    assert problems(path, *nodes, "allocation_mode=sglang.d1+d1", "external_configs.envs.RAY_ADDRESS=head:6379") == []
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert problems(path, *nodes, "allocation_mode=sglang.d1+d1") == []


def test_a_tokenizer_file_that_is_a_link_to_elsewhere_is_named(tmp_path: Path) -> None:
    path, link = write_run(tmp_path), tmp_path / "model" / "special_tokens_map.json"
    link.symlink_to(tmp_path / "run.yaml")
    (message,) = problems(path)
    assert "special_tokens_map.json: a link to run.yaml, outside of the model's folder; copy the file" in message
    link.unlink()
    snapshot = tmp_path / "cache" / "snapshots" / "abc"
    shutil.copytree(tmp_path / "model", snapshot)
    os.renames(snapshot / "tokenizer.json", tmp_path / "cache" / "blobs" / "def")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/def")
    assert problems(path, f"actor.path={snapshot}") == []


def test_a_models_path_may_begin_at_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert problems(path, "actor.path=~/model") == []
    assert "~nobody99/model: no such folder" in problems(path, "actor.path=~nobody99/model")[0]


def test_an_auxiliary_model_needs_a_folder_and_leaves_a_generator_to_the_policy(tmp_path: Path) -> None:
    path, judge = write_run(tmp_path), write_model(tmp_path / "judge")
    more = ("allocation_mode=embedded.d2m1p1+d1m1p1", "n_gpus_per_node=3")
    assert problems(path, f"auxiliary.path={judge}", *more) == []
    none_left = "2 of 2 generators would serve the auxiliary model.* at least d3, as in embedded.d3"
    with pytest.raises(ConfigError, match=none_left):
        problems(path, f"auxiliary.path={judge}", "auxiliary.num_servers=2", *more)
    (message,) = problems(path, f"auxiliary.path={tmp_path / 'none'}", *more)
    assert "auxiliary.path: " in message and "no such folder" in message
    (judge / "model.safetensors").unlink()
    (message,) = problems(path, f"auxiliary.path={judge}", *more)
    assert "auxiliary.path: " in message and "no weights" in message
