"""Everything that can be known to go wrong before a process is started: the checks of --dry-run and of every start.

Each check is a generator of problems; all of them run, so that all problems are seen at once. Nothing is written, and
neither torch nor Ray is imported.
"""

from __future__ import annotations

import importlib.util
import netrc
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from allocation import AllocationError, model_errors
from core.config.algorithm import check_algorithm
from core.config.allocation import resolve_allocation
from core.config.base import Problem
from core.config.experiments import DPOConfig, ExperimentConfig, PPOMATHConfig, SFTConfig
from core.config.models import ModelUse
from core.config.ray_address import joined_cluster
from core.paths import RunPaths
from model_specs.config import ModelConfig
from model_specs.families import FAMILIES
from model_specs.model_folder import ModelFolderError, read_model_folder
from rollout.data.preferences import read_preferences
from rollout.data.rows import DatasetError, read_pairs, scan_rows
from rollout.inference.gpus import check_gpus
from rollout.inference.registry import BACKENDS
from rollout.plugins import PluginError, load_plugin
from rollout.rewards.registry import REWARDS
from rollout.workflows import check_workflow

_SHORTEST_TOKENS = 32
"""Room of one request in the embedded generator, at least."""


def run_checks(config: ExperimentConfig, where: Callable[[str], str]) -> list[Problem]:
    """Return every problem of the machine, the files and the model that this configuration meets.

    `where(key)` returns the line in which a key was given."""
    checks = (_models, *_CHECKS[config.NAME], _monitors, _environment, _fileroot, _ray, _port, _gpus)
    return [
        Problem(key=problem.key, message=problem.message, where=where(problem.key))
        for check in checks
        for problem in check(config)
    ]


def _models(config: ExperimentConfig) -> Iterator[Problem]:
    vocabularies: dict[str, int] = {}
    for use in config.model_uses:
        try:
            model = read_model_folder(use.path, weights=not use.section.init_from_scratch, tokenizer=use.tokenizer)
        except ModelFolderError as error:
            yield Problem(key=f"{use.key}.path", message=str(error))
            continue
        vocabularies[use.key] = model.vocab_size
        yield from _family(use, model)
        yield from _positions(config.longest_sequences, use, model)
        yield from _replay(use, model)
        yield from _split(config, use, model)
    if len(set(vocabularies.values())) > 1:
        sizes = ", ".join(f"{key} {size}" for key, size in vocabularies.items())
        yield Problem(key="actor.path", message=f"the models must share one vocabulary; vocab_size of {sizes}")


def _family(use: ModelUse, model: ModelConfig) -> Iterator[Problem]:
    family = use.section.type.family
    if family not in ("auto", model.model_type):
        known = "" if family in FAMILIES else f" ({family!r} is not one of {', '.join(sorted(FAMILIES))})"
        message = f"{family!r}, but config.json of {use.path} has {model.model_type!r}{known}; write that, or auto"
        yield Problem(key=f"{use.key}.type._class", message=message)


def _replay(use: ModelUse, model: ModelConfig) -> Iterator[Problem]:
    if use.key == "actor" and use.section.moe_routing_replay and model.moe is None:
        message = f"true, but {use.path} is of type {model.model_type!r}, a model without experts; write false"
        yield Problem(key="actor.moe_routing_replay", message=message)


def _positions(longest: Mapping[str, tuple[int, int]], use: ModelUse, model: ModelConfig) -> Iterator[Problem]:
    """Check that sequences fit into the model's positions, before the first prompt is sampled."""
    for key, (prompt_tokens, num_tokens) in longest.items():
        length, limit = prompt_tokens + num_tokens, model.max_position_embeddings
        if length > limit:
            message = f"{num_tokens} + dataset.max_prompt_len={prompt_tokens} is {length}, more than "
            yield Problem(
                key=key, message=message + f"max_position_embeddings={limit} of {use.path}; lower one of them"
            )


