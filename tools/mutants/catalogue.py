"""The catalogue of bugs, tests/mutants.toml: what each one changes, which promise it breaks, which tests must fail."""

from __future__ import annotations

import ast
import random
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatch
from functools import cached_property, lru_cache
from pathlib import Path

CATALOGUE = "tests/mutants.toml"


class CatalogueError(ValueError):
    """An entry that cannot be run; the message names it."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One bug: in `file`, the text `find` is replaced by `replace`."""

    id: str
    file: str
    find: str
    replace: str
    promise: str
    """What the user loses, in one sentence."""
    tests: tuple[str, ...]
    """Arguments of pytest: files, node ids, and `-k` with its expression."""
    nth: int = 0
    """Which occurrence of `find` is replaced, from 1; 0: it must occur exactly once."""
    quick: bool = False
    """Whether the tests take at most 3 s, so that the sample in CI may contain it."""
    imports_fail: bool = False
    """Whether the bug is meant to appear as an error at import or as an undefined name."""
    survives: str = ""
    """Why no test notices it."""

    @property
    def area(self) -> str:
        """The folder of the file, at most two levels deep."""
        return "/".join(Path(self.file).parent.parts[:2])

    def apply(self, source: str) -> str:
        """Return `source` with the bug. Raises CatalogueError."""
        count = source.count(self.find)
        if (count != 1 and not self.nth) or count < self.nth:
            want = f"at least {self.nth} times" if self.nth else "exactly once"
            raise CatalogueError(f"{self.id}: find={self.find!r} must occur {want} in {self.file}; found {count}")
        pieces = source.split(self.find)
        nth = self.nth or 1
        changed = self.find.join(pieces[:nth]) + self.replace + self.find.join(pieces[nth:])
        if changed == source:
            raise CatalogueError(f"{self.id}: replace must differ from find={self.find!r}")
        if self.file.endswith(".py"):
            self._check_python(source, changed)
        return changed

    def _check_python(self, source: str, changed: str) -> None:
        try:
            tree = ast.parse(changed, self.file)
            compile(tree, self.file, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise CatalogueError(f"{self.id}: {self.file} does not compile with the bug: {error}") from error
        if ast.dump(tree) == _meaning(source):
            raise CatalogueError(f"{self.id}: only comments or layout of {self.file} change")

    def mutated(self, root: Path) -> str:
        """Return the text of the file with the bug. Raises CatalogueError."""
        path = root / self.file
        if not path.is_file():
            raise CatalogueError(f"{self.id}: there is no file {self.file}")
        return self.apply(path.read_text(encoding="utf-8"))

    @cached_property
    def test_files(self) -> list[str]:
        """The files in `tests`."""
        return [argument.partition("::")[0] for argument in self.tests if argument.startswith("tests/")]


@lru_cache(maxsize=8)
def _meaning(source: str) -> str:
    """Return the syntax tree of a source, without comments and layout."""
    return ast.dump(ast.parse(source))


def load(root: Path) -> list[Mutant]:
    """Return the entries of the catalogue in order. Raises CatalogueError."""
    entries = tomllib.loads((root / CATALOGUE).read_text(encoding="utf-8"))["mutant"]
    mutants = [_entry(entry) for entry in entries]
    seen: set[str] = set()
    for mutant in mutants:
        if mutant.id in seen:
            raise CatalogueError(f"{mutant.id}: the id occurs more than once")
        seen.add(mutant.id)
    return mutants


def _entry(entry: dict) -> Mutant:
    name = entry.get("id", "an entry without id")
    known = {field.name for field in fields(Mutant)}
    required = {"id", "file", "find", "replace", "promise", "tests"}
    if unknown := entry.keys() - known:
        raise CatalogueError(f"{name}: unknown keys {sorted(unknown)}; known: {sorted(known)}")
    if missing := required - entry.keys():
        raise CatalogueError(f"{name}: missing keys {sorted(missing)}")
    if empty := [key for key in ("find", "promise", "tests") if not entry[key]]:
        raise CatalogueError(f"{name}: {empty[0]} must not be empty")
    return Mutant(**{**entry, "tests": tuple(entry["tests"])})


def check(mutants: Iterable[Mutant], root: Path) -> list[str]:
    """Return what is wrong with the entries, one line each."""
    problems = []
    for mutant in mutants:
        try:
            mutant.mutated(root)
        except CatalogueError as error:
            problems.append(str(error))
        missing = [file for file in mutant.test_files if not (root / file).is_file()]
        problems += [f"{mutant.id}: there is no test file {file}" for file in missing]
        if not mutant.test_files:
            problems.append(f"{mutant.id}: tests={list(mutant.tests)} must name a file in tests/")
    return problems


def select(mutants: Sequence[Mutant], *, ids: Sequence[str] = (), areas: Sequence[str] = ()) -> list[Mutant]:
    """Return the entries whose id and file match one of the patterns; no patterns: all."""
    return [
        mutant
        for mutant in mutants
        if (not ids or any(fnmatch(mutant.id, pattern) for pattern in ids))
        and (not areas or any(fnmatch(mutant.file, f"{pattern.rstrip('/')}*") for pattern in areas))
    ]


def sample(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return `count` of the entries, each area in turn, chosen by the seed."""
    rng = random.Random(seed)
    by_area: dict[str, list[Mutant]] = {}
    for mutant in rng.sample(list(mutants), len(mutants)):
        by_area.setdefault(mutant.area, []).append(mutant)
    queues = list(by_area.values())
    chosen: list[Mutant] = []
    while queues and len(chosen) < count:
        chosen.append(queues[0].pop())
        queues = [queue for queue in (*queues[1:], queues[0]) if queue]
    return chosen
