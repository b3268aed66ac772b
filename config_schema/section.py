"""What every section of the configuration is made of: the keys of one component, which are its settings.

A section is a frozen pydantic model. Invariant: every field has a description; nothing in a section changes after
loading.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

from config_schema.needs import Needs

S = TypeVar("S", bound="Section")


def _of_known_home(path: str) -> str:
    if os.path.expanduser(path).startswith("~"):
        raise ValueError("there is no such home folder; write the path in full")
    return path


ModelPath = Annotated[str, AfterValidator(os.path.expanduser)]
"""A model folder that may begin with ~ or ~user, or the id of a model of the hub."""
OutputPath = Annotated[str, AfterValidator(_of_known_home)]
"""A path that may begin with ~ or ~user, where a run writes."""


class Section(BaseModel):
    """Base of every section. Keys are field names, or the alias where a key is no Python name (`_class`)."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    def rules(self, at: str) -> Iterator[Violation]:
        """Yield what several keys of this section are together that they must not be. `at`: the prefix of its keys,
        "ppo.gen." for instance."""
        return iter(())

    def warnings(self) -> Iterator[str]:
        """Yield what is valid and probably not intended."""
        return iter(())


def key(
    default: Any = ..., description: str = "", *, needs: Needs | None = None, first: bool = False, **constraints: Any
) -> Any:
    """Define a field of a section: default (none: required), meaning, and pydantic's constraints (gt, ge, alias, ...).

    needs: that without which the key has no effect. first: one of the few keys that most users set; --help shows it."""
    return Field(default, description=description, json_schema_extra=_extra(needs, first), **constraints)


def section(model: type[S], description: str = "", *, needs: Needs | None = None, **defaults: object) -> S:
    """Define a sub-section whose keys all have defaults; `defaults` replace the section's own."""
    filled: S = Field(model(**defaults), description=description, json_schema_extra=_extra(needs))
    return filled


def _extra(needs: Needs | None, first: bool = False) -> JsonDict:
    return cast(JsonDict, {"needs": needs, "first": first})  # pydantic keeps it as it is


def needs_of(info: FieldInfo) -> Needs | None:
    """Return what a field needs to have an effect; None if it always has one."""
    found = _mark(info, "needs")
    return found if isinstance(found, Needs) else None


def is_first(info: FieldInfo) -> bool:
    """Return whether a field is one of the few keys that most users set."""
    return _mark(info, "first") is True


def _mark(info: FieldInfo, name: str) -> object:
    extra = info.json_schema_extra
    return extra.get(name) if isinstance(extra, Mapping) else None


def fields_by_key(model: type[Section]) -> dict[str, tuple[str, FieldInfo]]:
    """Return key as users write it -> (attribute name, field), in order."""
    return {info.alias or name: (name, info) for name, info in model.model_fields.items()}


def sub_section(info: FieldInfo) -> type[Section] | None:
    """Return the section class of a field, None for a plain value."""
    annotation = info.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def named_section(info: FieldInfo) -> type[Section] | None:
    """Return the section class of a field that holds sections by name, None for any other field."""
    origin, args = get_origin(info.annotation), get_args(info.annotation)
    below = args[1] if origin is dict else None
    return below if isinstance(below, type) and issubclass(below, Section) else None


def broken_rules(section: Section, at: str = "") -> Iterator[Violation]:
    """Yield every rule that a section and those below it break."""
    yield from section.rules(at)
    for name, (attribute, info) in fields_by_key(type(section)).items():
        if sub_section(info) is not None:
            yield from broken_rules(getattr(section, attribute), f"{at}{name}.")
        elif named_section(info) is not None:
            for own, below in getattr(section, attribute).items():
                yield from broken_rules(below, f"{at}{name}.{own}.")


def default_of(defaults: object, attribute: str, info: FieldInfo) -> object:
    """Return the default of a field inside a section whose own default is `defaults`; None if it has none."""
    if isinstance(defaults, Section):
        return getattr(defaults, attribute)
    return None if info.is_required() else info.default


def all_keys(model: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield the dotted path of every plain value below `model`."""
    for name, (_, info) in fields_by_key(model).items():
        if (named := named_section(info)) is not None:
            yield from all_keys(named, f"{prefix}{name}.NAME.")
        elif (below := sub_section(info)) is None:
            yield prefix + name
        else:
            yield from all_keys(below, f"{prefix}{name}.")


@dataclass(frozen=True)
class Violation:
    """A broken rule; the first of `keys` is the one to change."""

    keys: tuple[str, ...]
    message: str
