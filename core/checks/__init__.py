"""Everything that can be known to go wrong before a process is started, of the recipe and of this host.

Each check is a generator of problems; all of them run, so that all problems are seen at once. Nothing is written, and
neither torch nor Ray is imported, unless an algorithm of the user needs torch, or prompts or rows have to be tokenised.
"""

from __future__ import annotations

from dataclasses import replace

from core.checks.host import host_problems, is_elsewhere
from core.checks.recipe import recipe_problems
from core.config.load import LoadedConfig
from core.config.parsing.problems import MISSING, Problem

__all__ = ["run_checks"]


def run_checks(loaded: LoadedConfig, *, connections: bool = False, nodes: bool = False) -> list[Problem]:
    """Return every problem of this host (`of_host`), the files and the model that this configuration meets.

    `connections`: connect to the Ray cluster and measure prompts or rows, too, which a start does anyway. `nodes`: ask
    the cluster for its nodes and GPUs. Paths that do not exist are facts of this host if the run starts on
    other machines."""
    config = loaded.config
    on_host = list(host_problems(config, connections=connections, nodes=nodes))
    recipe = [loaded.shown(p) for p in recipe_problems(config, lengths=connections)]
    host = [loaded.shown(p, of_host=True) for p in on_host]
    if is_elsewhere(on_host):
        recipe = [replace(p, of_host=any(words in p.message for words in MISSING)) for p in recipe]
    return list(dict.fromkeys([*recipe, *host]))  # models of one folder have the same problems
