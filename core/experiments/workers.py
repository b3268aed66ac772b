"""The processes of one attempt, made from configuration and allocation: trainer ranks, generators, the rollout side."""

from __future__ import annotations

import logging
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allocation import Allocation, ParallelLayout, RoleAllocation, Slot
from core.config.push import choose_transport
from core.launch.cluster import Cluster
from core.launch.generators import GeneratorPool, HealthSettings
from core.launch.rollout_client import RolloutClient
from core.launch.trainer_group import TrainerGroup
from core.monitoring.samples import SampleSettings
from core.recovery.memory import MemoryLimits
from core.rollout_settings import RolloutSettings
from core.trainer import EngineRef
from core.weight_sync.base import LocalPush, RunPush, WeightPush
from core.weight_sync.colocated import ColocatedPush
from core.weight_sync.fault_tolerant import FaultTolerantWeightSync
from core.weight_sync.servers import SenderPlan, ServerPush
from mcore_adapter.checkpoint.outcome import wait_for_outcome
from mcore_adapter.settings import EngineSettings, OptimizerSettings
from model_specs.hf_config import read_config
from rollout.inference.backend import BackendSettings, Transport, WeightFormat
from rollout.inference.registry import BACKENDS
from rollout.inference.router import requests_at_once
from rollout.types import SamplingParams

if TYPE_CHECKING:
    from core.config.experiments import PPOMATHConfig
    from core.config.models import ModelTrainEvalConfig
    from core.recovery.recover import WaitWritten

logger = logging.getLogger(__name__)

_ENGINE_ROLES = {
    "actor": ("actor_train", "actor_inf"),
    "critic": ("critic_train", "critic_inf"),
    "ref": ("ref_inf",) * 2,
}
GPU_THREADS = 8
"""CPU threads of a process that computes on a GPU, at most. They pack batches, and wait for each other after every
operation: with one for each core, some of which others use, an update took 8.45 s instead of 6.55."""


