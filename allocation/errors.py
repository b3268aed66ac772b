"""The one exception of this package, and the phrasing its messages share.

Invariant: every message names the key, the value, the broken rule with its numbers, and a way out.
"""

from __future__ import annotations

from collections.abc import Iterable

_SHOWN_CHARACTERS = 120


class AllocationError(ValueError):
    """An allocation that cannot work. `key` is the configuration key to change, `nearest` what works instead."""

    def __init__(self, rule: str, nearest: str | None = None, *, key: str = "allocation_mode", value: object = None):
        self.rule = rule
        self.key = key
        self.value = value
        self.nearest = nearest
        super().__init__(rule)

    def __str__(self) -> str:
        shown = "" if self.value is None else f"={shorten(self.value)}"
        hint = "" if self.nearest is None else f"; nearest: {self.nearest}"
        return f"{self.key}{shown}: {self.rule}{hint}"

    def within(self, key: str, value: object) -> AllocationError:
        """Return the same error as seen from the configuration: about `key`, whose whole value is `value`."""
        part = "" if self.value is None else f"{self.key} {shorten(self.value)}: "
        return AllocationError(part + self.rule, key=key, value=value, nearest=self.nearest)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.rule, self.key, self.value, self.nearest)


def _rebuild(rule: str, key: str, value: object, nearest: str | None) -> AllocationError:
    return AllocationError(rule, key=key, value=value, nearest=nearest)


def shorten(value: object) -> str:
    """Return the value as an error shows it: quoted when text, cut in the middle when long."""
    text = repr(value) if isinstance(value, str) else str(value)
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    half = _SHOWN_CHARACTERS // 2 - 3
    return f"{text[:half]} ... {text[-half:]}"


def nearest_of(value: int, working: Iterable[int]) -> str | None:
    """Return '2 or 4' for the valid numbers next to `value` below and above; None when there is none."""
    numbers = sorted(set(working))
    below = [n for n in numbers if n < value][-1:]
    above = [n for n in numbers if n > value][:1]
    return " or ".join(map(str, below + above)) or None


def divisors(n: int) -> list[int]:
    """Return all positive divisors of n >= 1, ascending."""
    small = [i for i in range(1, int(n**0.5) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)})
