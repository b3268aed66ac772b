"""Recipes of other systems: which system a file is of, and its translation by a table of that system's keys.

A target of a table is one of our keys, with what becomes of the value:

    actor.path                                 taken over
    algorithm.name: gae=ppo grpo=grpo          by value; `*=` is any other one
    ppo.ppo_n_minibatches = data.train_batch_size / .    another key's value, or a product, divided by this one
    ppo.kl_ctl if algorithm.use_kl_loss        only where that key is true; `a and b`: where both are
    algorithm.kl_loss_coeff if a else ppo.kl_ctl if b    the first one whose condition holds
"""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from math import prod
from pathlib import Path
from typing import Literal, NotRequired, TypedDict, get_args

import yaml

from core.config.parsing.yaml_tree import read_yaml

Fate = Literal["taken over", "renamed", "no meaning here", "no equivalent", "unknown"]
Recipe = Mapping[str, object]
"""The values of a recipe by dotted key."""
_REFERENCE = re.compile(r"\$\{([^${}]+)\}")


Without = TypedDict("Without", {"keys": list[str], "note": str, "if": NotRequired[list[str]]})
"""Keys of another system that have no target, and what to do about them. `if`: only where one of these keys of theirs
is true."""


@dataclass(frozen=True, kw_only=True)
class System:
    """A system by the keys of its recipes. Keys may have `*` for any part of a name."""

    name: str
    marks: Sequence[str]
    """Keys that tell its recipes from all others: every one of them is there. `a|b`: one of two."""
    keys: Mapping[str, str]
    """Their key -> target."""
    no_meaning: Sequence[Without] = ()
    """Nothing has to be written for them."""
    no_equivalent: Sequence[Without] = ()
    defaults: Recipe = field(default_factory=dict)
    """Ours, where their default differs."""
    experiment: str = ""
    """Their key that names the algorithm. Empty: all recipes are those of ppo-math."""
    experiments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Value of `experiment` that is an experiment of ours -> their keys and targets, which come before `keys`. An empty
    target: the experiment does not read the key."""
    stages: str = ""
    """Their key of a list of stages, each with its keys over those of the file. Empty: they have none."""

    @property
    def without(self) -> list[str]:
        """The keys that have no target."""
        return [key for group in (*self.no_meaning, *self.no_equivalent) for key in group["keys"]]

    def experiment_of(self, recipe: Recipe) -> str:
        """Return the experiment that a flat recipe is one of."""
        name = str(recipe.get(self.experiment, "")).lower()
        return name if name in self.experiments else "ppo-math"

    def is_of(self, recipe: Recipe) -> bool:
        """Return whether a flat recipe is one of this system."""
        return all(any(_is_at(name, key) for name in mark.split("|") for key in recipe) for mark in self.marks)


SYSTEMS = ("verl", "trinity", "roll", "nemo_rl", "areal", "skyrl", "openrlhf", "trl")
"""Names of the tables beside this file, in the order in which they are tried."""


def systems() -> list[System]:
    """Read every table."""
    folder = Path(__file__).parent / "systems"
    return [System(**tomllib.loads((folder / f"{name}.toml").read_text(encoding="utf-8"))) for name in SYSTEMS]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What became of one key."""

    key: str
    value: object
    fate: Fate
    note: str
    """Our key and value, or what to do."""
    target: str = ""
    """Our key, where it gets a value."""


def flat(tree: Recipe) -> dict[str, object]:
    """Return the values of a recipe by dotted key, with ${...} replaced."""
    found = dict(leaves(tree))
    return {key: _resolved(value, found) for key, value in found.items()}


def nested(values: Recipe) -> dict[str, object]:
    """Return values by dotted key as sections."""
    tree: dict[str, object] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        table = tree
        for section in sections:
            below = table.setdefault(section, {})
            assert isinstance(below, dict), f"{key}: {section} has a value of its own"
            table = below
        table[name] = value
    return tree


