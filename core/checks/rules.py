"""Every rule across several keys, every warning, keys that have no effect in a run, and a configuration that keeps the
rules.

Rules and `needs` of keys alone stand beside the keys (core/config, config_schema/needs.py); what follows from the
allocation and the models is added here. A rule names the keys that it reads, so that a key that is wrong by itself is
not reported twice.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from pathlib import Path

from config_schema.needs import Reason, Value, as_yaml
from config_schema.section import Section, Violation, all_keys, broken_rules, default_of, fields_by_key, needs_of
from core.algorithms.build import load_algorithm, own_options
from core.config.algorithm import AlgorithmSettings
from core.config.common import ModelUse
from core.config.experiments import ExperimentConfig
from core.config.load import LoadedConfig, apply_overrides, load, tree_of
from core.config.parsing.problems import ConfigError
from core.config.parsing.yaml_tree import Node, Scalar, Table
from core.placement import resolve_allocation, transport_of
from core.placement.rules import check_allocation
from model_specs import hub
from model_specs.config import ModelConfig
from model_specs.families import read_config
from model_specs.untrusted import ModelConfigError
from rollout.data.prompts import has_chat_template
from rollout.inference.registry import BACKENDS

_OPTIONS = "algorithm.options."


class RunFacts:
    """The settings of a run, what follows from them, and its models: what `needs` of keys are asked of."""

    def __init__(self, config: ExperimentConfig, options: Section | None = None) -> None:
        """`options`: the keys of an algorithm of the user."""
        self._config, self._options = config, options
        self._allocation = resolve_allocation(config)
        self._models = {use.key: use for use in config.model_uses}
        self._decided: dict[str, Value] = {}
        if (sampled := config.sampling) is not None:
            transport = transport_of(sampled, self._allocation).name
            self._decided = {"algorithm.correction": sampled.correction, "push.type": transport}

    def value(self, path: str) -> Value:
        """Return a setting; one that null leaves open, as it was decided."""
        if path in self._decided:
            return self._decided[path]
        found: object = self._options if path.startswith(_OPTIONS) else self._config
        for name in path.removeprefix(_OPTIONS).split("."):
            found = getattr(found, name)
        if isinstance(found, dict | list) and not found:
            return None
        return found if isinstance(found, bool | int | float | str | None) else str(found)

    def lacks(self, fact: str, section: str) -> str | None:
        """Return why `section` does not have what `fact` names; None where it does."""
        return _FACTS[fact](self, section)

    @property
    def _name(self) -> str:
        return self._config.NAME

    def _no_generators(self, section: str) -> str | None:
        return f"{self._name} has no generators" if self._config.TRAINER_ONLY else None

    def _no_servers(self, section: str) -> str | None:
        if self.value("push.type") != "local":
            return None
        return f"{self._allocation.generator.backend} generators are no servers"

    def _no_server_of_model(self, section: str) -> str | None:
        if self._config.TRAINER_ONLY:
            return f"{self._name} has no servers"
        return None if section == "actor" else "only the actor has servers"

    def _no_mock(self, section: str) -> str | None:
        backend = self._allocation.generator.backend
        holds = BACKENDS[backend].capabilities.holds_weights
        return f"{backend} generators sample at their own speed" if holds else None

    def _keeps_no_requests(self, section: str) -> str | None:
        if not self._allocation.shares_gpus or self.value("generator.interrupt") == "abort":
            return None
        return "generators share GPUs with the trainer: requests are aborted and continued (interrupt=abort)"

    def _releases_weights(self, section: str) -> str | None:
        if not self._allocation.shares_gpus:
            return None
        return "servers that share GPUs with the trainer release their weights: all are sent"

    def _no_evaluation(self, section: str) -> str | None:
        control = self._config.exp_ctrl
        if self._config.job in ("train", "serve"):
            return f"mode={self._config.job} does not evaluate"
        if control.evaluates or self._config.job == "bench":
            return None
        why = "exp_ctrl.eval_freq_*=null: no step is evaluated"
        if control.is_benchmark:
            why = "exp_ctrl.benchmark_steps: benchmarks do not evaluate after steps"
        return f"exp_ctrl.eval_at_start=false, and {why}"

    def _no_chat_template(self, section: str) -> str | None:
        return None if self.has_chat_template else "the model has no chat template"

    def _no_gpu(self, section: str) -> str | None:
        return None if self._allocation.trainer.on_gpu else "the trainer computes in host memory"

    def _not_trained(self, section: str) -> str | None:
        return "the reference model is not trained" if section == "ref" else None

    def _no_optimizer(self, section: str) -> str | None:
        optimizer = self._config.models[section].optimizer
        says_so = list(_changed(optimizer, None, "")) == ["type"] and not optimizer.trains
        return None if says_so else self._not_trained(section)

    def _no_value_head(self, section: str) -> str | None:
        if self._config.TRAINER_ONLY:
            return f"{self._name} trains no critic"
        return None if section == "critic" else "only the critic has a value head"

    def _no_experts(self, section: str) -> str | None:
        model = self._shape(section)
        if model is None or model.moe is not None:
            return None
        return f"{self._models[section].path} is of type {model.model_type}, without experts"

    def _no_biases(self, section: str) -> str | None:
        model = self._shape(section)
        if model is None or model.moe is None or model.moe.correction_bias:
            return None
        return f"{self._models[section].path} is of type {model.model_type}, without correction biases"

    def _reaches_no_layer(self, section: str) -> str | None:
        use, model = self._models.get(section), self._shape(section)
        if use is None or model is None or model.moe is None or not all(model.moe.sparse_layers):
            return None
        level, kept = use.section.gradient_checkpointing, self.kept_parts(use, model)
        if not (level == "selective" or (level == "linear" and len(kept) == 2)):
            return None
        why = f"{use.path} is of type {model.model_type}, every layer of which keeps {' and '.join(kept)}"
        return f"{why}; true and auto recompute whole layers"

    @cached_property
    def has_chat_template(self) -> bool:
        """True if there is a chat template, or no tokenizer can be read, which the checks report."""
        config = self._config
        folder = Path(next(use.path for use in config.model_uses if use.tokenizer))
        try:
            if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
                return True
            return has_chat_template(config.prompt.prompt_format(boxed=False), folder)
        except OSError:
            return True

    def _shape(self, section: str) -> ModelConfig | None:
        return read_shape(self._models[section].path) if section in self._models else None

    def kept_parts(self, use: ModelUse, model: ModelConfig) -> list[str]:
        """Return the parts of a model's layers that are recomputed with the whole layer alone
        (mcore_adapter/memory/recompute.py). On GPUs experts are taken for stacked; whether they are depends on the GPU,
        and the trainer reports it."""
        kept = []
        if use.section.gradient_checkpointing == "selective" or model.mla is not None:
            kept.append("the inputs of its attention" if model.mla is None else "the inputs of its latent attention")
        if model.moe is not None:
            stacked = self._allocation.trainer.on_gpu and use.section.fp8_recipe is None
            if use.section.gradient_checkpointing == "selective" or not stacked:
                kept.append("the first products of its experts" + ("" if stacked else ", which are not stacked"))
        return kept


_FACTS: Mapping[str, Callable[[RunFacts, str], str | None]] = {
    "ppo-math": RunFacts._no_generators,
    "servers": RunFacts._no_servers,
    "servers on GPUs of their own": RunFacts._releases_weights,
    "actor with servers": RunFacts._no_server_of_model,
    "mock generator": RunFacts._no_mock,
    "generators that keep their requests": RunFacts._keeps_no_requests,
    "an evaluation that is due": RunFacts._no_evaluation,
    "chat template": RunFacts._no_chat_template,
    "trainer on GPUs": RunFacts._no_gpu,
    "trained model": RunFacts._not_trained,
    "trained model, or type=empty": RunFacts._no_optimizer,
    "critic": RunFacts._no_value_head,
    "model with experts": RunFacts._no_experts,
    "correction biases (DeepSeek-V3)": RunFacts._no_biases,
    "layers that it reaches": RunFacts._reaches_no_layer,
}
"""What `fact` of config_schema/needs.py names -> why a section does not have it."""


def unused_keys(config: ExperimentConfig, keys: Set[str] | None = None) -> Iterator[tuple[str, str]]:
    """Yield every key that was given and has no effect in this run, with the reason; a section that this run does not
    have as a whole. `keys`: to ask about instead of those that were given."""
    asked = given_keys(config) if keys is None else keys
    sampled, of_algorithm = config.sampling, _keys_of_algorithm(config)
    own = None if sampled is None else sampled.own_algorithm
    options = None if sampled is None or own is None else own_options(sampled)
    run = RunFacts(config, options)
    for path, reason in _unused(run, config, asked, ""):
        if own is None or path not in of_algorithm:
            yield path, reason.shown(set_by=_set_by_name(config, reason))
    reads: frozenset[str] | None = None if own is None else getattr(load_algorithm(own), "reads", None)
    if reads is not None:
        read = reads | {"dynamic_sampling", "dynamic_sampling_limit"}
        for path in sorted(asked & of_algorithm):
            if path.rpartition(".")[2] not in read:
                yield path, f"algorithm.name={own} does not read it"
    if options is not None:
        asked = {f"{_OPTIONS}{name}" for name in options.model_fields_set}
        for path, reason in _unused(run, options, asked, _OPTIONS):
            yield path, reason.shown()


def _unused(run: RunFacts, section: Section, asked: Set[str], prefix: str) -> Iterator[tuple[str, Reason]]:
    for name, (attribute, info) in fields_by_key(type(section)).items():
        path, value, needs = prefix + name, getattr(section, attribute), needs_of(info)
        below = value if isinstance(value, Section) else None
        if not (path in asked if below is None else any(key in asked for key in all_keys(type(below), f"{path}."))):
            continue
        if needs is not None and (reason := needs.why_not(run, prefix.removesuffix("."))):
            yield path, reason
        elif below is not None:
            yield from _unused(run, below, asked, f"{path}.")


def given_keys(config: ExperimentConfig) -> set[str]:
    """Return the dotted keys that were given: those whose values are neither the defaults nor those of
    algorithm.name; next to a name also keys of the algorithm at their defaults."""
    keys, sampled = set(_changed(config, None, "")), config.sampling
    if sampled is None:
        return keys
    given = {prefix + name for prefix, part in sampled.algorithm_keys.items() for name in part.model_fields_set}
    return (keys | given & _keys_of_algorithm(config)) - sampled.preset.keys()


def _changed(section: Section, defaults: object, prefix: str) -> Iterator[str]:
    for name, (attribute, info) in fields_by_key(type(section)).items():
        value, default = getattr(section, attribute), default_of(defaults, attribute, info)
        if isinstance(value, Section):
            yield from _changed(value, default, f"{prefix}{name}.")
        elif value != default:
            yield prefix + name


def _keys_of_algorithm(config: ExperimentConfig) -> set[str]:
    """Return the dotted keys that an algorithm reads as settings."""
    known, sampled = AlgorithmSettings.model_fields.keys(), config.sampling
    sections = {} if sampled is None else sampled.algorithm_keys
    return {prefix + name for prefix, part in sections.items() for name in type(part).model_fields.keys() & known}


def _set_by_name(config: ExperimentConfig, reason: Reason) -> str:
    """Return that algorithm.name sets what decides, where it does."""
    preset = {} if config.sampling is None else config.sampling.preset
    if not any(key in preset and f"{key}={as_yaml(preset[key])}" in reason.text for key in reason.settings):
        return ""
    return f", which algorithm.name={config.algorithm_name} sets"


def not_used(keys: Sequence[str], reason: str) -> str:
    """Return the warning about keys without effect."""
    return f"{', '.join(keys)}: not used by this run ({reason}); remove {'it' if len(keys) == 1 else 'them'}"


def recomputation_warnings(config: ExperimentConfig) -> Iterator[str]:
    """Yield which parts of a model gradient_checkpointing=linear does not reach."""
    run, unused = RunFacts(config), dict(unused_keys(config))
    for use in config.model_uses:
        key, model = f"{use.key}.gradient_checkpointing", read_shape(use.path)
        if use.section.gradient_checkpointing != "linear" or model is None or key in unused:
            continue
        if kept := run.kept_parts(use, model):
            yield (
                f"{key}=linear: {use.path} is of type {model.model_type}, which keeps {' and '.join(kept)}; "
                "write true or auto to recompute whole layers"
            )


def read_shape(path: str) -> ModelConfig | None:
    """Return a model's shape; None where that cannot be read, which the checks of the folder report."""
    try:
        return read_config(Path(path))
    except (ModelConfigError, OSError):
        return None


