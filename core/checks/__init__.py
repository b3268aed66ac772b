"""Everything that can be known to go wrong before a process is started, of the recipe and of this host.

Each check is a generator of problems; all of them run, so that all problems are seen at once. Nothing is written, and
neither torch nor Ray is imported, unless an algorithm of the user needs torch, or prompts or rows have to be tokenised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from core.checks.host import host_checks, is_elsewhere
from core.checks.recipe import recipe_checks
from core.config.experiments import ExperimentConfig
from core.config.problems import Problem

__all__ = ["run_checks"]


def run_checks(config: ExperimentConfig, where: Callable[[str], str], *, connections: bool = False) -> list[Problem]:
    """Return every problem of this host (`of_host`), the files and the model that this configuration meets.

    `where(key)` returns the line in which a key was given. `connections`: connect to the Ray cluster and measure
    prompts or rows, too, which a start does anyway. Paths that do not exist are facts of this host if the run starts on
    other machines."""
    checks = host_checks(config, connections=connections)
    host = [replace(p, where=where(p.key), of_host=True) for check in checks for p in check(config)]
    recipe = [
        replace(p, where=where(p.key)) for check in recipe_checks(config, lengths=connections) for p in check(config)
    ]
    if is_elsewhere(host):
        recipe = [replace(p, of_host=p.missing_path) for p in recipe]
    return list(dict.fromkeys([*recipe, *host]))  # models of one folder have the same problems
