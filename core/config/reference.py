"""The configuration as users read it: the listing at start-up, --help, and docs/configuration.md, which `python -m
core.config.reference > docs/configuration.md` generates.

Box, rules and lines of the listing are exactly those of the AReaL tutorial. On the page, sections with the same keys
(actor, critic, ref, model) are one table. Invariant: every key of every experiment is on the page, with its type,
default, meaning and what it needs to have an effect.
"""

import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from config_schema.needs import as_yaml
from config_schema.section import Section, default_of, fields_by_key, is_first, named_section, needs_of, sub_section
from core.config.areal_v02 import PPO_ROWS, RENAMED, ROWS, rows_of
from core.config.common import CommonExperimentConfig
from core.config.experiments import EXPERIMENTS, ExperimentConfig
from core.config.parsing.problems import Problem
from core.config.presets import PRESETS

_WIDTH = 80


def box(title: str) -> str:
    """Return a title in a box, three lines."""
    bar = "─" * (len(title) + 2)
    return f"╭{bar}╮\n│ {title} │\n╰{bar}╯"


def rule(title: str) -> str:
    """Return a title in the middle of a line."""
    left = (_WIDTH - len(title) - 2) // 2
    return f"{'─' * left} {title} {'─' * (_WIDTH - left - len(title) - 2)}"


def listing(config: ExperimentConfig) -> str:
    """Return the text that is printed at start-up: the box, then every key with its type and value."""
    lines = [box(f"Setting {type(config).__name__} with the Following Values")]
    lines.append(rule("Current Configuration Begin"))
    lines += _values(config.masked(), "")
    lines.append(rule("Current Configuration End"))
    return "\n".join(lines)


def recorded(config: ExperimentConfig) -> dict[str, object]:
    """Return every key with its value, without secrets, so that it loads again as a configuration file."""
    tree: dict[str, object] = config.masked().model_dump(mode="json", by_alias=True)
    if any(section.is_mapped for section in config.placed_roles.values()):
        tree["allocation_mode"] = "manual"  # the roles' own mappings decide
    return tree


def _values(config: Section, prefix: str) -> Iterator[str]:
    for name, (attribute, info) in fields_by_key(type(config)).items():
        value = getattr(config, attribute)
        if isinstance(value, Section):
            yield f"{prefix}{name} ({type(value).__name__})"
            yield from _values(value, f"{prefix}{name}.")
        elif named_section(info) is not None:
            for own, below in value.items():
                yield f"{prefix}{name}.{own} ({type(below).__name__})"
                yield from _values(below, f"{prefix}{name}.{own}.")
        else:
            yield f"{prefix}{name} ({python_type(info.annotation)}) - {value}"


