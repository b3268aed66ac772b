"""The promises of tests/mutants.toml, each with a bug that breaks it and the tests that must fail then."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatch
from pathlib import Path

CATALOGUE = "tests/mutants.toml"


class CatalogueError(ValueError):
    """A malformed entry or a choice that cannot be tried; the message names it."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One promise and its bug: in `file`, the text `find` is replaced by `replace`."""

    id: str
    promise: str
    """The behavior that a user relies on, in one sentence."""
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]
    """Arguments of pytest: files, node ids, and `-k` with its expression."""

    def missing(self, root: Path) -> str:
        """Return why the entry does not fit the source any more; empty if it fits."""
        path = root / self.file
        if not path.is_file():
            return f"there is no file {self.file}"
        count = path.read_text(encoding="utf-8").count(self.find)
        if count != 1:
            return f"find={self.find!r} must occur once in {self.file}; found {count} times"
        files = [test.partition("::")[0] for test in self.tests if test.startswith("tests/")]
        gone = [file for file in files if not (root / file).exists()]
        return f"there is no test file {gone[0]}" if gone else ""


def load(root: Path) -> list[Mutant]:
    """Return the entries of the catalogue in order. Raises CatalogueError."""
    entries = tomllib.loads((root / CATALOGUE).read_text(encoding="utf-8"))["mutant"]
    known = {field.name for field in fields(Mutant)}
    mutants: dict[str, Mutant] = {}
    for entry in entries:
        name = entry.get("id", "an entry without id")
        if entry.keys() != known:
            raise CatalogueError(f"{name}: keys must be {sorted(known)}; found {sorted(entry)}")
        if empty := [key for key in sorted(known - {"replace"}) if not entry[key]]:
            raise CatalogueError(f"{name}: {empty[0]} must not be empty")
        if entry["find"] == entry["replace"]:
            raise CatalogueError(f"{name}: replace must differ from find={entry['find']!r}")
        if name in mutants:
            raise CatalogueError(f"{name}: the id occurs more than once")
        mutants[name] = Mutant(**{**entry, "tests": tuple(entry["tests"])})
    return list(mutants.values())


def select(mutants: Sequence[Mutant], *, ids: Sequence[str] = (), areas: Sequence[str] = ()) -> list[Mutant]:
    """Return the entries whose id and file match one of the patterns; no patterns: all."""
    return [
        mutant
        for mutant in mutants
        if (not ids or any(fnmatch(mutant.id, pattern) for pattern in ids))
        and (not areas or any(fnmatch(mutant.file, f"{pattern.rstrip('/')}*") for pattern in areas))
    ]
