"""Recover checkpoints of a trial as files: which there are, which run wrote them, and whether they are whole.

    {fileroot}/recover/<user>/<experiment>/<trial>/globalstep{N}/run.json        identity and state of the run
                                                                 manifest.json   size and checksum of every file
                                                                 COMMITTED       size and checksum of manifest.json;
                                                                                 appears last, by rename

Invariant: a folder that `verify` accepts holds, byte for byte, what was there when it was sealed. Checksums are
BLAKE2b: in the standard library, without Python's lock while it runs, and wide enough that no damage passes by chance.
Blocks of a file are hashed side by side.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from config_schema import nearest_names
from core.config.common import RunIdentity
from model_specs.untrusted import UntrustedFileError, read_json_object

State = Mapping[str, Any]
"""What a file of a checkpoint or of a run holds, by name."""
CONFIG_KEYS = {"group_size": "group_size", "n_nodes": "n_nodes", "algorithm": "algorithm.name"}
"""Field of RunIdentity -> the key that sets it; that of train_bs_n_seqs is ExperimentConfig.batch_key."""

_NAME = re.compile(r"globalstep(\d+)")
MARKER = "COMMITTED"
"""What appears last in a recover checkpoint."""
MAX_STATE_BYTES, MAX_STATE_DEPTH = 1 << 34, 400
"""Of files that hold the state of a run: rows of data sets, as deep as those may be, inside lists of the state."""


def recover_checkpoints(folder: Path) -> list[Path]:
    """Return the recover checkpoints in a folder, the newest last. None has been verified."""
    if not folder.is_dir():
        return []
    named = [(int(m[1]), path) for path in folder.iterdir() if (m := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(named)]


def has_checkpoint(recover: Path) -> bool:
    """Return whether a trial, by its folder `recover`, has a recover checkpoint that was written to its end."""
    return bool(committed(recover))


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a recover checkpoint that was written to its end."""
    return (folder / MARKER).exists()


def committed(recover: Path) -> list[Path]:
    """Return the marker files of the recover checkpoints that were written to their end."""
    return list(recover.glob(f"globalstep*/{MARKER}"))


def near_trials(recover: Path) -> str:
    """Return a note, in brackets, of the trials of the user, as experiment/trial, that have a recover checkpoint and a
    name like that of the folder `recover`, the most similar first; empty where there are none."""
    user = recover.parent.parent
    others = [trial for trial in user.glob("*/*") if trial != recover and has_checkpoint(trial)]
    names = [f"{trial.parent.name}/{trial.name}" for trial in others]
    near = nearest_names(f"{recover.parent.name}/{recover.name}", names, most=3)
    return f" (trials with one: {', '.join(near)})" if near else ""


def read_run(checkpoint: Path) -> tuple[RunIdentity, Mapping[str, object]]:
    """Return the identity of the run that wrote a checkpoint, and its driver's state.

    Raises OSError, and ValueError, TypeError or LookupError for a file that no run wrote."""
    saved = _read(checkpoint / "run.json")
    state = dict(saved["state"])
    for key in ("step", "version"):
        number = state.get(key, 0)
        if type(number) is not int or not 0 <= number < 2**53:
            raise ValueError(f"{key}={number!r} is no number of steps")
    return RunIdentity(**saved["identity"]), state


def read_stream(checkpoint: Path) -> tuple[State, State]:
    """Return what a checkpoint holds of its data set, a PromptDataset's state or that of the rows of sft and dpo, and
    the settings of its experience (rollout/experience/rules.py), which sft and dpo do not have.

    Raises as read_run()."""
    saved = _read(checkpoint / "rollout.json")
    if "producer" not in saved:
        return dict(saved), {}
    return dict(saved["producer"]["dataset"]), dict(saved["producer"]["settings"])


def _read(path: Path) -> State:
    return read_json_object(path, max_bytes=MAX_STATE_BYTES, max_depth=MAX_STATE_DEPTH)


def cannot_continue(checkpoint: Path) -> str:
    """Return why changes of the identity are refused, and the ways out."""
    return (
        f"{checkpoint} cannot be continued exactly with other values. Restore them; or set recover_ignore_changes=true "
        "to keep model and optimizer and drop the rest; or start a new run with another trial_name or "
        "recover_mode=disabled"
    )


