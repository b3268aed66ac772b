"""Training, evaluation and conversion as Python functions: each runs the same command as the command line.

A run is a process of its own, so the caller's process may have imported torch or CUDA already. Invariant: the command
runs the code of this installation, whatever packages the working folder holds.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import yaml

from core.checks import run_checks
from core.checks.rules import load_config as _load
from core.config.experiments import EXPERIMENTS, ExperimentConfig, PPOMATHConfig
from core.config.parsing.problems import ConfigError, Problem
from core.config.parsing.yaml_tree import Table
from core.monitoring.logs import DRIVER_LOG
from core.monitoring.metrics import read_rows
from core.monitoring.samples import Sample, read_samples
from core.processes.supervise import EXIT_CODES
from core.runs.paths import RunPaths
from core.runs.record import newest_model
from core.stages import stages_of
from rollout.plugins import functions_folder, make_state_folder, python_path, refuse_while_importing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_MODULE = '''"""{name}, by value, as slipstream was given it in Python {version}."""

import base64
import pickle

{name} = pickle.loads(base64.b85decode({data!r}))
'''


def import_path(found: Callable[..., object]) -> str:
    """Return "module:name" of a function, class or callable object, as configuration keys take it.

    Raises ValueError for an object that holds what cannot be passed to another process, such as a lock or an open file.
    """
    module, name = getattr(found, "__module__", None), getattr(found, "__qualname__", "")
    is_named = (
        isinstance(name, str) and name.isidentifier() and getattr(sys.modules.get(module or ""), name, 0) is found
    )
    return f"{module}:{name}" if is_named and module != "__main__" else _by_value(found)


def _by_value(found: Callable[..., object]) -> str:
    """Write an object as a module and return its import path."""
    name = _name(found)
    try:
        data = cloudpickle.dumps(found)
    except Exception as error:  # noqa: BLE001 - pickling raises anything
        raise ValueError(
            f"{name}: cannot be passed to the processes of a run ({type(error).__name__}: {error}); it uses an object "
            "that belongs to this process: create that in the function, or import the function from a module"
        ) from None
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    text = _MODULE.format(name=name, version=version, data=base64.b85encode(data).decode())
    module = f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    folder = functions_folder()
    make_state_folder(folder)
    descriptor, new = tempfile.mkstemp(dir=folder)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(new, folder / f"{module}.py")
    return f"{module}:{name}"


def _name(found: object) -> str:
    """Return an identifier for an object: its own name, that of what it wraps, or that of its class."""
    while isinstance(found, functools.partial):
        found = found.func
    name = getattr(found, "__name__", type(found).__name__)
    return name if name.isidentifier() else f"{name.strip('<>')}_function"


def script_folder() -> list[str]:
    """Return the folder of the script that runs, from which it imports its own modules; empty in a notebook."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return [str(Path(file).resolve().parent)] if file else []


ConfigSource = str | Path | Mapping[str, object]
"""A YAML file, or the same tree as a mapping; keys may be dotted ("ppo.kl_ctl")."""


class RunError(RuntimeError):
    """A command ended with an exit code other than 0. `code` is that exit code, `cause` the last error of its log."""

    def __init__(self, message: str, code: int, cause: str = "") -> None:
        super().__init__(f"{message}: {cause}" if cause else message)
        self.code, self.cause = code, cause


