"""From a YAML file and overrides to a typed configuration, or to everything that is wrong with them at once.

The pass over the schema (`_Binder`) finds unknown keys, wrong types and interpolations without value; pydantic then
checks the bounds of single fields, and the caller's rules what several fields are together. A key that failed one stage
is left out of the next, so that one mistake is one message.
"""

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from config_schema import nearest_names
from config_schema.section import Section, Violation, all_keys, default_of, fields_by_key, named_section, sub_section
from core.config.areal_v02 import Translated, translate
from core.config.common import ModelTrainEvalConfig
from core.config.experiments import EXPERIMENTS, ExperimentConfig
from core.config.migrate import hint, is_foreign
from core.config.parsing.problems import ConfigError, Problem, broken_bounds
from core.config.parsing.values import CoerceError, Interpolator, coerce, describe, to_node
from core.config.parsing.yaml_tree import Node, Scalar, Table, apply_override, copied, read_yaml
from core.config.presets import PRESETS, plain_name
from core.config.runtime import AuxiliaryConfig, BenchConfig

S = TypeVar("S", bound=Section)


@dataclass(frozen=True, kw_only=True)
class LoadedConfig:
    """A valid configuration, and where its values were written."""

    config: ExperimentConfig
    ignored: tuple[Problem, ...]
    """Keys that were given and have no effect, with the reason."""
    sources: Mapping[str, str]
    translated: Translated

    def shown(self, problem: Problem, *, of_host: bool = False) -> Problem:
        """Return a problem of a key with its place, and the key as the user wrote it."""
        key = self.translated.spelled(problem.key)
        return replace(problem, key=key, where=self.where(problem.key), of_host=of_host)

    def where(self, key: str) -> str:
        """Return file:line or the override that gave `key` or the section around it; empty for a default."""
        return _where(self.sources, key)


def load(
    experiment: str,
    source: str | Path | Table | None,
    overrides: Sequence[str],
    rules: Callable[[ExperimentConfig], Iterable[Violation]],
    model_folder: Callable[[str, bool], str] = lambda path, weights: path,
) -> LoadedConfig:
    """Return the configuration of `experiment` (a key of EXPERIMENTS) that keeps `rules`. Raises ConfigError with
    every problem there is. `source`: a file, or its tree. `model_folder`: (path or id of a model, whether its weights
    are read) -> folder."""
    model = EXPERIMENTS[experiment]
    tree = tree_of(source)
    problems = apply_overrides(tree, overrides)
    _name_algorithm(tree)
    as_given = copied(tree)
    translated = translate(tree, model)
    tree.children.setdefault("trial_name", default_trial())
    binder = _Binder(model, tree, as_given)
    values = binder.bind()
    problems += translated.problems + binder.problems
    _replace_ids(model, values, model_folder)
    config, found = _validate(
        model, values, binder.sources, tree.where if isinstance(source, Table) else str(source or "")
    )
    problems += found
    bad = {p.key for p in problems} | binder.meant
    for rule in rules(config):
        if not any(_related(key, b) for key in rule.keys for b in bad):
            problems.append(Problem(key=rule.keys[0], message=rule.message, where=_where(binder.sources, rule.keys[0])))
    if problems:
        shown = [replace(problem, key=translated.spelled(problem.key)) for problem in problems]
        raise ConfigError(sorted(shown, key=_line))
    return LoadedConfig(
        config=config,
        ignored=tuple(sorted(translated.ignored, key=_line)),
        sources=binder.sources,
        translated=translated,
    )


def tree_of(source: str | Path | Table | None) -> Table:
    """Return the tree of a file, or a copy of one, with `algorithm` as a section. Raises ConfigError as read_yaml."""
    if source is None:
        return Table("")
    tree = copied(source) if isinstance(source, Table) else read_yaml(source)
    assert isinstance(tree, Table), "a copy is of the same type"
    _name_algorithm(tree)  # so that overrides and stages may write other keys of the section
    return tree


