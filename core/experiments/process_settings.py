"""From configuration and allocation to the settings of each process: generators, engines, the rollout side."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from allocation import Allocation
from core.monitoring.samples import SampleSettings
from core.rollout_settings import RolloutSettings
from model_specs.hf_config import read_config
from rollout.inference.backend import BackendSettings, WeightFormat
from rollout.inference.registry import BACKENDS
from rollout.inference.router import requests_at_once
from rollout.types import SamplingParams

if TYPE_CHECKING:
    from core.config.experiments import PPOMATHConfig

GPU_THREADS = 8
"""CPU threads of a process that computes on a GPU, at most. They pack batches, and wait for each other after every
operation: with one for each core, some of which others use, an update took 8.45 s instead of 6.55."""


def threads_per_process(allocation: Allocation, *, configured: int, max_staleness: int, gpus: bool) -> int:
    """Return the CPU threads of a trainer rank or a generator: `configured`, or the cores divided among the processes
    that work at once, with GPUs GPU_THREADS at most.

    Without staleness trainer and generators take turns, so each side may use all cores."""
    if configured:
        return configured
    num_generators = allocation.generator.layout.dp
    num_ranks = len({slot for name, role in allocation.roles.items() if name != "actor_gen" for slot in role.slots})
    busy = num_generators + num_ranks if max_staleness else max(num_generators, num_ranks)
    share = max(1, _num_cores() // busy)
    return min(share, GPU_THREADS) if gpus else share


def _num_cores() -> int:
    """Return the number of cores that this process may use: a container or a job may be pinned to some of the
    machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def backend_settings(config: PPOMATHConfig, allocation: Allocation) -> BackendSettings:
    """Return the settings of every generator; the pool adds those that differ between them."""
    generator, colocated = config.generator, allocation.shares_gpus
    backend = BACKENDS[allocation.generator.backend]
    return BackendSettings(
        model_path=config.actor.path,
        dtype=generator_dtype(config, allocation),
        weight_format=generator.weight_format,
        device=allocation.generator.device,
        max_running=generator.max_running,
        # Generators that leave their memory to the trainer cannot keep requests meanwhile.
        interrupt="abort" if colocated else generator.interrupt,
        colocated=colocated,
        load_weights=not config.actor.init_from_scratch and "local" not in backend.capabilities.transports,
        reports_experts=config.actor.moe_routing_replay,
        flags={**config.actor.sglang, **generator.flags},
        python=generator.python or sys.executable,
        seconds_per_token=generator.mock_seconds_per_token,
        startup_timeout_seconds=config.launch.startup_timeout_seconds,
    )


def generator_dtype(config: PPOMATHConfig, allocation: Allocation) -> WeightFormat:
    """Return the format of the generators' weights."""
    return config.generator.dtype or config.actor.dtype(on_gpu=allocation.trainer.on_gpu)


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
    return RolloutSettings(
        tokenizer_path=config.actor.path,
        dataset=config.dataset.source(config.dataset.path),
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
        workflow=config.workflow.type,
        on_error=config.workflow.on_error,
        max_error_share=config.workflow.max_error_share,
        vocab_size=read_config(Path(config.actor.path)).vocab_size,
        max_tokens=min(config.max_tokens_per_mb(role) for role in config.roles),
        prompt_format=config.prompt.prompt_format(boxed=config.reward.function == "math"),
        samples=SampleSettings(
            folder=str(logs),
            share=config.samples.share,
            max_file_bytes=config.samples.max_file_mib * 2**20,
            keep_files=config.samples.keep_files,
        ),
        reward=config.reward.function,
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
