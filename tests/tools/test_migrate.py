"""Recipes of other systems: recognised, explained key by key, and translated into recipes that a run accepts."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from config_schema.section import all_keys
from core.checks.rules import load_config
from core.config.experiments import PPOMATHConfig
from core.config.migrate import read, system_of, systems, translate
from core.stages import stages_of
from helpers.config_inputs import write_model, write_prompts
from tools.migrate.__main__ import main

RECIPES = {
    "verl": """
data: {train_files: [a.parquet], val_files: b.parquet, train_batch_size: 64, max_prompt_length: 100,
       max_response_length: 200, shuffle: true, truncation: error}
actor_rollout_ref:
  hybrid_engine: true
  model: {path: model, use_remove_padding: true, enable_gradient_checkpointing: true, lora_rank: 0}
  actor: {strategy: fsdp, ppo_mini_batch_size: 16, ppo_micro_batch_size_per_gpu: 2, clip_ratio_high: 0.28,
          use_kl_loss: true, kl_loss_coef: 0.001, kl_loss_type: low_var_kl, optim: {lr: 1e-6},
          loss_agg_mode: token-mean,
          fsdp_config: {param_offload: false}}
  rollout: {name: sglang, n: 8, temperature: 0.9, tensor_model_parallel_size: 2, gpu_memory_utilization: 0.6}
algorithm: {adv_estimator: grpo, use_kl_in_reward: false}
trainer: {project_name: demo run, experiment_name: try 1, nnodes: 1, n_gpus_per_node: 8, total_epochs: 3, save_freq: -1,
          test_freq: 5, logger: [console]}
""",
    "Trinity-RFT": """
project: demo
name: example
mode: both
checkpoint_root_dir: ${oc.env:NOT_SET_HERE,./checkpoints}
algorithm: {algorithm_type: grpo, repeat_times: 4, optimizer: {lr: 1e-6, warmup_style: constant}, kl_loss_fn: k2}
model: {model_path: model, max_prompt_tokens: 64, max_response_tokens: 128}
cluster: {node_num: 1, gpu_per_node: 4}
buffer:
  batch_size: 16
  train_batch_size: 96
  total_epochs: 2
  explorer_input:
    default_reward_fn_type: math_reward
    taskset: {name: train, path: a.jsonl, split: train, format: {prompt_key: question, response_key: answer},
              rollout_args: {temperature: 0.8}}
    eval_tasksets: []
  trainer_input:
    experience_buffer: {storage_type: queue, max_read_timeout: 60, replay_buffer: {enable: false}}
explorer: {max_timeout: 100, max_retry_times: 2, dynamic_timeout: {enable: true, ratio: 2.5},
           rollout_model: {engine_num: 2}, eval_interval: 10}
synchronizer: {sync_method: nccl, sync_interval: 2, sync_style: fixed}
trainer: {save_interval: 10, grad_clip: 1.0, trainer_config: {actor_rollout_ref: {actor: {shuffle: false}}}}
monitor: {monitor_type: tensorboard}
""",
    "ROLL": """
exp_name: demo
num_gpus_per_node: 8
rollout_batch_size: 32
num_return_sequences_in_group: 4
prompt_length: 128
response_length: 256
adv_estimator: reinforce
pretrain: model
track_with: tensorboard
actor_train:
  model_args: {dtype: bf16}
  training_args: {learning_rate: 1.0e-6, weight_decay: 0, gradient_accumulation_steps: 8}
  data_args: {file_name: [a.jsonl], template: qwen2_5}
  strategy_args: {strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 2}}
  device_mapping: list(range(0,8))
actor_infer:
  generating_args: {max_new_tokens: "${response_length}", top_p: 0.99, temperature: 0.9}
rewards: {math_rule: {worker_cls: some.module.Class}}
""",
    "NeMo-RL": """
grpo: {num_prompts_per_step: 16, num_generations_per_prompt: 4, max_num_steps: 100, val_period: 10, seed: 3,
       async_grpo: {enabled: true, max_trajectory_age_steps: 2}}
