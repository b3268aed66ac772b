"""Everything that can be known to go wrong before a process is started, of the recipe and of this host, and the header
of a start.

Each check is a generator of problems; all of them run, so that all problems are seen at once. Nothing is written, and
neither torch nor Ray is imported, unless an algorithm of the user needs torch, or prompts or rows have to be tokenised.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from rich.text import Text

from config_schema.needs import as_yaml
from core.checks.host import host_problems, is_elsewhere
from core.checks.recipe import recipe_problems
from core.config.experiments import ExperimentConfig
from core.config.load import LoadedConfig
from core.config.migrate import leaves
from core.config.parsing.problems import MISSING, Problem
from core.config.presets import PRESETS
from core.config.reference import recorded
from core.placement import resolve_allocation
from core.runs.paths import RunPaths
from model_specs import hub
from model_specs.model_folder import stored_parameters

__all__ = ["header", "run_checks"]


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


_SHOWN_ELSEWHERE = ("experiment_name", "trial_name", "allocation_mode", "algorithm.name", "external_configs")
"""Keys, or the start of keys, that other lines show."""


def header(loaded: LoadedConfig, paths: RunPaths) -> Iterator[Text]:
    """Yield the five lines at the start of a run, each with its title: what it is, model, data, layout, and the keys
    that were set."""
    config = loaded.config
    name = f"slipstream {_version()} · {config.NAME} · {config.run_name}"
    yield _line("run", f"{name} · logs {_short(paths.logs)}")
    yield _line("model", _model(config))
    yield _line("data", _data(config))
    yield _line("layout", _layout(config))
    yield _line("keys", _keys(loaded))


def _line(title: str, text: str) -> Text:
    return Text(f"{title:<8}", style="dim").append(text, style="default")


def _version() -> str:
    try:
        return metadata.version("slipstream")
    except metadata.PackageNotFoundError:  # a checkout
        return ""


def _short(path: str | Path) -> str:
    """Return a path from the working folder on, where that is shorter."""
    return min(str(path), os.path.relpath(path), key=len)


def _model(config: ExperimentConfig) -> str:
    about = config.summary
    try:
        count = stored_parameters(about.model)
    except (OSError, ValueError):
        count = 0
    size = f" · {_count(count)} parameters" if count else ""
    return f"{hub.shown(_short(about.model))}{size} · {about.optimizer}"


def _count(number: int) -> str:
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{unit}"
    return str(number)


def _data(config: ExperimentConfig) -> str:
    epochs, steps = config.exp_ctrl.length
    length = "1 epoch" if epochs == 1 else f"{epochs} epochs"
    if steps is not None:
        length += f", at most {steps} steps"
    (_, source), *_ = config.data_sources
    return " · ".join((_short(source.path), config.summary.batch, length, *config.summary.sampled))


def _layout(config: ExperimentConfig) -> str:
    allocation = resolve_allocation(config)
    alike: dict[str, list[str]] = {}
    for row in allocation.table():
        if row.role in config.placed_roles:
            alike.setdefault(f"{row.backend} {row.layout} on {row.device}", []).append(row.role)
    return " · ".join(f"{', '.join(roles)}: {what}" for what, roles in alike.items())


def _keys(loaded: LoadedConfig) -> str:
    """Return what the preset set, and what the user did."""
    config = loaded.config
    values = dict(leaves(recorded(config)))
    given = [key for key in values if key in loaded.sources and not key.startswith(_SHOWN_ELSEWHERE)]
    said = []
    if (name := config.summary.algorithm) is not None:
        preset = PRESETS[name].values if name in PRESETS else {}
        filled = " ".join(f"{key}={as_yaml(value)}" for key, value in preset.items() if not loaded.where(key))
        said.append(f"{name} set {filled}" if filled else f"algorithm {name}")
    given = [key for key in given if key.rpartition(".")[2] not in ("path", "train_path", "valid_path")]
    said.append(f"you set {' '.join(f'{key}={values[key]}' for key in given) or 'nothing else'}")
    return "; ".join(said)
