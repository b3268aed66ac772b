"""Weight push through a folder: safetensors written by the trainer, read by servers anywhere that see the folder.

The folder is written while generation continues; the pause is as long as the servers take to read it. Each server rank
reads what it needs, so this is also the way into servers with pipeline stages.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from core.weight_sync.buckets import (
    Buckets,
    Deadline,
    PushError,
    SenderSettings,
    SendReport,
    call_all,
    compare_checksums,
)
from rollout.inference.backend import WeightEndpoint


class DiskSender:
    """See core.weight_sync.buckets.Sender."""

    def __init__(self, settings: SenderSettings, device: torch.device, *, folder: Path, model_path: str) -> None:
        """`folder`: where pushes of this run alone are written, on a file system that the servers share. `model_path`:
        a Hugging Face folder whose config.json the pushed ones get."""
        self._settings = settings
        self._folder, self._model_path = folder, model_path
        self._servers: Sequence[WeightEndpoint] = ()
        self._count = 0
        self._written: tuple[Path, Buckets] | None = None

    def connect(self, servers: Sequence[WeightEndpoint]) -> None:
        """Remove what an attempt that was killed in the middle of a push left."""
        self._servers = servers
        if self._settings.rank == 0:
            for left in self._folder.glob("push-*"):
                shutil.rmtree(left, ignore_errors=True)

    def prepare(self, buckets: Iterator[Mapping[str, Tensor]], *, verify: bool) -> None:
        """Write the folder. Raises OSError when it cannot be written; nothing is left of it then."""
        rank0 = self._settings.rank == 0
        flat = Buckets(buckets, self._settings, torch.device("cpu"), self._servers, verify=verify)
        target = self._folder / f"push-{self._count}"
        self._count += 1
        if rank0:
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
        try:
            self._write(flat, target)
        except BaseException:
            if rank0:
                shutil.rmtree(target, ignore_errors=True)
            raise
        self._written = (target, flat)

    def _write(self, buckets: Buckets, target: Path) -> None:
        weight_map: dict[str, str] = {}
        total = 0
        for number, bucket in enumerate(buckets):
            if bucket is None:
                continue
            file = f"model-{number:05d}.safetensors"
            save_file(bucket.tensors(), target / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(bucket.names, file)
            total += bucket.num_bytes
        if self._settings.rank == 0:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (target / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
            shutil.copy(Path(self._model_path) / "config.json", target)

    def send(self) -> SendReport | None:
        written, self._written = self._written, None
        if written is None:
            raise PushError("send() without prepare()")
        if self._settings.rank != 0:
            return None
        target, buckets = written
        start = time.perf_counter()
        try:
            num_files, num_bytes, compared = self._read_by_servers(target, buckets)
        finally:  # A server that starts again reads its original folder.
            shutil.rmtree(target, ignore_errors=True)
        seconds = time.perf_counter() - start
        return SendReport(seconds=seconds, num_bytes=num_bytes, num_buckets=num_files, compared=compared)

    def _read_by_servers(self, target: Path, buckets: Buckets) -> tuple[int, int, str]:
        """Return (number of files, bytes, result of the comparison) once every server has loaded the folder."""
        deadline = Deadline(self._settings.timeout_seconds)
        files = list(target.glob("*.safetensors"))
        num_bytes = sum(file.stat().st_size for file in files)
        loading = call_all(self._servers, lambda s, left: s.load_folder(str(target), timeout_seconds=left), deadline)
        deadline.wait(loading, f"reading {target}")
        return len(files), num_bytes, compare_checksums(self._servers, buckets, deadline)

    def close(self) -> None:
        """Remove a folder that was written and not sent."""
        if self._written is not None and self._settings.rank == 0:
            shutil.rmtree(self._written[0], ignore_errors=True)
