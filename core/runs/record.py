"""What a run was started with, in its log folder: the resolved configuration, the command line and the versions.

    {logs}/config.yaml      every key with its value; `--config` reads it. config.1.yaml, config.2.yaml: those of
                            earlier starts that differed, the oldest first
    {logs}/starts.jsonl     one row for each start of the trial: time, command line, folder, host, versions
    {logs}/complete.json    after the end of training: the length of the run, its models and its last recover checkpoint

Callers pass configuration and command line with their secrets masked.
"""

import hashlib
import json
import os
import platform
import re
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from importlib import metadata
from itertools import count
from pathlib import Path

import yaml

from core.config.common import CommonExperimentConfig
from core.config.migrate import leaves
from core.runs.checkpoints import State, is_checkpoint, recover_checkpoints
from core.runs.paths import RunPaths
from rollout.plugins import make_state_folder, state_folder

CONFIG, STARTS, COMPLETE = "config.yaml", "starts.jsonl", "complete.json"
_MAX_CHANGES = 10
_MODEL = re.compile(r"epoch\d+epochstep\d+globalstep(\d+)")


def command_line(argv: Sequence[str] | None) -> list[str]:
    """Return the words that start this run again; `argv` are those of a caller in Python, None: those of the
    process."""
    if argv is None:
        return list(sys.orig_argv)
    return [sys.executable, "-m", "core.quickstart", *argv]


def write_record(experiment: str, config: Mapping[str, object], paths: RunPaths, command: Sequence[str]) -> None:
    """Write configuration, command line and versions of a start. A configuration that differed stays beside the new
    one. Raises OSError."""
    file = paths.logs / CONFIG
    if changes_since(paths, config):
        numbered = (file.with_suffix(f".{number}.yaml") for number in count(1))
        file.rename(next(path for path in numbered if not path.exists()))
    text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    text = f"# {experiment}: every key of the newest start of this trial\n{text}"
    file.write_text(text, encoding="utf-8")
    remember(text)
    (paths.logs / COMPLETE).unlink(missing_ok=True)
    with open(paths.logs / STARTS, "a+b") as starts:
        starts.seek(0)
        starts.truncate(starts.read().rfind(b"\n") + 1)  # a row that was cut off
        starts.write(json.dumps(_start(command)).encode() + b"\n")


def remember(text: str) -> None:
    """Note that a run of this user wrote a configuration; nothing where this user has no folder for it."""
    with suppress(OSError, RuntimeError):  # no home, or none that can be written
        mark = _mark(text)
        make_state_folder(mark.parent)
        mark.touch()


def is_own(file: Path) -> bool:
    """Return whether a run of this user wrote `file`, and it was not changed since: one that came with a downloaded
    folder may name code to run."""
    try:
        return _mark(file.read_text(encoding="utf-8")).stat().st_uid == os.getuid()
    except (OSError, RuntimeError, UnicodeDecodeError):
        return False


def _mark(text: str) -> Path:
    """Return the file that exists for a text that a run of this user wrote. Raises RuntimeError without a home."""
    return state_folder() / "configs" / hashlib.sha256(text.encode()).hexdigest()


def changes_since(paths: RunPaths, config: Mapping[str, object]) -> list[str]:
    """Return what differs from the configuration of the last start, as "key: before -> now"."""
    old, new = settings_of(paths.logs), dict(leaves(config))
    if not old:
        return []
    changed = [f"{key}: {old.get(key)} -> {value}" for key, value in new.items() if old.get(key) != value]
    more = [f"and {len(changed) - _MAX_CHANGES} more"] if len(changed) > _MAX_CHANGES else []
    return changed[:_MAX_CHANGES] + more


def write_complete(paths: RunPaths, end: Mapping[str, int | None]) -> None:
    """Record that training has come to its `end`, the keys that set the length of a run. Without the record, as on a
    full disk, another start finds out after its processes have started."""
    newest = newest_model(paths)
    models = [] if newest is None else [str(m) for m in paths.checkpoints.glob(f"*/{newest.name}")]
    with suppress(OSError):
        record = {"end": end, "models": models, "checkpoint": _newest_checkpoint(paths)}
        (paths.logs / COMPLETE).write_text(json.dumps(record), encoding="utf-8")


def is_complete(paths: RunPaths, end: Mapping[str, int | None]) -> bool:
    """Return whether the trial has come to this `end` already, and still has its models and the recover checkpoint of
    that step: from an earlier one, the run continues."""
    found = _read(paths.logs / COMPLETE)
    if found is None or found.get("end") != end or found.get("checkpoint") != _newest_checkpoint(paths):
        return False
    return all(Path(model, "config.json").is_file() for model in found["models"])


def _newest_checkpoint(paths: RunPaths) -> str | None:
    names = [folder.name for folder in recover_checkpoints(paths.recover) if is_checkpoint(folder)]
    return names[-1] if names else None


def how_to_continue(config: CommonExperimentConfig, paths: RunPaths, command: Sequence[str]) -> str:
    """Return what a user does to continue an interrupted run: the command, or why there is none."""
    model = newest_model(paths)
    if config.recovers:
        return f"Continue with: {shlex.join(_lasting(command, paths))}"
    if model is not None:
        return f"{config.recover_setting}: there is no checkpoint to continue from. The model is in {model}"
    return f"{config.recover_setting}: nothing was saved"


def where_the_model_is(paths: RunPaths) -> str:
    """Return the folder of the newest saved model as a sentence."""
    model = newest_model(paths)
    return f"No model was saved below {paths.checkpoints}." if model is None else f"The model is in {model}"


def newest_model(paths: RunPaths) -> Path | None:
    """Return the folder of the newest model that the trial has saved; the actor's where a critic is trained, too."""
    found = [
        (step, engine.name != "critic", folder)
        for engine in paths.checkpoints.glob("*")
        for step, folder in _models(engine)
    ]
    return max(found)[2] if found else None


def saved_models(engine: Path) -> list[Path]:
    """Return the models that were saved below an engine's folder, oldest step first."""
    return [folder for _, folder in sorted(_models(engine))]


def _models(engine: Path) -> Iterator[tuple[int, Path]]:
    for folder in engine.glob("epoch*globalstep*"):
        if (name := _MODEL.fullmatch(folder.name)) and (folder / "config.json").is_file():
            yield int(name[1]), folder


def _read(file: Path) -> State | None:
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return found if isinstance(found, dict) else None


def settings_of(logs: Path) -> dict[str, object]:
    """Return the configuration of the last start by dotted key; empty where it cannot be read."""
    return dict(leaves(_read(logs / CONFIG) or {}))


def _start(command: Sequence[str]) -> dict[str, object]:
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "versions": {found.name: found.version for found in metadata.distributions()},
    }


def _lasting(command: Sequence[str], paths: RunPaths) -> list[str]:
    """Return the command with the record in place of the temporary configuration file of slipstream.train()."""
    after_config = [False, *(word == "--config" for word in command)]
    return [
        str(paths.logs / CONFIG) if is_file and Path(word).parent.name.startswith("slipstream-") else word
        for is_file, word in zip(after_config, command, strict=False)
    ]
