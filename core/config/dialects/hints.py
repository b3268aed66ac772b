"""What to write for keys of other trainers (TRL, verl, Trinity, ROLL), where the nearest name would mislead."""

from __future__ import annotations

from collections.abc import Mapping

_SAVED = "write external_configs.cluster_config.fileroot"
_TIMELINE = "write monitor.timeline_mib, and see python -m tools.timeline"
HINTS: Mapping[str, str] = {
    "actor_rollout_ref": "write actor, ref and generator.*",
    "algorithm.optimizer": "write actor.optimizer",
    "algorithm_type": "write algorithm.name",
    "batch_size": "write dataset.train_bs_n_seqs",
    "buffer": "write dataset.* and staleness.*",
    "checkpoint_root_dir": _SAVED,
    "clip_ratio_high": "write algorithm.clip_high",
    "clip_ratio_low": "write algorithm.clip_low",
    "cluster.gpu_per_node": "write n_gpus_per_node at the top level",
    "cluster.node_num": "write n_nodes at the top level",
    "continue_from_checkpoint": "write recover_mode: auto continues, disabled begins anew",
    "data_processor": "rows are read as they are; prepare the file of dataset.path",
    "dataset.fields": "write dataset.prompt_field, chosen_field and rejected_field",
    "enable_ray_timeline": _TIMELINE,
    "eps_clip_higher": "write algorithm.clip_high",
    "evaluation": "write dataset.valid_path and exp_ctrl.eval_freq_*",
    "explorer": "write generator.*",
    "grad_clip": "write optimizer.gradient_clipping of the model",
    "gradient_accumulation_steps": "write ppo.ppo_n_minibatches, the optimizer updates of a batch",
    "kl_loss_fn": "write algorithm.kl_in=loss and algorithm.kl_estimator",
    "kl_penalty_fn": "write algorithm.kl_in=reward and algorithm.kl_estimator",
    "log": "write monitor.log_level",
    "log.level": "write monitor.log_level",
    "model": "write actor (ref and critic for the other models)",
    "name": "write experiment_name and trial_name",
    "num_return_sequences_in_group": "write group_size",
    "per_device_train_batch_size": "write mb_spec.max_tokens_per_mb, the tokens of a microbatch",
    "ppo_epochs": "write ppo.actor_sample_reuse",
    "ppo_mini_batch_size": "write ppo.ppo_n_minibatches, the number of minibatches of a step",
    "pretrain": "write actor.path",
    "profiler_output_dir": _TIMELINE,
    "project": "write experiment_name, and wandb.project",
    "ray_namespace": "leave it out: a run that joins a Ray cluster makes its own namespace",
    "repeat_times": "write group_size",
    "resume_from_path": "write resume_from",
    "reward_clip": "rewards are not clipped; see ppo.reward_output_scaling and reward_output_bias",
    "rollout_batch_size": "write dataset.train_bs_n_seqs",
    "service": "there are no services; rewards and workflows are functions: reward.function, workflow.type",
    "stages": "there are no stages; start one run after the other, with actor.path set to the model of the first",
    "synchronizer": "write push.* and staleness.max_staleness",
    "system_envs": "write external_configs.envs",
    "trainer": "write actor.*, ppo.* and exp_ctrl.*",
}
"""By path, or by name where that is of several words, which mean the same in every section."""


def hint(name: str, path: str) -> str | None:
    """Return what to write for the key `name` at the dotted `path`; None where nothing is known about it."""
    return HINTS.get(path) or (HINTS.get(name) if "_" in name else None)
