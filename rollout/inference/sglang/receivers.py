"""How weights come into a SGLang server: by broadcast, in memory that it shares with the trainer, and in a folder. The
calls that announce them, and what the server does with them.

The loops of the senders are core/weight_sync/nccl.py, ipc.py and disk.py. Read by the server's processes too, so of
this project nothing but the bucket and rollout/inference/changes.py is imported.

- Broadcast: SGLang itself makes every tensor of a bucket and concatenates them before it receives over them, and
  receives nothing while it copies; here a bucket is received while the one before is copied. Invariant: when a bucket
  begins to arrive, at most one other is being copied.
- Shared memory: a payload has types of torch and the standard library alone: SGLang unpickles no others.
- Folder: it holds all weights, or changes to those of the push before.
"""

from __future__ import annotations

import base64
import json
import math
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypedDict

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.multiprocessing import reductions

from rollout.bucket import FlatBucket
from rollout.inference.changes import IDENTITY, INDEX, ChangesReader
from rollout.inference.sglang.hooks.recorded_copies import Outcome, RecordedCopies, WeightUpdater, outcome_of


def broadcast_call(bucket: FlatBucket, group: str) -> tuple[str, dict[str, object]]:
    """Return the call that receives this bucket as one broadcast from rank 0 of the group."""
    return "/update_weights_from_distributed", {
        "names": bucket.names,
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in bucket.dtypes],
        "shapes": bucket.shapes,
        "group_name": group,
        "load_format": "flattened_bucket",
        "flush_cache": False,
    }


class BroadcastBuckets:
    """The broadcast buckets of one scheduler process."""

    def __init__(self, copies: RecordedCopies) -> None:
        self._copies = copies
        self._stream: torch.cuda.Stream | None = None
        """Broadcasts run in this stream."""
        self._ends: deque[torch.cuda.Event] = deque()
        """The ends of the copies of the last two buckets."""

    def receive(
        self,
        original: object,
        updater: WeightUpdater,
        names: Sequence[str],
        dtypes: Sequence[str | torch.dtype],
        shapes: Sequence[Sequence[int]],
        group_name: str,
    ) -> Outcome:
        """Receive a bucket in place of WeightUpdater._update_bucketed_weights_from_distributed; return (whether it
        succeeded, message). On a GPU the broadcast and the copies may be running when it returns."""

        def receive() -> None:
            formats = tuple(d if isinstance(d, torch.dtype) else getattr(torch, d) for d in dtypes)
            sizes = tuple(tuple(shape) for shape in shapes)
            num_bytes = sum(d.itemsize * math.prod(size) for d, size in zip(formats, sizes, strict=True))
            flat = self._broadcast(num_bytes, torch.device(updater.device), updater._model_update_group[group_name])
            bucket = FlatBucket(names=tuple(names), dtypes=formats, shapes=sizes, flat=flat)
            self._copies.load(updater.get_model(), bucket)
            if flat.is_cuda:
                self._ends.append(torch.cuda.current_stream().record_event())

        return outcome_of(receive)

    def _broadcast(self, num_bytes: int, device: torch.device, group: ProcessGroup) -> Tensor:
        """Return the bytes that rank 0 of the group sends; what the current stream does next waits for them."""
        if device.type != "cuda":
            flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            torch.distributed.broadcast(flat, src=0, group=group)
            return flat
        if len(self._ends) == 2:
            self._ends.popleft().synchronize()
        current = torch.cuda.current_stream()
        self._stream = self._stream or torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            torch.distributed.broadcast(flat, src=0, group=group)
        current.wait_stream(self._stream)
        flat.record_stream(current)  # read by the copies there, after this function's caller has dropped it
        return flat


class Payload(TypedDict):
    """A bucket of which the server has the bytes, or gets them here."""

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: int
    memory: Tensor | None
    """Memory that begins with the bucket's bytes. None: the server has it already."""
    number: int | None
    """The server keeps the memory under this number."""


RELEASE = base64.b64encode(pickle.dumps({})).decode()
"""A payload that closes all memory that was kept."""
_DEVICE_ARGUMENT = 6
"""Place of the device among the arguments of torch's rebuild_cuda_tensor."""


def shared_call(payloads: Sequence[str]) -> tuple[str, dict[str, object]]:
    """Return the call that copies from these payloads, one for each tensor-parallel rank."""
    body = {"serialized_named_tensors": list(payloads), "load_format": "flattened_bucket", "flush_cache": False}
    return "/update_weights_from_tensor", body


def share(bucket: FlatBucket, memory: Tensor | None, *, number: int) -> str:
    """Return the payload of a bucket. See rollout.inference.backend.WeightEndpoint.share."""
    if memory is None:
        return payload_of(bucket, None, number=number)
    if memory.device.type != "cuda":
        return payload_of(bucket, memory[: bucket.num_bytes].clone())
    return payload_of(bucket, _SharedMemory(memory), number=number)


def payload_of(bucket: FlatBucket, memory: object | None, *, number: int | None = None) -> str:
    """Return a bucket for shared_call(), pickled and base64-coded. `memory`: its bytes, or a handle to device memory
    that begins with them and that the server keeps as `number`; None: it has that memory."""
    content = {
        "names": bucket.names,
        "dtypes": bucket.dtypes,
        "shapes": bucket.shapes,
        "num_bytes": bucket.num_bytes,
        "memory": memory,
        "number": number,
    }
    return base64.b64encode(pickle.dumps(content)).decode()


class _SharedMemory:
    """Pickles as a handle to a tensor's device memory. The device is named by its UUID: its number differs between
    processes that see different GPUs, and SGLang's processes look it up that way."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Callable[..., Tensor], tuple[object, ...]]:
        rebuild, arguments = reductions.reduce_tensor(self._tensor)
        uuid = str(torch.cuda.get_device_properties(self._tensor.device).uuid)
        return rebuild, (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])


class SharedBuckets:
    """The memory that one scheduler process shares with the trainer."""

    def __init__(self, copies: RecordedCopies) -> None:
        self._copies = copies
        self._memory: dict[int, Tensor] = {}
        """Memory by the sender's numbers, until it is released."""

    def copy(self, original: object, updater: WeightUpdater, flattened_tensor_bucket_dict: Payload) -> Outcome:
        """Copy a bucket in place of WeightUpdater._update_weights_from_flattened_bucket, by its argument's name; return
        (whether it succeeded, message) when the copies are complete."""
        content = flattened_tensor_bucket_dict
        return outcome_of(lambda: self._copy(updater, content) if content else self._memory.clear())

    def _copy(self, updater: WeightUpdater, content: Payload) -> None:
        memory, number = content["memory"], content["number"]
        if memory is not None and number is not None:
            self._memory[number] = memory
        elif memory is None:
            if number not in self._memory:
                raise RuntimeError(f"memory {number} of the trainer was not shared with this server")
            memory = self._memory[number]
        bucket = FlatBucket(
            names=content["names"],
            dtypes=content["dtypes"],
            shapes=content["shapes"],
            flat=memory[: content["num_bytes"]],
        )
        try:
            self._copies.load(updater.get_model(), bucket)
        finally:
            # Each rank of the server does so before they meet: the first one answers for all, and the trainer writes
            # the next bucket but one into this memory then.
            wait_for_copies(memory)


def wait_for_copies(memory: Tensor) -> None:
    """Return when the copies from it are complete, in whatever stream a model's loader has queued them."""
    if memory.is_cuda:
        torch.cuda.synchronize(memory.device)


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