loss_fn: {reference_policy_kl_penalty: 0.01, ratio_clip_max: 0.2, token_level_loss: true}
policy: {model_name: model, max_total_sequence_length: 512, max_grad_norm: 1.0, optimizer: {kwargs: {lr: 5.0e-6}},
         generation: {backend: vllm, max_new_tokens: 256, temperature: 1.0, top_k: null}, dtensor_cfg: {enabled: true}}
data: {dataset_name: a.jsonl, max_input_seq_length: 128, shuffle: true, prompt_file: p.txt}
logger: {wandb_enabled: false, wandb: {project: demo, name: one}}
cluster: {gpus_per_node: 2, num_nodes: 1}
""",
    "AReaL": """
experiment_name: demo
trial_name: one
allocation_mode: sglang.d2p1t2+d4p1t1
cluster: {n_nodes: 1, n_gpus_per_node: 8, fileroot: /tmp/areal}
rollout: {max_head_offpolicyness: 3, max_concurrent_rollouts: 64}
gconfig: {n_samples: 4, max_new_tokens: 128, temperature: 1.0, greedy: false}
actor: {path: model, dtype: bfloat16, optimizer: {type: adam, lr: 1.7e-5, beta1: 0.9}, eps_clip: 0.4, kl_ctl: 0.0,
        ppo_n_minibatches: 2, use_decoupled_loss: true, behav_imp_weight_cap: 5.0, reward_scaling: 10.0}
train_dataset: {path: a.jsonl, batch_size: 32, max_length: 64, type: rl}
saver: {freq_epochs: 1, freq_steps: null}
recover: {mode: disabled}
""",
    "SkyRL": """
data: {train_data: [a.parquet], val_data: [b.parquet]}
trainer:
  policy: {model: {path: model}, optimizer_config: {lr: 1.0e-6, scheduler: constant_with_warmup}}
  algorithm: {advantage_estimator: rloo, use_kl_loss: false, kl_loss_coef: 0.1, eps_clip_low: 0.2, policy_loss_type: x}
  placement: {policy_num_nodes: 1, policy_num_gpus_per_node: 4}
  train_batch_size: 64
  policy_mini_batch_size: 32
  max_prompt_length: 64
  eval_interval: -1
  project_name: demo
  run_name: one
generator: {n_samples_per_prompt: 5, backend: vllm, sampling_params: {max_generate_length: 100, temperature: 1.0}}
""",
    "OpenRLHF": """
pretrain: model
prompt_data: a.jsonl
input_key: input
rollout_batch_size: 64
train_batch_size: 128
micro_rollout_batch_size: 8
n_samples_per_prompt: 8
prompt_max_len: 64
generate_max_len: 128
actor_learning_rate: 5.0e-7
init_kl_coef: 0.01
advantage_estimator: reinforce_baseline
zero_stage: 3
vllm_num_engines: 2
remote_rm_url: http://host/score
""",
    "TRL (GRPOConfig)": """
