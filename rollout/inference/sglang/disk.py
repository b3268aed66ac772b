"""Weights in a folder: the call that lets a SGLang server load one, and what the server does with it.

The sender is core/weight_sync/disk.py. A folder holds all weights, or changes to those of the push before. Read by the
server's processes too, so of this project nothing but changes.py is imported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rollout.inference.changes import IDENTITY, INDEX, ChangesReader
from rollout.inference.sglang.hooks.recorded_copies import Outcome, WeightUpdater


def folder_call(path: str) -> tuple[str, dict[str, object]]:
    """Return the call that loads a folder."""
    return "/update_weights_from_disk", {"model_path": path, "load_format": "auto", "flush_cache": False}


class _Result(Protocol):
    success: bool
    message: str


class _UpdaterManager(Protocol):
    """SGLang's SchedulerWeightUpdaterManager."""

    tp_cpu_group: ProcessGroup


class PushedFolders:
    """Identity of the push that one scheduler process has loaded, if it was a folder."""

    def __init__(self) -> None:
        self._identity: str | None = None

    def forget(self, result: object, *args: object, **kwargs: object) -> None:
        """Take no more changes until everything has been loaded: the weights came another way, or were released."""
        self._identity = None

    def load(
        self, original: Callable[..., Outcome], updater: WeightUpdater, model_path: str, *args: object, **kwargs: object
    ) -> Outcome:
        """Load a folder around WeightUpdater.update_weights_from_disk; return (whether it succeeded, message)."""
        folder, before, self._identity = Path(model_path), self._identity, None
        if not (folder / INDEX).is_file():
            success, message = original(updater, model_path, *args, **kwargs)
            if success and (file := folder / IDENTITY).is_file():
                self._identity = json.loads(file.read_text(encoding="utf-8"))["id"]
            return success, message
        try:
            reader = ChangesReader(folder, before)
            _load_some(updater, reader.tensors)
        except Exception as error:  # noqa: BLE001  reported to the sender, which sends all weights then
            return False, f"{type(error).__name__}: {error}"
        self._identity = reader.identity
        return True, "Succeeded to update the changed weights."

    def report_any_failure(self, result: _Result, manager: _UpdaterManager, *args: object, **kwargs: object) -> None:
        """Put the failure of any tensor-parallel rank into what an update of SchedulerWeightUpdaterManager returns.
        SGLang reports what the first rank did alone, so the others could keep old weights unnoticed."""
        group = manager.tp_cpu_group
        outcomes = [(result.success, result.message)] * torch.distributed.get_world_size(group=group)
        if len(outcomes) > 1:
            torch.distributed.all_gather_object(outcomes, outcomes[0], group=group)
        failures = [message for success, message in outcomes if not success]
        if failures:
            self._identity = None
            result.success, result.message = False, failures[0]


def _load_some(updater: WeightUpdater, tensors: Callable[[torch.device], Iterable[tuple[str, Tensor]]]) -> None:
    """Load `tensors` as update_weights_from_disk loads whole ones."""
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    device = torch.device(updater.device)
    with set_default_torch_dtype(updater.model_config.dtype):
        DefaultModelLoader.load_weights_and_postprocess(updater.get_model(), tensors(device), device)
