"""What to write for keys of TRL, verl, Trinity, ROLL, OpenRLHF, AReaL and slime: the nearest name would mislead.

Keys that are only renamed stand in the tables of core/config/migrate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from core.config.migrate import systems

_TIMELINE = "write monitor.timeline_mib, and see python -m tools.timeline"
HINTS: Mapping[str, str] = {
    "actor_rollout_ref": "write actor, ref and generator.*",
    "adv_estimator": "write algorithm.name",
    "advantage_estimator": "write algorithm.name",
    "algorithm.adv_estimator": "write algorithm.name",
    "algorithm.kl_ctrl": "write ppo.kl_ctl",
    "algorithm.optimizer": "write actor.optimizer",
    "algorithm_type": "write algorithm.name",
    "async_training": "write staleness.max_staleness; 0: synchronous",
    "buffer": "write dataset.* and staleness.*",
    "cluster.gpu_per_node": "write n_gpus_per_node at the top level",
    "cluster.node_num": "write n_nodes at the top level",
    "continue_from_checkpoint": "write recover_mode: auto continues, disabled begins anew",
    "data": "write dataset.*",
    "data_processor": "rows are read as they are; prepare the file of dataset.path",
    "dataset.fields": "write dataset.prompt_field, chosen_field and rejected_field",
    "enable_ray_timeline": _TIMELINE,
    "evaluator": "write exp_ctrl.eval_freq_*",
    "explorer": "write generator.*",
    "gconfig": "write ppo.gen.* and group_size",
    "global_batch_size": "write ppo.ppo_n_minibatches, the number of minibatches of a step",
    "gpu_memory_utilization": "write generator.flags, by the names of the servers",
    "grad_clip": "write optimizer.gradient_clipping of the model",
    "gradient_accumulation_steps": "write ppo.ppo_n_minibatches, the optimizer updates of a batch",
    "hf_checkpoint": "write actor.path",
    "importance_sampling_level": "write algorithm.ratio",
    "kl_coef": "write ppo.kl_ctl",
    "kl_loss_fn": "write algorithm.kl_in=loss and algorithm.kl_estimator",
    "kl_penalty_fn": "write algorithm.kl_in=reward and algorithm.kl_estimator",
    "log": "write monitor.log_level",
    "log.level": "write monitor.log_level",
    "logging_steps": "leave it out: every step is logged",
    "lora_rank": "LoRA is not supported; all weights are trained",
    "loss_type": "write algorithm.name, or algorithm.loss and algorithm.aggregation",
    "max_model_len": "write dataset.max_prompt_len and ppo.gen.max_new_tokens",
    "micro_batch_size": "write mb_spec.max_tokens_per_mb, the tokens of a microbatch",
    "micro_train_batch_size": "write mb_spec.max_tokens_per_mb, the tokens of a microbatch",
    "name": "write experiment_name and trial_name",
    "num_rollout": "write exp_ctrl.total_train_steps",
    "per_device_train_batch_size": "write mb_spec.max_tokens_per_mb, the tokens of a microbatch",
    "ppo_epochs": "write ppo.actor_sample_reuse",
    "ppo_mini_batch_size": "write ppo.ppo_n_minibatches, the number of minibatches of a step",
    "profiler_output_dir": _TIMELINE,
    "project": "write experiment_name, and wandb.project",
    "ray_namespace": "leave it out: a run that joins a Ray cluster makes its own namespace",
    "recover": "write recover_mode and exp_ctrl.ckpt_freq_*",
    "ref_load": "write ref.path",
    "remote_rm_url": "write reward.function",
    "report_to": "write wandb.mode or monitor.tensorboard",
    "reward_clip": "rewards are not clipped; see ppo.reward_output_scaling and reward_output_bias",
    "reward_funcs": "write reward.function",
    "rm_type": "write reward.function",
    "rollout": "write generator.* and staleness.max_staleness",
    "rollout_max_response_len": "write ppo.gen.max_new_tokens",
    "save_steps": "write exp_ctrl.save_freq_steps",
    "saver": "write exp_ctrl.save_freq_*",
    "scale_rewards": "write algorithm.advantage_std",
    "service": "there are no services; rewards and workflows are functions: reward.function, workflow.type",
    "stages": "slipstream train runs the stages of a file, [{sft: {...}}, {grpo: {...}}]",
    "stop_sequences": "write ppo.gen.stop",
    "stop_strings": "write ppo.gen.stop",
    "stats_logger": "write wandb.* and monitor.*",
    "system_envs": "write external_configs.envs",
    "tensor_parallel_size": "write allocation_mode, where m is tensor parallelism",
    "train_dataset": "write dataset.*",
    "trainer": "write actor.*, ppo.* and exp_ctrl.*",
    "use_kl_loss": "write algorithm.kl_in=loss",
    "use_lora": "LoRA is not supported; all weights are trained",
    "use_peft": "LoRA is not supported; all weights are trained",
    "use_vllm": "write allocation_mode, which names the generators",
    "valid_dataset": "write evaluation.*",
    "vllm_gpu_memory_utilization": "write generator.flags, by the names of the servers",
}
"""By path, or by name where that is of several words, which mean the same in every section."""


@cache
def _renamed() -> list[tuple[str, str]]:
    """Return the keys of other systems that are only renamed here, with our keys."""
    return [
        (key, target)
        for system in systems()
        for key, target in system.keys.items()
        if re.fullmatch(r"[\w.]+", target) and target.rpartition(".")[2] != key.rpartition(".")[2]
    ]


def hint(name: str, path: str) -> str | None:
    """Return what to write for the key `name` at the dotted `path`; None where nothing is known about it. The tables of
    other systems know what the keys that are only renamed are called here."""
    if path in HINTS:
        return HINTS[path]
    if target := _only_target(path):
        return f"write {target}"
    if "_" not in name or name == "experiment_name":  # which is a key here too
        return None
    target = _only_target(name)
    return HINTS.get(name) or (f"write {target}" if target else None)


def _only_target(names: str) -> str | None:
    """Return our key for the keys of other systems that end with these names; None where they have several."""
    targets = {target for key, target in _renamed() if f".{key}".endswith(f".{names}")}
    return targets.pop() if len(targets) == 1 else None