model_name_or_path: model
dataset_name: a.jsonl
learning_rate: 1.0e-6
num_generations: 8
max_prompt_length: 64
max_completion_length: 128
beta: 0.04
per_device_train_batch_size: 4
gradient_accumulation_steps: 4
use_vllm: true
bf16: true
output_dir: out
reward_funcs: [accuracy]
""",
}


@pytest.fixture(params=RECIPES)
def recipe(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    path = tmp_path / "theirs.yaml"
    path.write_text(RECIPES[request.param])
    return request.param, path


def test_each_recipe_is_recognised_explained_and_becomes_a_valid_one(recipe, tmp_path, capsys) -> None:
    name, path = recipe
    given = read(path)
    system = system_of(given)
    assert system is not None and system.name == name
    ours, rows = translate(system, given)
    assert [row.key for row in rows if row.fate == "unknown"] == []
    assert all(row.note for row in rows)
    assert main([str(path), "-o", str(tmp_path / "ours.yaml")]) == 0
    assert "Written to" in capsys.readouterr().out
    config = load_config("ppo-math", tmp_path / "ours.yaml").config
    assert isinstance(config, PPOMATHConfig)
    assert config.actor.path == "model" and config.dataset.path.startswith("a.")
    assert config.group_size == {"verl": 8, "SkyRL": 5, "OpenRLHF": 8, "TRL (GRPOConfig)": 8}.get(name, 4)
    check_values(name, config)


def check_values(name: str, config: PPOMATHConfig) -> None:
    if name == "verl":
        assert (config.ppo.ppo_n_minibatches, config.ppo.kl_ctl, config.algorithm.kl_in) == (4, 0.001, "loss")
        assert (config.experiment_name, config.trial_name) == ("demo-run", "try-1")
        assert config.actor.optimizer.lr == 1e-6 and config.exp_ctrl.ckpt_freq_steps is None
    if name == "NeMo-RL":
        assert config.staleness.max_staleness == 2
    if name == "OpenRLHF":
        assert config.ppo.ppo_n_minibatches == 4, "64 prompts of 8 answers, 128 answers in an update"
    if name == "AReaL":
        assert config.allocation_mode == "sglang.d2m2p1+d4m1p1" and config.staleness.max_staleness == 3
    if name == "SkyRL":
        assert (config.ppo.ppo_n_minibatches, config.ppo.kl_ctl) == (2, 0.0), "use_kl_loss is off"
    if name == "Trinity-RFT":
        assert config.experience.max_read_timeout == 60.0 and config.workflow.timeout_seconds == 100.0
        assert (config.workflow.dynamic_timeout, config.experience.train_batch_size) == (2.5, 96)
        assert (config.dataset.train_bs_n_seqs, config.batch_size) == (16, 24), "explored and trained per step"


HAND_WRITTEN = """
algorithm: {name: grpo}
group_size: 4
actor: {path: model, optimizer: {lr: 2.0e-4, weight_decay: 0.0, lr_scheduler_type: constant,
        warmup_steps_proportion: 0.0}}
dataset: {path: prompts.jsonl, train_bs_n_seqs: 8, max_prompt_len: 8}
ppo: {gen: {max_new_tokens: 8}, ppo_n_minibatches: 2, kl_ctl: 0.0, eps_clip: 0.25}
"""
SAME_RECIPES = {
    "verl": """
data: {train_files: prompts.jsonl, train_batch_size: 8, max_prompt_length: 8, max_response_length: 8}
actor_rollout_ref:
  model: {path: model, use_remove_padding: true}
  actor: {optim: {lr: 2e-4, weight_decay: 0.0, lr_scheduler_type: constant, lr_warmup_steps_ratio: 0.0},
          ppo_mini_batch_size: 4, clip_ratio: 0.25, use_kl_loss: false}
  rollout: {name: sglang, n: 4, temperature: 1.0}
algorithm: {adv_estimator: grpo, use_kl_in_reward: false}
trainer: {project_name: sums, experiment_name: one, nnodes: 1, n_gpus_per_node: 2}
""",
    "Trinity-RFT": """
project: sums
name: one
algorithm: {algorithm_type: grpo, repeat_times: 4,
            optimizer: {lr: 2e-4, weight_decay: 0.0, lr_scheduler_type: constant, lr_warmup_steps_ratio: 0.0}}
model: {model_path: model, max_prompt_tokens: 8, max_response_tokens: 8}
cluster: {node_num: 1, gpu_per_node: 2}
buffer: {batch_size: 8, explorer_input: {taskset: {path: prompts.jsonl}}}
trainer: {trainer_config: {actor_rollout_ref: {actor: {ppo_epochs: 1}}}}
""",
    "AReaL": """
experiment_name: sums
trial_name: one
gconfig: {n_samples: 4, max_new_tokens: 8, temperature: 1.0}
actor: {path: model, eps_clip: 0.25, kl_ctl: 0.0, ppo_n_minibatches: 2,
        optimizer: {lr: 2.0e-4, weight_decay: 0.0, lr_scheduler_type: constant, warmup_steps_proportion: 0.0}}
train_dataset: {path: prompts.jsonl, batch_size: 8, max_length: 8}
""",
    "TRL": """
