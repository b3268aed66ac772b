"""How a key of the configuration is declared: by the component that reads it, once. Here: the known name that a wrong
one was probably meant to be. Every error about a name asks for it."""

import difflib
from collections.abc import Iterable

_COMPARED = 100
"""Characters of a name that are compared: the time grows with their square."""


def nearest_names(name: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return the known names that are similar to `name` in any case of letters, the most similar first.

    cutoff: the least similarity, from 0 (all names) to 1 (equal names)."""
    by_folded = {one.casefold(): one for one in known}
    near = difflib.get_close_matches(name[:_COMPARED].casefold(), by_folded, n=most, cutoff=cutoff)
    return [by_folded[folded] for folded in near]


def did_you_mean(name: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6) -> str:
    """Return "; did you mean 'x'?" with the nearest_names(); empty where there is none."""
    near = nearest_names(name, known, most=most, cutoff=cutoff)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
