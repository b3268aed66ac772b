"""The model of an evaluation: what kind of folder it is, and the generators that run it."""

import asyncio
import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from allocation import CPU, GPU
from model_specs.untrusted import UntrustedFileError, read_json_object
from rollout.inference.backend import BackendSettings, GeneratorConfig, WeightFormat
from rollout.inference.gpus import query_gpus
from rollout.inference.registry import BACKENDS, DEFAULT_BACKEND
from rollout.inference.sglang.arguments import is_installed
from rollout.types import Generator
from tools.convert import CRITIC, ENGINE_NAMES, default_engine, engine_folders
from tools.eval.data import EvalError, EvalFailure

logger = logging.getLogger(__name__)

Backend = Literal["auto", "sglang", "embedded"]
DEFAULT_DTYPES: Mapping[str, WeightFormat] = {"sglang": "bfloat16", "embedded": "float32"}

SETTINGS = "settings.json"
"""File in the evaluation's folder with what settles the answers."""
CONVERTED = "model"
"""Folder in the evaluation's for a converted checkpoint."""
CONVERTING = f".{CONVERTED}.converting"
"""What the folder of a conversion under way has in its name."""
_MADE_FROM = "made_from.json"
"""File in a conversion with what it was made from."""
TEMPORARY = ".new"
"""What the name of a file that is being written ends with."""
_CONVERT_REFUSED = 2
"""Exit code of tools.convert for bad input."""


@dataclass(frozen=True, kw_only=True)
class GeneratorChoice:
    """Which generators answer."""

    backend: Backend
    tensor_parallel: int
    max_running: int
    dtype: WeightFormat | None
    sglang_python: Path | None
    sglang: Mapping[str, str | int | float | bool]
    """Server arguments by name."""

    def resolved(self) -> str:
        """Return the name of the backend; auto: the default of GPUs, if there are any, or of the CPU."""
        return self.backend if self.backend != "auto" else DEFAULT_BACKEND[GPU if query_gpus() else CPU]

    def check(self) -> None:
        """Raise EvalError where its servers cannot start, or not with these arguments."""
        if (name := self.resolved()) != "sglang":
            return
        if self.sglang_python is None and not is_installed():
            raise EvalError(
                "--generator sglang: SGLang is not installed here; run pip install 'slipstream[gpu]', or name an "
                "interpreter that has it with --sglang_python"
            )
        if self.sglang_python is not None and not os.access(self.sglang_python, os.X_OK):
            raise EvalError(f"--sglang_python {self.sglang_python}: no such interpreter")
        for flag, message in BACKENDS[name].refused_flags(self.sglang):
            raise EvalError(f"--sglang {flag}: {message}")


def find_model(path: Path) -> tuple[Path, bool]:
    """Return (folder, whether it is a Hugging Face one): the given folder (a saved step is one), or the checkpoint in
    it that is to be converted: of a recover checkpoint its only engine, or its actor. Raises EvalError for anything
    else."""
    if not path.is_dir():
        raise EvalError(f"--model_path {path}: no such folder")
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        return path, True
    if (path / "metadata.json").is_file():
        return path, False
    engines = engine_folders(path)
    name = default_engine(engines)
    if name is not None and name != CRITIC:
        return engines[name], False
    if engines:
        why = "a critic alone, which generates nothing" if name else "several engines and no actor"
        raise EvalError(f"--model_path {path} has {why}: {', '.join(engines)}; give the folder of one")
    raise EvalError(
        f"--model_path {path}: neither a Hugging Face folder (config.json and *.safetensors) nor a recover "
        f"checkpoint (metadata.json, or ENGINE/metadata.json of {ENGINE_NAMES}); {_content(path)}"
    )


def _content(path: Path) -> str:
    """Return what a folder without a model contains, and which of it may be a model."""
    names = sorted(p.name for p in path.iterdir())
    steps = [name for name in names if "globalstep" in name and (path / name).is_dir()]
    if steps:
        return f"it contains {', '.join(steps)}: give one of these folders"
    return f"it contains {', '.join(names[:10])}{', ...' if len(names) > 10 else ''}" if names else "it is empty"