model_name_or_path: model
dataset_name: prompts.jsonl
learning_rate: 2.0e-4
weight_decay: 0.0
lr_scheduler_type: constant
warmup_ratio: 0.0
num_generations: 4
max_prompt_length: 8
max_completion_length: 8
beta: 0.0
epsilon: 0.25
output_dir: out
""",
}
NO_EQUIVALENT = {
    "Trinity-RFT": {"ppo": {"ppo_n_minibatches": 2, "eps_clip": 0.25}},
    "TRL": {"ppo": {"ppo_n_minibatches": 2}, "dataset": {"train_bs_n_seqs": 8}},
}
"""What the table of a system tells its user to write by hand."""


def test_recipes_of_one_run_become_the_one_that_is_written_here(tmp_path: Path) -> None:
    """Equal configurations, and so equal curves."""

    def loaded(recipe: dict) -> dict:
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        overrides = ["allocation_mode=embedded.d1m1p1+d1m1p1", "n_gpus_per_node=2", "experiment_name=e", "trial_name=t"]
        found = load_config("ppo-math", tmp_path / "recipe.yaml", overrides).config.model_dump()
        del found["external_configs"], found["algorithm"]["kl_in"]  # of a coefficient that is 0
        return found

    expected = loaded(yaml.safe_load(HAND_WRITTEN))
    for name, text in SAME_RECIPES.items():
        theirs, ours = tmp_path / f"{name}.yaml", tmp_path / f"{name}-ours.yaml"
        theirs.write_text(text)
        assert main([str(theirs), "-o", str(ours)]) == 0
        recipe = yaml.safe_load(ours.read_text())
        for section, values in NO_EQUIVALENT.get(name, {}).items():
            recipe[section] = recipe.get(section, {}) | values
        assert loaded(recipe) == expected, name


@pytest.mark.parametrize(
    ("in_loss", "in_reward", "ours"),
    [
        (True, True, {"kl_in": "both", "kl_ctl": 0.02, "kl_loss_coeff": 0.001}),
        (True, False, {"kl_in": "loss", "kl_ctl": 0.001}),
        (False, True, {"kl_in": "reward", "kl_ctl": 0.02}),
        (False, False, {"kl_in": "reward"}),
    ],
)
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("verl", ("actor_rollout_ref.actor.use_kl_loss", "actor_rollout_ref.actor.kl_loss_coef",
                  "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef")),
        ("ROLL", ("use_kl_loss", "kl_loss_coef", "add_token_level_kl", "init_kl_coef")),
    ],
)  # fmt: skip
def test_each_kl_divergence_keeps_its_coefficient(name, keys, in_loss, in_reward, ours) -> None:
    given = dict(zip(keys, (in_loss, 0.001, in_reward, 0.02), strict=True))
    system = next(system for system in systems() if system.name == name)
    for recipe in (given, dict(reversed(given.items()))):
        values, _ = translate(system, recipe)
        assert {key.rpartition(".")[2]: value for key, value in values.items()} == ours


def test_every_target_of_every_table_is_a_key() -> None:
    known = set(all_keys(PPOMATHConfig)) | {"evaluation.sets"}
    for system in systems():
        targets = {
            choice.partition(" if ")[0].partition(" = ")[0].partition(": ")[0]
            for target in system.keys.values()
            for choice in target.split(" else ")
        }
        assert targets | set(system.defaults) <= known, (system.name, targets - known)


def test_a_run_names_the_command_and_the_result_passes_a_dry_run(tmp_path: Path) -> None:
    path, ours = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    model, data = write_model(tmp_path / "model"), write_prompts(tmp_path / "prompts.jsonl")
    of_files = {"model_path: model": f"model_path: {model}", "path: a.jsonl, split: train": f"path: {data}"}
    text = RECIPES["Trinity-RFT"]
    for old, new in {**of_files, "prompt_key: question": "prompt_key: prompt", "response_key: answer": ""}.items():
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    run = [sys.executable, "-m", "core.quickstart", "ppo-math", "--dry-run", "--config"]
    refused = subprocess.run([*run, str(path)], capture_output=True, text=True)
    assert refused.returncode == 2
    shown = refused.stdout + refused.stderr
    assert f"{path} is a recipe of Trinity-RFT; translate it: slipstream migrate {path}" in shown
    assert main([str(path), "cluster.gpu_per_node=2", "-o", str(ours)]) == 0
    here = ["allocation_mode=embedded.d1m1p1+d1m1p1", f"external_configs.cluster_config.fileroot={tmp_path}"]
    passed = subprocess.run(
        [*run, str(ours), *here, "dataset.max_prompt_len=16", "ppo.gen.max_new_tokens=16"],
        capture_output=True,
        text=True,
    )
    assert passed.returncode == 0, passed.stdout + passed.stderr


@pytest.mark.parametrize(
    "text", ["a: " + "[" * 3000, "".join(f"{' ' * i}a:\n" for i in range(900)), "a: " + "9" * 5000]
)
def test_a_file_that_no_parser_ends_on_is_of_no_system(tmp_path: Path, text: str) -> None:
    (tmp_path / "deep.yaml").write_text(text)
    assert read(tmp_path / "deep.yaml") == {}


def test_a_file_of_no_known_system_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: 1\n")
    assert main([str(path)]) == 2
    assert "its keys are those of none of verl, Trinity-RFT" in capsys.readouterr().err


def test_overrides_reach_references_and_sections_and_are_numbers(tmp_path: Path) -> None:
    path, ours = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    path.write_text(
        RECIPES["verl"].replace("ppo_mini_batch_size: 16", 'ppo_mini_batch_size: "${data.train_batch_size}"')
    )
    overrides = ["data.train_batch_size=32", "actor_rollout_ref.actor.optim.lr=3e-6", "++trainer={nnodes: 2}"]
    assert main([str(path), *overrides, "-o", str(ours)]) == 0
    written = yaml.safe_load(ours.read_text())
    assert written["ppo"]["ppo_n_minibatches"] == 1 and written["dataset"]["train_bs_n_seqs"] == 32
    assert written["actor"]["optimizer"]["lr"] == 3e-6 and written["n_nodes"] == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a=["], "'a=[': the value is not valid YAML"),
        (["a"], "'a': write KEY=VALUE"),
        (["-o", "/proc/none/y.yaml"], "-o /proc/none/y.yaml: cannot be written: No such file or directory"),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(RECIPES["TRL (GRPOConfig)"])
    with pytest.raises(SystemExit) as end:
        main([str(path), *words])
    assert end.value.code == 2 and said in capsys.readouterr().err


def test_the_table_shows_values_as_they_are_and_what_was_dropped(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "theirs.yaml"
    path.write_text(RECIPES["TRL (GRPOConfig)"] + "system_prompt: '[INST] be :smile: brief [/INST]'\neval_steps: 5\n")
    assert main([str(path)]) == 0
    rows = {line.split("│")[1].strip(): line for line in capsys.readouterr().out.splitlines() if line.startswith("│")}
    assert "[INST] be :smile: brief [/INST]" in rows["system_prompt"]
    assert "no meaning here" in rows["eval_steps"], "there is no evaluation set"
    several = RECIPES["ROLL"].replace("[a.jsonl]", "[a.jsonl, b.jsonl]")
    assert several != RECIPES["ROLL"]
    path.write_text(several)
    assert main([str(path)]) == 0
    rows = {line.split("│")[1].strip(): line for line in capsys.readouterr().out.splitlines() if line.startswith("│")}
    assert "dataset.path=a.jsonl; write task_sets for the others" in rows["actor_train.data_args.file_name"]
    assert "ppo.ppo_n_minibatches" in rows["actor_train.training_args.gradient_accumulation_steps"]


STAGES = """
project: demo
model: {model_path: model, max_prompt_tokens: 16, max_response_tokens: 16}
cluster: {node_num: 1, gpu_per_node: 2}
buffer: {batch_size: 4, explorer_input: {taskset: {path: prompts.jsonl}}}
stages:
  - stage_name: warmup
    mode: train
    algorithm: {algorithm_type: sft, optimizer: {lr: 1e-3}}
    buffer: {train_batch_size: 2, total_steps: 10, trainer_input: {experience_buffer: {path: "answers.jsonl"}}}
  - stage_name: rft
    algorithm: {algorithm_type: grpo, repeat_times: 4, optimizer: {lr: "${learning.rate}"}}
    buffer: {total_steps: 20}