def apply_overrides(tree: Table, overrides: Sequence[str]) -> list[Problem]:
    """Write `a.b.c=value` words into the tree; see apply_override."""
    problems: list[Problem] = []
    for override in overrides:
        name = override.removeprefix("algorithm=")
        is_name = name != override and name.strip()[:1] not in ("", "{", "[")
        problems += apply_override(tree, f"algorithm.name={name}" if is_name else override)
    return problems


def _replace_ids(model: type[Section], values: Mapping[str, object], model_folder: Callable[[str, bool], str]) -> None:
    """Replace the paths of models in `values` by those that `model_folder` returns."""
    for name, (_, info) in fields_by_key(model).items():
        section, below = values.get(name), sub_section(info)
        if not isinstance(section, dict) or below is None:
            continue
        if issubclass(below, ModelTrainEvalConfig | AuxiliaryConfig) and isinstance(path := section.get("path"), str):
            section["path"] = model_folder(path, not section.get("init_from_scratch"))
        elif issubclass(below, BenchConfig):
            section["models"] = [model_folder(path, True) for path in section.get("models", ())]


def bind(model: type[S], values: Mapping[str, object], prefix: str) -> S:
    """Return a section of `values`, which were read already; `prefix`: of their keys. Raises ConfigError with every
    problem there is."""
    table = to_node(dict(values))
    assert isinstance(table, Table), "a dictionary is a section"
    binder = _Binder(model, table, table)
    bound = binder.bind(prefix)
    problems = binder.problems
    try:
        section = model.model_validate(bound)
    except ValidationError as error:
        for path, is_missing, message in broken_bounds(error):
            key = prefix + ".".join(path)
            if not is_missing or key not in binder.sources:  # its value is a problem already
                problems.append(Problem(key=key, message=message))
    if problems:
        raise ConfigError(problems)
    return section


def default_trial() -> Scalar:
    """Return the name of a trial that is given none: date and time."""
    return Scalar(time.strftime("%Y%m%d-%H%M%S"), "")


def _name_algorithm(tree: Table) -> None:
    """Read `algorithm: grpo` as its name, and the name of a preset in any case and with any of - . + in it."""
    node = tree.children.get("algorithm")
    if isinstance(node, Scalar) and not node.is_null:
        node = tree.children["algorithm"] = Table(node.where, {"name": node})
    name = node.children.get("name") if isinstance(node, Table) else None
    if isinstance(node, Table) and isinstance(name, Scalar):
        plain = plain_name(name.text)
        if plain in PRESETS:
            node.children["name"] = Scalar(plain, name.where, name.quoted)


def _where(sources: Mapping[str, str], key: str) -> str:
    """Return the place of a key, or of the section around it; not an override of another key of that section."""
    section = key
    while section:
        place = sources.get(section, "")
        given = place.removeprefix("override '").partition("=")[0] if place.startswith("override ") else section
        if place and (section == key or f"{key}.".startswith(f"{given}.")):
            return place
        section = section.rpartition(".")[0]
    return ""


def _line(problem: Problem) -> int:
    """Return the line in the file; overrides have none and come last."""
    line = problem.where.rpartition(":")[2]
    return int(line) if line.isdigit() else sys.maxsize


def _related(a: str, b: str) -> bool:
    return a == b or a.startswith(f"{b}.") or b.startswith(f"{a}.")


_MOST_SUGGESTIONS = 100
"""Problems after which unknown keys are named without the nearest known one, whose search takes time."""
MOST_LISTED = 20


