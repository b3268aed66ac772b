"""Keys that have no effect in a run, given the others: each is reported at the start, with the reason.

A key counts as given if its value is not the default. core/algorithms/effects.py has those of the algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from allocation import Allocation
from core.config.allocation import resolve_allocation
from core.config.base import Section, default_of, fields_by_key
from core.config.experiments import DPOConfig, ExperimentConfig, PPOMATHConfig, SFTConfig
from core.config.models import ModelTrainEvalConfig, ModelUse
from core.config.push import choose_transport
from model_specs.hf_config import ModelConfig, ModelConfigError, read_config
from rollout.data.left_out import has_chat_template
from rollout.inference.registry import BACKENDS

Idle = tuple[str, tuple[str, ...]]
"""A reason, and patterns of the keys that have no effect for it."""
_OF_CHAT_TEMPLATES = ("prompt.system", "prompt.chat_template", "prompt.chat_options")
"""Keys that conversations and prompts in the chat template use; prompt.instruction is for the latter alone."""


def unused_keys(config: ExperimentConfig) -> Iterator[tuple[str, str]]:
    """Yield every key that was given and has no effect in this run, with the reason; a section that this run does not
    have as a whole."""
    given = list(given_keys(config))
    absent = dict(_ABSENT[config.NAME](config))
    if config.wandb.mode == "disabled":
        absent["wandb"] = "wandb.mode=disabled"
    for name, reason in absent.items():
        if any(key.startswith(f"{name}.") for key in given):
            yield name, reason
    allocation = resolve_allocation(config)
    rules = [*_common(config), *_prompt(config), *_BY_EXPERIMENT[config.NAME](config, allocation), *_experts(config)]
    rules += _recomputation(config, allocation)
    roles = dict(_unused_roles(config))
    for key in [key for key in given if key.partition(".")[0] not in absent]:
        why = roles.get(key) or next((why for why, keys in rules if any(fnmatchcase(key, k) for k in keys)), None)
        if why is not None:
            yield key, why


def given_keys(config: Section, defaults: Section | None = None, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys whose values are not the defaults."""
    for name, (attribute, info) in fields_by_key(type(config)).items():
        value, default = getattr(config, attribute), default_of(defaults, attribute, info)
        if isinstance(value, Section):
            yield from given_keys(value, default if isinstance(default, Section) else None, f"{prefix}{name}.")
        elif value != default:
            yield prefix + name


def keys_of_conversations(config: ExperimentConfig) -> list[str]:
    """Return the keys that were given and that only rows which are conversations use, because prompt.template decides
    about all others and the model has a chat template."""
    if config.prompt.template is None or not _has_chat_template(config):
        return []
    return [key for key in given_keys(config) if key in _OF_CHAT_TEMPLATES]


def not_used(keys: Sequence[str], reason: str) -> str:
    """Return the warning about keys without effect."""
    return f"{', '.join(keys)}: not used by this run ({reason}); remove {'it' if len(keys) == 1 else 'them'}"


def _absent_from_ppo(config: PPOMATHConfig) -> Iterator[tuple[str, str]]:
    if not config.uses_critic:
        yield from ((name, "it has no critic") for name in ("critic", "critic_train", "critic_inf"))
    if not config.uses_reference:
        yield from ((name, "ppo.kl_ctl=0: it has no reference model") for name in ("ref", "ref_inf"))
    if not config.algorithm.demonstration_weight:
        yield "demonstrations", "algorithm.demonstration_weight=0: it trains on rollouts alone"


def _common(config: ExperimentConfig) -> Iterator[Idle]:
    control = config.exp_ctrl
    if config.recover_mode == "disabled":
        yield "recover_mode=disabled", ("exp_ctrl.ckpt_freq_*", "recover_keep", "recover_ignore_changes", "resume_from")
    if config.recover_mode != "auto":
        yield f"recover_mode={config.recover_mode}", ("recover_retries",)
    if control.benchmark_steps is not None:
        yield _no_step_evaluated(config), ("exp_ctrl.eval_freq_*",)
        keys = ("exp_ctrl.save_freq_*", "exp_ctrl.ckpt_freq_*", "recover_keep", "resume_from")
        yield "exp_ctrl.benchmark_steps: benchmarks save nothing", (*keys, "recover_ignore_changes")
        yield "exp_ctrl.benchmark_steps: benchmarks save nothing", ("exp_ctrl.save_keep", "exp_ctrl.save_hf_checkpoint")
    if control.save_hf_checkpoint == "never":
        yield "exp_ctrl.save_hf_checkpoint=never", ("exp_ctrl.save_freq_*", "exp_ctrl.save_keep")
    for name, model in config.models.items():
        if model.optimizer.lr_scheduler_type == "constant":
            yield f"{name}.optimizer.lr_scheduler_type=constant", (f"{name}.optimizer.min_lr_ratio",)
        if model.gradient_checkpointing != "auto":
            yield f"{name}.gradient_checkpointing is not auto", (f"{name}.gradient_checkpointing_*_gib",)