def python_type(annotation: object) -> str:
    """Return the type as Python spells it (`int | None`); a choice has the type of its values."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return type(args[0]).__name__
    if origin in (Union, types.UnionType):
        return " | ".join(python_type(a) for a in args)
    if annotation is type(None):
        return "None"
    named = annotation if origin is None else origin
    return named.__name__ if isinstance(named, type) else str(named)


def choices_of(annotation: object) -> str:
    """Return the values of a choice, separated by commas; empty for any other type."""
    if get_origin(annotation) is Literal:
        return ", ".join(get_args(annotation))
    args = get_args(annotation)
    found = next((found for a in args if (found := choices_of(a))), "")
    return f"true, false, {found}" if found and bool in args else found


def ignored_lines(ignored: Sequence[Problem]) -> str:
    """Return the warning about keys that are accepted without effect; empty if there are none."""
    if not ignored:
        return ""
    width = max(len(p.key) for p in ignored)
    lines = [f"  {p.key:<{width}}  {p.message}" for p in ignored]
    head = (
        "1 key has no effect here and is" if len(ignored) == 1 else f"{len(ignored)} keys have no effect here and are"
    )
    return "\n".join([f"{head} ignored:", *lines])


def difference_line(config: ExperimentConfig, ignored: Sequence[Problem]) -> str:
    """Return what trains otherwise than the system that a file with its keys comes from; empty for a file without such
    keys, or that decides this itself."""
    sampled = config.sampling
    if not ignored or sampled is None or not sampled.differences:
        return ""
    return (
        f"This file has keys of AReaL 0.2, which trains otherwise: {'; '.join(sampled.differences)}. "
        "staleness.max_staleness=0 trains as there; write the value to keep it"
    )


def first_keys(experiment: str, model: type[Section]) -> str:
    """Return the keys that most users set, one a line, with default and the first sentence of their meaning."""
    lines = [
        *_usage(experiment),
        "Keys that most runs set, with their defaults; `--help --verbose` shows all keys.",
        "",
    ]
    return "\n".join([*lines, *_first_keys(model, None, "", set())])


def _first_keys(model: type[Section], defaults: object, prefix: str, shown: set[type[Section]]) -> Iterator[str]:
    """Yield the keys of a section, then those of its sub-sections. `shown`: the kinds of sections that were yielded; of
    one kind (actor, critic, ref) only the first is."""
    shown.add(model)
    fields = fields_by_key(model).items()
    for name, (attribute, info) in fields:
        if is_first(info):
            default = "" if info.is_required() else as_yaml(default_of(defaults, attribute, info))
            meaning = (info.description or "").partition(". ")[0] + (" (required)" if info.is_required() else "")
            yield f"  {f'{prefix}{name}={default}':<46}  {meaning}"
    for name, (attribute, info) in fields:
        below = sub_section(info)
        if below is None or below in shown:
            continue
        lines = list(_first_keys(below, default_of(defaults, attribute, info), f"{prefix}{name}.", shown))
        if lines and not prefix:
            yield f"{name}: {info.description}"
        yield from lines


def _usage(experiment: str) -> Iterator[str]:
    command = "train" if experiment == "ppo-math" else experiment
    yield f"usage: slipstream {command} X.yaml [a.b.c=value ...] [--dry-run] [--verbose]"
    yield ""
    yield "Overrides a.b.c=value win over the file. Values may hold ${oc.env:VAR,default} and ${a.b.c}."


def help_text(experiment: str, model: type[Section]) -> str:
    """Return every key with its type, default and meaning, and the keys that are accepted without effect."""
    lines = [
        *_usage(experiment),
        "",
        *_keys(model, None, ""),
        "",
        *(_presets() if "algorithm" in model.model_fields else ()),
        "Keys of other trainers that are accepted and have no effect:",
        *_ignored_keys(model),
    ]
    return "\n".join(lines)


def _presets() -> Iterator[str]:
    yield "Keys that algorithm.name sets unless they are given; all others keep their defaults:"
    for name, preset in PRESETS.items():
        yield f"  {name}: {preset.about} ({preset.source})"
        if preset.values:
            yield f"      {' '.join(f'{key}={as_yaml(value)}' for key, value in preset.values.items())}"
    yield ""


def _keys(model: type[Section], defaults: object, prefix: str) -> Iterator[str]:
    for name, (attribute, info) in fields_by_key(model).items():
        named = named_section(info)
        below = named or sub_section(info)
        default = default_of(defaults, attribute, info)
        condition = needs_of(info)
        needs = f". Needs {condition.text}" if condition else ""
        if below is not None:
            name = f"{name}.NAME" if named else name
            yield f"{prefix}{name}: {info.description}{needs}"
            yield from _keys(below, default, f"{prefix}{name}.")
            continue
        shown = "required" if info.is_required() else f"default {as_yaml(default)}"
        yield f"  {prefix}{name} ({python_type(info.annotation)}; {shown})"
        choices = choices_of(info.annotation)
        yield f"      {info.description}{f'. One of: {choices}' if choices else ''}{needs}"


def _ignored_keys(model: type[Section]) -> Iterator[str]:
    for row in rows_of(model):
        only = f" (only {' or '.join(row.accepted)})" if row.accepted else ""
        yield f"  {', '.join(row.shown)}{only}: {row.why}"


_COMMAND = "python -m core.config.reference > docs/configuration.md"
_HEAD = ("key", "type", "default", "meaning", "needs")
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_INTRODUCTION = f"""\
# Configuration