def _split(config: ExperimentConfig, use: ModelUse, model: ModelConfig) -> Iterator[Problem]:
    """Yield layouts that do not divide heads, layers or vocabulary; one message where several roles break the same
    rule."""
    try:
        allocation = resolve_allocation(config)
    except AllocationError:
        return  # a rule of the configuration has said so
    seen: set[str] = set()
    for role in use.roles:
        placed = allocation.roles[role]
        if placed.backend in BACKENDS:
            for key, message in BACKENDS[placed.backend].model_problems(model, use.path):
                yield Problem(key=key, message=message)
        for error in model_errors(
            placed.layout, role, num_heads=model.num_heads, num_kv_heads=model.num_kv_heads,
            num_layers=model.num_layers, vocab_size=model.vocab_size, intermediate_size=model.intermediate_size,
            num_experts=model.moe.num_experts if model.moe else 0,
            path=use.path,
        ):  # fmt: skip
            message = str(error).removeprefix(f"{error.key}: ")
            rule = message.removeprefix(f"{role}:")
            if rule not in seen:
                seen.add(rule)
                yield Problem(key=error.key, message=message)


def _prompts(config: PPOMATHConfig) -> Iterator[Problem]:
    yield from _data_files(config, _scan_solved_rows if config.reward.function == "math" else scan_rows)
    if config.demonstrations.path:
        try:
            read_pairs(config.demonstrations.path)
        except DatasetError as error:
            yield Problem(key="demonstrations.path", message=str(error))


def _answers(config: SFTConfig) -> Iterator[Problem]:
    return _data_files(config, read_pairs)


def _preferences(config: DPOConfig) -> Iterator[Problem]:
    return _data_files(config, lambda path: read_preferences(path, config.dataset.fields.columns))


def _data_files(config: ExperimentConfig, scan: Callable[[str], object]) -> Iterator[Problem]:
    for key, path in config.data_files:
        if not path:
            continue
        if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
            yield Problem(key=key, message=f"{path}: a pipe or device, which can be read only once; copy it to a file")
            continue
        try:
            scan(path)
        except DatasetError as error:
            yield Problem(key=key, message=str(error))


def _scan_solved_rows(path: str) -> None:
    """Check that rows of task math have solutions: without them every completion would count as wrong."""
    for row in scan_rows(path):
        if not row.solutions:
            raise DatasetError(
                f"{path}:{row.line}: task {row.task!r} without solutions, and reward.function=math compares with them; "
                "write your own reward.function"
            )


def _reward(config: PPOMATHConfig) -> Iterator[Problem]:
    if config.reward.function in REWARDS:
        return
    function = config.reward.function
    if ":" not in function:
        message = f"unknown reward {function!r}; use one of {', '.join(sorted(REWARDS))}, or package.module:function"
        yield Problem(key="reward.function", message=message)
        return
    try:
        load_plugin(function, kind="reward function", arguments=("prompt", "text"))
    except PluginError as error:
        yield Problem(key="reward.function", message=str(error))


def _workflow(config: PPOMATHConfig) -> Iterator[Problem]:
    try:
        check_workflow(config.workflow.type)
    except PluginError as error:
        yield Problem(key="workflow.type", message=str(error))


def _environment(config: ExperimentConfig) -> Iterator[Problem]:
    """Yield names and values that no environment can hold."""
    for name, value in config.external_configs.envs.items():
        if not name or "=" in name or "\0" in name + value:
            message = f"{name!r} cannot be set: a name is not empty and has no '=', and neither it nor its value a NUL"
            yield Problem(key="external_configs.envs", message=message)


def _running(config: PPOMATHConfig) -> Iterator[Problem]:
    """Yield a number of requests whose keys and values do not fit into the memory of this machine, each of the shortest
    length; of generators on the CPU, which run here."""
    if _gpus_of_own_ray(config) or joined_cluster(config):
        return
    try:
        model = read_model_folder(config.actor.path, weights=False, tokenizer=False)
    except ModelFolderError:
        return  # reported with the model
    per_token = 8 * model.num_layers * model.num_kv_heads * model.head_dim  # key and value, float32
    most, running = psutil.virtual_memory().total, config.generator.max_running
    gib = running * per_token * _SHORTEST_TOKENS / 2**30
    if gib * 2**30 > most:
        fits = most // (per_token * _SHORTEST_TOKENS)
        message = (
            f"{running} requests of {_SHORTEST_TOKENS} tokens need {gib:,.0f} GiB for keys and values, this machine "
            f"has {most / 2**30:.0f} GiB; write at most {fits}"
        )
        yield Problem(key="generator.max_running", message=message)


_CHECKS: Mapping[str, tuple[Callable[[Any], Iterator[Problem]], ...]] = {
    "ppo-math": (_running, _prompts, _reward, _workflow, check_algorithm),
    "sft": (_answers,),
    "dpo": (_preferences,),
}
"""The checks that only one experiment has, by its name."""