learning: {rate: 3e-4}
"""


@pytest.mark.parametrize(
    ("mode", "buffer", "ours"),
    [
        ("both", "storage_type: sql, path: 'sqlite:///a/b.db'", ("sqlite", "a/b.db")),
        ("both", "storage_type: sql", ("sqlite", "experience")),
        ("both", "storage_type: queue, path: 'sqlite:///a/b.db'", ("memory", "")),
        ("train", "storage_type: queue, path: 'sqlite:///a/b.db'", ("sqlite", "a/b.db")),
        ("explore", "storage_type: file, path: a/b", ("file", "a/b")),
    ],
)
def test_a_buffer_in_a_database_keeps_its_file(mode: str, buffer: str, ours: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(RECIPES["Trinity-RFT"].replace("{storage_type: queue, ", f"{{{buffer}, "))
    assert main([str(path), f"mode={mode}", "-o", str(tmp_path / "ours.yaml")]) == 0
    config = load_config("ppo-math", tmp_path / "ours.yaml").config
    assert isinstance(config, PPOMATHConfig)
    assert (config.experience.store, config.experience.path) == ours


def test_stages_become_runs_that_follow_one_another(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    model, data = write_model(tmp_path / "model"), write_prompts(tmp_path / "prompts.jsonl")
    answers = tmp_path / "answers.jsonl"
    answers.write_text('{"prompt": "1", "answer": "2"}\n' * 4)
    places = {"model_path: model": f"model_path: {model}", "path: prompts.jsonl": f"path: {data}"}
    text = STAGES
    for old, new in {**places, "answers.jsonl": str(answers)}.items():
        text = text.replace(old, new)
    path, ours = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    path.write_text(text)
    assert main([str(path), "-o", str(ours)]) == 0
    shown = capsys.readouterr().out
    assert "stages[1].buffer.total_steps" in shown and "slipstream dry-run train --config" in shown
    first, second = yaml.safe_load(ours.read_text())["stages"]
    assert first["sft"]["dataset"] == {"train_bs_n_seqs": 2, "train_path": str(answers)}
    assert first["sft"]["model"] == {"path": str(model), "optimizer": {"lr": 1e-3}}
    assert second["grpo"]["actor"] == {"optimizer": {"lr": 3e-4}}, "it begins from the model of the first"
    assert (second["grpo"]["group_size"], second["grpo"]["dataset"]["path"]) == (4, str(data))
    assert [stage.name for stage in stages_of(ours, [])] == ["1-sft", "2-grpo"]
    # every stage alone is a recipe that is accepted
    for stage in stages_of(ours, [f"external_configs.cluster_config.fileroot={tmp_path}"]):
        load_config(stage.experiment, stage.tree, [])


@pytest.mark.parametrize(
    ("algorithm", "buffer", "ours"),
    [
        ("sft", "path: a.jsonl, format: {messages_key: messages}",
         {"dataset": {"train_bs_n_seqs": 8, "train_path": "a.jsonl", "messages_field": "messages"}}),
        ("dpo", "path: a.jsonl, format: {chosen_key: good, rejected_key: bad}",
         {"dataset": {"train_bs_n_seqs": 8, "train_path": "a.jsonl", "chosen_field": "good", "rejected_field": "bad"},
          "dpo": {"beta": 0.2}}),
    ],
)  # fmt: skip
def test_a_recipe_of_files_becomes_one_of_their_experiment(algorithm, buffer, ours, tmp_path, capsys) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(
        f"algorithm: {{algorithm_type: {algorithm}, kl_loss_fn_args: {{kl_coef: 0.2}}}}\n"
        "model: {model_path: m}\n"
        f"buffer: {{train_batch_size: 8, trainer_input: {{experience_buffer: {{{buffer}}}}}}}\n"
    )
    assert main([str(path), "-o", str(tmp_path / "ours.yaml")]) == 0
    assert f"slipstream dry-run {algorithm}" in capsys.readouterr().out.replace("\n", " ")
    written = yaml.safe_load((tmp_path / "ours.yaml").read_text())
    assert {key: written[key] for key in ours} == ours and written["model"] == {"path": "m"}
    load_config(algorithm, tmp_path / "ours.yaml", ["experiment_name=a"])
