"""Recover checkpoints: the whole run in one folder, written beside the training, visible only when complete.

    {fileroot}/recover/<user>/<experiment>/<trial>/globalstep{N}/
                                          {engine}/      the trainer's distributed checkpoint, one folder an engine
                                          rollout.json   data cursor, buffer, prompts in flight with their tokens, as
                                                         rollout/experience/serial.py encodes them
                                          rollout.npz    their arrays, end to end: one flat array a dtype
                                          run.json       step, version, and the settings that must not change
                                          manifest.json  size and checksum of each of these files
                                          COMMITTED      seals the manifest (core/runs/checkpoints.py)

`begin` returns when everything is copied to host memory; a thread writes it into a temporary folder and commits that by
one rename. Reading a checkpoint cannot run code. Invariants: what `newest` answers was verified byte for byte and can
be read; a failed write is raised by the next call. `read_state` returns what `write_state` got, types and bits
included, except that numpy scalars become Python numbers.
"""

import json
import logging
import math
import os
import shutil
import threading
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import numpy as np

from allocation import GPU
from core.config.common import RunIdentity
from core.errors import LaunchError, could_not_write, first_line, is_of_disk
from core.processes.signals import raise_if_interrupted
from core.runs.checkpoints import (
    MAX_STATE_BYTES,
    MAX_STATE_DEPTH,
    DamagedError,
    read_run,
    recover_checkpoints,
    seal,
    sync,
    verify,
)
from mcore_adapter.data.planner import PassLimits
from mcore_adapter.memory.out_of_memory import StepOutOfMemory
from model_specs.untrusted import open_regular, read_json
from rollout.experience.serial import Arrays, decode, encode
from rollout.inference.backend import BackendSettings, MemoryFlag
from tracing import add_span

logger = logging.getLogger(__name__)


class RecoverError(ValueError):
    """A checkpoint cannot be used: a file does not hold what a run writes."""


def write_state(folder: Path, name: str, state: object) -> None:
    """Write `{name}.json` and `{name}.npz`. Raises OSError, and TypeError, with the place in the state, for a type that
    has no plain form."""
    arrays = Arrays()
    text = json.dumps(encode(state, arrays, name))
    with open(folder / f"{name}.npz", "wb") as f:
        np.savez(f, **dict(arrays.flat()))  # type: ignore[arg-type]
    (folder / f"{name}.json").write_text(text)


def read_state(folder: Path, name: str) -> object:
    """Return the state that was written. Raises OSError, and RecoverError where the files do not hold one."""
    try:
        tree = read_json(folder / f"{name}.json", max_bytes=MAX_STATE_BYTES, max_depth=MAX_STATE_DEPTH)
        with open_regular(folder / f"{name}.npz") as file, np.load(file, allow_pickle=False) as stored:
            if any(member.compress_type != zipfile.ZIP_STORED for member in stored.zip.infolist()):
                raise ValueError("its arrays are compressed, so that a small file could take all memory")
            return decode(tree, {key: stored[key] for key in stored.files})
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 (damaged zip, JSON and numpy headers raise a dozen types)
        raise RecoverError(
            f"{folder / name}.json and .npz do not hold a saved state: {error!r}; remove {folder} to continue from the "
            "checkpoint before it"
        ) from error


_ROLLOUT = "rollout"
_WRITING = ".writing-"
_REMOVING = ".removing-"
_LOOK_EVERY_SECONDS = 0.2
"""For a signal, while a write is waited for."""
_END_SECONDS = 30.0
"""For a write that is given up to notice it."""

