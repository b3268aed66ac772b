"""What a key needs to have an effect. The predicate beside a key gives its help, its row in docs/configuration.md, and
the warning at the start of a run in which it has none.

Paths are dotted keys of the experiment; one that begins with a dot is of the section of the key itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

Value = bool | int | float | str | None


class Run(Protocol):
    """What predicates are asked of: the settings of a run, and what follows from them and from its models."""

    def value(self, path: str) -> Value:
        """Return a setting; one that null leaves open, as it was decided."""

    def lacks(self, fact: str, section: str) -> str | None:
        """Return why `section` does not have what `fact` names; None where it does."""


class Reason(NamedTuple):
    """Why a key has no effect."""

    text: str
    settings: tuple[str, ...] = ()
    """The keys that decide it."""
    consequence: str = ""

    def shown(self, *, set_by: str = "") -> str:
        """Return the text; `set_by`: who gave the settings their values."""
        return self.text + set_by + (f": {self.consequence}" if self.consequence else "")


@dataclass(frozen=True)
class Needs:
    """A condition, as documentation writes it, and the reason where it does not hold."""

    text: str
    why_not: Callable[[Run, str], Reason | None]
    """(run, section of the key) -> None where the condition holds."""

    def __and__(self, other: Needs) -> Needs:
        return Needs(f"{self.text} and {other.text}", lambda run, at: self.why_not(run, at) or other.why_not(run, at))

    def __or__(self, other: Needs) -> Needs:
        def why_not(run: Run, at: str) -> Reason | None:
            first, second = self.why_not(run, at), other.why_not(run, at)
            if first is None or second is None:
                return None
            if first.text == second.text:
                return first
            return Reason(f"{first.text}, {second.text}", (*first.settings, *second.settings))

        return Needs(f"{self.text} or {other.text}", why_not)

    def else_(self, consequence: str) -> Needs:
        """Return the same condition; `consequence`: what is so where it does not hold."""

        def why_not(run: Run, at: str) -> Reason | None:
            reason = self.why_not(run, at)
            return reason and reason._replace(consequence=consequence)

        return Needs(self.text, why_not)


def equals(path: str, *values: Value) -> Needs:
    """Need one of these values."""
    return _setting(path, f"={_either(values)}", lambda value: value in values, null_holds=None in values)


def unlike(path: str, *values: Value) -> Needs:
    """Need another value than these."""
    return _setting(path, f" other than {_either(values)}", lambda value: value not in values)


def above(path: str, bound: float) -> Needs:
    """Need a number above `bound`."""
    return _setting(path, f" > {bound:g}", lambda value: isinstance(value, int | float) and value > bound)


def given(path: str) -> Needs:
    """Need a value that is neither null nor empty."""
    return _setting(path, "", lambda value: value not in (None, ""))


def fact(name: str) -> Needs:
    """Need what follows from the settings and the models: see Run.lacks."""

    def why_not(run: Run, at: str) -> Reason | None:
        why = run.lacks(name, at)
        return None if why is None else Reason(why)

    return Needs(name, why_not)


def refused_without(text: str) -> Needs:
    """Need what a rule or a check demands: without it the key is an error, not one without effect."""
    return Needs(text, lambda run, at: None)


def _setting(path: str, condition: str, holds: Callable[[Value], bool], *, null_holds: bool = False) -> Needs:
    def why_not(run: Run, at: str) -> Reason | None:
        whole = f"{at}{path}".lstrip(".") if path.startswith(".") else path
        value = run.value(whole)
        if holds(value):
            return None
        shown = " is set" if isinstance(value, str) and null_holds else f"={as_yaml(value)}"  # it may be long
        return Reason(whole + shown, (whole,))

    return Needs(path.lstrip(".") + condition, why_not)


def _either(values: tuple[Value, ...]) -> str:
    shown = [as_yaml(value) for value in values]
    return " or ".join(", ".join(shown).rsplit(", ", 1))


def as_yaml(value: object) -> str:
    """Return a value as YAML spells it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value) if value == "" else str(value)
