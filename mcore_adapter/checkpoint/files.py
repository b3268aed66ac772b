"""One rank's copied part of a checkpoint on its way to files: at once, or in a thread beside the training.

Which rank writes what is agreed on when the part is copied, by collectives of the calling thread. Writing needs none,
it touches host memory and files only. In a thread, ranks report to the first one, in files beside the folder, what they
wrote, and so does the first rank with the outcome. Invariant: metadata.json is
written last, and an outcome without error appears after it.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)

from mcore_adapter.checkpoint.outcome import LOOK_EVERY_SECONDS, put_whole, tell_outcome
from mcore_adapter.checkpoint.restricted import load_plain
from mcore_adapter.hf.safetensors_folder import copy_tokenizer
from mcore_adapter.memory.out_of_memory import is_out_of_memory

Written = list[Any] | Exception
"""The report of torch's writer about the shards of one rank, or why there are none: an OSError where files could not be
written."""


def write_small_files(path: Path, files: Mapping[str, bytes], tokenizer_from: Path) -> None:
    """Write everything of a checkpoint except its tensors and the marker."""
    for name, content in files.items():
        (path / name).write_bytes(content)
    copy_tokenizer(tokenizer_from, path)


def mark_complete(path: Path) -> None:
    """Write metadata.json, without which a folder is no checkpoint."""
    save_config(CheckpointingConfig("torch_dist", 1), str(path))


class CopiedCheckpoint:
    """The shards of which this rank holds the main replica; on the first rank also what is not sharded."""

    def __init__(
        self, path: Path, sharded: ShardedStateDict, small_files: Mapping[str, bytes], *, tokenizer_from: Path
    ) -> None:
        """Collective. `small_files`: content of whole files that the first rank writes."""
        self._path, self._small_files, self._tokenizer_from = path, small_files, tokenizer_from
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
        state = mcore_to_pyt_state_dict(by_key, is_loading=False)
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        is_first = self._rank == 0
        self._writer = dcp.FileSystemWriter(path)
        self._planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._planner.set_up_planner(state, self._writer.storage_meta(), is_first)
        self._writer.set_up_storage_writer(is_first, rank=self._rank, use_collectives=True)
        local = self._planner.create_local_plan()
        everyone: list[Any] | None = [None] * self._world_size if is_first else None
        dist.gather_object(local, everyone)
        plans: list[Any] | None = None
        if everyone is not None:
            plans, self._metadata = self._planner.create_global_plan(everyone)
            plans = self._writer.prepare_global_plan(plans)
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, plans)
        self._plan = self._planner.finish_plan(mine[0])

    def write(self) -> Written:
        """Write this rank's shards, and the small files on the first rank."""
        try:
            if self._rank == 0:
                write_small_files(self._path, self._small_files, self._tokenizer_from)
            return self._writer.write_data(self._plan, self._planner).value()
        except OSError as error:
            return error
        except Exception as error:  # noqa: BLE001 (reported to the process that waits for this rank, whatever it is)
            if isinstance(error, RuntimeError) and not is_out_of_memory(error):  # torch's word for a full disk
                return OSError(str(error))
            return RuntimeError(f"{type(error).__name__}: {error}")  # which can be pickled, whatever it was

    def raise_first(self, everyone: Sequence[Written]) -> None:
        """Raise OSError if a rank could not write its part, RuntimeError if it failed for another reason."""
        for rank, written in enumerate(everyone):
            if isinstance(written, Exception):
                kind = OSError if isinstance(written, OSError) else RuntimeError
                raise kind(f"{self._path}: rank {rank} could not write its part of the checkpoint: {written}")

    def finish(self, everyone: Sequence[Written]) -> None:
        """Complete the folder, on the first rank. Raises OSError."""
        self._writer.finish(self._metadata, [written for written in everyone if not isinstance(written, Exception)])
        mark_complete(self._path)

    def write_in_background(self) -> None:
        """Start a thread that writes this rank's part, and on the first rank waits for the others', finishes, and
        leaves the outcome."""
        threading.Thread(target=self._write_in_background, name="checkpoint", daemon=True).start()

    def _write_in_background(self) -> None:
        written = self.write()
        if isinstance(written, Exception):
            self._remove_own_shards()
        if self._rank != 0:
            if isinstance(written, OSError):  # a plain one: reports may name no other classes
                written = OSError(str(written))
            put_whole(self._report_of(self._rank), pickle.dumps(written))
            return
        error = None
        try:
            everyone = [written, *(self._await_report(rank) for rank in range(1, self._world_size))]
            self.raise_first(everyone)
            self.finish(everyone)
        except Exception as failure:  # noqa: BLE001 (reported to the process that waits for the checkpoint)
            error = failure
            self._remove_own_shards()
        tell_outcome(self._path, error)

    def _remove_own_shards(self) -> None:
        """Remove this rank's shards of a checkpoint that failed: where a full disk is the reason, the message needs a
        little of it."""
        for shard in self._path.glob(f"__{self._rank}_*"):
            shard.unlink(missing_ok=True)

    def _report_of(self, rank: int) -> Path:
        return self._path.with_name(f"{self._path.name}.rank{rank}")

    def _await_report(self, rank: int) -> Written:
        """Wait for a rank's report. Raises FileNotFoundError when the folder has been removed and the checkpoint is no
        longer needed."""
        report = self._report_of(rank)
        while not report.exists():
            if not self._path.exists():
                raise FileNotFoundError(f"{self._path} was removed while it was written")
            time.sleep(LOOK_EVERY_SECONDS)
        written: Written = load_plain(report.read_bytes())
        report.unlink()
        return written
