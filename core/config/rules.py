"""Rules across several keys.

Every rule names the keys that it reads, so that a key that is wrong by itself is not reported twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from allocation import Allocation, AllocationError, batch_errors
from allocation.errors import divisors, nearest_of
from allocation.plan import SAME_WEIGHTS
from core.config.algorithm import algorithm_warnings, unread_settings
from core.config.allocation import resolve_allocation
from core.config.experiments import DPOConfig, ExperimentConfig, PPOMATHConfig, SFTConfig
from core.config.models import ModelTrainEvalConfig
from core.config.push import choose_transport
from core.config.runtime import NOT_IN_A_RUN
from core.config.unused import unused_keys
from rollout.inference.registry import BACKENDS

_MORE_THAN_ALL_TOKENS = 1_000_000
"""No vocabulary is so large: as a top_k it cuts nothing off."""


@dataclass(frozen=True)
class Violation:
    """A broken rule; the first of `keys` is the one to change."""

    keys: tuple[str, ...]
    message: str


def check_rules(config: ExperimentConfig) -> Iterator[Violation]:
    """Yield every rule that `config` breaks."""
    if config.mode == "local" and config.n_nodes > 1:
        yield Violation(("mode", "n_nodes"), f"mode=local is for one node, n_nodes={config.n_nodes}; write mode=ray")
    if config.mode == "local" and config.launch.ray_address:
        message = f"mode=local is for this machine, launch.ray_address={config.launch.ray_address}; write mode=ray"
        yield Violation(("mode", "launch.ray_address"), message)
    yield from _tracing(config)
    yield from _microbatches(config)
    yield from _evaluation(config)
    yield from _template(config)
    for rule in _RULES[config.NAME]:
        yield from rule(config)
    yield from _allocation(config)


def config_warnings(config: ExperimentConfig) -> Iterator[str]:
    """Yield settings that are valid but probably not intended."""
    unused: dict[str, list[str]] = {}
    for key, reason in unused_keys(config):
        unused.setdefault(f" ({reason})", []).append(key)
    elsewhere = {key for keys in unused.values() for key in keys}
    if unread := [key for find in _UNREAD[config.NAME] for key in find(config) if key not in elsewhere]:
        unused[""] = unread
    for reason, keys in unused.items():
        yield f"{', '.join(keys)}: not used by this run{reason}; remove {'it' if len(keys) == 1 else 'them'}"
    for warn in _WARNINGS[config.NAME]:
        yield from warn(config)


def _inexact_sampling(config: PPOMATHConfig) -> Iterator[str]:
    gen = config.ppo.gen
    if gen.top_p < 1.0 or 0 < gen.top_k < _MORE_THAN_ALL_TOKENS:
        yield (
            f"ppo.gen.top_p={gen.top_p}, top_k={gen.top_k}: completions come from a truncated distribution; the "
            "trainer's log-probabilities refer to the full one, which biases importance weights; "
            "top_p=1, top_k=-1 are exact"
        )
    if gen.min_new_tokens:
        yield (
            f"ppo.gen.min_new_tokens={gen.min_new_tokens}: until then stop tokens are excluded from sampling, "
            "but included in the trainer's log-probabilities; min_new_tokens=0 is exact"
        )


def _tracing(config: ExperimentConfig) -> Iterator[Violation]:
    for name, why in NOT_IN_A_RUN.items():
        if name in config.external_configs.envs:
            yield Violation(("external_configs.envs",), f"{name} cannot be set: {why}; leave it out")


def _microbatches(config: ExperimentConfig) -> Iterator[Violation]:
    parts = config.LENGTH_KEYS
    for role, section in config.roles.items():
        limit = section.mb_spec.max_tokens_per_mb
        if limit is not None and limit < config.max_seqlen:
            yield Violation(
                (f"{role}.mb_spec.max_tokens_per_mb", *parts),
                f"max_tokens_per_mb={limit} cannot hold the longest sequence, {' + '.join(parts)} = "
                f"{config.max_seqlen}; raise it to at least {config.max_seqlen}",
            )


def _evaluation(config: ExperimentConfig) -> Iterator[Violation]:
    control = config.exp_ctrl
    if not config.evaluates and (control.eval_freq_epochs or control.eval_freq_steps or control.eval_freq_secs):
        yield Violation(
            (config.EVALUATION_KEY, "exp_ctrl"), "exp_ctrl.eval_freq_* enables evaluation; set this to a jsonl file"
        )


def _sampling(config: PPOMATHConfig) -> Iterator[Violation]:
    gen = config.ppo.gen
    if gen.min_new_tokens > gen.max_new_tokens:
        yield Violation(
            ("ppo.gen.min_new_tokens", "ppo.gen.max_new_tokens"),
            f"min_new_tokens={gen.min_new_tokens} must be at most max_new_tokens={gen.max_new_tokens}",
        )
    if gen.top_k == 0:
        yield Violation(("ppo.gen.top_k",), "top_k=0 leaves no token to sample; write -1 for all")
    if config.group_adv_norm and config.group_size == 1:
        yield Violation(
            ("group_adv_norm", "group_size"),
            "group_adv_norm=true normalizes within a group and requires group_size of at least 2, got 1",
        )


def _template(config: ExperimentConfig) -> Iterator[Violation]:
    template = config.prompt.template
    if template is not None and "{prompt}" not in template:
        message = f"template={template!r} has no {{prompt}}; write it where the prompt belongs"
        yield Violation(("prompt.template",), message)


def _sft_model(config: SFTConfig) -> Iterator[Violation]:
    return _trained_model("model", config.model)


def _reference(config: PPOMATHConfig | DPOConfig) -> Iterator[Violation]:
    if config.ref.type.is_critic:
        yield Violation(("ref.type.is_critic",), "ref is a language model; only the critic has a value head")


def _ppo_models(config: PPOMATHConfig) -> Iterator[Violation]:
    yield from _trained_model("actor", config.actor)
    yield from _reference(config)
    if not config.uses_critic:
        return
    if not config.critic.path and not config.critic.init_critic_from_actor:
        yield Violation(
            ("critic.path", "critic.init_critic_from_actor", "ppo.disable_value"),
            "required with a critic: the folder of a value model; or initialize it from the actor with "
            "critic.init_critic_from_actor=true; or train without one with ppo.disable_value=true",
        )
    if config.critic.optimizer.type == "empty":
        yield Violation(("critic.optimizer.type",), "the critic is trained; write adam, or ppo.disable_value=true")


def _server_arguments(config: PPOMATHConfig, allocation: Allocation) -> Iterator[Violation]:
    backend = BACKENDS[allocation.generator.backend]
    for section, flags in (("actor.sglang", config.actor.sglang), ("generator.flags", config.generator.flags)):
        for key, message in backend.refused_flags(flags):
            yield Violation((f"{section}.{key}", section, "allocation_mode"), message)


def _trained_model(name: str, model: ModelTrainEvalConfig) -> Iterator[Violation]:
    if not model.path:
        yield Violation((f"{name}.path",), "required: the Hugging Face folder of the model to train")
    if model.type.is_critic:
        yield Violation((f"{name}.type.is_critic",), f"{name} is a language model; only the critic has a value head")
    if model.optimizer.type == "empty":
        yield Violation((f"{name}.optimizer.type",), f"{name} is trained; write adam")


def _allocation(config: ExperimentConfig) -> Iterator[Violation]:
    size = ("allocation_mode", "n_nodes", "n_gpus_per_node")
    try:
        allocation = resolve_allocation(config)
    except AllocationError as impossible:
        yield _violation(impossible, *size)
        return
    yield from _numerics(config, allocation)
    for rule in _ALLOCATION_RULES[config.NAME]:
        yield from rule(config, allocation)
    shape = config.batch_shape
    if uneven := _minibatches(**shape):
        yield uneven
        return
    seen: set[str] = set()
    for role in config.batch_roles:
        for error in batch_errors(allocation.roles[role].layout, role, **shape):
            if error.key not in seen:  # roles of one layout break the same rule
                seen.add(error.key)
                yield _violation(error, *size, *(_BATCH_KEYS[name] for name in shape))


def _transport(config: PPOMATHConfig, allocation: Allocation) -> Iterator[Violation]:
    try:
        choose_transport(config.push.type, allocation)
    except ValueError as impossible:
        yield Violation(("push.type", "allocation_mode", "n_nodes", "n_gpus_per_node"), str(impossible))


def _shared_ranks(config: PPOMATHConfig, allocation: Allocation) -> Iterator[Violation]:
    """Check that a trained model has its weights once, on the ranks of its training."""
    for inference, train in SAME_WEIGHTS.items():
        a, b = allocation.roles[train], allocation.roles[inference]
        if inference not in config.roles or (a.layout, a.slots) == (b.layout, b.slots):
            continue
        by_mapping = config.roles[inference].device_mapping is not None
        yield Violation(
            (f"{inference}.device_mapping" if by_mapping else "allocation_mode", "n_nodes", "n_gpus_per_node"),
            f"{inference} has {b.layout} on {b.row().placement}, {train} has {a.layout} on {a.row().placement}: both "
            f"run on the same ranks; leave {inference} out, or write the layout and the slots of {train}",
        )


def _backend(config: PPOMATHConfig, allocation: Allocation) -> Iterator[Violation]:
    """Yield settings that the generators' backend does not support."""
    backend = BACKENDS[allocation.generator.backend]
    formats = backend.capabilities.weight_formats
    dtype = config.generator.dtype or config.actor.dtype(on_gpu=allocation.trainer.on_gpu)
    if dtype not in formats:
        message = f"{backend.label}s hold weights in {' or '.join(formats)}, not in {dtype}; write one of them"
        yield Violation(("generator.dtype", "allocation_mode"), message)
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
    gpus = allocation.trainer.on_gpu
    for name, model in ((use.key, use.section) for use in config.model_uses):
        dtype = model.dtype(on_gpu=gpus)
        if not gpus:
            for key, enabled in ((f"{name}.fp8", model.fp8), (f"{name}.optimizer.offload", model.optimizer.offload)):
                if enabled:
                    message = f"{key.rpartition('.')[2]}=true requires GPUs, but this run trains on CPU; write false"
                    yield Violation((key, "allocation_mode"), message)
        elif model.fp8 and dtype != "bfloat16":
            yield Violation((f"{name}.fp8", f"{name}.bf16"), "fp8=true requires bfloat16; write bf16=true")
        if not model.grad_reduce_in_fp32 and dtype != "bfloat16":
            message = f"grad_reduce_in_fp32=false is for bfloat16, {name} is {dtype}; write {name}.bf16=true, or true"
            yield Violation((f"{name}.grad_reduce_in_fp32", f"{name}.bf16"), message)


