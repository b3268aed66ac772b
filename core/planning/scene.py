"""What is planned: GPU, engines of the trainer, servers and batch of a run, as plain numbers.

Invariant: a `Scene` has everything that the other files of this folder read; they take no configuration.
"""

import re
import shlex
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from allocation import GENERATOR_ROLE, TRAINER_ROLE, Allocation, ParallelLayout
from core.config.common import ModelUse
from core.config.experiments import ExperimentConfig, PPOMATHConfig
from core.config.presets import PRESETS
from core.placement import resolve_allocation
from core.placement.rules import split_errors
from mcore_adapter.memory.available import available_on_host
from mcore_adapter.memory.estimate import States, rank_states
from mcore_adapter.settings import Level
from model_specs.config import ModelConfig
from model_specs.model_folder import ModelFolderError, read_model_folder
from rollout.inference.gpus import query_gpus
from rollout.inference.registry import BACKENDS


class PlanError(ValueError):
    """A plan that cannot be made. The message names what is wrong and the way out."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as torch sees it."""

    name: str
    gib: float
    """Memory in total."""
    host_bytes: float | None = None
    """Memory that its host has left. None: not known, as of another machine."""


GPUS: dict[str, Gpu] = {
    "H100": Gpu(name="H100", gib=79.1),
    "H200": Gpu(name="H200", gib=139.8),
    "A100": Gpu(name="A100", gib=79.1),
}
"""Key: name as in --gpu."""
MOST_GIB = 2000.0
"""Of a GPU: what is above is no size in GiB."""
_DRIVER_GIB = 0.6
"""What the driver keeps of the memory that it reports: 81,559 MiB of an H100, 143,771 of an H200."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A model on the ranks of the trainer."""

    name: str
    """Section of the configuration: actor, critic, ref, model."""
    config: ModelConfig
    layout: ParallelLayout
    trains: bool
    is_critic: bool
    itemsize: int
    gradient_itemsize: int
    recompute: Level | Literal["auto"]
    fp8: bool
    offload: bool
    """Masters and moments are in host memory."""
    tokens: int
    """Most of a microbatch, as configured."""
    limit_gib: float | None
    host_gib: float | None
    has_pass: bool = True
    """A step computes its log-probabilities or values before the updates."""
    has_pass_in_turns: bool = True
    """The same with max_staleness=0."""
    sample_reuse: int = 1
    """Passes of updates over a batch."""
    is_drawn: bool = False
    """It starts from random weights."""
    batch_tokens: int = 1 << 62
    """Most of a training step."""
    has_worst_routing: bool = False
    """Every token of all ranks goes to the experts of one rank, not to those of all ranks alike."""

    @property
    def microbatch_tokens(self) -> int:
        """Most of a microbatch: no more than a data-parallel rank has of a step."""
        return min(self.tokens, -(-self.batch_tokens // self.layout.dp))

    @property
    def whole_weights(self) -> int:
        """Bytes of the weights of the model, which a weight update sends."""
        return rank_states(self.config, ParallelLayout(), pp_rank=0, trains=False, itemsize=self.itemsize).weights

    def stage_of(self, rank: int) -> int:
        """Return the pipeline stage of a rank."""
        return rank // (self.layout.world_size // self.layout.pp) % self.layout.pp

    def states(self, stage: int) -> States:
        """Return what the ranks of a stage hold between two updates."""
        return rank_states(
            self.config, self.layout, pp_rank=stage, is_critic=self.is_critic, itemsize=self.itemsize,
            gradient_itemsize=self.gradient_itemsize, trains=self.trains,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Servers:
    """The generators."""

    backend: str
    config: ModelConfig
    layout: ParallelLayout
    itemsize: int
    fp8: bool
    max_running: int
    share: float | None
    """Share of the memory of a GPU for weights and cache (mem_fraction_static)."""
    colocated_share: float
    """Value of `share` if servers share the GPUs with the trainer."""
    on_gpu: bool
    num_auxiliary: int = 0
    """Further ones of allocation_mode, which serve the auxiliary model."""
    auxiliary_config: ModelConfig | None = None

    @property
    def of_auxiliary(self) -> Self | None:
        """The servers of the auxiliary model, if there is one."""
        if self.auxiliary_config is None:
            return None
        layout = replace(self.layout, dp=self.num_auxiliary)
        return replace(
            self, config=self.auxiliary_config, layout=layout, fp8=False, num_auxiliary=0, auxiliary_config=None
        )


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A run to be planned."""

    gpu: Gpu
    on_gpu: bool
    """The trainer computes on GPUs."""
    engines: tuple[Engine, ...]
    """The trained policy first."""
    servers: Servers | None
    shares_gpus: bool
    n_nodes: int
    n_gpus_per_node: int
    bucket_bytes: int
    sequences: int
    """Sequences of a training step."""
    prompts: int
    group_size: int
    minibatches: int
    prompt_tokens: int
    """Longest prompt."""
    answer_tokens: int
    """Longest answer; 0: what is trained on are whole sequences of prompt_tokens."""
    max_staleness: int
    writes_checkpoints: bool
    token_bytes: int = 13
    """Of a trajectory, in host memory."""
    keeps_episodes: bool = True
    """The store of the run is in host memory."""
    keeps_weights: bool = False
    """A weight update leaves a copy of them in host memory: in the object store, or to find what has changed."""
    host_bytes: float | None = None
    """Memory that a node has left for the run. None: not known."""

    @property
    def actor(self) -> Engine:
        return self.engines[0]

    @property
    def longest(self) -> int:
        return self.prompt_tokens + self.answer_tokens

    @property
    def processes(self) -> list[tuple[Engine, ...]]:
        """The engines of each process of a rank: those of one layout share one."""
        layouts = dict.fromkeys(engine.layout for engine in self.engines)
        return [tuple(engine for engine in self.engines if engine.layout == layout) for layout in layouts]

    @property
    def ranks_of_node(self) -> range:
        """Ranks of the trainer on its first node."""
        return range(min(self.actor.layout.world_size, self.n_gpus_per_node))

    def in_layout(self, layout: ParallelLayout) -> Self:
        """Return the scene with every engine in this layout."""
        return replace(self, engines=tuple(replace(e, layout=layout) for e in self.engines))

    def with_engines(self, **changes: object) -> Self:
        """Return the scene with changes of every trained engine."""
        engines = tuple(replace(e, **changes) if e.trains else e for e in self.engines)  # type: ignore[arg-type]
        return replace(self, engines=engines)


def scene_of(config: ExperimentConfig, gpu: Gpu) -> Scene:
    """Return what a configuration runs, on the CPU that of this machine. Raises PlanError for a model that cannot be
    read or sequences beyond its positions, AllocationError for an impossible allocation."""
    allocation = resolve_allocation(config)
    on_gpu = allocation.trainer.on_gpu
    engines = tuple(_engine(config, use, allocation) for use in config.model_uses)
    prompt_tokens, answer_tokens = config.trained_tokens
    sampling: PPOMATHConfig | None = config.sampling
    scene = Scene(
        gpu=gpu,
        on_gpu=on_gpu,
        engines=engines,
        servers=_servers(sampling, engines[0].config, allocation) if sampling else None,
        shares_gpus=allocation.shares_gpus and not config.TRAINER_ONLY,
        n_nodes=allocation.n_nodes,
        n_gpus_per_node=allocation.n_gpus_per_node,
        bucket_bytes=0 if sampling is None else sampling.push.bucket_bytes,
        sequences=_sequences(config),
        prompts=config.batch_shape["train_bs_n_seqs"],
        group_size=config.batch_shape.get("group_size", 1),
        minibatches=config.batch_shape.get("ppo_n_minibatches", 1),
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        max_staleness=sampling.staleness.max_staleness if sampling else 0,
        writes_checkpoints=config.recovers,
        host_bytes=gpu.host_bytes if on_gpu or gpu.host_bytes is not None else available_on_host(),
        **(_in_host_memory(sampling, engines[0].config, allocation) if sampling else {}),
    )
    _check_positions(scene)
    for use, engine in zip(config.model_uses, engines, strict=True):
        for role in use.roles:
            for error in split_errors(allocation.roles[role].layout, role, engine.config, use.path):
                raise error
    return scene


def _in_host_memory(config: PPOMATHConfig, model: ModelConfig, allocation: Allocation) -> dict[str, Any]:
    """Return the fields of a scene about what processes of the run hold in host memory."""
    token = 4 + 4 + 4 + 1  # token, log-probability, version; whether it is trained
    if config.actor.moe_routing_replay and model.moe is not None:
        token += 2 * sum(model.moe.sparse_layers) * model.moe.top_k
    transports = BACKENDS[allocation.generator.backend].capabilities.transports
    through_store = config.push.type in ("auto", "local") and "local" in transports
    return {
        "token_bytes": token,
        "keeps_episodes": config.experience.store == "memory",
        "keeps_weights": through_store or config.push.sends_changes,
    }


def _check_positions(scene: Scene) -> None:
    """Raise PlanError where the longest sequence does not fit into the positions of a model."""
    length, keys = f"{scene.longest}", "dataset.max_seqlen"
    if scene.servers is not None:
        length = f"{scene.prompt_tokens} + {scene.answer_tokens} = {scene.longest}"
        keys = "dataset.max_prompt_len or ppo.gen.max_new_tokens"
    for engine in scene.engines:
        limit = engine.config.max_position_embeddings
        if scene.longest > limit:
            raise PlanError(
                f"{engine.name}: the longest sequence has {length} tokens, max_position_embeddings={limit}; lower "
                f"{keys}, or take a model for longer sequences"
            )


def _sequences(config: ExperimentConfig) -> int:
    shape = config.batch_shape
    pairs = 2 if config.NAME == "dpo" else 1
    return pairs * shape["train_bs_n_seqs"] * shape.get("group_size", 1)


def _model(key: str, path: str) -> ModelConfig:
    try:
        return read_model_folder(path, weights=False, tokenizer=False)
    except ModelFolderError as error:
        raise PlanError(f"{key}.path: {error}") from None


def _engine(config: ExperimentConfig, use: ModelUse, allocation: Allocation) -> Engine:
    model = _model(use.key, use.path)
    on_gpu, trains, section = allocation.trainer.on_gpu, use.key != "ref", use.section
    if config.TRAINER_ONLY:
        placed, role = TRAINER_ROLE, "allocation"
    else:
        placed = role = next(role for role in use.roles if role != GENERATOR_ROLE)
    limit_gib, host_gib = section.auto_limits
    return Engine(
        name=use.key,
        config=model,
        layout=allocation.roles[placed].layout,
        trains=trains,
        is_critic=use.key == "critic",
        **section.held(on_gpu=on_gpu)._asdict(),
        recompute=section.recompute(on_gpu=on_gpu) if trains else "none",
        fp8=section.fp8_recipe is not None,
        tokens=config.max_tokens_per_mb(role),
        limit_gib=limit_gib,
        host_gib=host_gib,
        has_pass=_has_pass(config, use.key),
        has_pass_in_turns=_has_pass(config, use.key, in_turns=True),
        sample_reuse=getattr(config.algorithm, f"{use.key}_sample_reuse", 1) if config.sampling else 1,
        is_drawn=not section.loads_weights,
        batch_tokens=_sequences(config) * sum(config.trained_tokens),
    )


def _has_pass(config: ExperimentConfig, name: str, *, in_turns: bool = False) -> bool:
    """Return whether a step runs a pass without gradients of the model. That of the actor depends on the algorithm; one
    of the user may need it."""
    if name != "actor" or config.sampling is None:
        return name != "model"
    sampling: PPOMATHConfig = config.sampling
    run = sampling.in_turns if in_turns else sampling
    return run.algorithm_name not in PRESETS or run.algorithm_settings.needs_old_logprobs


def _servers(config: PPOMATHConfig, model: ModelConfig, allocation: Allocation) -> Servers:
    placed = allocation.generator
    dtype = config.generator_dtype(on_gpu=allocation.trainer.on_gpu)
    flag = BACKENDS[placed.backend].memory_flag
    share, colocated_share = None, 1.0
    if flag:
        share = _given_share(config, flag.name)
        colocated_share = flag.colocated if share is None else share
    return Servers(
        backend=placed.backend,
        config=model,
        layout=replace(placed.layout, dp=max(1, placed.layout.dp - config.num_auxiliary_servers)),
        itemsize=2 if dtype == "bfloat16" else 4,
        fp8=config.generator.quantizes,
        max_running=config.generator.max_running,
        share=share,
        colocated_share=colocated_share,
        on_gpu=placed.on_gpu,
        num_auxiliary=config.num_auxiliary_servers,
        auxiliary_config=_model("auxiliary", config.auxiliary_model) if config.auxiliary_model else None,
    )


def _given_share(config: PPOMATHConfig, flag: str) -> float | None:
    """Return the share of a GPU's memory that this flag gives a server; None where it is not given. Raises
    PlanError."""
    given = [
        (f"{section}.{name}", value)
        for section, flags in config.server_flags.items()
        for name, value in flags.items()
        if name.replace("-", "_") == flag
    ]
    key, value = given[-1] if given else ("", None)
    if value is None:
        return None
    try:
        share = float(str(value))
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise PlanError(
            f"{key}: must be a number above 0 and below 1, not {value!r}; write one as 0.85, or leave the key out"
        )
    return share


def gpu_of_machine() -> Gpu | None:
    """Return the first GPU of this machine, with the memory that its driver reports; None without any."""
    found = query_gpus()
    if not found:
        return None
    name, gib = found[0].name, max(0.0, found[0].total_mib / 1024 - _DRIVER_GIB)
    known = _known(name)
    if known is None:
        gpu = Gpu(name=name, gib=gib)
    else:
        gpu = known if not gib or abs(gib - known.gib) < 1 else replace(known, gib=gib)
    return replace(gpu, host_bytes=available_on_host())


def _known(text: str) -> Gpu | None:
    """Return the GPU of the table that is named in a text."""
    return next((gpu for name, gpu in GPUS.items() if re.search(rf"\b{name}\b", text, re.IGNORECASE)), None)


def find_gpu(text: str) -> Gpu:
    """Return the GPU of a name, "H100" or as the driver writes it, "NVIDIA H100 80GB HBM3"; or of NAME:GIB. Raises
    PlanError for another one, for a size of 0 or above MOST_GIB, and for a name with another size than that of the
    table."""
    shown = f"--gpu {shlex.quote(text)}"
    name, colon, size = text.rpartition(":")
    known = _known(name if colon else text)
    if colon:
        try:
            gib = float(size)
        except ValueError:
            gib = 0.0
        if not name.strip() or ":" in name or not 0 < gib <= MOST_GIB:
            raise PlanError(
                f"{shown}: NAME:GIB needs a name without a colon, and a number above 0, at most {MOST_GIB:g}, as in "
                "B200:178"
            )
        return Gpu(name=name.strip() if known is None else known.name, gib=gib)
    if known is None:
        raise PlanError(
            f"{shown}: unknown; known: {', '.join(GPUS)}. Write NAME:GIB, as in B200:178, for a plan of memory alone; "
            "times need a calibration (--calibrate), see docs/planner.md"
        )
    sizes = [int(size) for size in re.findall(r"(\d+) ?GB\b", text, re.IGNORECASE)]
    if any(abs(size - known.gib) > 2 for size in sizes) or re.search(r"H100.NVL", text, re.IGNORECASE):
        raise PlanError(
            f"{shown}: {known.name} is the one with {known.gib} GiB; write {known.name}:GIB with the memory of this one"
        )
    return known


def chosen_gpu(name: str | None = None) -> Gpu:
    """Return the GPU that is named, or that of this machine; without one an H100. Raises PlanError."""
    if name is not None:
        return find_gpu(name)
    return gpu_of_machine() or find_gpu("H100")
