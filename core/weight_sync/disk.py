"""Weight push through a folder: safetensors written by the trainer, read by servers anywhere that see the folder.

The folder is written while generation continues; the pause is as long as the servers take to read it. Each server rank
reads what it needs, so this is also the way into servers with pipeline stages.

With push.changes=always, rank 0 keeps the weights of the last push in host memory, and writes only the values that
differ from them (rollout/inference/changes.py). A server that cannot take changes, as one that has just started, gets
all weights at once.
"""

import json
import logging
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from core.config.runtime import Changes
from core.weight_sync.buckets import Buckets, compare_checksums
from core.weight_sync.push import Deadline, PushError, SenderSettings, SendReport, call_all
from model_specs.untrusted import read_json_object
from model_specs.weight_files import QUANTIZATION_CONFIG, SCALE, follow_umask
from rollout.errors import GeneratorCallError
from rollout.inference.backend import WeightEndpoint
from rollout.inference.changes import IDENTITY, NOT_THE_BASE, ChangesWriter

logger = logging.getLogger(__name__)


@dataclass
class _Written:
    """A folder that has been written and not yet read."""

    folder: Path
    buckets: Buckets
    num_bytes: int
    changed: float | None
    """Share of the values, where it holds only changes."""


class DiskSender:
    """See core.weight_sync.buckets.Sender."""

    def __init__(self, settings: SenderSettings) -> None:
        self._settings = replace(settings, device="cpu")
        self._folder = settings.folder
        self._servers: Sequence[WeightEndpoint] = ()
        self._count = 0
        self._written: _Written | None = None
        self._changes: Changes = settings.changes if settings.rank == 0 else "never"
        self._last: list[dict[str, Tensor]] = []
        """With changes: the tensors of the last prepare(), one part for each bucket; every push has the same ones."""
        self._identity = ""
        """Identity of `_last`."""

    def connect(self, servers: Sequence[WeightEndpoint]) -> None:
        """Remove what an attempt that was killed in the middle of a push left."""
        self._servers = servers
        if self._settings.rank == 0:
            for left in self._folder.glob("push-*"):
                shutil.rmtree(left, ignore_errors=True)

    def prepare(self, buckets: Iterator[Mapping[str, Tensor]], *, verify: bool) -> None:
        """Write the folder. Raises OSError when it cannot be written; nothing is left of it then."""
        flat = Buckets(buckets, self._settings, self._servers, verify=verify)
        if self._settings.rank != 0:
            for _ in flat:
                pass
            self._written = _Written(self._folder, flat, 0, None)
            return
        target = self._new_folder()
        try:
            num_bytes, changed = self._write(flat, target)
            follow_umask(target)
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            self._last = []  # the next push is whole: what the servers have is no longer what is here
            raise
        self._written = _Written(target, flat, num_bytes, changed)

    def _new_folder(self) -> Path:
        target = self._folder / f"push-{self._count}"
        self._count += 1
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        return target

    def _write(self, buckets: Buckets, target: Path) -> tuple[int, float | None]:
        """Write all weights, or what has changed of them. Return the bytes, and the share of values that changed, where
        only those are there."""
        base, self._identity = self._identity, uuid.uuid4().hex
        parts = (bucket.tensors() for bucket in buckets if bucket is not None)
        if not self._last:
            return self._write_whole(target, self._kept(parts)), None
        changes = ChangesWriter(target)
        for i, tensors in enumerate(parts):
            changes.add(tensors, self._last[i])
            self._last[i] = tensors
        changes.finish(base=base, identity=self._identity)
        return changes.num_bytes, changes.num_changed / max(1, changes.num_values)

    def _kept(self, parts: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        """Yield the parts, which the next push may be compared with."""
        for tensors in parts:
            if self._changes != "never":
                self._last.append(tensors)
            yield tensors

    def _write_whole(self, target: Path, parts: Iterable[Mapping[str, Tensor]]) -> int:
        """Write all weights; return the bytes."""
        whole = WholeWriter(target)
        for tensors in parts:
            whole.add(tensors)
        whole.finish(self._settings.model_path, self._identity)
        return whole.num_bytes

    def send(self) -> SendReport | None:
        """Let every server load the folder; the report on rank 0. Raises PushError."""
        written, self._written = self._written, None
        if written is None:
            raise PushError("send() without prepare()")
        if self._settings.rank != 0:
            return None
        start = time.perf_counter()
        try:
            deadline = Deadline(self._settings.timeout_seconds)
            num_files = len(list(written.folder.glob("*.safetensors")))
            sent_again = self._load(written, deadline)
            compared = compare_checksums(self._servers, written.buckets, deadline)
        except BaseException:
            self._last = []
            raise
        finally:  # A server that starts again reads its original folder.
            shutil.rmtree(written.folder, ignore_errors=True)
        seconds = time.perf_counter() - start
        return SendReport(
            seconds=seconds,
            num_bytes=written.num_bytes + sent_again,
            num_buckets=num_files,
            compared=compared,
            changed=written.changed,
        )

    def _load(self, written: _Written, deadline: Deadline) -> int:
        """Return once every server has loaded the folder, or all weights where it refused changes; the bytes of these,
        0 where none did."""
        changes = written.changed is not None
        loading = call_all(self._servers, lambda s, left: _refusal(s, written.folder, left, changes), deadline)
        deadline.wait(loading, f"reading {written.folder}")
        reasons = {name: future.result() for name, future in loading.items() if future.result()}
        if not reasons:
            return 0
        return self._load_all([s for s in self._servers if s.name in reasons], list(reasons.values()), deadline)

    def _load_all(self, servers: Sequence[WeightEndpoint], reasons: Sequence[str], deadline: Deadline) -> int:
        """Let servers that refused changes load all weights, of the same push; return the bytes."""
        for reason in reasons:
            logger.warning("Changes were refused, so all weights are sent: %s", reason)
        if not all(NOT_THE_BASE in reason for reason in reasons):
            logger.warning("No more changes are sent: a server could not read or apply them")
            self._changes = "never"
        target = self._new_folder()
        try:
            num_bytes = self._write_whole(target, self._last)
            loading = call_all(servers, lambda s, left: s.load_folder(str(target), timeout_seconds=left), deadline)
            deadline.wait(loading, f"reading {target}")
        finally:
            shutil.rmtree(target, ignore_errors=True)
        if self._changes == "never":
            self._last = []
        return num_bytes

    def close(self) -> None:
        """Remove a folder that was written and not sent."""
        if self._written is not None and self._settings.rank == 0:
            shutil.rmtree(self._written.folder, ignore_errors=True)


def _refusal(server: WeightEndpoint, folder: Path, seconds: float, changes: bool) -> str:
    """Let a server load a folder; return why it refused changes, or an empty string. Raises GeneratorCallError where it
    refused all weights."""
    try:
        server.load_folder(str(folder), timeout_seconds=seconds)
    except GeneratorCallError as error:
        if not changes:
            raise
        return str(error)
    return ""


class WholeWriter:
    """Writes a Hugging Face folder, one file for each bucket."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._weight_map: dict[str, str] = {}
        self._num_files = 0
        self._total = 0
        self.num_bytes = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Write a bucket; nothing where it is empty. Raises OSError."""
        if not tensors:
            return
        file = f"model-{self._num_files:05d}.safetensors"
        save_file(dict(tensors), self._folder / file, metadata={"format": "pt"})
        self._weight_map |= dict.fromkeys(tensors, file)
        self._num_files += 1
        self._total += sum(tensor.nbytes for tensor in tensors.values())
        self.num_bytes += (self._folder / file).stat().st_size

    def finish(self, model_path: str, identity: str) -> None:
        """Write the index, the configuration of the model in `model_path`, and the identity of the push."""
        index = {"metadata": {"total_size": self._total}, "weight_map": self._weight_map}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        config = read_json_object(Path(model_path) / "config.json")
        if any(name.endswith(SCALE) for name in self._weight_map):
            config["quantization_config"] = dict(QUANTIZATION_CONFIG)
        (self._folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (self._folder / IDENTITY).write_text(json.dumps({"id": identity}), encoding="utf-8")