def _minibatches(*, train_bs_n_seqs: int, ppo_n_minibatches: int = 1, group_size: int = 1) -> Violation | None:
    parts, prompts = ppo_n_minibatches, train_bs_n_seqs
    if prompts % parts == 0:
        return None
    nearest = nearest_of(parts, divisors(prompts))
    return Violation(
        ("ppo.ppo_n_minibatches", "dataset.train_bs_n_seqs"),
        f"ppo_n_minibatches={parts} must divide train_bs_n_seqs={prompts}; nearest: {nearest}",
    )


def _violation(error: AllocationError, *others: str) -> Violation:
    """Return an error of the allocation package; its text begins with the key, which is shown anyway."""
    text = str(error).removeprefix(error.key).removeprefix("=").removeprefix(": ")
    return Violation((error.key, *(key for key in others if key != error.key)), text)


_BATCH_KEYS = {
    "group_size": "group_size",
    "train_bs_n_seqs": "dataset.train_bs_n_seqs",
    "ppo_n_minibatches": "ppo.ppo_n_minibatches",
}
_RULES: Mapping[str, tuple[Callable[[Any], Iterator[Violation]], ...]] = {
    "ppo-math": (_sampling, _ppo_models),
    "sft": (_sft_model,),
    "dpo": (_sft_model, _reference),
}
_ALLOCATION_RULES: Mapping[str, tuple[Callable[[Any, Allocation], Iterator[Violation]], ...]] = {
    "ppo-math": (_server_arguments, _transport, _shared_ranks, _backend, _interrupt, _routing_replay),
    "sft": (),
    "dpo": (),
}
_UNREAD: Mapping[str, tuple[Callable[[Any], Iterator[str]], ...]] = {
    "ppo-math": (unread_settings,), "sft": (), "dpo": ()
}  # fmt: skip
_WARNINGS: Mapping[str, tuple[Callable[[Any], Iterator[str]], ...]] = {
    "ppo-math": (_inexact_sampling, algorithm_warnings),
    "sft": (),
    "dpo": (),
}
"""Rules and warnings that only one experiment has, by its name."""
