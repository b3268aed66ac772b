"""The way of weights into one SGLang server, from the trainer's ranks: see rollout.inference.backend.WeightEndpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from rollout.bucket import FlatBucket
from rollout.inference.backend import GroupMembership
from rollout.inference.sglang.checksums import ExpectedChecksums, ModelShape
from rollout.inference.sglang.model_config import read_model_config
from rollout.inference.sglang.weights import (
    CHECKSUMS,
    FORMATS,
    RELEASE,
    ServerAddress,
    checksums_of,
    formats_of,
    join_group,
    leave_group,
    payload_of,
    post,
    receive_broadcast,
    receive_folder,
    receive_tensors,
)

_DEVICE_ARGUMENT = 6
"""Place of the device among the arguments of torch's rebuild_cuda_tensor."""


@dataclass(frozen=True, kw_only=True)
class SGLangEndpoint(ServerAddress):
    """One server; every call is a POST on a connection of its own."""

    model_path: str = ""
    """The server's model folder: its config.json determines how the server fuses and shards parameters."""
    trainer_ranks: tuple[int, ...] = ()
    """Shared slots: the trainer's rank in the place of each tensor-parallel rank."""

    def beside(self, trainer_ranks: tuple[int, ...]) -> SGLangEndpoint:
        return replace(self, trainer_ranks=trainer_ranks)

    def join_group(self, group: GroupMembership, *, timeout_seconds: float) -> None:
        post(self, join_group(group), timeout_seconds=timeout_seconds)

    def receive_bucket(self, bucket: FlatBucket, *, group: str, timeout_seconds: float) -> None:
        post(self, receive_broadcast(bucket, group=group), timeout_seconds=timeout_seconds)

    def leave_group(self, group: str, *, timeout_seconds: float) -> None:
        post(self, leave_group(group), timeout_seconds=timeout_seconds)

    def share(self, bucket: FlatBucket, memory: Tensor | None, *, number: int) -> str:
        if memory is None:
            return payload_of(bucket, None, number=number)
        if memory.device.type != "cuda":
            return payload_of(bucket, memory[: bucket.num_bytes].clone())
        return payload_of(bucket, _SharedMemory(memory), number=number)

    def receive_shared(self, shared: Sequence[str], *, timeout_seconds: float) -> None:
        post(self, receive_tensors(shared), timeout_seconds=timeout_seconds)

    def release_shared(self, *, timeout_seconds: float) -> None:
        post(self, receive_tensors([RELEASE] * self.tp), timeout_seconds=timeout_seconds)

    def load_folder(self, path: str, *, timeout_seconds: float) -> None:
        post(self, receive_folder(path), timeout_seconds=timeout_seconds)

    def expected_checksums(self) -> ExpectedChecksums:
        return ExpectedChecksums(ModelShape.from_config(read_model_config(self.model_path)), tp=self.tp)

    def checksums(self, *, timeout_seconds: float) -> list[dict[str, int]]:
        return checksums_of(post(self, CHECKSUMS, timeout_seconds=timeout_seconds))

    def formats(self, *, timeout_seconds: float) -> list[dict[str, str]]:
        return formats_of(post(self, FORMATS, timeout_seconds=timeout_seconds))


class _SharedMemory:
    """Pickles as a handle to a tensor's device memory. The device is named by its UUID: its number differs between
    processes that see different GPUs, and SGLang's processes look it up that way."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        rebuild, arguments = reductions.reduce_tensor(self._tensor)
        uuid = str(torch.cuda.get_device_properties(self._tensor.device).uuid)
        return rebuild, (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])
