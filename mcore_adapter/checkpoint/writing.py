"""One rank's part of a checkpoint, copied to host memory and written to files: at once, or beside the training.

Copies hold what the next update changes. Their memory is page-locked where the tensors are on a device, so that they
leave it at full speed, and is used again by the next copy. Invariant: a copy may be written until the next one is
taken, and no longer.

Which rank writes what is agreed on when the part is copied, by collectives of the calling thread. Writing needs none,
it touches host memory and files only. In a thread, ranks report to the first one, in files beside the folder, what they
wrote, and so does the first rank with the outcome. Invariant: metadata.json is written last, and an outcome without
error appears after it.
"""

from __future__ import annotations

import io
import logging
import pickle
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from mcore_adapter.checkpoint.outcome import LOOK_EVERY_SECONDS, put_whole, tell_outcome
from mcore_adapter.checkpoint.owned import OwnedRows
from mcore_adapter.checkpoint.restricted import load_plain
from mcore_adapter.hf.safetensors_folder import copy_tokenizer
from mcore_adapter.memory.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range

    Places = Mapping[Tensor, Mapping[str, Range]]
    """Where a rank's part of each parameter lies, by what it is counted in."""

logger = logging.getLogger(__name__)

_KEYS = ("param", "exp_avg", "exp_avg_sq")
_CHUNK_ELEMENTS = 2**26
"""How much of a sharded state is on the device twice while the first rank gathers it: 256 MiB in fp32."""


