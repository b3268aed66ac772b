"""Senders of one trainer rank, into test doubles."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.weight_sync.buckets import Sender, make_sender
from core.weight_sync.push import SenderSettings
from helpers.sglang_double import model
from helpers.sglang_double.server import SGLangDouble
from helpers.sglang_double.updates import UPDATES
from helpers.sglang_double.weights import Parameters
from rollout.inference.sglang.client import SGLangEndpoint

KINDS = ("nccl", "ipc", "disk")
UPDATE_OF = dict(zip(("ipc", "nccl", "disk"), UPDATES, strict=True))
CPU = torch.device("cpu")
MODEL = tempfile.TemporaryDirectory(prefix="push-doubles-")
"""Folder of the model that the doubles serve: its config.json alone."""
(Path(MODEL.name) / "config.json").write_text(json.dumps(model.CONFIG))


def sender_of(kind: str, folder: Path, **changes: Any) -> Sender:
    """`folder`: of the model; folders of pushes are made in it. `changes`: of SenderSettings."""
    values: dict[str, Any] = dict(
        type=kind, dtype="float32", timeout_seconds=30.0, bucket_bytes=1 << 20, folder=folder,
        model_path=str(folder),
    )  # fmt: skip
    return make_sender(SenderSettings(**values | changes))


def connected(kind: str, folder: Path, servers: list[SGLangEndpoint], **changes: Any) -> Sender:
    """As sender_of(), with these servers."""
    sender = sender_of(kind, folder, **changes)
    sender.connect(servers)
    return sender


def limit(sender: Any, seconds: float) -> None:
    """Give the next pushes a short time limit. Everything before had a long one, also on a busy host."""
    sender._settings = replace(sender._settings, timeout_seconds=seconds)


def buckets(version: int) -> Iterator[Mapping[str, Tensor]]:
    """Three of them, which cut through fused parameters."""
    items = list(model.weights(version).items())
    for part in range(3):
        yield dict(items[part::3])


def address(double: SGLangDouble, index: int = 0, **changes: Any) -> SGLangEndpoint:
    values: dict[str, Any] = {"tp": double.tp, "model_path": MODEL.name, "trainer_ranks": (0,) * double.tp}
    return SGLangEndpoint(name=f"generator-{index}", url=double.url, **values | changes)


@contextmanager
def paused(*tps: int, **options: Any) -> Iterator[tuple[list[SGLangDouble], list[SGLangEndpoint]]]:
    """A double for each tensor-parallel size, none of which samples."""
    with ExitStack() as stack:
        doubles = [stack.enter_context(SGLangDouble(tp=tp, **options)) for tp in tps]
        addresses = [address(double, i) for i, double in enumerate(doubles)]
        for server in addresses:
            server.post(("/pause_generation", {"mode": "in_place"}), timeout_seconds=30)
        yield doubles, addresses


def push(sender: Sender, version: int, *, verify: bool = True) -> Any:
    """prepare() and send()."""
    sender.prepare(buckets(version), verify=verify)
    return sender.send()


def holds(double: SGLangDouble, version: int, dtype: torch.dtype = torch.float32) -> bool:
    """Whether every rank has this version of the weights, bit for bit."""
    expected = Parameters(model.weights(version), tp=double.tp, dtype=dtype)
    return all(
        mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
        for mine, theirs in zip(double.parameters.ranks, expected.ranks, strict=True)
    )