WaitWritten = Callable[[threading.Event], None]
"""Returns when what was begun is on disk, or when the event is set. Raises OSError when it could not be written,
LaunchError when its writer has exited, another RuntimeError when something else went wrong there."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The driver's own state after `step` finished steps; `version` is the version of the trainer's weights."""

    step: int
    version: int
    elapsed_seconds: float
    extra: dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where an attempt begins: a recover checkpoint, or the beginning."""

    state: RunState
    rollout_state: object | None
    checkpoint: Path | None
    identity: RunIdentity | None = None
    """Of the run that wrote the checkpoint."""
    changes: tuple[str, ...] = ()
    """What differs from that run and is let go."""


class RecoverStore:
    """Writes and finds the recover checkpoints of one trial, and keeps the newest `keep`."""

    def __init__(
        self, folder: Path, identity: RunIdentity, *, keep: int = 2, timeout_seconds: float = math.inf
    ) -> None:
        """`timeout_seconds`: for one checkpoint to be on the disk (deadlines.call_seconds)."""
        self._folder = folder
        self._identity = identity
        self._keep = keep
        self._timeout = timeout_seconds
        self._writing = (0, math.inf)  # step, and by when
        self._invalid: set[Path] = set()
        self._writer: threading.Thread | None = None
        self._error: Exception | None = None
        self._stop = threading.Event()

    def newest(self) -> Path | None:
        """Return the newest valid checkpoint; those that are not are skipped with a log line that contains the
        reason."""
        for path in reversed(recover_checkpoints(self._folder)):
            try:
                verify(path)
                _read_run(path)
                read_state(path, _ROLLOUT)
                return path
            except (DamagedError, RecoverError, OSError) as error:
                self._invalid.add(path)
                logger.warning("Recover checkpoint %s is not used: %s. Trying the previous one.", path.name, error)
        return None

    def begin(
        self,
        state: RunState,
        rollout_state: Callable[[], object],
        begin_save: Callable[[Path], WaitWritten],
        *,
        began: float,
    ) -> None:
        """Start one checkpoint; waits for the last one first. `begin_save(folder)` copies the trainer's part and starts
        writing it. `began` is when the trainer stopped for this (time.perf_counter). Raises as `wait`."""
        self.wait()
        waited = time.perf_counter() - began
        self._clear_leftovers()
        temporary = self._folder / f"{_WRITING}globalstep{state.step}-{os.getpid()}"
        try:
            temporary.mkdir(parents=True)
            wait_engines = begin_save(temporary)
            rollout = rollout_state()
        except BaseException as error:
            self._remove(temporary)
            if is_of_disk(error):
                raise self._failure(state.step, error) from error
            raise
        stall = time.perf_counter() - began
        note = f", {waited:.3f} s of it for the one before" if waited > 0.001 else ""
        logger.info("Recover checkpoint of step %d: the trainer stopped for %.3f s%s.", state.step, stall, note)
        self._stop = threading.Event()
        self._writing = (state.step, time.monotonic() + self._timeout)
        write = partial(self._write, temporary, state, rollout, wait_engines, self._stop)
        self._writer = threading.Thread(
            target=self._keep_error, args=(write, state.step, self._stop), name="recover", daemon=True
        )
        self._writer.start()

    def wait(self) -> None:
        """Return when nothing is being written. Raises OSError, with the space left on the disk, when the last write
        found no room, LaunchError when its writers exited or took too long, else what went wrong there: nothing
        half-written stays, older checkpoints are as they were."""
        while self._writer is not None:
            raise_if_interrupted()
            self._writer.join(_LOOK_EVERY_SECONDS)
            self.raise_if_failed()
            if not self._writer.is_alive():
                self._writer = None
        self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """Raise the error of a write that has failed meanwhile, or that is late."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        step, deadline = self._writing
        if self._writer is not None and self._writer.is_alive() and time.monotonic() > deadline:
            self._stop.set()
            raise LaunchError(
                f"the recover checkpoint of step {step} was not written within "
                f"deadlines.call_seconds={self._timeout:g} to {self._folder}"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: object, *error: object) -> None:
        """Wait for the last write at the end of the run. If the run failed, end the writers and what they write."""
        if error_type is None:
            self.wait()
            return
        self._stop.set()
        if self._writer is not None:
            self._writer.join(_END_SECONDS)
            self._writer = None

    def _keep_error(self, write: Callable[[], None], step: int, stop: threading.Event) -> None:
        """Run in a thread of its own and keep the error; once `stop` is set the result is not used."""
        try:
            write()
        except Exception as error:  # noqa: BLE001 (raised by the next call, whatever it is)
            if not stop.is_set():
                self._error = self._failure(step, error) if is_of_disk(error) else error
                logger.error("The recover checkpoint of step %d failed: %s", step, first_line(self._error))

    def _write(
        self, temporary: Path, state: RunState, rollout_state: object, wait_engines: WaitWritten, stop: threading.Event
    ) -> None:
        """Write a checkpoint; when this returns or raises, nothing half-written is left."""
        began = time.perf_counter()
        try:
            write_state(temporary, _ROLLOUT, rollout_state)
            with open(temporary / "run.json", "w") as f:
                json.dump({"identity": asdict(self._identity), "state": asdict(state)}, f)
            wait_engines(stop)
            if stop.is_set():
                return
            num_bytes = seal(temporary)
            if stop.is_set():
                return
            self._commit(temporary, self._folder / f"globalstep{state.step}")
        finally:
            self._remove(temporary)
        logger.info("Dumped recover info to file.")
        seconds = time.perf_counter() - began
        add_span("write recover checkpoint", seconds, lane="checkpoint", step=state.step)
        logger.info("Recover checkpoint of step %d: %.1f MiB written in %.3f s in the background.",
                    state.step, num_bytes / 2**20, seconds)  # fmt: skip

    def _commit(self, temporary: Path, target: Path) -> None:
        self._remove(target)  # one of the same step, which could not be used
        os.rename(temporary, target)
        sync(self._folder)
        self._invalid.discard(target)
        valid = [path for path in recover_checkpoints(self._folder) if path not in self._invalid]
        # Beyond this step they are of a run that counted its steps in batches of another size.
        last = valid.index(target) + 1
        for old in [*self._invalid, *valid[last:], *valid[:last][: -self._keep]]:
            self._remove(old)
        self._invalid.clear()

    def _remove(self, checkpoint: Path) -> None:
        """Remove a checkpoint by one rename first: no other process finds half of it, and ranks that still write it
        cannot add files to a folder that is being removed."""
        if not checkpoint.exists():
            return
        aside = self._folder / f"{_REMOVING}{checkpoint.name}"
        try:
            os.rename(checkpoint, aside)
        except OSError:  # a full disk may have no room for a longer name
            aside = checkpoint
        shutil.rmtree(aside, ignore_errors=True)

    def _clear_leftovers(self) -> None:
        """Remove the files of runs that were killed while they wrote."""
        for prefix in (_WRITING, _REMOVING):
            for path in self._folder.glob(f"{prefix}*"):
                shutil.rmtree(path, ignore_errors=True)

    def _failure(self, step: int, error: Exception) -> OSError:
        return could_not_write(f"the recover checkpoint of step {step}", self._folder, error)

    def load(self, checkpoint: Path) -> Start:
        """Return the driver's and the rollout's state, without the state of another algorithm; no file of the
        checkpoint can run code.

        Whether the configuration may have changed was decided before (core/checks/resumption.py). Raises RecoverError
        where a file has another content than a run writes."""
        identity, state = _read_run(checkpoint)
        changes = self._identity.changes_since(identity)
        if "algorithm" in changes:
            logger.warning("%s: the state of that algorithm is dropped.", changes["algorithm"])
            state = replace(state, extra={key: value for key, value in state.extra.items() if key != "algorithm"})
        return Start(
            state=state,
            rollout_state=read_state(checkpoint, _ROLLOUT),
            checkpoint=checkpoint,
            identity=identity,
            changes=tuple(changes.values()),
        )