class HostCopy:
    """Host memory by name. On a device copies are under way until `wait()`."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}  # uint8
        self._devices: set[torch.device] = set()
        self._reserving: threading.Thread | None = None

    def reserve(self, rooms: Mapping[str, int], *, on: torch.device) -> None:
        """Begin to take memory, bytes by name, for what is on the device `on`. Page-locking it takes seconds for every
        10 GB, which a thread spends here instead of the first copy."""
        if on.type != "cpu":
            self._reserving = threading.Thread(target=self._take_all, args=(dict(rooms), on), name="reserve")
            self._reserving.start()

    def _take_all(self, rooms: Mapping[str, int], on: torch.device) -> None:
        """Stop where the process is ending: the interpreter waits for one of them, as a daemon thread could abort
        it."""
        torch.accelerator.set_device_index(on)
        for name, size in rooms.items():
            if not threading.main_thread().is_alive():
                return
            try:
                self._buffers[name] = _host_memory(size, page_locked=True)
            except RuntimeError as error:
                logger.warning("could not page-lock %.1f GB of memory for checkpoints: %s", size / 1e9, error)
                return

    def room(self, name: str, numel: int, dtype: torch.dtype, *, on: torch.device) -> Tensor:
        """Return memory for a tensor that lies on the device `on`: [numel]."""
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
        size = numel * dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = _host_memory(size, page_locked=on.type != "cpu")
            self._buffers[name] = buffer
        return buffer[:size].view(dtype)

    def fill(self, host: Tensor, tensor: Tensor) -> None:
        host.copy_(tensor.detach(), non_blocking=tensor.device.type != "cpu")
        if tensor.device.type != "cpu":
            self._devices.add(tensor.device)

    def wait(self) -> None:
        """Return when every copy has arrived."""
        for device in self._devices:
            torch.accelerator.synchronize(device)
        self._devices.clear()


def _host_memory(num_bytes: int, *, page_locked: bool) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=page_locked)


@contextmanager
def gathered_by(copy: HostCopy, optimizers: Sequence[DistributedOptimizer]) -> Iterator[OwnedRows]:
    """Make Megatron's distributed optimizers gather masters and moments into `copy` inside the block; yield what this
    rank has of the memory that they take to load.

    Megatron's own way mixes up the parameters behind the first bucket of a buffer, of which there are several where a
    pipeline ties its embeddings: it lays buckets end to end, and reads them as if there were padding between them. It
    also goes through pageable memory, to the device and back, and holds the whole on every rank."""
    owned = OwnedRows()
    for i, optimizer in enumerate(optimizers):
        optimizer.get_parameter_state_dp_zero = _Gather(copy, optimizer, i, owned)
    try:
        yield owned
    finally:
        for optimizer in optimizers:
            del optimizer.get_parameter_state_dp_zero


def gathered_sizes(optimizers: Sequence[DistributedOptimizer]) -> dict[str, int]:
    """Return the bytes of every buffer that gathered_by() needs on this rank, by name."""
    return {
        _name(i, index, key): 4 * optimizer.buffers[index].numel
        for i, optimizer in enumerate(optimizers)
        if optimizer.data_parallel_group.rank() == 0
        for index, by_dtype in enumerate(optimizer.gbuf_ranges)
        for _ in by_dtype
        for key in _KEYS
    }


def _name(optimizer: int, buffer: int, key: str) -> str:
    return f"optimizer{optimizer}.{buffer}.{key}"


class _Gather:
    """Stands for one optimizer's get_parameter_state_dp_zero(): {buffer: {dtype: {key: [numel] fp32 on the host}}},
    each tensor laid out as the buffer is, padding included.

    The first data-parallel rank, which writes, has the values; the others have the shape alone. With empty_data all
    have memory to load into, and `owned` has their parts of it."""

    def __init__(self, copy: HostCopy, optimizer: DistributedOptimizer, number: int, owned: OwnedRows) -> None:
        self._copy, self._optimizer, self._number, self._owned = copy, optimizer, number, owned

    def __call__(self, *, empty_data: bool = False, **options: object) -> dict[int | str, object]:
        state: dict[int | str, object] = {"buckets_coalesced": True}
        for index, by_dtype in enumerate(self._optimizer.gbuf_ranges):
            numel = self._optimizer.buffers[index].numel
            for dtype, buckets in by_dtype.items():
                tensors = self._empty(index) if empty_data else self._buffer(index, buckets)
                state[index] = {dtype: {"numel_unpadded": numel, **tensors}}
        return state

    def _empty(self, index: int) -> dict[str, Tensor]:
        buffer, group = self._optimizer.buffers[index], self._optimizer.data_parallel_group
        parts = []
        for bucket in buffer.buckets:
            local = bucket.grad_data.numel() // group.size()
            first = bucket.offset + group.rank() * local
            parts.append((first, first + local))
        tensors = {key: torch.empty(buffer.numel) for key in _KEYS}
        for tensor in tensors.values():
            self._owned.add(tensor, parts)
        return tensors

    def _buffer(self, index: int, buckets: Sequence[Mapping[str, Places]]) -> dict[str, Tensor]:
        buffer = self._optimizer.buffers[index]
        is_first = self._optimizer.data_parallel_group.rank() == 0
        device = buffer.grad_data.device
        whole: dict[str, Tensor] = {}
        for key in _KEYS:
            if is_first:
                name = _name(self._number, index, key)
                whole[key] = self._copy.room(name, buffer.numel, torch.float32, on=device)
            else:
                whole[key] = torch.zeros(1).expand(buffer.numel)
            for bucket, ranges in zip(buffer.buckets, buckets, strict=True):
                place = whole[key][bucket.offset :][: bucket.grad_data.numel()]
                self._bucket(key, ranges["param_map"], place, device)
        return whole

    def _bucket(self, key: str, param_map: Places, whole: Tensor, device: torch.device) -> None:
        """Gather one bucket, sharded over the data-parallel ranks, into `whole`."""
        group = self._optimizer.data_parallel_group
        if group.size() == 1:
            for param, ranges in param_map.items():
                place = ranges["gbuf_local"]
                self._copy.fill(whole[place.start : place.end], self._state(param, key).flatten())
            return
        local = whole.numel() // group.size()
        shard = torch.zeros(local, dtype=torch.float32, device=device)
        for param, ranges in param_map.items():
            place = ranges["gbuf_local"]
            shard[place.start : place.end].copy_(self._state(param, key).detach().flatten())
        first = dist.get_global_rank(group, 0)
        for start in range(0, local, _CHUNK_ELEMENTS):
            part = shard[start : start + _CHUNK_ELEMENTS]
            parts = [torch.empty_like(part) for _ in range(group.size())] if group.rank() == 0 else None
            dist.gather(part, parts, dst=first, group=group)
            for rank, received in enumerate(parts or ()):
                self._copy.fill(whole[rank * local + start :][: part.numel()], received)
            self._copy.wait()  # what was received is overwritten by the next chunk

    def _state(self, param: Tensor, key: str) -> Tensor:
        tensor: Tensor = self._optimizer._get_main_param_and_optimizer_states(param)[key]
        return tensor


Written = list[WriteResult] | Exception
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


class _SavePlanner(MCoreSavePlanner):
    """Gives the writer tensors in the same memory with a storage of exactly their size: torch clones all others, and
    keeps a clone of each name until the file is complete."""

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        if not isinstance(data, Tensor) or not data.is_cpu or not data.is_contiguous():
            return data  # torch's to copy
        start = data.storage_offset() * data.itemsize
        storage = data.untyped_storage()[start : start + data.nbytes]  # keeps the whole memory alive
        return torch.empty(0, dtype=data.dtype).set_(storage, 0, data.shape, data.stride())


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
        # Its shards are in host memory: with copies ahead it would wait for all kernels of the trainer before each one.
        self._writer = dcp.FileSystemWriter(path, per_thread_copy_ahead=0)
        self._planner = _SavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._planner.set_up_planner(state, self._writer.storage_meta(), is_first)
        self._writer.set_up_storage_writer(is_first, rank=self._rank, use_collectives=True)
        local = self._planner.create_local_plan()
        everyone: list[SavePlan | None] | None = [None] * self._world_size if is_first else None
        dist.gather_object(local, everyone)
        plans: list[SavePlan] | None = None
        if everyone is not None:
            plans, self._metadata = self._planner.create_global_plan(everyone)
            plans = self._writer.prepare_global_plan(plans)
        mine: list[SavePlan | None] = [None]
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
        written = cast("Written", load_plain(report.read_bytes()))
        report.unlink()
        return written