def _no_step_evaluated(config: ExperimentConfig) -> str:
    """Return why no evaluation follows a step."""
    if config.exp_ctrl.benchmark_steps is not None:
        return "exp_ctrl.benchmark_steps: benchmarks do not evaluate after steps"
    return "exp_ctrl.eval_freq_*=null: no step is evaluated"


def _prompt(config: ExperimentConfig) -> Iterator[Idle]:
    """Yield keys of the chat template in runs that do not use it, whatever their rows are."""
    if config.prompt.template is not None:
        yield "prompt.template is set", ("prompt.instruction",)
    if not _has_chat_template(config):
        yield "the model has no chat template", ("prompt.instruction", *_OF_CHAT_TEMPLATES)


def _has_chat_template(config: ExperimentConfig) -> bool:
    """Return whether there is a chat template. True where no tokenizer can be read, which the checks report."""
    folder = Path(next(use.path for use in config.model_uses if use.tokenizer))
    try:
        if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
            return True
        return has_chat_template(config.prompt.prompt_format(boxed=False), folder)
    except OSError:
        return True


def _ppo(config: PPOMATHConfig, allocation: Allocation) -> Iterator[Idle]:
    yield "only the actor has servers", ("critic.sglang", "ref.sglang")
    yield "only the actor's experts are replayed", ("critic.moe_routing_replay", "ref.moe_routing_replay")
    yield "only the critic has a value head", ("actor.init_critic_from_actor", "ref.init_critic_from_actor")
    yield _untrained(config.ref)
    if config.staleness.max_staleness == 0:
        yield "staleness.max_staleness=0: no token is too old", ("staleness.over_age",)
    if not config.samples.share:
        yield "samples.share=0", tuple(f"samples.{key}" for key in type(config.samples).model_fields if key != "share")
    if not config.evaluation.paths:
        yield "evaluation.path=null", ("evaluation.*", "exp_ctrl.eval_at_start")
    if not config.exp_ctrl.eval_at_start and not config.exp_ctrl.evaluates_steps:
        yield f"exp_ctrl.eval_at_start=false, and {_no_step_evaluated(config)}", ("evaluation.*",)
    if config.workflow.on_error == "fail":
        yield "workflow.on_error=fail", ("workflow.max_error_share",)
    yield from _generators(config, allocation)


def _generators(config: PPOMATHConfig, allocation: Allocation) -> Iterator[Idle]:
    backend = allocation.generator.backend
    transport = choose_transport(config.push.type, allocation)
    if transport != "disk":
        yield f"weights travel by push.type={transport}, not through files", ("push.changes",)
    elif allocation.shares_gpus:
        yield "servers that share GPUs with the trainer release their weights: all are sent", ("push.changes",)
    if transport == "local":
        servers = ("actor.sglang", "generator.flags", "generator.python", "push.verify")
        yield f"{backend} generators are no servers", servers
    if BACKENDS[backend].capabilities.holds_weights:
        yield f"{backend} generators sample at their own speed", ("generator.mock_seconds_per_token",)
    if allocation.shares_gpus and config.generator.interrupt != "abort":
        why = "generators share GPUs with the trainer: requests are aborted and continued (interrupt=abort)"
        yield why, ("generator.interrupt",)


def _without_generators(config: SFTConfig, allocation: Allocation) -> Iterator[Idle]:
    for name in config.models:
        yield f"{config.NAME} has no servers", (f"{name}.sglang",)
        yield f"{config.NAME} has no generators", (f"{name}.moe_routing_replay",)
        yield f"{config.NAME} trains no critic", (f"{name}.init_critic_from_actor",)
    yield f"{config.NAME} has no generators", ("monitor.save_batches",)
    yield f"{config.NAME} does not evaluate before the first step", ("exp_ctrl.eval_at_start",)
    if not config.dataset.valid_path:
        yield "dataset.valid_path is empty", ("dataset.valid_bs_n_seqs", "dataset.valid_split")


