"""What a train job does with new weights: it publishes the versions that are due for the jobs that sample with them.

By the folder, every version that is due is written. With a group (jobs.py), it goes to the jobs that are connected, and
is written as well where a job needs the folder: the first and the last version, what a recover checkpoint begins with,
and any version while a job follows the folder that is not connected.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from core.errors import LaunchError
from core.weight_sync.folder import VersionFolder
from core.weight_sync.jobs import JobServers
from core.weight_sync.push import PushReport, WeightPush

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Group:
    """The explore jobs that are connected, and the push to their servers."""

    jobs: JobServers
    push: WeightPush


class Publisher:
    """Publishes the actor's weights every `interval` steps, and after the last one; with `on_request` when a replica
    asks for newer ones instead."""

    def __init__(
        self,
        save: Callable[[Path], None],
        versions: VersionFolder,
        *,
        interval: int,
        last_step: int,
        on_request: bool = False,
        group: Group | None = None,
    ) -> None:
        """`save`: write a Hugging Face folder. `group`: None: all weights come through the folder."""
        self._save, self._versions, self._group = save, versions, group
        self._interval, self._last_step, self._on_request = interval, last_step, on_request
        self._version = self._sent = -1
        """Those of the trainer's weights, and of the last push to the group."""
        self._failure = ""
        """Of the last push that failed."""

    def push(self, version: int) -> PushReport:
        """Publish a version that is due. One that a killed attempt has published already stays as it is: replicas may
        sample with it, and it has the same number of updates."""
        began, self._version = time.perf_counter(), version
        report = PushReport(seconds=0.0, longest_pause_seconds=0.0, gather_seconds=0.0, send_seconds=0.0, num_bytes=0)
        newest = self._newest
        if (newest is None or newest < version) and self._is_due(version, newest):
            report = self._publish(version, behind=version) or report
        return replace(report, seconds=time.perf_counter() - began)

    @property
    def _newest(self) -> int | None:
        """The newest version that replicas may sample with."""
        latest = self._versions.latest()
        newest = max(self._sent, -1 if latest is None else latest.version)
        return None if newest < 0 else newest

    def _is_due(self, version: int, newest: int | None) -> bool:
        if version == self._last_step:
            return True
        if self._on_request:
            return newest is None or self._versions.wanted(newest)
        due = version - version % self._interval  # after a recovery the newest may be older
        return newest is None or newest < due

    def _publish(self, version: int, *, behind: int) -> PushReport | None:
        """Give the trainer's weights to the jobs that have none as new as `behind`."""
        if self._group is None:
            return self._write(version)
        if version == self._last_step:  # every job ends with it
            self._group.push.close()
            return self._write(version)
        report = self._send(self._group, version, behind)
        return self._write(version) if self._is_read(self._group, behind) else report

    def _send(self, group: Group, version: int, behind: int) -> PushReport | None:
        """Push to the jobs that are connected, as far as they take it."""
        self._sent = version
        if not group.jobs.choose(behind):
            return None
        try:
            return group.push.push(version)
        except LaunchError as error:
            group.jobs.lose_all(error)
            failure = f"The push of version {version} failed: {error}"
            if failure != self._failure:  # a job whose servers start again is asked every second
                logger.warning("%s", failure)
            self._failure = failure
            return None

    def _is_read(self, group: Group, behind: int) -> bool:
        """Return whether a job needs the folder for weights as new as `behind`."""
        latest = self._versions.latest()
        if latest is not None and latest.version >= behind:
            return False
        known = group.jobs.names | group.jobs.ended
        holders = self._versions.holders().items()
        return latest is None or any(name not in known and (held is None or held < behind) for name, held in holders)

    def _write(self, version: int) -> PushReport:
        began = time.perf_counter()
        written = self._versions.write(version, self._save)
        num_bytes = sum(file.stat().st_size for file in Path(written.where).iterdir())
        logger.info("Published version %d in %s", version, written.where)
        seconds = time.perf_counter() - began
        return PushReport(
            seconds=seconds, longest_pause_seconds=0.0, gather_seconds=0.0, send_seconds=seconds, num_bytes=num_bytes
        )

    def before_checkpoint(self) -> None:
        """Write what a recover checkpoint begins with, so that jobs which start while this one is down have weights for
        the steps that follow it."""
        latest = self._versions.latest()
        if self._group is not None and latest is not None and latest.version < self._version == self._newest:
            self._write(self._version)

    def offload_generators(self) -> None:
        """Do nothing: the job has no generators."""

    def sync_rejoined(self) -> None:
        """Publish what a replica has asked for, and give weights to jobs that have come, or were behind; the trainer
        waits for them then."""
        newest = self._newest
        if newest is None or newest > self._version:  # jobs wait for a version that a killed attempt has published
            return
        if self._on_request and self._versions.wanted(newest):
            self.push(self._version)
        elif self._group is not None and (self._group.jobs.choose(newest) or self._is_read(self._group, newest)):
            self._publish(self._version, behind=newest)

    def close(self) -> None:
        """Do nothing: the folder stays."""