@dataclass(frozen=True, kw_only=True, repr=False)
class Run:
    """A finished run: its configuration and its output folders."""

    config: ExperimentConfig
    logs: Path
    checkpoints: Path
    recover: Path

    def __repr__(self) -> str:
        rows = self.metrics()
        return f"<Run {self.config.run_name}: {int(rows[-1]['step']) if rows else 0} steps, {self.logs}>"

    @property
    def model(self) -> Path | None:
        """The folder of the newest saved model, in the format of Hugging Face; None without one."""
        return newest_model(RunPaths(logs=self.logs, checkpoints=self.checkpoints, recover=self.recover))

    def samples(self) -> list[Sample]:
        """Return the sampled answers of samples.jsonl, oldest first."""
        return list(read_samples(self.logs)) if (self.logs / "samples.jsonl").exists() else []

    def plot(self, path: str | Path | None = None) -> Figure:
        """Return a figure of the mean reward, or the loss, over the steps; write it to `path` where that is given."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 3.5), layout="constrained")
        axes = figure.subplots()
        rows = [row for row in self.metrics() if "time/step" in row]
        name = "reward/mean" if rows and "reward/mean" in rows[0] else "loss"
        axes.plot([row["step"] for row in rows], [row[name] for row in rows])
        axes.set(xlabel="step", ylabel=name, title=self.config.run_name)
        if path is not None:
            figure.savefig(path)
        return figure

    def metrics(self) -> list[dict[str, float]]:
        """Return the rows of logs/metrics.jsonl, oldest first: one for each step, and one for each evaluation."""
        return read_rows(self.logs / "metrics.jsonl")


def load_config(config: ConfigSource, *, experiment: str = "ppo-math", **overrides: object) -> ExperimentConfig:
    """Read and check a configuration without starting anything.

    `overrides` are keys with their values; dotted keys are passed as `**{"ppo.kl_ctl": 0.0}`. A function or class as a
    value becomes its import path ("module:name"), also one of a notebook, a text stays the same text. Raises
    ConfigError (a ValueError) that lists every problem. Of several `stages`, all are checked and the last is returned.
    """
    return _checked(config, experiment, overrides)[1][-1]


def train(
    config: ConfigSource,
    *,
    experiment: str = "ppo-math",
    on_step: Callable[[dict[str, float]], object] | None = None,
    **overrides: object,
) -> Run:
    """Run an experiment to its end and return where it wrote; its output goes to this process's terminal.

    Arguments as in load_config(). `on_step` is called with each new row of metrics.jsonl, in this thread; what it
    raises ends the run, which saves first. Several `stages` run one after the other; the last one is returned. Raises
    ConfigError for bad input before anything starts, RunError when the run fails, and KeyboardInterrupt after Ctrl-C
    once the run has saved.
    """
    refuse_while_importing()
    trial, checked = _checked(config, experiment, overrides)
    folders = [RunPaths.of(each) for each in checked]
    with _arguments(config, overrides) as (file, words):
        words.append(f"trial_name={trial}")  # its default is the time of this call
        rows = [_NewRows(paths.logs / "metrics.jsonl", on_step) for paths in folders] if on_step else []
        code = _run("core.quickstart", [experiment, "--config", str(file), *words], meanwhile=rows)
    if code:
        why = EXIT_CODES.get(code, "killed by a signal")
        cause = _last_error([paths.logs / DRIVER_LOG for paths in folders])
        raise RunError(f"{experiment} ended with exit code {code} ({why})", code, cause)
    paths = folders[-1]
    return Run(config=checked[-1], logs=paths.logs, checkpoints=paths.checkpoints, recover=paths.recover)


def evaluate(model: str | Path, output: str | Path, *, data: Sequence[str], **options: object) -> list[dict[str, Any]]:
    """Evaluate a model on benchmarks (names, or paths of files) and return the results, one row a benchmark.

    `options` are those of `python -m tools.eval`, such as n_sampling=8 or temperature=0.6. Raises RunError.
    """
    words = ["--model_path", str(model), "--output_path", str(output), "--data_names", ",".join(map(str, data))]
    code = _run("tools.eval", [*words, *_flags(options)])
    if code:
        raise RunError(f"evaluation of {model} ended with exit code {code}", code)
    written: dict[str, list[dict[str, Any]]] = json.loads((Path(output) / "results.json").read_text(encoding="utf-8"))
    return written["results"]


def convert(checkpoint: str | Path, output: str | Path, **options: object) -> Path:
    """Convert a Megatron checkpoint to a Hugging Face folder, or back with to_megatron=True; return `output`.

    `options` are those of `python -m tools.convert`, such as dtype="bfloat16". Raises RunError.
    """
    words = ["--checkpoint_path", str(checkpoint), "--output_path", str(output), *_flags(options, dash=True)]
    code = _run("tools.convert", words)
    if code:
        raise RunError(f"conversion of {checkpoint} ended with exit code {code}", code)
    return Path(output)


def _checked(
    config: ConfigSource, experiment: str, overrides: Mapping[str, object]
) -> tuple[str, list[ExperimentConfig]]:
    """Return the trial name and the configuration, or those of several stages, in order. Raises ConfigError with the
    problems of all."""
    if experiment not in EXPERIMENTS:
        message = f"must be one of {', '.join(EXPERIMENTS)}, got {experiment!r}"
        raise ConfigError([Problem(key="experiment", message=message)])
    problems: list[Problem] = []
    configs: list[ExperimentConfig] = []
    with _arguments(config, overrides) as (file, words):

        def shown(problem: Problem) -> Problem:
            return _of_mapping(problem, file) if isinstance(config, Mapping) else problem

        def check(experiment: str, source: Path | Table, words: Sequence[str]) -> list[Problem]:
            try:
                loaded = _load(experiment, source, words)
                configs.append(loaded.config)
                return [shown(problem) for problem in run_checks(loaded)]
            except ConfigError as error:
                return [shown(problem) for problem in error.problems]

        try:
            stages = stages_of(file, words) if experiment == PPOMATHConfig.NAME else []
        except ConfigError as error:
            raise ConfigError([shown(problem) for problem in error.problems]) from None
        for stage in stages:
            problems += map(stage.named, check(stage.experiment, stage.tree, ()))
        if not stages:
            problems = check(experiment, file, words)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    trial = RunPaths.of(configs[-1]).trial
    return trial.removesuffix(f".{stages[-1].name}") if stages else trial, configs


@contextmanager
def _arguments(config: ConfigSource, overrides: Mapping[str, object]) -> Iterator[tuple[Path, list[str]]]:
    """Yield the configuration as a file, and the overrides as words of the command line."""
    if isinstance(config, Mapping) and "stages" in overrides:  # no override: problems in it have places of their own
        config = {**config, "stages": overrides["stages"]}
        overrides = {key: value for key, value in overrides.items() if key != "stages"}
    words = [f"{key}={_word(value)}" for key, value in overrides.items()]
    if not isinstance(config, Mapping):
        yield Path(config), words
        return
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        file = Path(folder) / "config.yaml"
        dotted = {key: value for key, value in config.items() if "." in key and key not in overrides}
        tree = {key: _plain(value) for key, value in config.items() if "." not in key}
        file.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
        yield file, [*(f"{key}={_word(value)}" for key, value in dotted.items()), *words]


def _of_mapping(problem: Problem, file: Path) -> Problem:
    """Return a problem of a mapping without lines of the file that it was written to."""
    line = re.compile(rf"{re.escape(str(file))}(:\d+)?")
    return replace(problem, where=line.sub("config", problem.where), message=line.sub("config", problem.message))


def _word(value: object) -> str:
    """Convert a value to YAML. A text stays the same text, also where YAML would read a section or a comment in it;
    null, numbers and ${references} have their meaning."""
    value = _plain(value)
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return value if _is_plain(value) else yaml.safe_dump(value, default_style='"', width=math.inf).removesuffix("\n")


def _plain(value: object) -> object:
    """Return a value of a configuration in the types of YAML: a function or class as its import path, a path as text,
    a scalar of numpy or torch as a number."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if callable(value):
        return import_path(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if hasattr(value, "item") else value


def _is_plain(text: str) -> bool:
    """Return whether YAML reads a text without quotes as it is."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return False
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value == text


def _flags(options: Mapping[str, object], *, dash: bool = False) -> list[str]:
    """Convert options to words: True is a bare flag, False and None are left out."""
    words = []
    for name, value in options.items():
        flag = "--" + (name.replace("_", "-") if dash and name != "checkpoint_path" else name)
        if value is True:
            words.append(flag)
        elif value is not False and value is not None:
            words += [flag, str(value)]
    return words


class _NewRows:
    """Passes each new row of a file of metrics on. The file may be written anew from some of its rows: those of the
    recover checkpoint that an attempt continues from."""

    def __init__(self, file: Path, on_step: Callable[[dict[str, float]], object]) -> None:
        self._file, self._on_step = file, on_step
        self._place = (0, 0)
        """Inode and size of what was read."""
        self._known: list[int] = []
        """Hashes of these rows."""
        self._read()

    def __call__(self) -> None:
        for row in self._read():
            self._on_step(json.loads(row))

    def _read(self) -> list[bytes]:
        """Return the rows that were not there before."""
        if not self._file.exists():
            return []
        found, (inode, done) = self._file.stat(), self._place
        begin = done if found.st_ino == inode and found.st_size >= done else 0
        with open(self._file, "rb") as file:
            file.seek(begin)
            whole = file.read().rpartition(b"\n")[0]
        rows = whole.splitlines()
        kept = 0
        if begin == 0:
            kept = sum(
                1 for _ in takewhile(lambda pair: hash(pair[0]) == pair[1], zip(rows, self._known, strict=False))
            )
            del self._known[kept:]
        self._known.extend(map(hash, rows[kept:]))
        self._place = (found.st_ino, begin + len(whole) + bool(whole))
        return rows[kept:]


def _last_error(logs: Sequence[Path]) -> str:
    """Return the last line with an error of the newest of these logs, without its time; empty without one."""
    written = [log for log in logs if log.exists()]
    if not written:
        return ""
    lines = max(written, key=os.path.getmtime).read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.partition(" ERROR: ")[2] for line in reversed(lines) if " ERROR: " in line), "")


def _run(module: str, words: Sequence[str], *, meanwhile: Sequence[Callable[[], object]] = ()) -> int:
    """Run a module of this installation in a process of its own; return its exit code. Each of `meanwhile` is called
    twice a second, and after the end. Raises RuntimeError where a script that a run imports calls it."""
    refuse_while_importing()
    env = os.environ | {"PYTHONPATH": python_path(*script_folder())}
    with subprocess.Popen([sys.executable, "-P", "-m", module, *words], env=env) as process:
        try:
            while process.returncode is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.5 if meanwhile else None)
                for call in meanwhile:
                    call()
            return process.returncode
        except BaseException:
            process.terminate()  # the command ends its own processes in order
            process.wait()
            raise
