"""The processes of one attempt, made from configuration and allocation: trainer ranks, generators, the rollout side."""

import logging
import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path

from allocation import Allocation, ParallelLayout, RoleAllocation, Slot
from core.config.experiments import ExperimentConfig, PPOMATHConfig
from core.launch.cluster import Cluster
from core.launch.generators import GeneratorPool
from core.launch.rollout_client import RolloutActor, RolloutClient
from core.launch.trainer_group import TrainerGroup
from core.launch.trainer_rank import TrainerRank
from core.train.recover import MemoryLimits, WaitWritten
from core.trainer import EngineRef
from core.weight_sync.push import Replicas, SenderSettings, Trainer, WeightPush
from mcore_adapter.checkpoint.outcome import wait_for_outcome
from rollout.inference.backend import BackendSettings
from rollout.inference.registry import BACKENDS, Transport

logger = logging.getLogger(__name__)

_ENGINE_ROLES = {
    "actor": ("actor_train", "actor_inf"),
    "critic": ("critic_train", "critic_inf"),
    "ref": ("ref_inf",) * 2,
}


GPU_THREADS = 8
"""CPU threads of a process that computes on a GPU, at most. They pack batches, and wait for each other after every
operation: with one for each core, some of which others use, an update took 8.45 s instead of 6.55."""


