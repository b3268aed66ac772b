"""From configuration and allocation to the settings of each process: generators, engines, the rollout side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allocation import Allocation
from core.checks.workflow import task_set_workflow, workflow_choice
from core.explore.settings import RolloutSettings, Side, TaskSetSettings
from core.monitoring.samples import SampleSettings
from model_specs.hf_config import read_config
from rollout.experience import StoreSettings
from rollout.inference.router import requests_at_once
from rollout.rewards.load import split_spec
from rollout.types import SamplingParams

if TYPE_CHECKING:
    from core.config.experiments import PPOMATHConfig
    from core.config.task_sets import TaskSetConfig
    from rollout.data.encoder import PromptFormat


_SIDES: Mapping[str, Side] = {"explore": "explore", "train": "train"}


def rollout_settings(config: PPOMATHConfig, allocation: Allocation, logs: Path) -> RolloutSettings:
    """Take the settings of the rollout side from the configuration. `logs`: folder of the samples."""
    gen, evaluation = config.ppo.gen, config.evaluation
    sampling = SamplingParams(
        max_new_tokens=gen.max_new_tokens,
        min_new_tokens=gen.min_new_tokens,
        temperature=gen.temperature,
        top_p=gen.top_p,
        top_k=gen.top_k,
    )
    eval_sampling = SamplingParams(
        max_new_tokens=evaluation.max_new_tokens or gen.max_new_tokens, temperature=evaluation.temperature
    )
    task_sets = {
        name: TaskSetSettings(
            source=one.source(one.path),
            weight=one.weight,
            order=one.order or ("shuffled" if config.shuffle_dataset else "sequential"),
            curriculum=one.curriculum,
            prompt_format=_format_of(config, one),
            group_size=one.group_size or config.group_size,
            sampling=replace(sampling, **_given(one, "temperature", "top_p", "top_k", "max_new_tokens")),
            workflow=task_set_workflow(config.workflow, name, one),
            reward=one.reward or config.reward.spec,
            right_at=one.right_at if one.right_at is not None or one.reward else config.reward.threshold,
        )
        for name, one in config.task_sets.items()
    }
    # A bench job keeps no episodes: as the lessee of a shared store it would shut out the trainer.
    kept = config.mode != "bench"
    store = StoreSettings(store=config.experience.store, path=config.experience_path) if kept else StoreSettings()
    return RolloutSettings(
        store=store,
        side=_SIDES.get(config.mode, "both"),
        lessee=f"{config.experiment_name}/{config.trial_name}",
        keep_steps=config.experience.keep_steps,
        acknowledges_saved=store.is_durable and config.recovers,
        tokenizer_path=config.actor.path,
        dataset=config.dataset.source(config.dataset.path),
        task_sets=task_sets,
        eval_sets=config.evaluation_sources,
        num_eval_prompts=evaluation.num_prompts,
        max_prompt_len=config.dataset.max_prompt_len,
        batch_size=config.dataset.train_bs_n_seqs,
        group_size=config.group_size,
        max_staleness=config.staleness.max_staleness,
        over_age=config.staleness.over_age,
        in_order=config.staleness.in_order,
        demonstrations_path=config.demonstrations.path if config.demonstrations_per_step else "",
        demonstrations_per_step=config.demonstrations_per_step,
        dynamic_sampling_limit=config.algorithm.dynamic_sampling_limit if config.algorithm.dynamic_sampling else None,
        num_epochs=config.exp_ctrl.total_train_epochs,
        num_steps=config.exp_ctrl.total_train_steps,  # benchmark_steps end in full flight
        sampling=sampling,
        eval_sampling=eval_sampling,
        max_in_flight=requests_at_once(
            max_running=config.generator.max_running,
            num_generators=allocation.generator.layout.dp,
            group_size=config.group_size,
        ),
        workflow=workflow_choice(config.workflow),
        workflow_timeout_seconds=config.workflow.timeout_seconds,
        max_retries=config.workflow.max_retries,
        on_error=config.workflow.on_error,
        max_error_share=config.workflow.max_error_share,
        vocab_size=read_config(Path(config.actor.path)).vocab_size,
        max_tokens=min(config.max_tokens_per_mb(role) for role in config.roles),
        prompt_format=config.prompt_format,
        samples=SampleSettings(
            folder=str(logs),
            share=config.samples.share,
            max_file_bytes=config.samples.max_file_mib * 2**20,
            keep_files=config.samples.keep_files,
        ),
        reward=config.reward.spec,
        right_at=config.reward.threshold,
        reward_workers=config.reward.num_workers,
        reward_timeout_seconds=config.reward.timeout_seconds,
        max_failed_share=config.reward.max_failed_share,
        max_failed_batches=config.reward.max_failed_batches,
        seed=config.seed,
        shuffle=config.shuffle_dataset,
        health_interval_seconds=config.generator.health_interval_seconds,
        health_timeout_seconds=config.generator.health_timeout_seconds,
        generator_patience_seconds=config.generator.patience_seconds,
    )


def _given(one: TaskSetConfig, *names: str) -> dict[str, Any]:
    return {name: getattr(one, name) for name in names if getattr(one, name) is not None}


def _format_of(config: PPOMATHConfig, one: TaskSetConfig) -> PromptFormat:
    boxed = "math" in [name for _, name in split_spec(one.reward or config.reward.spec)]
    written = config.prompt.prompt_format(boxed=boxed)
    return written if one.system is None else replace(written, system=one.system)
