"""The configuration as users read it: the listing at start-up and the list of all keys of --help.

Box, rules and lines are exactly those of the AReaL tutorial.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Literal, Union, get_args, get_origin

from config_schema.needs import as_yaml
from config_schema.section import Section, default_of, fields_by_key, named_section, needs_of, sub_section
from core.config.dialects.areal_v02 import rows_of
from core.config.experiments import ExperimentConfig
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
    if any(section.device_mapping is not None for section in config.placed_roles.values()):
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
    if not ignored or not config.differences:
        return ""
    return (
        f"This file has keys of AReaL 0.2, which trains otherwise: {'; '.join(config.differences)}. "
        "staleness.max_staleness=0 trains as there; write the value to keep it"
    )


def help_text(experiment: str, model: type[Section]) -> str:
    """Return every key with its type, default and meaning, and the keys that are accepted without effect."""
    lines = [
        f"python -m core.quickstart {experiment} --config X.yaml [a.b.c=value ...] [--dry-run]",
        "",
        "Keys of the file and of a.b.c=value overrides, which win. Values may hold ${oc.env:VAR,default} and ${a.b.c}.",
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


def _keys(model: type[Section], defaults: Section | None, prefix: str) -> Iterator[str]:
    for name, (attribute, info) in fields_by_key(model).items():
        named = named_section(info)
        below = named or sub_section(info)
        default = None if named else default_of(defaults, attribute, info)
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