Generated by `{_COMMAND}`. A test compares the page with the
schema. Edit the descriptions in `core/config/`.

A run reads a YAML file and overrides from the command line, which take precedence:

    python -m core.quickstart ppo-math --config X.yaml ppo.kl_ctl=0.01 actor.optimizer.lr=1e-6
    python -m core.quickstart ppo-math --config X.yaml --dry-run     # reports all problems, starts no process

- Values may contain `${{oc.env:VAR,default}}` (an environment variable) and `${{a.b.c}}` (another key).
- `slipstream train --help` shows the keys that most runs set.
- Unknown keys, wrong types and contradictions are errors with file and line.
- The column "needs" contains the setting or hardware without which a key has no effect; the start-up log lists the keys
  of a run for which it does not hold. "Servers" are generators in processes of their own, as on GPUs.
- [allocation.md](allocation.md) describes `allocation_mode`, [reliability.md](reliability.md) timeouts and recovery,
  [customization.md](customization.md) custom rewards, workflows and algorithms.
"""


@dataclass(frozen=True)
class _Place:
    """One occurrence of a section in the tree of an experiment."""

    prefix: str
    experiment: str
    description: str
    needs: str
    defaults: object


@dataclass
class _Group:
    """A section class with all its occurrences."""

    model: type[Section]
    places: list[_Place] = field(default_factory=list)

    @property
    def keys(self) -> dict[str, tuple[str, FieldInfo]]:
        """Plain values of the section by key: (attribute, field)."""
        return {
            name: found
            for name, found in fields_by_key(self.model).items()
            if not (sub_section(found[1]) or named_section(found[1]))
        }

    @property
    def name(self) -> str:
        """Dotted path of the section; `*` stands for the sections that share it."""
        prefixes = [place.prefix for place in self.places]
        _, dot, last = prefixes[0].rpartition(".")
        if len(prefixes) > 1 and dot and all(prefix.endswith(f".{last}") for prefix in prefixes):
            return f"*.{last}"
        return "/".join(prefixes)


def page() -> str:
    """Return the content of docs/configuration.md."""
    groups = list(_groups())
    top = [_top_level("all experiments", _Group(CommonExperimentConfig, [_Place("", "", "", "", None)]).keys)]
    for experiment, model in EXPERIMENTS.items():
        own = {name: found for name, found in _Group(model).keys.items() if not _is_common(name, found[1])}
        top.append(_top_level(f"`{experiment}`", own))
    sections = [_section(group, groups) for group in groups if group.keys]
    return "\n".join([_INTRODUCTION, *top, *sections, _renamed(), _fixed(), _ignored()])


def _groups() -> list[_Group]:
    """Return every section class in the order of the tree."""
    found: dict[type[Section], _Group] = {}
    for experiment, model in EXPERIMENTS.items():
        _collect(model, None, "", experiment, found)
    return list(found.values())


def _collect(
    model: type[Section], defaults: object, prefix: str, experiment: str, found: dict[type[Section], _Group]
) -> None:
    for name, (attribute, info) in fields_by_key(model).items():
        named = named_section(info)
        below = named or sub_section(info)
        if below is None:
            continue
        inner = default_of(defaults, attribute, info)
        name = f"{name}.NAME" if named else name
        place = _Place(f"{prefix}{name}", experiment, info.description or "", _needs(info), inner)
        group = found.setdefault(below, _Group(below))
        if place.prefix not in (other.prefix for other in group.places):
            group.places.append(place)
        _collect(below, inner, f"{prefix}{name}.", experiment, found)


def _is_common(name: str, info: FieldInfo) -> bool:
    """Return whether a key of an experiment is that of all experiments, unchanged."""
    common = CommonExperimentConfig.model_fields.get(name)
    return common is not None and (common.default, common.description) == (info.default, info.description)


def _top_level(title: str, keys: Mapping[str, tuple[str, FieldInfo]]) -> str:
    group = _Group(CommonExperimentConfig, [_Place("", "", "", "", None)])
    rows = [_row(group, name, attribute, info) for name, (attribute, info) in keys.items()]
    return "\n".join([f"## Top level of {title}", "", *_table(_HEAD, rows), ""])


def _section(group: _Group, groups: Sequence[_Group]) -> str:
    """Return heading, description and table of one of the section classes `groups`."""
    title = "## " + ", ".join(f"`{name}`" for name in group.name.split("/"))
    if sum(group.name in (place.prefix for place in other.places) for other in groups) > 1:
        title += f" of `{group.places[0].experiment}`"
    if len({(place.description, place.needs) for place in group.places}) == 1:
        about = [_about(group.places[0])]
    else:
        about = [f"- `{place.prefix}`: {_about(place)}" for place in group.places]
    rows = [_row(group, name, attribute, info) for name, (attribute, info) in group.keys.items()]
    return "\n".join([title, "", *about, "", *_table(_HEAD, rows), ""])


def _about(place: _Place) -> str:
    return f"{place.description}." + (f" Needs {place.needs}." if place.needs else "")


def _row(group: _Group, name: str, attribute: str, info: FieldInfo) -> Sequence[str]:
    return f"`{name}`", _type(info), _default(group, name, attribute, info), info.description or "", _needs(info)


def _needs(info: FieldInfo) -> str:
    condition = needs_of(info)
    return condition.text if condition else ""


def _type(info: FieldInfo) -> str:
    """Return the type with its bounds, or the values of a choice."""
    nullable = " or null" if "None" in python_type(info.annotation) else ""
    if choices := choices_of(info.annotation):
        return ", ".join(f"`{choice}`" for choice in choices.split(", ")) + nullable
    bounds = [f"{sign} {getattr(m, name)}" for m in info.metadata for name, sign in _BOUNDS.items() if hasattr(m, name)]
    name = python_type(info.annotation).replace(" | None", "").replace(" | ", " or ")
    return f"{name} {', '.join(bounds)}".strip() + nullable


def _default(group: _Group, name: str, attribute: str, info: FieldInfo) -> str:
    """Return the default, followed by those of occurrences that differ."""
    if info.is_required():
        return "required"
    usual = as_yaml(info.default)
    others = {
        place.prefix: shown
        for place in group.places
        if (shown := as_yaml(default_of(place.defaults, attribute, info))) != usual
    }
    return "; ".join([f"`{usual}`", *(f"`{prefix}.{name}`: `{shown}`" for prefix, shown in others.items())])


def _renamed() -> str:
    """Return the table of other spellings of keys."""
    rows = [(f"`{name}`", f"`{ours}`") for name, ours in RENAMED.items()]
    return "\n".join(["## Other spellings", "", *_table(("key", "same as"), rows), ""])


def _fixed() -> str:
    """Return the table of keys with a single accepted value."""
    rows = [
        (", ".join(f"`{key}`" for key in row.shown), " or ".join(f"`{value}`" for value in row.accepted), row.why)
        for row in (*ROWS, *PPO_ROWS)
        if row.accepted
    ]
    table = _table(("key", "accepted", "reason"), rows)
    return "\n".join(["## Keys with one accepted value", "", *table, ""])


def _ignored() -> str:
    """Return the table of keys that are accepted without effect, grouped by the reason."""
    keys: dict[str, list[str]] = {}
    for row in (*ROWS, *PPO_ROWS):
        if not row.accepted:
            keys.setdefault(row.why, []).extend(f"`{key}`" for key in row.shown)
    rows = [(", ".join(names), why) for why, names in keys.items()]
    introduction = "Keys of other trainers, accepted so that their files load. The start-up log lists those in a file."
    return "\n".join(["## Keys without effect", "", introduction, "", *_table(("keys", "reason"), rows), ""])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        cells = " | ".join(cell.replace("|", "&#124;") for cell in row)
        yield f"| {cells} |".replace("|  |", "| |")


if __name__ == "__main__":
    sys.stdout.write(page())
