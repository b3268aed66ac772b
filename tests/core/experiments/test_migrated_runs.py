"""Recipes of other systems, translated, train as the recipe that was written here: the same curve, bit for bit."""

from pathlib import Path

import pytest
import yaml

from helpers.runs import metrics_of
from tools.curves import make_inputs
from tools.migrate.__main__ import main

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_STEPS = 10
HAND_WRITTEN = """
algorithm: {name: grpo}
group_size: 4
actor: {path: FOLDER/model, optimizer: {lr: 2.0e-4, weight_decay: 0.0, lr_scheduler_type: constant,
        warmup_steps_proportion: 0.0}}
dataset: {path: FOLDER/prompts.jsonl, train_bs_n_seqs: 8, max_prompt_len: 8}
ppo: {gen: {max_new_tokens: 8}, ppo_n_minibatches: 2, kl_ctl: 0.0, eps_clip: 0.25}
"""
RECIPES = {
    "verl": """
data: {train_files: FOLDER/prompts.jsonl, train_batch_size: 8, max_prompt_length: 8, max_response_length: 8}
actor_rollout_ref:
  model: {path: FOLDER/model, use_remove_padding: true}
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
model: {model_path: FOLDER/model, max_prompt_tokens: 8, max_response_tokens: 8}
cluster: {node_num: 1, gpu_per_node: 2}
buffer: {batch_size: 8, explorer_input: {taskset: {path: FOLDER/prompts.jsonl}}}
trainer: {trainer_config: {actor_rollout_ref: {actor: {ppo_epochs: 1}}}}
""",
    "AReaL": """
experiment_name: sums
trial_name: one
gconfig: {n_samples: 4, max_new_tokens: 8, temperature: 1.0}
actor: {path: FOLDER/model, eps_clip: 0.25, kl_ctl: 0.0, ppo_n_minibatches: 2,
        optimizer: {lr: 2.0e-4, weight_decay: 0.0, lr_scheduler_type: constant, warmup_steps_proportion: 0.0}}
train_dataset: {path: FOLDER/prompts.jsonl, batch_size: 8, max_length: 8}
""",
    "TRL": """
model_name_or_path: FOLDER/model
dataset_name: FOLDER/prompts.jsonl
learning_rate: 2.0e-4
weight_decay: 0.0
lr_scheduler_type: constant
warmup_ratio: 0.0
num_generations: 4
max_prompt_length: 8
max_completion_length: 8
beta: 0.0
epsilon: 0.25
output_dir: FOLDER/out
""",
}
NO_EQUIVALENT = {
    "Trinity-RFT": {"ppo": {"ppo_n_minibatches": 2, "eps_clip": 0.25}},
    "TRL": {"ppo": {"ppo_n_minibatches": 2}, "dataset": {"train_bs_n_seqs": 8}},
}
"""What the table of a system tells its user to write by hand."""
HERE = {
    "allocation_mode": "embedded.d1m1p1+d1m1p1",
    "n_gpus_per_node": 2,
    "staleness": {"max_staleness": 0, "in_order": True},
    "generator": {"max_running": 1},  # answers that are sampled together round differently
    "reward": {"num_workers": 1},
    "launch": {"threads_per_process": 1},
    "monitor": {"tensorboard": False},
    "exp_ctrl": {"total_train_epochs": 2, "total_train_steps": NUM_STEPS},
    "experiment_name": "test",
    "trial_name": "trial",  # an earlier run of the name is put aside
}
NAMES = ("step", "loss", "actor_loss", "grad_norm", "lr", "task_reward", "n_tokens")


def test_migrated_recipes_train_the_curve_of_the_one_that_was_written_here(run_command, tmp_path: Path) -> None:
    make_inputs(tmp_path)
    recipes = {"hand-written": yaml.safe_load(HAND_WRITTEN.replace("FOLDER", str(tmp_path)))}
    for name, text in RECIPES.items():
        theirs, ours = tmp_path / f"{name}.yaml", tmp_path / f"{name}-ours.yaml"
        theirs.write_text(text.replace("FOLDER", str(tmp_path)))
        assert main([str(theirs), "-o", str(ours)]) == 0
        recipes[name] = merged(yaml.safe_load(ours.read_text()), NO_EQUIVALENT.get(name, {}))
    curves = {}
    for name, recipe in recipes.items():
        recipe.pop("external_configs", None)
        command = run_command("ppo-math", merged(recipe, HERE))
        assert command.finish(600) == 0, command.output()[-4000:]
        rows = metrics_of(command)
        curves[name] = [{key: row[key] for key in NAMES} for row in rows if "actor_loss" in row]
    expected = curves.pop("hand-written")
    assert len(expected) == NUM_STEPS and len({row["task_reward"] for row in expected}) > 1
    assert any(row["loss"] != 0.0 for row in expected)
    assert {name for name, curve in curves.items() if curve != expected} == set()


def merged(recipe: dict, changes: dict) -> dict:
    """The recipe with other values, section by section."""
    return recipe | {
        key: merged(recipe.get(key, {}), value) if isinstance(value, dict) else value for key, value in changes.items()
    }