def _dpo(config: DPOConfig, allocation: Allocation) -> Iterator[Idle]:
    yield _untrained(config.ref)
    yield from _without_generators(config, allocation)
    if config.dpo.loss == "ipo":
        yield "dpo.loss=ipo", ("dpo.label_smoothing",)


def _untrained(reference: ModelTrainEvalConfig) -> Idle:
    keys = ["gradient_checkpointing*", "grad_reduce_in_fp32", "moe_aux_loss_coeff", "moe_bias_update_rate"]
    optimizer = reference.optimizer
    keys += [f"optimizer.{k}" for k in type(optimizer).model_fields if (k, optimizer.type) != ("type", "empty")]
    return "the reference model is not trained", tuple(f"ref.{key}" for key in keys)


_ABSENT: Mapping[str, Callable[[Any], Iterator[tuple[str, str]]]] = {
    "ppo-math": _absent_from_ppo,
    "sft": lambda config: iter(()),
    "dpo": lambda config: iter(()),
}
_BY_EXPERIMENT: Mapping[str, Callable[[Any, Allocation], Iterator[Idle]]] = {
    "ppo-math": _ppo,
    "sft": _without_generators,
    "dpo": _dpo,
}


def _unused_roles(config: ExperimentConfig) -> Iterator[tuple[str, str]]:
    """Yield keys of roles that do not place anything."""
    running = config.placed_roles.values()
    for name, section in config.role_sections.items():
        if not any(section is used for used in running):
            yield from ((f"{name}.{key}", "it does not have the role") for key in ("device_mapping", "layout"))
        elif section.device_mapping is None:
            yield f"{name}.layout", f"{name}.device_mapping=null"


def _experts(config: ExperimentConfig) -> Iterator[Idle]:
    for use in config.model_uses:
        model = _read(use.path)
        if model is None:
            continue
        kind = f"{use.path} is of type {model.model_type}"
        if model.moe is None:
            yield f"{kind}, without experts", (f"{use.key}.moe_*",)
        elif not model.moe.correction_bias:
            yield f"{kind}, without correction biases", (f"{use.key}.moe_bias_update_rate",)


def _recomputation(config: ExperimentConfig, allocation: Allocation) -> Iterator[Idle]:
    for use in config.model_uses:
        if not allocation.trainer.on_gpu:
            yield "the trainer computes in host memory", (f"{use.key}.gradient_checkpointing_host_gib",)
        level, model = use.section.gradient_checkpointing, _read(use.path)
        if level in ("selective", "linear") and model is not None and model.moe is not None:
            kept = _kept_parts(use, model, allocation)
            if all(model.moe.sparse_layers) and (level == "selective" or len(kept) == 2):
                why = f"{use.path} is of type {model.model_type}, every layer of which keeps {' and '.join(kept)}"
                yield f"{why}; true and auto recompute whole layers", (f"{use.key}.gradient_checkpointing",)


def recomputation_warnings(config: ExperimentConfig) -> Iterator[str]:
    """Yield which parts of a model gradient_checkpointing=linear does not reach."""
    unused = dict(unused_keys(config))
    for use in config.model_uses:
        key, model = f"{use.key}.gradient_checkpointing", _read(use.path)
        if use.section.gradient_checkpointing != "linear" or model is None or key in unused:
            continue
        if kept := _kept_parts(use, model, resolve_allocation(config)):
            yield (
                f"{key}=linear: {use.path} is of type {model.model_type}, which keeps {' and '.join(kept)}; "
                "write true or auto to recompute whole layers"
            )


def _kept_parts(use: ModelUse, model: ModelConfig, allocation: Allocation) -> list[str]:
    """Return the parts of a model's layers that are recomputed with the whole layer alone (mcore_adapter/recompute.py).
    On GPUs experts are taken for stacked; whether they are depends on the GPU, and the trainer reports it."""
    kept = []
    if use.section.gradient_checkpointing == "selective" or model.mla is not None:
        kept.append("the inputs of its attention" if model.mla is None else "the inputs of its latent attention")
    if model.moe is not None:
        stacked = allocation.trainer.on_gpu and not use.section.fp8
        if use.section.gradient_checkpointing == "selective" or not stacked:
            kept.append("the first products of its experts" + ("" if stacked else ", which are not stacked"))
    return kept


def _read(path: str) -> ModelConfig | None:
    """Return a model's shape; None where that cannot be read, which the checks of the folder report."""
    try:
        return read_config(Path(path))
    except (ModelConfigError, OSError):
        return None