def check_rules(config: ExperimentConfig) -> Iterator[Violation]:
    """Yield every rule that `config` breaks."""
    yield from broken_rules(config)
    yield from check_allocation(config)


def config_warnings(config: ExperimentConfig, spelled: Callable[[str], str] = str) -> Iterator[str]:
    """Yield settings that are valid but probably not intended. `spelled`: (key) -> as the user wrote it."""
    unused: dict[str, list[str]] = {}
    for key, reason in unused_keys(config):
        unused.setdefault(reason, []).append(spelled(key))
    for reason, keys in unused.items():
        yield not_used(keys, reason)
    yield from config.warnings()
    yield from recomputation_warnings(config)


def load_config(
    experiment: str, source: str | Path | Table | None, overrides: Sequence[str] = (), *, weights: bool = False
) -> LoadedConfig:
    """Return the configuration of `experiment` (a key of EXPERIMENTS), with models of the hub as folders of the cache,
    and what the planner proposes in place of allocation_mode=search.

    `source`: a file, or its tree. `weights`: download their weights, too. Raises ConfigError with every problem there
    is."""

    def folder(given: str, reads_weights: bool) -> str:
        try:
            return hub.model_folder(given, weights=weights and reads_weights)
        except hub.HubError:
            return given  # reported with the other problems of models

    def loaded(more: Sequence[str]) -> LoadedConfig:
        return load(experiment, source, [*overrides, *more], check_rules, folder)

    try:
        return loaded([])
    except ConfigError as error:
        if not any(p.key == "allocation_mode" for p in error.problems) or not searches(source, overrides):
            raise
    from core.planning.search import searched

    return loaded(searched(loaded))


def searches(source: str | Path | Table | None, overrides: Sequence[str]) -> bool:
    """Return whether allocation_mode is search."""
    return written(source, overrides, "allocation_mode") == "search"


def written(source: str | Path | Table | None, overrides: Sequence[str], key: str) -> str:
    """Return the value of a key, `section.name`, as the user writes it; empty where it is not written."""
    tree = tree_of(source)
    apply_overrides(tree, overrides)
    node: Node | None = tree
    for name in key.split("."):
        node = node.children.get(name) if isinstance(node, Table) else None
    return node.text if isinstance(node, Scalar) else ""
