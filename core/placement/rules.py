"""Rules of an allocation beside its model and batch, and which layouts to suggest in place of an impossible one.

Invariant: a suggestion passes every rule that depends on layouts. Rules of the backend and the device are the same for
all suggestions; they are reported once the layouts fit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from allocation import (
    TRAINER_ROLE,
    Allocation,
    AllocationError,
    Checks,
    ParallelLayout,
    batch_errors,
    model_errors,
    nearest_minibatches,
)
from allocation.checks import nearest_layouts_of
from allocation.plan import SAME_WEIGHTS
from config_schema.section import Violation
from core.config.experiments import ExperimentConfig, PPOMATHConfig
from core.config.runtime import APART
from core.placement import on_devices, resolve_allocation, transport_of
from model_specs.config import ModelConfig
from model_specs.model_folder import ModelFolderError, read_model_folder
from rollout.inference.registry import BACKENDS


def check_allocation(config: ExperimentConfig) -> Iterator[Violation]:
    """Yield what makes the allocation impossible, or else every rule that it breaks."""
    size = ("allocation_mode", "n_nodes", "n_gpus_per_node")
    allocation: Allocation | None = None
    try:
        allocation = resolve_allocation(config, layout_checks(config))
    except AllocationError as impossible:
        yield _violation(impossible, *size)
    placed = {} if allocation is None else {role: allocation.roles[role].layout for role in config.batch_roles}
    uneven = list(_minibatches(placed, config.batch_key, **config.batch_shape))
    yield from uneven
    if allocation is not None:
        yield from _allocation_rules(config, allocation)
        yield from () if uneven else _batch(config, placed, size)


def _allocation_rules(config: ExperimentConfig, allocation: Allocation) -> Iterator[Violation]:
    yield from _numerics(config, allocation)
    if (sampled := config.sampling) is not None:
        for rule in (*_OF_BACKENDS, *_OF_LAYOUTS):
            yield from rule(sampled, allocation)


def _batch(config: ExperimentConfig, layouts: Mapping[str, ParallelLayout], size: Sequence[str]) -> Iterator[Violation]:
    """Yield what keeps the batch from being dealt out to the ranks; suggested numbers work for every role."""
    seen: set[str] = set()
    for role, layout in layouts.items():
        for error in batch_errors(layout, role, **config.batch_shape, beside=layouts):
            if error.key not in seen:  # roles of one layout break the same rule
                seen.add(error.key)
                yield _violation(
                    error, *size, *(_BATCH_KEYS.get(name, config.batch_key) for name in config.batch_shape)
                )


def layout_checks(config: ExperimentConfig) -> Checks:
    """Return what a suggested allocation must pass: the rules of layouts for this batch and the models on this host."""
    models: dict[str, tuple[ModelConfig, str]] = {}
    for use in config.model_uses:
        try:
            model = read_model_folder(use.path, weights=False, tokenizer=False)
        except ModelFolderError:
            continue  # reported with the models
        models |= dict.fromkeys(use.roles, (model, use.path))
    shape = {} if any(_minibatches({}, config.batch_key, **config.batch_shape)) else config.batch_shape

    def suits(role: str, layout: ParallelLayout) -> bool:
        if role in models and split_errors(layout, role, *models[role]):
            return False
        return not (shape and role in config.batch_roles and batch_errors(layout, role, **shape, beside=None))

    sampled = config.sampling

    def accepts(allocation: Allocation) -> bool:
        if config.is_local and allocation.n_nodes > 1:
            return False
        if any(not suits(role, placed.layout) for role, placed in allocation.roles.items()):
            return False
        return sampled is None or not any(True for rule in _OF_LAYOUTS for _ in rule(sampled, allocation))

    return Checks(suits=suits, accepts=accepts)


def nearest_allocation(config: ExperimentConfig, allocation: Allocation) -> str | None:
    """Return allocation_mode with the layouts closest to these that pass the rules, or None."""
    if "allocation_mode" not in config.model_fields_set:
        return None
    near = nearest_layouts_of(allocation, on_devices(config, layout_checks(config)))
    if near is None:
        return None
    return str(near.trainer[TRAINER_ROLE]) if config.TRAINER_ONLY else str(near)


def split_errors(layout: ParallelLayout, role: str, model: ModelConfig, path: str) -> list[AllocationError]:
    """Return every way in which the model at `path` cannot be split as `layout` specifies."""
    return model_errors(
        layout, role, num_heads=model.num_heads, num_kv_heads=model.num_kv_heads, num_layers=model.num_layers,
        vocab_size=model.vocab_size, intermediate_size=model.intermediate_size,
        num_experts=model.moe.num_experts if model.moe else 0, path=path,
    )  # fmt: skip


def _server_arguments(config: PPOMATHConfig, allocation: Allocation) -> Iterator[Violation]:
    backend = BACKENDS[allocation.generator.backend]
    for section, flags in config.server_flags.items():
        for key, message in backend.refused_flags(flags):
            yield Violation((f"{section}.{key}", section, "allocation_mode"), message)


def _transport(config: PPOMATHConfig, allocation: Allocation) -> Iterator[Violation]:
    try:
        transport_of(config, allocation)
    except ValueError as impossible:
        yield Violation(("push.type", "allocation_mode", "n_nodes", "n_gpus_per_node"), str(impossible))


def _group_of_jobs(config: PPOMATHConfig, allocation: Allocation) -> Iterator[Violation]:
    """Check that the generators of explore jobs can be in one group with the trainer."""
    if not config.synchronizer.broadcasts or config.job not in (*APART, "serve"):
        return
    generator, trainer = allocation.generator, allocation.trainer
    why = "servers and trainer share GPUs" if allocation.shares_gpus else ""
    if generator.layout.pp > 1:
        why = f"servers of {generator.layout.pp} pipeline stages cannot join one group with the trainer"
    elif generator.device != trainer.device:
        why = f"the generators compute on {generator.device}, the trainer on {trainer.device}"
    if why:
        yield Violation(
            ("synchronizer.method", "allocation_mode"), f"{config.synchronizer.method}: {why}; write folder"
        )


def _shared_ranks(config: PPOMATHConfig, allocation: Allocation) -> Iterator[Violation]:
    """Check that a trained model has its weights once, on the ranks of its training."""
    for inference, train in SAME_WEIGHTS.items():
        a, b = allocation.roles[train], allocation.roles[inference]
        if inference not in config.roles or (a.layout, a.slots) == (b.layout, b.slots):
            continue
        by_mapping = config.roles[inference].is_mapped
        yield Violation(
            (f"{inference}.device_mapping" if by_mapping else "allocation_mode", "n_nodes", "n_gpus_per_node"),
            f"{inference} has {b.layout} on {b.row().placement}, {train} has {a.layout} on {a.row().placement}: both "
            f"run on the same ranks; leave {inference} out, or write the layout and the slots of {train}",
        )


def _weight_format(config: PPOMATHConfig, allocation: Allocation) -> Iterator[Violation]:
    backend = BACKENDS[allocation.generator.backend]
    formats = backend.capabilities.weight_formats
    dtype = config.generator_dtype(on_gpu=allocation.trainer.on_gpu)
    if dtype not in formats:
        message = f"{backend.label}s hold weights in {' or '.join(formats)}, not in {dtype}; write one of them"
        yield Violation(("generator.dtype", "allocation_mode"), message)


def _quantization(config: PPOMATHConfig, allocation: Allocation) -> Iterator[Violation]:
    wanted, placed = config.generator.weight_format, allocation.generator
    if not config.generator.quantizes:
        return
    keys, backend = ("generator.weight_format", "allocation_mode"), BACKENDS[placed.backend]
    if wanted not in backend.capabilities.quantizations:
        able = " or ".join(f"{b.label}s" for b in BACKENDS.values() if wanted in b.capabilities.quantizations)
        yield Violation(keys, f"{wanted} needs {able} on GPUs, the generator is {placed.backend}; write auto")
        return
    if not placed.on_gpu:
        yield Violation(keys, f"{wanted} needs generators on GPUs, these compute on {placed.device}; write auto")
        return
    dtype = config.generator_dtype(on_gpu=allocation.trainer.on_gpu)
    if dtype != "bfloat16":
        message = f"{wanted} needs bfloat16 for what is not quantized, got {dtype}; write generator.dtype=bfloat16"
        yield Violation(("generator.weight_format", "generator.dtype"), message)
    if config.push.sends_changes:
        message = f"always, but with generator.weight_format={wanted} all weights are sent; write never"
        yield Violation(("push.changes", "generator.weight_format"), message)
    for section, flags in config.server_flags.items():
        for name in flags:
            if name.replace("-", "_") not in ("quantization", "load_format"):
                continue
            message = f"cannot be set: generator.weight_format={wanted} determines it; leave it out"
            yield Violation((f"{section}.{name}", "generator.weight_format"), message)


def _colocation(config: PPOMATHConfig, allocation: Allocation) -> Iterator[Violation]:
    backend = BACKENDS[allocation.generator.backend]
    if allocation.shares_gpus and not backend.capabilities.colocates:
        message = f"{backend.label}s cannot leave the GPUs to the trainer; write + for GPUs of their own"
        yield Violation(("allocation_mode", "n_gpus_per_node"), message)


def _interrupt(config: PPOMATHConfig, allocation: Allocation) -> Iterator[Violation]:
    generator, interrupt = allocation.generator, config.generator.interrupt
    backend = BACKENDS[generator.backend]
    exact = backend.capabilities.staged_interrupts
    # Generators that take turns with the trainer abort, whatever is configured.
    if generator.layout.pp > 1 and interrupt not in exact and not allocation.shares_gpus:
        yield Violation(
            ("generator.interrupt", "allocation_mode"),
            f"interrupt={interrupt} needs p1 on the generator's side, got {generator.layout}: a {backend.label} of "
            f"{generator.layout.pp} pipeline stages does not return per-token versions; write "
            f"{' or '.join(exact)}, or tensor parallelism (m) instead of p",
        )


def _routing_replay(config: PPOMATHConfig, allocation: Allocation) -> Iterator[Violation]:
    generator = allocation.generator
    if not config.actor.moe_routing_replay:
        return
    keys = ("actor.moe_routing_replay", "allocation_mode")
    backend = BACKENDS[generator.backend]
    if not backend.capabilities.routed_experts:
        able = {name: b.label for name, b in BACKENDS.items() if b.capabilities.routed_experts}
        yield Violation(
            keys,
            f"moe_routing_replay=true needs {' or '.join(able.values())}s, which return the experts of each token; the "
            f"generator is {generator.backend}; write {' or '.join(able)} in allocation_mode, or false",
        )
    elif generator.layout.pp > 1:
        yield Violation(
            keys,
            f"moe_routing_replay=true needs p1 on the generator's side, got {generator.layout}: each pipeline stage of "
            f"a {backend.label} returns the experts of its own layers only; write tensor parallelism (m) instead "
            "of p, or false",
        )


def _numerics(config: ExperimentConfig, allocation: Allocation) -> Iterator[Violation]:
    """Yield settings that the device or the format does not support."""
    for use in config.model_uses:
        yield from use.section.numeric_rules(f"{use.key}.", on_gpu=allocation.trainer.on_gpu)


def _minibatches(
    layouts: Mapping[str, ParallelLayout], size: str, *, ppo_n_minibatches: int = 1, **batch: int
) -> Iterator[Violation]:
    """Yield a number of minibatches that does not divide the prompts, which the key `size` sets; what is suggested
    suits `layouts`."""
    prompts = batch["train_bs_n_seqs"]
    if prompts % ppo_n_minibatches:
        near = nearest_minibatches(layouts, ppo_n_minibatches=ppo_n_minibatches, **batch)
        is_own = size == "dataset.train_bs_n_seqs"
        of_size = f"train_bs_n_seqs={prompts}" if is_own else f"the {prompts} prompts of {size}"
        yield Violation(
            ("ppo.ppo_n_minibatches", size),
            f"ppo_n_minibatches={ppo_n_minibatches} must divide {of_size}; nearest: {near}",
        )


def _violation(error: AllocationError, *others: str) -> Violation:
    """Return an error of the allocation package; its text begins with the key, which is shown anyway."""
    text = str(error).removeprefix(error.key).removeprefix("=").removeprefix(": ")
    return Violation((error.key, *(key for key in others if key != error.key)), text)


_BATCH_KEYS = {"group_size": "group_size", "ppo_n_minibatches": "ppo.ppo_n_minibatches"}


def _auxiliary(config: PPOMATHConfig, allocation: Allocation) -> Iterator[Violation]:
    servers, generators = config.num_auxiliary_servers, allocation.generator.layout.dp
    if servers and allocation.shares_gpus:
        message = "its servers need GPUs that the trainer does not use; write + in allocation_mode"
        yield Violation(("auxiliary.path", "allocation_mode"), message)
    elif servers >= generators:
        yield Violation(
            ("auxiliary.num_servers", "allocation_mode"),
            f"{servers} of {generators} generators would serve the auxiliary model, which leaves none for the policy; "
            f"write a layout of at least d{servers + 1}, as in {allocation.generator.backend}.d{servers + 1}",
        )


def _turns(config: PPOMATHConfig, allocation: Allocation) -> Iterator[Violation]:
    if allocation.shares_gpus:
        yield from config.rules_of_turns()


_Rule = Callable[[PPOMATHConfig, Allocation], Iterator[Violation]]
_OF_LAYOUTS: tuple[_Rule, ...] = (
    _transport,
    _group_of_jobs,
    _shared_ranks,
    _colocation,
    _interrupt,
    _routing_replay,
    _auxiliary,
    _turns,
)
"""Rules of generators that depend on layouts."""
_OF_BACKENDS: tuple[_Rule, ...] = (_server_arguments, _weight_format, _quantization)
"""Rules of generators that do not."""