def _read_run(checkpoint: Path) -> tuple[RunIdentity, RunState]:
    try:
        identity, state = read_run(checkpoint)
        return identity, RunState(**state)  # type: ignore[arg-type]
    except (ValueError, TypeError, LookupError) as error:
        raise RecoverError(
            f"{checkpoint / 'run.json'}: not what a run writes ({error!r}); remove its folder to continue from the "
            "checkpoint before it"
        ) from error


T = TypeVar("T")

_WORDS = ("out of memory", "can't allocate memory", "not enough memory", "memoryerror", "outofmemory")
_LESS_MEM_FRACTION, _LEAST_MEM_FRACTION = 0.1, 0.3


def reports_out_of_memory(message: str) -> bool:
    """Return whether an error or log line reports that memory ran out."""
    return any(word in message.lower() for word in _WORDS)


class MemoryLimits:
    """Limits by name: the roles of the trainer in tokens (`actor_train`), and the generators' settings."""

    def __init__(
        self, learnt: Mapping[str, float] = {}, *, on_lowered: Callable[[dict[str, float]], None] = lambda _: None
    ):
        """`learnt`: limits of an earlier attempt. `on_lowered` gets all limits whenever one was lowered."""
        self._learnt = dict(learnt)
        self._on_lowered = on_lowered

    def state_dict(self) -> dict[str, float]:
        return dict(self._learnt)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Take the lower of each limit here and in `state`."""
        for name, value in state.items():
            self._learnt[name] = min(value, self._learnt.get(name, value))

    def tokens(self, role: str, configured: int) -> int:
        """Return max_tokens_per_mb of a role."""
        return int(min(configured, self._learnt.get(role, configured)))

    def limits(self, role: str, configured: int) -> PassLimits:
        """Return the limits of a pass of a role."""
        return PassLimits(self.tokens(role, configured), max_sequence_tokens=configured)

    def fitting(self, role: str, configured: int, call: Callable[[PassLimits], T]) -> T:
        """Run `call(limits)`, again with half of the tokens whenever memory ran out without changing anything.

        Raises LaunchError when the call cannot be repeated in these processes, or not even one sequence fits."""
        while True:
            limits = self.limits(role, configured)
            try:
                return call(limits)
            except StepOutOfMemory as e:
                self._halve(role, limits.max_tokens_per_mb, e)
                if not e.repeatable:
                    raise LaunchError(
                        f"{e}; {role} continues with {self.tokens(role, configured)} tokens per microbatch"
                    ) from e

    def fit_generator(self, settings: BackendSettings, flag: MemoryFlag | None) -> BackendSettings:
        """Return the generators' settings, lowered as far as was necessary. `flag`: the backend's share of GPU
        memory."""
        running = int(self._learnt.get("max_running", settings.max_running))
        flags = dict(settings.flags)
        if flag is not None and flag.name in self._learnt:
            flags[flag.name] = self._learnt[flag.name]
        return settings.lowered(max_running=running, flags=flags)

    def lower_generator(self, settings: BackendSettings, flag: MemoryFlag | None) -> None:
        """Halve the sequences of a generator that ran out of memory; on a GPU also reduce its share of the memory."""
        fitted = self.fit_generator(settings, flag)
        lowered: dict[str, float] = {"max_running": max(1, fitted.max_running // 2)}
        if flag is not None and fitted.device == GPU:
            given = fitted.flags.get(flag.name)
            fraction = float(given) if isinstance(given, int | float | str) and given else flag.default
            lowered[flag.name] = round(max(_LEAST_MEM_FRACTION, fraction - _LESS_MEM_FRACTION), 3)
        self._lower(lowered, "a generator ran out of memory")

    def _halve(self, role: str, limit: int, error: StepOutOfMemory) -> None:
        lowered = max(error.longest, min(limit, error.largest) // 2)
        if lowered >= error.largest:
            raise LaunchError(
                f"{error}; its largest microbatch cannot be smaller: it holds {error.largest} tokens, the "
                f"longest sequence {error.longest}. Use more tensor or pipeline parallelism (allocation_mode), "
                "or shorter sequences"
            ) from error
        self._lower({role: lowered}, str(error))

    def _lower(self, lowered: Mapping[str, float], why: str) -> None:
        for name, value in lowered.items():
            logger.warning("%s: for the rest of the run %s is %.10g", why, name, value)
        self._learnt |= lowered
        self._on_lowered(self.state_dict())