def ends_too_early(end: str, step: int, checkpoint: Path, *, way_out: str) -> str:
    """Return why a run of this length cannot continue from a checkpoint of the later step `step`, and the ways
    out."""
    return (
        f"{end} must be at least {step}, the step that the run continues from ({checkpoint}). {way_out}; or start a "
        "new run with another trial_name or recover_mode=disabled"
    )


def too_few_steps(total: int, step: int, checkpoint: Path) -> str:
    """Return ends_too_early() of exp_ctrl.total_train_steps."""
    way_out = (
        f"Set it to {step} to save the model of that step, or higher to train on, with as many exp_ctrl."
        "total_train_epochs as that takes"
    )
    return ends_too_early(str(total), step, checkpoint, way_out=way_out)


MANIFEST = "manifest.json"
_BLOCK_BYTES = 64 * 2**20
_READ_BYTES = 2**20
_DIGEST_BYTES = 16
_THREADS = min(16, os.cpu_count() or 1)


def sync(path: Path) -> None:
    """Return when the file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class DamagedError(ValueError):
    """A folder is not what was sealed; the message contains the file and the reason."""


@dataclass(frozen=True)
class Seal:
    """Size in bytes and checksum of one file."""

    size: int
    checksum: str


def seal(folder: Path) -> int:
    """Bring every file of `folder` to the disk, write the manifest, then the marker. Returns the bytes sealed."""
    with ThreadPoolExecutor(_THREADS) as pool:
        files = {}
        for path in _files(folder):
            sync(path)
            files[path.relative_to(folder).as_posix()] = _seal(path, pool)
        text = json.dumps({"files": {name: asdict(entry) for name, entry in files.items()}}, indent=1)
        (folder / MANIFEST).write_text(text)
        sync(folder / MANIFEST)
        unfinished = folder / f".{MARKER}"
        unfinished.write_text(json.dumps(asdict(_seal(folder / MANIFEST, pool))))
    sync(unfinished)
    for inner in {path.parent for path in _files(folder)}:
        sync(inner)
    os.rename(unfinished, folder / MARKER)
    sync(folder)
    return sum(entry.size for entry in files.values())


def verify(folder: Path, *, inside: str = "") -> None:
    """Raise DamagedError unless every file is present, whole and unchanged, the manifest and the marker included.
    `inside`: only those of this folder in it."""
    with ThreadPoolExecutor(_THREADS) as pool:
        _compare(folder / MANIFEST, _read_json(folder / MARKER), pool)
        files = _read_json(folder / MANIFEST).get("files")
        if not isinstance(files, dict) or not files:
            raise DamagedError(f"{MANIFEST} lists no files")
        for name, entry in files.items():
            if not inside or name.startswith(f"{inside}/"):
                _compare(folder / name, entry, pool)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in (MANIFEST, f".{MARKER}"))


def _seal(path: Path, pool: Executor) -> Seal:
    """Return the checksum of a file: that of the checksums of its blocks."""
    size = path.stat().st_size
    blocks = pool.map(lambda start: _hash_block(path, start), range(0, size, _BLOCK_BYTES))
    return Seal(size, hashlib.blake2b(b"".join(blocks), digest_size=_DIGEST_BYTES).hexdigest())


def _hash_block(path: Path, start: int) -> bytes:
    """Hash a block in small pieces: a thread does not hold a whole block."""
    checksum = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    with open(path, "rb") as f:
        f.seek(start)
        for _ in range(_BLOCK_BYTES // _READ_BYTES):
            checksum.update(f.read(_READ_BYTES))
    return checksum.digest()


def _compare(path: Path, expected: Mapping[str, object], pool: Executor) -> None:
    try:
        size, checksum = expected["size"], expected["checksum"]
        if path.stat().st_size != size:
            raise DamagedError(f"{path.name} has {path.stat().st_size} bytes instead of {size}")
        if _seal(path, pool).checksum != checksum:
            raise DamagedError(f"{path.name} is damaged: its checksum differs")
    except FileNotFoundError:
        raise DamagedError(f"{path.name} is missing") from None
    except (OSError, KeyError, TypeError) as error:
        raise DamagedError(f"{path.name} cannot be checked: {error!r}") from error


def _read_json(path: Path) -> dict[str, object]:
    try:
        return read_json_object(path)
    except FileNotFoundError:
        raise DamagedError(f"{path.name} is missing: it was never committed") from None
    except (OSError, UntrustedFileError) as error:
        raise DamagedError(f"{path.name} cannot be read: {error}") from error
