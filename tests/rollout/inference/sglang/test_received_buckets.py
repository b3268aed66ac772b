"""What a server does with buckets in memory that it shares with the trainer."""

import base64
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollout.bucket import FlatBucket
from rollout.inference.sglang import receivers
from rollout.inference.sglang.client import SGLangEndpoint
from rollout.inference.sglang.hooks.recorded_copies import RecordedCopies
from rollout.inference.sglang.receivers import SharedBuckets


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.zeros(3))

    def load_weights(self, tensors: list[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            if name != "norm":
                raise ValueError(f"{name} is unknown")
            self.norm.data.copy_(tensor)


class Server:
    """The part of a scheduler process that receives what is shared with it."""

    def __init__(self) -> None:
        self.model, self.buckets = Model(), SharedBuckets(RecordedCopies())

    def receive(self, payload: str, **replaced: Any) -> tuple[bool, str]:
        content = pickle.loads(base64.b64decode(payload))
        updater = SimpleNamespace(get_model=lambda: self.model)
        return self.buckets.copy(None, updater, flattened_tensor_bucket_dict=content and {**content, **replaced})

    @property
    def shared(self) -> dict[int, Tensor]:
        return self.buckets._memory


def bucket(value: float, name: str = "norm") -> FlatBucket:
    return FlatBucket.of({name: torch.full((3,), value, dtype=torch.float32)})


def payload(value: float, number: int | None = None, name: str = "norm") -> str:
    return receivers.payload_of(bucket(value, name), None, number=number)


def holding(value: float) -> Tensor:
    """Memory that begins with a bucket."""
    return torch.cat([bucket(value).flat, torch.full((20,), 255, dtype=torch.uint8)])


def test_memory_is_kept_by_its_number_until_it_is_released() -> None:
    server, memory = Server(), [holding(1), holding(2)]
    for number in (0, 1):
        assert server.receive(payload(0, number), memory=memory[number])[0]
        assert server.model.norm.tolist() == [number + 1] * 3
    memory[0][:12] = bucket(5).flat
    assert server.receive(payload(0, 0))[0] and server.model.norm.tolist() == [5] * 3
    assert server.receive(payload(0, 1))[0] and server.model.norm.tolist() == [2] * 3
    larger = holding(7)
    assert server.receive(payload(0, 1), memory=larger)[0] and server.shared[1] is larger
    assert server.receive(receivers.RELEASE)[0] and not server.shared
    succeeded, message = server.receive(payload(0, 1))
    assert not succeeded and "memory 1 of the trainer was not shared with this server" in message
    assert server.model.norm.tolist() == [7] * 3


def test_bytes_that_come_with_the_bucket_are_not_kept() -> None:
    server = Server()
    assert server.receive(payload(0), memory=bucket(3).flat)[0]
    assert server.model.norm.tolist() == [3] * 3 and not server.shared


def test_a_bucket_that_cannot_be_loaded_is_a_failure_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Tensor] = []
    monkeypatch.setattr(receivers, "wait_for_copies", waited.append)
    succeeded, message = Server().receive(payload(0, 0, "other"), memory=holding(1))
    assert not succeeded and "other is unknown. Weights are partially updated" in message
    assert len(waited) == 1, "copies that were queued before may still run"


def test_the_trainers_end_shares_memory_once_and_bytes_of_the_cpu_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    server = SGLangEndpoint(name="generator-0", url="", tp=1)

    def shared(memory: Any, number: int) -> dict[str, Any]:
        content: dict[str, Any] = pickle.loads(base64.b64decode(server.share(bucket(1), memory, number=number)))
        return content

    again = shared(None, 1)
    assert (again["memory"], again["number"], again["num_bytes"]) == (None, 1, 12)
    memory = holding(1)
    sent = shared(memory, 1)
    assert sent["memory"].equal(memory[:12]) and sent["memory"].untyped_storage().nbytes() == 12
    assert sent["number"] is None
    monkeypatch.setattr(receivers, "_SharedMemory", lambda memory: "a handle")
    opened = shared(SimpleNamespace(device=torch.device("cuda")), 1)
    assert (opened["memory"], opened["number"]) == ("a handle", 1)
