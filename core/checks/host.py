"""Facts of this host: whether a recipe can be started here. A dry run reports them apart from the recipe's problems."""

import importlib.util
import json
import netrc
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from urllib.parse import urlsplit

from allocation import GENERATOR_ROLE, Allocation, AllocationError
from core.config.experiments import ExperimentConfig, PPOMATHConfig
from core.config.parsing.problems import Problem
from core.placement import connection_error, joined_cluster, resolve_allocation, started
from core.processes.watchdog import unusable_temporary
from core.runs.paths import RunPaths
from model_specs.model_folder import stored_parameters
from rollout.inference.gpus import check_gpus
from rollout.inference.registry import BACKENDS
from rollout.plugins import python_path

_ANSWER_SECONDS = 60.0
_FEWEST_FILES = 512
_LARGEST_FILE = 1 << 40
_CHECKPOINT_BYTES = 12
"""Bytes of a parameter in a recover checkpoint, at least: its value and the two moments of Adam."""


def _monitors(config: ExperimentConfig) -> Iterator[Problem]:
    """Yield trackers whose library, an extra, is missing, or whose key is: Weights & Biases would ask for it on the
    terminal."""
    wanted = {"wandb": config.wandb.is_on, "mlflow": config.monitor.uses_mlflow}
    keys = {"wandb": "wandb.mode", "mlflow": "monitor.mlflow_uri"}
    for name in (name for name, is_wanted in wanted.items() if is_wanted):
        if importlib.util.find_spec(name) is None:
            yield Problem(key=keys[name], message=f"{name} is not installed: pip install -e '.[{name}]'")
    if config.wandb.logs_in and not _has_wandb_key(config.external_configs.environment()):
        message = "no API key: export WANDB_API_KEY=..., or run `wandb login`; or write offline, or disabled"
        yield Problem(key=keys["wandb"], message=message)


def _has_wandb_key(variables: Mapping[str, str]) -> bool:
    """Return whether there is a key where `wandb` searches without a terminal: the environment, then the netrc file of
    `wandb login`."""
    if variables.get("WANDB_API_KEY"):
        return True
    host = urlsplit(variables.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(variables.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _fileroot(config: ExperimentConfig) -> Iterator[Problem]:
    """Yield folders that cannot be written, or a disk without room for one recover checkpoint."""
    paths, message = RunPaths.of(config), ""
    # Of one problem with the folder that all are in, one message.
    for existing in dict.fromkeys(map(_existing, (paths.logs, paths.checkpoints, paths.recover))):
        try:
            # Writing is the only test that knows about read-only mounts, quotas and root; the file has no name.
            with tempfile.TemporaryFile(dir=existing) as file:
                file.write(b"\0" * 4096)
        except OSError as error:
            message = (
                f"{paths.root}: cannot write in {existing}: {error.strerror}; set it to a folder that you may write"
            )
            yield Problem(key="external_configs.cluster_config.fileroot", message=message)
    if config.recovers and not message and (message := _lack_of_space(config, _existing(paths.recover))):
        yield Problem(key="external_configs.cluster_config.fileroot", message=message)


def _lack_of_space(config: ExperimentConfig, folder: Path) -> str:
    """Return why one recover checkpoint does not fit, or an empty text."""
    trained = {use.path for use in config.model_uses if use.key != "ref"}
    try:
        needed = sum(stored_parameters(path) for path in trained) * _CHECKPOINT_BYTES
        free = shutil.disk_usage(folder).free
    except (OSError, ValueError):
        return ""  # reported with the recipe
    if needed <= free:
        return ""
    return (
        f"one recover checkpoint has {needed / 2**30:.1f} GiB or more, {folder} has {free / 2**30:.1f} GiB free; free "
        "some, set another folder, or write recover_mode=disabled"
    )


def _existing(folder: Path) -> Path:
    """Return the deepest part of a path that is there already."""
    # os.path.exists: Path.exists raises for a folder inside one that may not be entered.
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))


def _temporary(config: ExperimentConfig) -> Iterator[Problem]:
    """Yield a folder for temporary files that a run which starts Ray cannot use."""
    if not joined_cluster(config) and (message := unusable_temporary()):
        yield Problem(key="RAY_TMPDIR" if os.environ.get("RAY_TMPDIR") else "TMPDIR", message=message)


def _limits(config: ExperimentConfig) -> Iterator[Problem]:
    """Yield limits of this shell with which Ray's processes end without a message; a cluster that runs has its own."""
    if joined_cluster(config):
        return
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < _FEWEST_FILES:
        message = f"{files} open files per process; Ray and torch need at least {_FEWEST_FILES}: run `ulimit -n 65536`"
        yield Problem(key="ulimit -n", message=message)
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size != resource.RLIM_INFINITY and size < _LARGEST_FILE:
        message = f"files of at most {size / 2**20:,.0f} MiB; Ray's object store is one file: run `ulimit -f unlimited`"
        yield Problem(key="ulimit -f", message=message)


