"""Weight updates of a train job: a folder that explore jobs follow, in place of a push to generators."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Protocol

from core.weight_sync.folder import VersionFolder
from core.weight_sync.push import PUSHED, PushReport
from rollout.inference.versions import Published

logger = logging.getLogger(__name__)


class Ranks(Protocol):
    """The ranks of the trainer (core/launch/trainer_group.py)."""

    def save_hf(self, engine: str, path: str, tokenizer_from: str) -> None: ...


class Publisher:
    """Publishes the actor's weights every `interval` steps, and after the last one; with `on_request` when a replica
    asks for newer ones instead."""

    def __init__(
        self, ranks: Ranks, versions: VersionFolder, *, model_path: str, interval: int, last_step: int,
        on_request: bool = False,
    ) -> None:  # fmt: skip
        self._ranks, self._versions, self._model_path = ranks, versions, model_path
        self._interval, self._last_step, self._on_request = interval, last_step, on_request
        self._version: int | None = None

    def push(self, version: int) -> PushReport:
        """Publish a version that is due. One that a killed attempt has published already stays as it is: replicas may
        sample with it, and it has the same number of updates."""
        began, self._version = time.perf_counter(), version
        latest = self._versions.latest()
        num_bytes = 0
        if (latest is None or latest.version < version) and self._is_due(version, latest):
            written = self._versions.write(version, self._save)
            num_bytes = sum(file.stat().st_size for file in Path(written.where).iterdir())
            logger.info("Published version %d in %s", version, written.where)
        seconds = time.perf_counter() - began
        return PushReport(
            seconds=seconds, longest_pause_seconds=0.0, gather_seconds=0.0, send_seconds=seconds, num_bytes=num_bytes
        )

    def _is_due(self, version: int, latest: Published | None) -> bool:
        if version == self._last_step:
            return True
        if self._on_request:
            return latest is None or self._versions.wanted()
        return version % self._interval == 0

    def _save(self, folder: Path) -> None:
        self._ranks.save_hf(PUSHED, str(folder), self._model_path)

    def offload_generators(self) -> None:
        """Do nothing: the job has no generators."""

    def sync_rejoined(self) -> None:
        """Publish what a replica has asked for; the trainer waits for it then."""
        if self._on_request and self._version is not None and self._versions.wanted():
            self.push(self._version)

    def close(self) -> None:
        """Do nothing: the folder stays."""