def threads_per_process(allocation: Allocation, *, configured: int, takes_turns: bool, gpus: bool) -> int:
    """Return the CPU threads of a trainer rank or a generator: `configured`, or the cores divided among the processes
    that work at once, with GPUs GPU_THREADS at most.

    Where trainer and generators take turns, each side may use all cores."""
    if configured:
        return configured
    num_generators = allocation.generator.layout.dp
    num_ranks = len({slot for name, role in allocation.roles.items() if name != "actor_gen" for slot in role.slots})
    busy = max(num_generators, num_ranks) if takes_turns else num_generators + num_ranks
    share = max(1, len(os.sched_getaffinity(0)) // busy)  # a container may be pinned to some cores
    return min(share, GPU_THREADS) if gpus else share


class TrainerGroups:
    """One group of ranks for each distinct layout and place in the device map; roles that agree share theirs."""

    def __init__(self, cluster: Cluster, *, port: int, threads: int, seed: int) -> None:
        self._cluster = cluster
        self._port, self._threads, self._seed = port, threads, seed
        self._groups: dict[tuple[ParallelLayout, tuple[Slot, ...]], TrainerGroup] = {}

    def group(self, placed: RoleAllocation) -> TrainerGroup:
        """Return the group of this role, started on the first call."""
        key = (placed.layout, placed.slots)
        if key not in self._groups:
            name = f"trainer{len(self._groups) or ''}"
            port = self._port and self._port + len(self._groups)
            self._groups[key] = TrainerGroup(
                self._cluster, placed, name=name, port=port, threads=self._threads, seed=self._seed
            )
        return self._groups[key]

    def wait_started(self) -> None:
        """Return when every rank of every group has joined."""
        for group in self._groups.values():
            group.wait_started()


class TrainedEngines(list[EngineRef]):
    """The engines that checkpoints hold; a reference never changes and is not among them."""

    def prepare_saves(self) -> None:
        """Let the ranks take the memory for copies while they wait for others to start."""
        for engine in self:
            engine.group.call(TrainerRank.prepare_saves, engine.name)

    def begin_save(self, folder: Path) -> WaitWritten:
        """Copy every engine to host memory and start writing distributed checkpoints of them under `folder`."""
        for engine in self:
            engine.group.call(TrainerRank.begin_save, engine.name, str(folder / engine.name))

        def wait(stop: threading.Event) -> None:
            for engine in self:
                wait_for_outcome(folder / engine.name, stop, engine.group.raise_if_dead)

        return wait

    def load(self, folder: Path) -> None:
        """Load what save() wrote; complete when it returns."""
        for engine in self:
            engine.group.load(engine.name, str(folder / engine.name))


@dataclass(frozen=True, kw_only=True)
class TrainerSide:
    """The engines of one attempt, and their ranks."""

    actor: EngineRef
    critic: EngineRef | None
    reference: EngineRef | None
    groups: TrainerGroups

    @property
    def trained(self) -> TrainedEngines:
        return TrainedEngines(e for e in (self.actor, self.critic) if e is not None)


def start_generators(
    config: PPOMATHConfig, allocation: Allocation, cluster: Cluster, memory: MemoryLimits
) -> tuple[GeneratorPool, RolloutClient]:
    """Start the generators and the rollout process. Call it before start_trainer(), whose first rank is waited for."""
    placed, others = allocation.generator.split(config.num_auxiliary_servers)
    settings = backend_settings(config, allocation)
    threads = _threads(config, allocation, gpus=placed.on_gpu)
    auxiliary = None
    if others is not None:
        frozen = auxiliary_settings(config, settings)
        auxiliary = GeneratorPool(
            cluster, others, frozen, threads=threads, restarts=False, memory=memory, name="auxiliary"
        )
    generators = GeneratorPool(
        cluster,
        placed,
        settings,
        threads=threads,
        restarts=BACKENDS[placed.backend].capabilities.restarts and not allocation.shares_gpus,
        memory=memory,
        auxiliary=auxiliary,
    )
    rollout = RolloutClient(
        cluster, RolloutActor, config, generators.actors, {} if auxiliary is None else auxiliary.actors
    )
    generators.judge = rollout
    return generators, rollout


def trainer_groups(config: ExperimentConfig, allocation: Allocation, cluster: Cluster) -> TrainerGroups:
    """Return the groups of ranks of a run, none of them started."""
    threads = _threads(config, allocation, gpus=allocation.trainer.on_gpu)
    return TrainerGroups(cluster, port=config.launch.master_port, threads=threads, seed=config.seed)


def start_trainer(config: PPOMATHConfig, allocation: Allocation, cluster: Cluster) -> TrainerSide:
    """Start the ranks of the trainer."""
    groups = trainer_groups(config, allocation, cluster)
    return TrainerSide(
        actor=_engine_ref("actor", config, allocation, groups),
        critic=_engine_ref("critic", config, allocation, groups) if config.uses_critic else None,
        reference=_engine_ref("ref", config, allocation, groups) if config.uses_reference else None,
        groups=groups,
    )


def backend_settings(config: PPOMATHConfig, allocation: Allocation) -> BackendSettings:
    """Return the settings of every generator; the pool adds those that differ between them."""
    generator, backend = config.generator, BACKENDS[allocation.generator.backend]
    return BackendSettings(
        config=generator.model_copy(update={"flags": config.merged_flags}),
        model_path=config.model_folder,
        dtype=config.generator_dtype(on_gpu=allocation.trainer.on_gpu),
        device=allocation.generator.device,
        colocated=allocation.shares_gpus,
        load_weights=config.actor.loads_weights and "local" not in backend.capabilities.transports,
        reports_experts=config.actor.moe_routing_replay,
        push_timeout_seconds=config.push.timeout_seconds,
    )


def auxiliary_settings(config: PPOMATHConfig, settings: BackendSettings) -> BackendSettings:
    """Return the settings of a server of the auxiliary model; `settings`: those of the generators."""
    return replace(
        settings,
        config=settings.config.unquantized,
        model_path=config.auxiliary_model,
        load_weights=True,
        reports_experts=False,
    )


def _threads(config: ExperimentConfig, allocation: Allocation, *, gpus: bool) -> int:
    takes_turns = config.sampling is None or config.sampling.is_synchronous
    configured = config.launch.threads_per_process
    return threads_per_process(allocation, configured=configured, takes_turns=takes_turns, gpus=gpus)


def make_push(
    config: PPOMATHConfig,
    allocation: Allocation,
    trainer: Trainer,
    generators: Replicas,
    rollout: RolloutClient,
    *,
    transport: Transport,
    folder: Path,
) -> WeightPush:
    """Return the push by this transport, not yet connected. `folder`: of pushes through files."""
    has_checksums = "local" not in BACKENDS[allocation.generator.backend].capabilities.transports
    logger.info("Weight updates: push.type=%s", transport.name)
    plan = SenderSettings(
        type=transport.name,
        model_path=config.model_folder,
        dtype=config.generator_dtype(on_gpu=allocation.trainer.on_gpu),
        bucket_bytes=config.push.bucket_bytes,
        timeout_seconds=config.push.timeout_seconds,
        folder=folder,
        changes="never" if allocation.shares_gpus or config.generator.quantizes else config.push.changes,
        quantizes=config.generator.quantizes,
    )
    return WeightPush(
        trainer,
        generators,
        rollout,
        plan=plan,
        slots=allocation.trainer,
        shares_gpus=allocation.shares_gpus,
        verify=config.push.verify if has_checksums else "never",
        patience_seconds=config.generator.patience_seconds,
    )


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


def build_ppo_engines(config: PPOMATHConfig, workers: TrainerSide, *, total_updates: int) -> None:
    """Load actor, critic and reference on their ranks."""
    actor, critic, reference = workers.actor, workers.critic, workers.reference
    updates, of_critic = (total_updates * reuse for reuse in config.ppo.sample_reuse)
    actor.group.build(actor.name, config.engine_model(actor.name, total_updates=updates))
    if critic is not None:
        critic.group.build(critic.name, config.engine_model(critic.name, total_updates=of_critic))
    if reference is not None:
        reference.group.build(reference.name, config.engine_model(reference.name))
