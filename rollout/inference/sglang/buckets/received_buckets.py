"""How a SGLang server receives a bucket of weights: by a broadcast, while the bucket before it is copied into the
model, or in memory that it shares with the sender.

SGLang itself makes every tensor of a broadcast bucket and concatenates them before it receives over them, and receives
nothing while it copies. Read by the server's processes, so nothing else of this project is imported. Invariant: when a
bucket begins to arrive, at most one other is being copied.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class ReceivedBuckets:
    """The buckets of one scheduler process."""

    def __init__(self, copies: Any) -> None:
        """`copies`: RecordedCopies, which load a bucket into the model."""
        self._copies = copies
        self._stream: torch.cuda.Stream | None = None
        """Broadcasts run in this stream."""
        self._ends: deque[torch.cuda.Event] = deque()
        """The ends of the copies of the last two buckets."""
        self._shared: dict[int, Tensor] = {}
        """Memory of the sender, by its numbers, until it is released."""

    def receive(
        self, original: Any, updater: Any, names: Sequence[str], dtypes: Sequence[Any], shapes: Any, group_name: str
    ) -> tuple[bool, str]:
        """Receive a bucket in place of WeightUpdater._update_bucketed_weights_from_distributed; return (whether it
        succeeded, message). On a GPU the broadcast and the copies may be running when it returns."""

        def receive() -> None:
            formats = [d if isinstance(d, torch.dtype) else getattr(torch, d) for d in dtypes]
            num_bytes = sum(d.itemsize * math.prod(shape) for d, shape in zip(formats, shapes, strict=True))
            flat = self._broadcast(num_bytes, updater.device, updater._model_update_group[group_name])
            self._copies.load(updater.get_model(), flat, names, formats, shapes)
            if flat.is_cuda:
                self._ends.append(torch.cuda.current_stream().record_event())

        return _outcome_of(receive)

    def copy_shared(
        self, original: Any, updater: Any, flattened_tensor_bucket_dict: dict[str, Any]
    ) -> tuple[bool, str]:
        """Load a bucket in place of WeightUpdater._update_weights_from_flattened_bucket; return as receive() does, when
        the copies are complete. See payload_of() in weights.py."""
        content = flattened_tensor_bucket_dict
        return _outcome_of(lambda: self._copy(updater, content) if content else self._shared.clear())

    def _copy(self, updater: Any, content: dict[str, Any]) -> None:
        memory, number = content["memory"], content["number"]
        if memory is None and number not in self._shared:
            raise RuntimeError(f"memory {number} of the trainer was not shared with this server")
        if memory is None:
            memory = self._shared[number]
        elif number is not None:
            self._shared[number] = memory
        layout = (content[name] for name in ("names", "dtypes", "shapes"))
        try:
            self._copies.load(updater.get_model(), memory[: content["num_bytes"]], *layout)
        finally:
            # Each rank of the server does so before they meet: the first one answers for all, and the trainer writes
            # the next bucket but one into this memory then.
            wait_for_copies(memory)

    def _broadcast(self, num_bytes: int, device: Any, group: Any) -> Tensor:
        """Return the bytes that rank 0 of the group sends; what the current stream does next waits for them."""
        if torch.device(device).type != "cuda":
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


def wait_for_copies(memory: Tensor) -> None:
    """Return when the copies from it are complete, in whatever stream a model's loader has queued them."""
    if memory.is_cuda:
        torch.cuda.synchronize(memory.device)


def _outcome_of(update: Callable[[], None]) -> tuple[bool, str]:
    """Run a part of an update; return (whether it succeeded, message), as SGLang's own functions do."""
    try:
        update()
    except Exception as error:  # noqa: BLE001  reported to the sender, as SGLang does
        logger.exception("a bucket of weights")
        return False, f"Failed to update parameter online: {error}. Weights are partially updated."
    return True, "Succeeded to update parameter online."