def _monitors(config: ExperimentConfig) -> Iterator[Problem]:
    """Yield trackers whose library, an extra, is missing, or whose key is: Weights & Biases would ask for it on the
    terminal."""
    wanted = {"wandb": config.wandb.mode != "disabled", "mlflow": config.monitor.mlflow_uri is not None}
    keys = {"wandb": "wandb.mode", "mlflow": "monitor.mlflow_uri"}
    for name in (name for name, is_wanted in wanted.items() if is_wanted):
        if importlib.util.find_spec(name) is None:
            yield Problem(key=keys[name], message=f"{name} is not installed: pip install -e '.[{name}]'")
    if config.wandb.mode == "online" and not _has_wandb_key(config.external_configs.envs):
        message = "no API key: export WANDB_API_KEY=..., or run `wandb login`; or write offline, or disabled"
        yield Problem(key=keys["wandb"], message=message)


def _has_wandb_key(envs: Mapping[str, str]) -> bool:
    """Return whether there is a key where `wandb` searches without a terminal: the environment, then the netrc file of
    `wandb login`."""
    variables = {**envs, **os.environ}
    if variables.get("WANDB_API_KEY"):
        return True
    host = urlsplit(variables.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(variables.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _fileroot(config: ExperimentConfig) -> Iterator[Problem]:
    given = config.external_configs.cluster_config.fileroot
    if "\0" in given:
        yield Problem(
            key="external_configs.cluster_config.fileroot", message=f"{given!r}: a path has no NUL; remove it"
        )
        return
    try:
        root = Path(given).expanduser().absolute()
    except RuntimeError:
        message = f"{given}: there is no such home folder; write the path in full"
        yield Problem(key="external_configs.cluster_config.fileroot", message=message)
        return
    paths = RunPaths.for_trial(given, config.experiment_name, config.trial_name)
    # Of one problem with the folder that all are in, one message.
    for existing in dict.fromkeys(map(_existing, (paths.logs, paths.checkpoints, paths.recover))):
        try:
            # Writing is the only test that knows about read-only mounts, quotas and root; the file has no name.
            with tempfile.TemporaryFile(dir=existing) as file:
                file.write(b"\0" * 4096)
        except OSError as error:
            message = f"{root}: cannot write in {existing}: {error.strerror}; set it to a folder that you may write"
            yield Problem(key="external_configs.cluster_config.fileroot", message=message)


def _existing(folder: Path) -> Path:
    """Return the deepest part of a path that is there already."""
    # os.path.exists: Path.exists raises for a folder inside one that may not be entered.
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))


def _ray(config: ExperimentConfig) -> Iterator[Problem]:
    """Yield problems of a Ray cluster that the run starts: it is this machine alone, and GPUs of each node need a
    machine of their own; processes without GPUs are packed wherever there is room."""
    if config.n_nodes > 1 and _gpus_of_own_ray(config):
        message = (
            f"needed with n_nodes={config.n_nodes}, or Ray is started on this machine alone; run `ray start --head` on "
            "this node and `ray start --address=HOST:PORT` on the others, or set this, or RAY_ADDRESS, to HOST:PORT"
        )
        yield Problem(key="launch.ray_address", message=message)


def _gpus_of_own_ray(config: ExperimentConfig) -> list[int]:
    """Return the numbers, on their nodes, of the GPUs of a run that starts Ray itself; none where it joins a
    cluster."""
    if joined_cluster(config):
        return []
    try:
        allocation = resolve_allocation(config)
    except AllocationError:
        return []  # reported with the configuration
    return sorted({slot.gpu for slot in allocation.gpu_slots})


def _port(config: ExperimentConfig) -> Iterator[Problem]:
    port = config.launch.master_port
    if port == 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            message = f"port {port}: {os.strerror(error.errno or 0)}; write 0 for a free one"
            yield Problem(key="launch.master_port", message=message)


def _gpus(config: ExperimentConfig) -> Iterator[Problem]:
    """Check that the GPUs of a run on this machine exist and are free; a joined cluster has them elsewhere."""
    if config.n_nodes > 1 or not (indices := _gpus_of_own_ray(config)):
        return
    try:
        check_gpus(indices)
    except ValueError as error:
        yield Problem(key="allocation_mode", message=str(error))