class _Binder:
    """Walks the tree along the schema and collects plain values for pydantic."""

    def __init__(self, model: type[Section], tree: Table, as_given: Node) -> None:
        """`as_given`: the tree with the keys of other trainers, which interpolations may refer to."""
        self._model = model
        self._tree = tree
        self._interpolator = Interpolator((tree, as_given), self._default_node)
        self.sources: dict[str, str] = {}
        self.problems: list[Problem] = []
        self.meant: set[str] = set()
        """Keys that an unknown one stands close to: what they hold by default is not the user's setting."""

    def bind(self, prefix: str = "") -> dict[str, object]:
        """Return the valid values by key; `problems` lists those that were left out."""
        return self._bind(self._model, self._tree, None, prefix)

    def _bind(self, model: type[Section], table: Table, defaults: object, prefix: str) -> dict[str, object]:
        known = fields_by_key(model)
        values: dict[str, object] = {}
        for name, node in table.children.items():
            path = prefix + name
            if name not in known:
                self._unknown(model, name, node, path)
                continue
            self.sources[path] = node.where
            attribute, info = known[name]
            resolved = self._resolved(path, node)
            below = sub_section(info)
            if resolved is None:
                continue
            if (named := named_section(info)) is not None:
                values[name] = self._named(named, resolved, path)
            elif below is None:
                if isinstance(resolved, Table):
                    self.sources |= {f"{path}.{entry}": value.where for entry, value in resolved.children.items()}
                self._value(values, name, path, resolved, info.annotation)
            elif isinstance(resolved, Table):
                values[name] = self._bind(below, resolved, default_of(defaults, attribute, info), f"{path}.")
            elif not (isinstance(resolved, Scalar) and resolved.is_null):
                self._problem(path, f"is a section with keys of its own, got {describe(resolved)}")
        for name, (attribute, info) in known.items():
            if name in values:
                continue
            if isinstance(defaults, Section) and attribute in defaults.model_fields_set:
                values[name] = getattr(defaults, attribute)
            elif info.is_required() and sub_section(info):
                values[name] = {}  # so that pydantic names the keys that are missing in it
        return values

    def _named(self, model: type[Section], node: Node, path: str) -> dict[str, object]:
        """Return the valid values of sections by name."""
        if isinstance(node, Scalar) and node.is_null:
            return {}
        if not isinstance(node, Table):
            self._problem(path, f"must be sections by name, got {describe(node)}")
            return {}
        values: dict[str, object] = {}
        for name, below in node.children.items():
            self.sources[f"{path}.{name}"] = below.where
            if isinstance(below, Table):
                values[name] = self._bind(model, below, None, f"{path}.{name}.")
            else:
                self._problem(f"{path}.{name}", f"is a section with keys of its own, got {describe(below)}")
        return values

    def _value(self, values: dict[str, object], name: str, path: str, node: Node, annotation: object) -> None:
        try:
            # A scalar is resolved already, and must not be twice: its text may hold a literal ${.
            values[name] = coerce(node if isinstance(node, Scalar) else self._resolve_inside(node), annotation)
        except CoerceError as error:
            self._problem(path, str(error))

    def _resolved(self, path: str, node: Node) -> Node | None:
        if not isinstance(node, Scalar):
            return node
        try:
            return self._interpolator.resolve(node)
        except CoerceError as error:
            self._problem(path, str(error))
            return None

    def _resolve_inside(self, node: Node) -> Node:
        """Resolve interpolations in the elements of a list or a free mapping."""
        if isinstance(node, Scalar):
            return self._interpolator.resolve(node)
        if isinstance(node, Table):
            return Table(node.where, {name: self._resolve_inside(child) for name, child in node.children.items()})
        return type(node)(tuple(self._resolve_inside(item) for item in node.items), node.where)

    def _problem(self, path: str, message: str) -> None:
        self.problems.append(Problem(key=path, message=message, where=_where(self.sources, path)))

    def _unknown(self, model: type[Section], name: str, node: Node, path: str) -> None:
        if len(self.problems) >= _MOST_SUGGESTIONS:
            self.problems.append(Problem(key=path, message="unknown key", where=node.where))
            return
        if isinstance(node, Table) and (is_foreign(name) or hint(name, path)):
            known = {child: value for child, value in node.children.items() if _is_known(child, value, path)}
            for child, value in known.items():
                self._unknown(model, child, value, f"{path}.{child}")
            if known and len(known) == len(node.children):
                return
        near = [] if hint(name, path) or is_foreign(name) else nearest_names(name, fields_by_key(model))
        self.meant.update(path.removesuffix(name) + meant for meant in near)
        message = f"unknown key; {_suggestion(self._model, model, name, path)}"
        self.problems.append(Problem(key=path, message=message, where=node.where))

    def _default_node(self, key: str) -> Node:
        """Return the default of a dotted key, for references to keys that are not given. Raises CoerceError."""
        value: object = None
        model: type[Section] | None = self._model
        for name in key.split("."):
            known = fields_by_key(model) if model else {}
            if name not in known:
                raise CoerceError(f"${{{key}}} is not a key; {_suggestion(self._model, self._model, key, key)}")
            attribute, info = known[name]
            if info.is_required() and sub_section(info) is None:
                raise CoerceError(f"${{{key}}} has no value")
            value = default_of(value, attribute, info)
            model = sub_section(info)
        return to_node(value.model_dump(by_alias=True) if isinstance(value, Section) else value)