def hugging_face_folder(path: Path, output: Path) -> Path:
    """Return the folder itself where it is a Hugging Face one; a recover checkpoint is converted into `output`/model
    first, unless what is there was made from it as it is now. Raises EvalError for anything else, EvalFailure where the
    conversion is ended."""
    checkpoint, is_ready = find_model(path)
    if is_ready:
        return path
    converted = output / CONVERTED
    source = {"checkpoint": str(checkpoint.resolve()), "weights": weights_identity(path)}
    if converted.exists():
        if not is_conversion(converted):
            raise EvalError(
                f"{converted} is where --model_path {path} would be converted to, and no conversion itself (it has no "
                f"{_MADE_FROM}); move it away, or give another --output_path"
            )
        if read_json(converted / _MADE_FROM) == source:
            return converted
        logger.info("%s was made from another checkpoint, or from this one before it changed", converted)
        shutil.rmtree(converted)
    for left_over in (p for p in output.iterdir() if CONVERTING in p.name):
        shutil.rmtree(left_over)
    _convert(path, checkpoint, output / CONVERTING)
    write_json(output / CONVERTING / _MADE_FROM, source)
    (output / CONVERTING).rename(converted)  # never without what it was made from
    return converted


def is_conversion(folder: Path) -> bool:
    """Return whether an evaluation converted a checkpoint into it."""
    return (folder / _MADE_FROM).is_file()


def weights_identity(path: Path) -> str:
    """Return an identifier of the model as it was given, not of its conversion; it differs after any of its files
    changed."""
    folder, is_ready = find_model(path)
    files = [p for p in folder.glob("*.safetensors" if is_ready else "**/*") if p.is_file()]
    stats = sorted((str(p.relative_to(folder)), p.stat().st_size, p.stat().st_mtime_ns) for p in files)
    return hashlib.blake2b(repr(stats).encode()).hexdigest()[:16]


def _convert(path: Path, checkpoint: Path, target: Path) -> None:
    command = [sys.executable, "-m", "tools.convert", "--checkpoint_path", str(checkpoint)]
    done = subprocess.run([*command, "--output_path", str(target)], capture_output=True, text=True)
    message = (done.stderr.strip().splitlines() or ["no error message"])[-1].removeprefix("error: ")
    if done.returncode == _CONVERT_REFUSED:
        raise EvalError(f"--model_path {path}: {message}")
    if done.returncode:
        how = f"exit code {done.returncode}" if done.returncode > 0 else signal.Signals(-done.returncode).name
        raise EvalFailure(f"--model_path {path}: its conversion was ended by {how}: {message}")


def server_arguments(given: Sequence[str]) -> dict[str, str | int | float | bool]:
    """Parse KEY=VALUE words; a value is a number or true/false where it reads as one. Raises EvalError."""
    arguments: dict[str, str | int | float | bool] = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise EvalError(f"--sglang {word}: write KEY=VALUE, as mem_fraction_static=0.8")
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = value
        arguments[name] = parsed if isinstance(parsed, bool | int | float) else value
    return arguments


def read_json(path: Path) -> dict[str, Any]:
    """Return a json object, or an empty one where the file is missing. Raises EvalError for anything else."""
    try:
        return read_json_object(path) if path.exists() else {}
    except UntrustedFileError as error:
        raise EvalError(f"{path} is damaged: {str(error).removeprefix(f'{path}: ')}") from error


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write all of a file, or leave it unchanged, even if this process ends in the middle."""
    temporary = path.with_name(path.name + TEMPORARY)
    with temporary.open("w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


async def start_generators(stack: AsyncExitStack, model: Path, choice: GeneratorChoice, logs: Path) -> list[Generator]:
    """Start the generators, which the stack closes, and return them when they are ready. Raises EvalError, ValueError
    and GeneratorStartError."""
    name = choice.resolved()
    backend, tp = BACKENDS[name], choice.tensor_parallel
    gpus = [gpu.index for gpu in query_gpus()] if GPU in backend.capabilities.devices else []
    if gpus and len(gpus) < tp:
        raise EvalError(f"--tensor_parallel {tp}: this machine has {len(gpus)} GPUs; give at most that")
    places = [tuple(gpus[i : i + tp]) for i in range(0, len(gpus) - tp + 1, tp)] or [()]
    logs.mkdir(parents=True, exist_ok=True)
    settings = BackendSettings(
        model_path=str(model),
        dtype=choice.dtype or DEFAULT_DTYPES[name],
        device=GPU if gpus else CPU,
        tp=tp,
        config=GeneratorConfig(
            max_running=choice.max_running,
            flags=dict(choice.sglang),
            python=str(choice.sglang_python or sys.executable),
        ),
    )
    starting = [
        backend.start(replace(settings, name=f"generator-{i}", log_file=logs / f"generator-{i}.log", gpus=place))
        for i, place in enumerate(places)
    ]
    started = await asyncio.gather(*starting, return_exceptions=True)
    failures = [failure for failure in started if isinstance(failure, BaseException)]
    generators = [generator for generator in started if not isinstance(generator, BaseException)]
    for generator in generators:
        stack.push_async_callback(generator.close)
    if failures:
        raise failures[0]
    return list(generators)