def leaves(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield every dotted key of a nested mapping with its value."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _resolved(value: object, recipe: Recipe, depth: int = 0) -> object:
    """Return a value with its ${...} replaced, as far as they name keys or variables of the environment."""
    if not isinstance(value, str) or depth > 10:
        return value
    whole = _REFERENCE.fullmatch(value)
    if whole is not None and whole[1] in recipe:
        return _resolved(recipe[whole[1]], recipe, depth + 1)

    def of(match: re.Match[str]) -> str:
        name, _, default = match[1].removeprefix("oc.env:").partition(",")
        if match[1].startswith("oc.env:"):
            return os.environ.get(name, default) if default or name in os.environ else match[0]
        return str(recipe.get(match[1], match[0]))

    return _REFERENCE.sub(of, value)


def _is_at(name: str, key: str) -> bool:
    """Return whether a key has this name, or is in a section of this name."""
    return fnmatchcase(key, name) or fnmatchcase(key, f"{name}.*")


def translate(system: System, recipe: Recipe) -> tuple[dict[str, object], list[Row]]:
    """Return our values by dotted key, and what became of each of theirs, in their order."""
    ours, rows = dict(system.defaults), []
    for key, value in recipe.items():
        row, given = _row(system, recipe, key, value)
        rows.append(row)
        ours |= {name: found for name, found in given.items() if found is not None}
    return ours, rows


def stages_of(system: System, recipe: Recipe) -> list[tuple[Recipe, Recipe]]:
    """Return for each stage of a flat recipe the flat keys of its own, and the file's with these over them."""
    listed = recipe.get(system.stages)
    found, shared = list[tuple[Recipe, Recipe]](), {key: v for key, v in recipe.items() if key != system.stages}
    for stage in listed if isinstance(listed, list) else ():
        own = {key: _number(_resolved(value, recipe)) for key, value in leaves(stage or {})}
        found.append((own, {**shared, **own}))
    return found


def _row(system: System, recipe: Recipe, key: str, value: object) -> tuple[Row, dict[str, object]]:
    experiment = system.experiment_of(recipe)
    if key == system.experiment and experiment != "ppo-math":
        return Row(key=key, value=value, fate="renamed", note=f"core.quickstart {experiment}"), {}
    own = system.experiments.get(experiment, {})
    target = _found(key, {**own, **system.keys, **own})  # its own come first, and count
    if target == "":
        return Row(key=key, value=value, fate="no meaning here", note="this run samples nothing"), {}
    if target is not None:
        if value in (None, "", "None"):
            return Row(key=key, value=value, fate="no meaning here", note="null: the default holds"), {}
        return _taken(key, value, target, recipe)
    without: Sequence[tuple[Sequence[Without], Fate]] = (
        (system.no_equivalent, "no equivalent"),
        (system.no_meaning, "no meaning here"),
    )
    for table, fate in without:
        for group in table:
            if any(_is_at(name, key) for name in group["keys"]):
                if not _is_on(group.get("if"), recipe):
                    return Row(key=key, value=value, fate="no meaning here", note="off in this recipe, and here"), {}
                return Row(key=key, value=value, fate=fate, note=group["note"]), {}
    return Row(key=key, value=value, fate="unknown", note="look it up in docs/configuration.md"), {}


def _is_on(switches: Sequence[str] | None, recipe: Recipe) -> bool:
    """Return whether one of the keys is true; also without any."""
    return switches is None or any(fnmatchcase(key, name) and on for key, on in recipe.items() for name in switches)


def _found(key: str, keys: Mapping[str, str]) -> str | None:
    return next((target for name, target in keys.items() if fnmatchcase(key, name)), None)


def _choice(target: str, recipe: Recipe) -> tuple[str, str]:
    """Return the first part of a target whose condition holds, and "", or the key for which the last one does not."""
    off = ""
    for choice in target.split(" else "):
        part, _, condition = choice.partition(" if ")
        off = next((key for key in condition.split(" and ") if key and not recipe.get(key)), "")
        if not off:
            break
    return part, off


def _taken(key: str, value: object, target: str, recipe: Recipe) -> tuple[Row, dict[str, object]]:
    choice, off = _choice(target, recipe)
    if off:
        return Row(key=key, value=value, fate="no meaning here", note=f"{off} is off"), {}
    name, _, other = choice.partition(" = ")
    name, _, values = name.partition(": ")
    if isinstance(value, str) and "${" in value:
        return Row(key=key, value=value, fate="no equivalent", note=f"a formula: write {name}"), {}
    given: object = value
    if values:
        pairs = dict(pair.split("=", 1) for pair in values.split())
        text = str(value).lower()
        if (given := pairs.get(text, pairs.get("*"))) is None:
            known = ", ".join(filter(None, pairs.values()))
            note = f"{name} has {known}" if known else f"write {name}"
            return Row(key=key, value=value, fate="no equivalent", note=note), {}
    elif other:
        factors = [recipe.get(factor) for factor in other.removesuffix(" / .").split(" * ")]
        whole = prod(factor if isinstance(factor, int) else 0 for factor in factors)
        if not isinstance(value, int) or value < 1 or whole < 1 or whole % value:
            return Row(key=key, value=value, fate="no equivalent", note=f"write {name}; {other} is no integer"), {}
        given = whole // value
    elif name == "experience.path":
        given = str(value).removeprefix("sqlite:///")
    elif isinstance(value, list):
        given = value[0] if len(value) == 1 or name.endswith("path") and name != "evaluation.path" else value
    fate: Fate = "taken over" if name == key else "renamed"
    note = f"{name}={given}"
    if isinstance(value, list) and given != value and len(value) > 1:
        note += "; write task_sets for the others (docs/experience.md)"
    return Row(key=key, value=value, fate=fate, note=note, target=name), {name: given}


def counts(rows: list[Row]) -> Iterator[tuple[str, int]]:
    """Yield how many keys had each fate."""
    for fate in get_args(Fate):
        yield fate, sum(row.fate == fate for row in rows)


def read(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, object]:
    """Return the values of a YAML file by dotted key, with overrides `KEY=VALUE`; empty for a file that is none.
    Numbers as 1e-6 are numbers. Raises ValueError for an override that cannot be read."""
    try:
        read_yaml(path)  # keeps to the limits of depth and size
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    if not isinstance(tree, Mapping):
        return {}
    for override in overrides:
        tree = _overridden(tree, override)
    return {key: _number(value) for key, value in flat(tree).items()}


def _overridden(tree: Recipe, override: str) -> dict[str, object]:
    """Return a recipe with one more value, which `+` or `++` may precede."""
    key, equals, text = override.lstrip("+").partition("=")
    if not equals or key.startswith("~"):
        raise ValueError(f"{override!r}: write KEY=VALUE")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(f"{override!r}: the value is not valid YAML") from None
    return _with(tree, key.split("."), value)


def _with(tree: object, names: Sequence[str], value: object) -> dict[str, object]:
    section = dict(tree) if isinstance(tree, Mapping) else {}
    first, *rest = names
    section[first] = _with(section.get(first), rest, value) if rest else value
    return section


def system_of(recipe: Recipe) -> System | None:
    """Return the system that a flat recipe is of."""
    return next((system for system in systems() if system.is_of(recipe)), None)


def _number(value: object) -> object:
    """Return a text such as 1e-6, which YAML reads as text, as a number."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d+)?e[+-]?\d+", value, re.IGNORECASE):
        return float(value)
    return value


_TIMELINE = "write monitor.timeline_mib, and see python -m tools.timeline"
HINTS: Mapping[str, str] = {
    "actor_infer.generating_args": "write ppo.gen.*",
    "actor_rollout_ref": "write actor, ref and generator.*",
    "algo": "write algorithm.*",
    "algorithm.kl_ctrl": "write ppo.kl_ctl",
    "algorithm.optimizer": "write actor.optimizer",
    "apply_chat_template": "write prompt.chat_template",
    "async_train": "write staleness.max_staleness; 0: synchronous",
    "async_training": "write staleness.max_staleness; 0: synchronous",
    "aux_loss_coef": "write moe_aux_loss_coeff of the model",
    "buffer": "write dataset.* and staleness.*",
    "chat_template_path": "write prompt.chat_template",
    "continue_from_checkpoint": "write recover_mode: auto continues, disabled begins anew",
    "custom_reward_function": "write reward.function",
    "data": "write dataset.*",
    "data_processor": "write dataset.processors for rows, experience.processors for what was sampled",
    "dataset.fields": "write dataset.prompt_field, chosen_field and rejected_field",
    "default_workflow_type": "write workflow.type",
    "enable_ray_timeline": _TIMELINE,
    "eval_gconfig": "write evaluation.temperature and evaluation.max_new_tokens",
    "evaluator": "write exp_ctrl.eval_freq_*",
    "explorer": "write generator.*, workflow.* and experience.*",
    "gconfig": "write ppo.gen.* and group_size",
    "global_batch_size": "write ppo.ppo_n_minibatches, the number of minibatches of a step",
    "gpu_memory_utilization": "write generator.flags, by the names of the servers",
    "grad_clip": "write optimizer.gradient_clipping of the model",
    "gradient_accumulation_steps": "write ppo.ppo_n_minibatches, the optimizer updates of a batch",
    "hf_checkpoint": "write actor.path",
    "kl_loss_fn": "write algorithm.kl_in=loss and algorithm.kl_estimator",
    "kl_penalty_fn": "write algorithm.kl_in=reward and algorithm.kl_estimator",
    "log": "write monitor.log_level",
    "log.level": "write monitor.log_level",
    "logging_steps": "leave it out: every step is logged",
    "lora_rank": "LoRA is not supported; all weights are trained",
    "loss_agg_mode": "write algorithm.aggregation",
    "loss_type": "write algorithm.name, or algorithm.loss and algorithm.aggregation",
    "max_model_len": "write dataset.max_prompt_len and ppo.gen.max_new_tokens",
    "max_running_requests": "write generator.max_running",
    "micro_batch_size": "write mb_spec.max_tokens_per_mb, the tokens of a microbatch",
    "micro_train_batch_size": "write mb_spec.max_tokens_per_mb, the tokens of a microbatch",
    "n_samples_per_prompt": "write group_size",
    "name": "write experiment_name and trial_name",
    "num_rollout": "write exp_ctrl.total_train_steps",
    "per_device_train_batch_size": "write mb_spec.max_tokens_per_mb, the tokens of a microbatch",
    "ppo_epochs": "write ppo.actor_sample_reuse",
    "ppo_max_token_len_per_gpu": "write mb_spec.max_tokens_per_mb, the tokens of a microbatch",
    "ppo_mini_batch_size": "write ppo.ppo_n_minibatches, the number of minibatches of a step",
    "profiler_output_dir": _TIMELINE,
    "project": "write experiment_name, and wandb.project",
    "ray_namespace": "leave it out: a run that joins a Ray cluster makes its own namespace",
    "recover": "write recover_mode and exp_ctrl.ckpt_freq_*",
    "ref_load": "write ref.path",
    "remote_rm_url": "write reward.function",
    "report_to": "write wandb.mode or monitor.tensorboard",
    "reward_clip": "rewards are not clipped; see ppo.reward_output_scaling and reward_output_bias",
    "reward_fn": "write reward.function",
    "reward_funcs": "write reward.function",
    "reward_manager": "write reward.function",
    "reward_weights": "write reward.weights",
    "rewards": "write reward.function",
    "rm_type": "write reward.function",
    "rollout": "write generator.* and staleness.max_staleness",
    "rollout_max_response_len": "write ppo.gen.max_new_tokens",
    "router_aux_loss_coef": "write moe_aux_loss_coeff of the model",
    "save_steps": "write exp_ctrl.save_freq_steps",
    "saver": "write exp_ctrl.save_freq_*",
    "scale_rewards": "write algorithm.advantage_std",
    "service": "there are no services; rewards and workflows are functions: reward.function, workflow.type",
    "stages": "slipstream train runs the stages of a file, [{sft: {...}}, {grpo: {...}}]",
    "stats_logger": "write wandb.* and monitor.*",
    "stop_sequences": "write ppo.gen.stop",
    "stop_strings": "write ppo.gen.stop",
    "sync_method": "write synchronizer.method, or push.type for one job",
    "system_envs": "write external_configs.envs",
    "system_prompt": "write prompt.system",
    "tensor_parallel_size": "write allocation_mode, where m is tensor parallelism",
    "train_batch_size": "write dataset.train_bs_n_seqs, the prompts of a step, and ppo.ppo_n_minibatches",
    "train_dataset": "write dataset.*",
    "trainer": "write actor.*, ppo.*, exp_ctrl.*, n_nodes and n_gpus_per_node",
    "trainer.logger": "write wandb.mode or monitor.tensorboard",
    "use_kl_loss": "write algorithm.kl_in=loss",
    "use_lora": "LoRA is not supported; all weights are trained",
    "use_peft": "LoRA is not supported; all weights are trained",
    "use_vllm": "write allocation_mode, which names the generators",
    "use_wandb": "write wandb.mode",
    "valid_dataset": "write evaluation.*",
    "validation": "write evaluation.*",
    "vllm_gpu_memory_utilization": "write generator.flags, by the names of the servers",
    "vllm_mode": "write allocation_mode: a+b for GPUs of their own, a|b for shared ones",
}
"""What to write for keys that the tables do not rename, as the nearest name would mislead. By path, or by name where
that is of several words, which mean the same in every section."""


@cache
def _targets() -> list[tuple[str, str | None]]:
    """Return the keys of other systems that are named otherwise here, with our key; None where they have no single
    one."""
    renamed = [(key, target) for system in systems() for key, target in system.keys.items() if key != target]
    without = [key for system in systems() for key in system.without if "*" not in key]
    return [(key, _single(target)) for key, target in renamed] + [(key, None) for key in without]


def _single(target: str) -> str | None:
    """Return the key of a target; None for one that needs other keys, but for the key that turns it on."""
    found = re.fullmatch(r"([\w.]+)(: [^=]+=.*?)?( if (?!.* else ).*)?", target)
    return None if found is None else found[1]


@cache
def _theirs() -> set[str]:
    """Return the names of all keys and sections in the tables of other systems."""
    keys = [key for system in systems() for key in (*system.keys, *system.without)]
    return {name for key in keys for name in key.split(".") if "*" not in name}


def hint(name: str, path: str) -> str | None:
    """Return what to write for the key `name` at the dotted `path`; None where nothing is known about it. The tables of
    other systems know what their keys are called here."""
    if path in HINTS:
        return HINTS[path]
    target = _only_target(path)
    if target is None and "_" in name and name != "experiment_name":  # which is a key here too
        if name in HINTS:
            return HINTS[name]
        target = _only_target(name)
    if target is None:
        return None
    return f"write {target} at the top level" if "." in path and "." not in target else f"write {target}"


def is_foreign(name: str) -> bool:
    """Return whether another system has a key or section of this name: the nearest of our names would mislead."""
    return name in _theirs()


def _only_target(names: str) -> str | None:
    """Return our key for the keys of other systems that end with these names; None where they have several, or one of
    them has none."""
    targets = {target for key, target in _targets() if f".{key}".endswith(f".{names}")}
    return targets.pop() if len(targets) == 1 else None