def taken_config(config: str | None, words: list[str]) -> str | None:
    """Return the configuration file: `config`, or else the only one of `words` that names a YAML file, which is taken
    out of them."""
    files = [word for word in words if word.endswith((".yaml", ".yml")) and "=" not in word]
    if config is not None or len(files) != 1:
        return config
    words.remove(files[0])
    return files[0]


def _is_known(name: str, node: Node, path: str) -> bool:
    """Return whether another system has the key `name` of the section at `path`, or one in it, that is another here."""
    path = f"{path}.{name}"
    if hint(name, path) is not None:
        return True
    return isinstance(node, Table) and any(_is_known(child, value, path) for child, value in node.children.items())


def _suggestion(root: type[Section], model: type[Section], name: str, path: str) -> str:
    """Return the nearest known key: of the same section, of the same name elsewhere, or of a similar path. A name
    without a section, as of flat configurations, is first looked for elsewhere."""
    if "." in name and path in all_keys(root):
        return f"write {name} as nested sections"
    theirs = [
        name for name, model in EXPERIMENTS.items() if any(f"{key}.".startswith(f"{path}.") for key in all_keys(model))
    ]
    if theirs:
        return f"it is a key of {' and '.join(theirs)}, not of this experiment"
    equivalent = hint(name, path)
    if equivalent is not None:
        return equivalent
    siblings = list(fields_by_key(model))
    prefix = path.removesuffix(name)
    everywhere = [known for known in all_keys(root) if ".NAME." not in known]
    same_name = [k for k in everywhere if k.rpartition(".")[2] == name]
    foreign = is_foreign(name)
    near = [] if foreign else nearest_names(name, siblings)
    if near and (prefix or not same_name):
        return f"did you mean {prefix + near[0]!r}?"
    if same_name:
        return f"did you mean {' or '.join(map(repr, same_name[:3]))}?"
    if not foreign and (near := nearest_names(path, everywhere, cutoff=0.7)):
        return f"did you mean {near[0]!r}?"
    few = prefix and len(siblings) <= MOST_LISTED
    return f"keys here are {', '.join(siblings) or 'none'}" if few else "--help --verbose lists all keys"


def _validate(
    model: type[ExperimentConfig], values: dict[str, object], sources: Mapping[str, str], file: str
) -> tuple[ExperimentConfig, list[Problem]]:
    """Return the configuration, and problems of single fields. Fields with problems hold defaults in the result."""
    problems: list[Problem] = []
    for _ in range(3):  # refused values become missing ones, missing ones are filled in
        try:
            return model.model_validate(values), problems
        except ValidationError as error:
            for path, is_missing, message in broken_bounds(error):
                key = ".".join(path)
                if not is_missing or key not in sources:
                    problems.append(Problem(key=key, message=message, where=_where(sources, key) or file))
                _repair(values, path, is_missing)
    raise AssertionError(f"defaults are valid, yet {problems}")


def _repair(values: dict[str, object], path: Sequence[str], missing: bool) -> None:
    """Make a refused value valid, so that the other rules can still be checked."""
    for name in path[:-1]:
        below = values[name]
        assert isinstance(below, dict), "sections are bound as dictionaries"
        values = below
    if missing:
        values[path[-1]] = "missing"
    else:
        values.pop(path[-1])