def _ray(config: ExperimentConfig) -> Iterator[Problem]:
    """Yield problems of a Ray cluster that the run starts: it is this machine alone, and GPUs of each node need a
    machine of their own; processes without GPUs are packed wherever there is room."""
    allocation = _on_own_ray(config)
    if allocation is not None and allocation.n_nodes > 1 and allocation.gpu_slots:
        message = (
            f"needed with n_nodes={allocation.n_nodes}, or Ray is started on this machine alone; run `ray start "
            "--head` on this node and `ray start --address=HOST:PORT` on the others, or set this, or RAY_ADDRESS, to "
            "HOST:PORT"
        )
        yield Problem(key="launch.ray_address", message=message)


def _on_own_ray(config: ExperimentConfig) -> Allocation | None:
    """Return what a job that starts Ray itself runs; None where it joins a cluster."""
    if joined_cluster(config):
        return None
    try:
        return started(config, resolve_allocation(config))
    except AllocationError:
        return None  # reported with the configuration


def _gpus(config: ExperimentConfig) -> Iterator[Problem]:
    """Check that the GPUs of a run on this machine exist and are free; a joined cluster has them elsewhere."""
    allocation = _on_own_ray(config)
    if allocation is None or allocation.n_nodes > 1 or not allocation.gpu_slots:
        return
    try:
        check_gpus(sorted({slot.gpu for slot in allocation.gpu_slots}))
    except ValueError as error:
        yield Problem(key="allocation_mode", message=str(error))


def _software(config: PPOMATHConfig) -> Iterator[Problem]:
    """Yield what generators need and this machine does not have installed; those of a joined cluster run elsewhere."""
    allocation = _on_own_ray(config)
    if allocation is None or allocation.n_nodes > 1 or GENERATOR_ROLE not in allocation.roles:
        return
    backend = BACKENDS[allocation.generator.backend]
    for key, message in backend.host_problems(config.generator.python, config.merged_flags):
        yield Problem(key=key, message=message)


def _connection(config: ExperimentConfig) -> Iterator[Problem]:
    """Check that the Ray cluster to join responds."""
    cluster = joined_cluster(config)
    if cluster is None:
        return
    if cluster.address is None:
        message = f"{cluster}: no Ray cluster was started on this node with `ray start`"
        yield Problem(key="launch.ray_address", message=message)
    elif why := connection_error(cluster):
        message = f"{cluster}: {why}; start Ray there with `ray start --head`, or correct the address"
        yield Problem(key="launch.ray_address", message=message)


def _nodes(config: ExperimentConfig) -> Iterator[Problem]:
    """Check that the Ray cluster to join has the nodes and GPUs of the run, and lets this host in."""
    cluster = joined_cluster(config)
    if cluster is None or cluster.address is None or connection_error(cluster):
        return  # reported by _connection
    try:
        slots = started(config, resolve_allocation(config)).gpu_slots
    except AllocationError:
        return  # reported with the configuration
    command = [sys.executable, "-m", "core.launch.cluster"]  # in a process of its own: Ray loads for seconds
    env = {**os.environ, "PYTHONPATH": python_path()}
    try:
        asked = subprocess.run(
            command, input=json.dumps(asdict(cluster)), env=env, capture_output=True, text=True, timeout=_ANSWER_SECONDS
        )
    except subprocess.TimeoutExpired:
        message = f"{cluster}: Ray does not answer within {_ANSWER_SECONDS:g} s; check `ray status` there"
        yield Problem(key="launch.ray_address", message=message)
        return
    if asked.returncode:
        yield Problem(key="launch.ray_address", message=asked.stderr.strip().rpartition("\n")[2])
        return
    found = sorted((int(node.get("GPU", 0)) for node in json.loads(asked.stdout)), reverse=True)
    needed = sorted(Counter(slot.node for slot in slots).values(), reverse=True)
    if len(found) < len(needed) or any(has < wants for has, wants in zip(found, needed, strict=False)):
        has, wants = (" + ".join(map(str, counts)) for counts in (found, needed))
        message = f"{cluster}: its nodes have {has} GPUs, the run needs {wants}; start Ray on more nodes, or lower "
        yield Problem(key="launch.ray_address", message=message + "n_nodes and n_gpus_per_node")


def host_problems(config: ExperimentConfig, *, connections: bool, nodes: bool) -> Iterator[Problem]:
    """Yield the problems of this host. `connections`: of --dry-run and --preflight as well; a start connects and starts
    servers anyway. `nodes`: those of the Ray cluster too, of --preflight."""
    for check in (_monitors, _fileroot, _temporary, _limits, _ray, _gpus):
        yield from check(config)
    if connections:
        yield from _connection(config)
        yield from _software(config.sampling) if config.sampling is not None else ()
    yield from _nodes(config) if nodes else ()


def is_elsewhere(problems: list[Problem]) -> bool:
    """Return whether these facts mean that the run starts on other machines: paths are theirs, too."""
    return any(problem.key in ("launch.ray_address", "allocation_mode") for problem in problems)