def threads_per_process(allocation: Allocation, *, asked: int, max_staleness: int, gpus: bool) -> int:
    """Return the CPU threads of a trainer rank or a generator: `asked`, or the cores divided among those that work at
    once, with GPUs GPU_THREADS at most.

    Without staleness trainer and generators take turns, so each side may use all cores."""
    if asked:
        return asked
    num_generators = allocation.generator.layout.dp
    num_ranks = len({slot for name, role in allocation.roles.items() if name != "actor_gen" for slot in role.slots})
    busy = num_generators + num_ranks if max_staleness else max(num_generators, num_ranks)
    share = max(1, _num_cores() // busy)
    return min(share, GPU_THREADS) if gpus else share


def _num_cores() -> int:
    """Return the number of cores that this process may use: a container or a job may be pinned to some of the
    machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class TrainerGroups:
    """One group of ranks for each distinct layout and place in the device map; roles that agree share theirs."""

    def __init__(self, cluster: Cluster, *, port: int, threads: int, seed: int) -> None:
        self._cluster = cluster
        self._options: dict[str, Any] = {"threads": threads, "seed": seed}
        self._port = port
        self._groups: dict[tuple[ParallelLayout, tuple[Slot, ...]], TrainerGroup] = {}

    def group(self, placed: RoleAllocation) -> TrainerGroup:
        """Return the group of this role, started on the first call."""
        key = (placed.layout, placed.slots)
        if key not in self._groups:
            name = f"trainer{len(self._groups) or ''}"
            port = self._port and self._port + len(self._groups)
            self._groups[key] = TrainerGroup(self._cluster, placed, name=name, port=port, **self._options)
        return self._groups[key]

    def wait_started(self, timeout_seconds: float) -> None:
        """Return when every rank of every group has joined."""
        for group in self._groups.values():
            group.wait_started(timeout_seconds)


class TrainedEngines(list[EngineRef]):
    """The engines that checkpoints hold; a reference never changes and is not among them."""

    def prepare_saves(self) -> None:
        """Let the ranks take the memory for copies while they wait for others to start."""
        for engine in self:
            engine.group.prepare_saves(engine.name)

    def begin_save(self, folder: Path) -> WaitWritten:
        """Copy every engine to host memory and start writing distributed checkpoints of them under `folder`."""
        for engine in self:
            engine.group.begin_save(engine.name, str(folder / engine.name))

        def wait(stop: threading.Event) -> None:
            for engine in self:
                wait_for_outcome(folder / engine.name, stop, engine.group.raise_if_dead)

        return wait

    def load(self, folder: Path) -> None:
        """Load what save() wrote; complete when it returns."""
        for engine in self:
            engine.group.load(engine.name, str(folder / engine.name))


@dataclass(frozen=True, kw_only=True)
class PPOWorkers:
    """Every process of one PPO attempt, by what the loop calls them for."""

    actor: EngineRef
    critic: EngineRef | None
    reference: EngineRef | None
    generators: GeneratorPool
    rollout: RolloutClient
    groups: TrainerGroups
    on_gpu: bool
    colocated: bool
    """Trainer and servers on the same GPUs, which take turns."""
    transport: Transport

    @property
    def trained(self) -> TrainedEngines:
        return TrainedEngines(e for e in (self.actor, self.critic) if e is not None)

    def close_senders(self) -> None:
        """Leave the servers and remove what a push left on disk."""
        if self.transport != "local":
            self.actor.group.push_close()


def start_ppo_workers(
    config: PPOMATHConfig, allocation: Allocation, cluster: Cluster, memory: MemoryLimits
) -> PPOWorkers:
    """Start every process; they come up side by side, so nothing here waits for another."""
    placed, colocated = allocation.generator, allocation.shares_gpus
    shared: dict[str, Any] = {
        "asked": config.launch.threads_per_process, "max_staleness": config.staleness.max_staleness
    }  # fmt: skip
    threads = threads_per_process(allocation, gpus=allocation.trainer.on_gpu, **shared)
    groups = TrainerGroups(cluster, port=config.launch.master_port, threads=threads, seed=config.seed)
    generators = GeneratorPool(
        cluster,
        placed,
        backend_settings(config, allocation),
        threads=threads_per_process(allocation, gpus=placed.on_gpu, **shared),
        health=HealthSettings(
            interval_seconds=config.generator.health_interval_seconds,
            timeout_seconds=config.generator.health_timeout_seconds,
            restarts=BACKENDS[placed.backend].capabilities.restarts and not colocated,
        ),
        memory=memory,
    )
    # Before the trainer's ranks, whose first one is waited for.
    rollout = RolloutClient(cluster, generators, rollout_settings(config, allocation, cluster.log_folder))
    return PPOWorkers(
        actor=_engine_ref("actor", config, allocation, groups),
        critic=_engine_ref("critic", config, allocation, groups) if config.uses_critic else None,
        reference=_engine_ref("ref", config, allocation, groups) if config.uses_reference else None,
        generators=generators,
        rollout=rollout,
        groups=groups,
        on_gpu=allocation.trainer.on_gpu,
        colocated=colocated,
        transport=choose_transport(config.push.type, allocation),
    )


def backend_settings(config: PPOMATHConfig, allocation: Allocation) -> BackendSettings:
    """Return the settings of every generator; the pool adds those that differ between them."""
    generator, colocated = config.generator, allocation.shares_gpus
    backend = BACKENDS[allocation.generator.backend]
    return BackendSettings(
        model_path=config.actor.path,
        dtype=generator_dtype(config, allocation),
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
    """Format of the generators' weights."""
    return config.generator.dtype or config.actor.dtype(on_gpu=allocation.trainer.on_gpu)


def make_push(config: PPOMATHConfig, allocation: Allocation, workers: PPOWorkers, folder: Path) -> RunPush:
    """Return the way of weights that fits the allocation; the senders are not yet made. `folder`: see
    connect_senders."""

    def reconnect() -> None:
        workers.close_senders()
        connect_senders(config, allocation, workers, folder)

    return FaultTolerantWeightSync(
        _push(config, workers),
        workers.generators,
        workers.rollout,
        reconnect=reconnect,
        patience_seconds=config.generator.patience_seconds,
    )


def _push(config: PPOMATHConfig, workers: PPOWorkers) -> WeightPush:
    push = config.push
    common: dict[str, Any] = {"bucket_bytes": push.bucket_mib * 2**20, "timeout_seconds": push.timeout_seconds}
    trainer, generators = workers.actor.group, workers.generators
    if workers.colocated:
        return ColocatedPush(trainer, generators, verify=push.verify, **common)
    if workers.transport == "local":
        return LocalPush(trainer, generators, **common)
    return ServerPush(trainer, generators, verify=push.verify, **common)


def connect_senders(config: PPOMATHConfig, allocation: Allocation, workers: PPOWorkers, folder: Path) -> None:
    """Make a sender in each of the actor's ranks, and let it join the servers, which are up. `folder` is for disk."""
    if workers.transport == "local":
        return
    plan = SenderPlan(
        type=workers.transport,
        model_path=config.actor.path,
        dtype=generator_dtype(config, allocation),
        bucket_bytes=config.push.bucket_mib * 2**20,
        timeout_seconds=config.push.timeout_seconds,
        folder=folder,
    )
    workers.actor.group.push_connect(plan, workers.generators.endpoints(allocation.trainer))


def _engine_ref(engine: str, config: PPOMATHConfig, allocation: Allocation, groups: TrainerGroups) -> EngineRef:
    """Return an engine's group of ranks and its microbatch limits. Training and inference of one engine share their
    weights, hence their ranks."""
    train, inference = _ENGINE_ROLES[engine]
    return EngineRef(
        group=groups.group(allocation.roles[train]),
        name=engine,
        train_role=train,
        inference_role=inference,
        train_tokens_per_mb=config.max_tokens_per_mb(train),
        inference_tokens_per_mb=config.max_tokens_per_mb(inference),
    )


def build_ppo_engines(config: PPOMATHConfig, workers: PPOWorkers, *, total_updates: int) -> None:
    """Load actor, critic and reference on their ranks."""
    common: dict[str, Any] = {"on_gpu": workers.on_gpu}
    build_engine(
        workers.actor,
        config.actor,
        path=config.actor.path,
        total_updates=total_updates * config.ppo.actor_sample_reuse,
        seed=config.seed,
        **common,
    )
    if workers.critic is not None:
        build_engine(
            workers.critic, config.critic, path=config.critic_path,
            total_updates=total_updates * config.ppo.critic_sample_reuse, seed=config.seed + 1,
            is_critic=True, **common,
        )  # fmt: skip
    if workers.reference is not None:
        build_engine(
            workers.reference, config.ref, path=config.ref_path, total_updates=None, seed=config.seed, **common
        )


def build_engine(
    ref: EngineRef,
    model: ModelTrainEvalConfig,
    *,
    path: str,
    total_updates: int | None,
    on_gpu: bool,
    seed: int,
    is_critic: bool = False,
) -> None:
    """Load one model on all its ranks; with an optimizer when it is trained for `total_updates` updates."""
    settings = EngineSettings(
        hf_path=path,
        is_critic=is_critic,
        init_from_scratch=model.init_from_scratch,
        init_critic_from_actor=model.init_critic_from_actor,
        dtype=model.dtype(on_gpu=on_gpu),
        recompute=model.recompute(on_gpu=on_gpu),
        fp8=model.fp8,
        grad_reduce_in_fp32=model.grad_reduce_in_fp32,
        seed=seed,
        moe_aux_loss_coeff=model.moe_aux_loss_coeff,
        moe_bias_update_rate=model.moe_bias_update_rate,
    )
    optimizer = None
    if total_updates is not None:
        o = model.optimizer
        optimizer = OptimizerSettings(
            lr=o.lr,
            min_lr_ratio=o.min_lr_ratio,
            lr_scheduler_type=o.lr_scheduler_type,
            warmup_steps_proportion=o.warmup_steps_proportion,
            total_steps=total_updates,
            weight_decay=o.weight_decay,
            beta1=o.beta1,
            beta2=o.beta2,
            eps=o.eps,
            gradient_clipping=o.gradient_clipping,
            offload=o.offload,
        )
    ref.group.build(ref.name, settings, optimizer)


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
