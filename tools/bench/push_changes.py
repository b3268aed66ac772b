"""A push through files to a server elsewhere, over a link of 10 Gbit/s: only what has changed, against everything.

The sender is that of a run. The server is a process in a network namespace of its own, whose link the kernel limits
(tc tbf): it takes the files over the link into its memory, and copies them into its weights, as a server's loader does
(core/weight_sync/disk.py, rollout/inference/changes.py). Weights are normal numbers of standard deviation 0.02 in
float32 on the trainer's side, and bfloat16 on the server's; an update moves each by the learning rate, up or down.
Needs root, ip and tc.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor

from core.config.push import Changes
from core.weight_sync.buckets import SenderSettings
from core.weight_sync.disk import DiskSender
from rollout.inference.backend import WeightEndpoint
from rollout.inference.changed import Changed
from rollout.inference.changes import IDENTITY, INDEX, ChangesError, ChangesReader
from rollout.inference.errors import GeneratorCallError
from rollout.inference.sglang.hooks import position_checksum
from tools.bench.cpu import Scene
from tools.bench.figure import Figure

NUM_TENSORS, SHAPE = 48, (2048, 5024)
"""494 million values: a model of 0.5B."""
RATES, PUSHES = (1e-6, 1e-5), 3
GBIT, NETWORK = 10, "10.213.7"
_CHUNK = 1 << 20


def push_changes(scene: Scene) -> Iterator[Figure]:
    """Yield seconds of a push, seconds without sampling, and bytes, each beside that of a push of everything."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        print("push_changes is left out: it needs root, ip and tc", flush=True)
        return
    with _limited_link() as namespace:
        for rate in RATES:
            whole, changes = (_measure(scene.folder, namespace, how, rate) for how in ("never", "always"))
            share = f"{changes.share:.2%} of the values changed by a learning rate of {rate:g}"
            for what, unit in (("seconds", "s"), ("pause", "s"), ("gigabytes", "GB")):
                value, baseline = getattr(changes, what), getattr(whole, what)
                yield Figure(
                    name=f"push_changes.{what}.{rate:g}", value=value, unit=unit, baseline=baseline,
                    target=f"less than a push of everything over {GBIT} Gbit/s; {share}",
                )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Cost:
    """Medians over the pushes after the first."""

    seconds: float
    pause: float
    gigabytes: float
    share: float


def _measure(folder: Path, namespace: str, changes: str, rate: float) -> _Cost:
    """Measure PUSHES pushes after a first one. Raises RuntimeError where the server ends with other weights."""
    settings = SenderSettings(
        rank=0, world_size=1, dtype=torch.bfloat16, timeout_seconds=300.0, bucket_bytes=256 * 2**20
    )  # fmt: skip
    config = folder / "config"
    config.mkdir(exist_ok=True)
    (config / "config.json").write_text("{}")
    torch.manual_seed(0)
    weights = {f"layers.{i}.weight": torch.randn(SHAPE) * 0.02 for i in range(NUM_TENSORS)}
    seconds, pauses, sizes, shares = [], [], [], []
    with _server(namespace) as server:
        sender = DiskSender(
            settings, torch.device("cpu"), folder=folder / "pushes", model_path=str(config),
            changes=cast(Changes, changes),
        )  # fmt: skip
        sender.connect([cast(WeightEndpoint, server)])
        for number in range(PUSHES + 1):
            for tensor in weights.values():
                tensor.add_(torch.randint(0, 2, SHAPE, dtype=torch.int8).mul_(2).sub_(1), alpha=rate)
            start = time.perf_counter()
            sender.prepare(({name: tensor} for name, tensor in weights.items()), verify=False)
            prepared = time.perf_counter()
            report = sender.send()
            end = time.perf_counter()
            assert report is not None, "this is rank 0"
            if number:
                seconds.append(end - start)
                pauses.append(end - prepared)
                sizes.append(report.num_bytes / 1e9)
                shares.append(report.changed or 0.0)
        if server.checksums() != _checksums({name: tensor.bfloat16() for name, tensor in weights.items()}):
            raise RuntimeError(f"push.changes={changes}: the server's weights are not those of the sender")
    return _Cost(
        seconds=statistics.median(seconds),
        pause=statistics.median(pauses),
        gigabytes=statistics.median(sizes),
        share=statistics.median(shares),
    )


def _checksums(weights: Mapping[str, Tensor]) -> list[int]:
    return [int(position_checksum(weights[name])) for name in sorted(weights)]


@contextlib.contextmanager
def _limited_link() -> Iterator[str]:
    """Make a network namespace with a link of GBIT Gbit/s in each direction; this end is .1, that one .2."""
    name, (here, there) = f"slipstream-{os.getpid()}", (f"sl{os.getpid() % 10**7}{end}" for end in "ab")

    def run(*words: str) -> None:
        subprocess.run(words, check=True, capture_output=True)

    limit = ("root", "tbf", "rate", f"{GBIT}gbit", "burst", "4mb", "latency", "20ms")
    run("ip", "netns", "add", name)
    try:
        run("ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        run("ip", "addr", "add", f"{NETWORK}.1/24", "dev", here)
        run("ip", "link", "set", here, "up")
        run("ip", "-n", name, "addr", "add", f"{NETWORK}.2/24", "dev", there)
        run("ip", "-n", name, "link", "set", there, "up")
        run("tc", "qdisc", "add", "dev", here, *limit)
        run("tc", "-n", name, "qdisc", "add", "dev", there, *limit)
        yield name
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


class _Elsewhere:
    """What DiskSender uses of a WeightEndpoint."""

    name, tp, pp = "generator-0", 1, 1

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def load_folder(self, path: str, *, timeout_seconds: float) -> None:
        self._connection.settimeout(timeout_seconds)
        for file in Path(path).iterdir():
            self._send({"file": file.name, "size": file.stat().st_size})
            with file.open("rb") as content:
                self._connection.sendfile(content)
        self._send({"load": True})
        if error := _line(self._connection)["error"]:
            raise GeneratorCallError(f"{self.name}: {error}")

    def checksums(self) -> list[int]:
        self._send({"checksums": True})
        return cast(list[int], _line(self._connection)["checksums"])

    def _send(self, message: Mapping[str, Any]) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")


@contextlib.contextmanager
def _server(namespace: str) -> Iterator[_Elsewhere]:
    command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "tools.bench.push_changes"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None, "stdout is a pipe"
            port = int(process.stdout.readline())
            with socket.create_connection((f"{NETWORK}.2", port)) as connection:
                yield _Elsewhere(connection)
            process.wait()  # it removes its files at the end of the connection
        finally:
            process.kill()


def _line(connection: socket.socket) -> dict[str, Any]:
    """Return one line of JSON; an empty dict at the end."""
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (byte := connection.recv(1)):
            return {}
        line += byte
    return cast(dict[str, Any], json.loads(line))


def _receive(connection: socket.socket, path: Path, size: int) -> None:
    buffer = memoryview(bytearray(_CHUNK))
    with path.open("wb") as file:
        while size:
            count = connection.recv_into(buffer, min(size, _CHUNK))
            if not count:
                raise ConnectionError(f"the sender left {size} bytes of {path.name} out")
            file.write(buffer[:count])
            size -= count


def _load(folder: Path, weights: dict[str, Tensor], identity: str | None) -> str:
    """Copy a pushed folder into `weights`; return the identity of the push. Raises ChangesError."""
    if (folder / INDEX).is_file():
        reader = ChangesReader(folder, identity)
        for name, tensor in reader.tensors(torch.device("cpu"), Changed.of):
            weights[name].copy_(tensor)
        return reader.identity
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            weights.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
    return cast(str, json.loads((folder / IDENTITY).read_text())["id"])


def serve() -> None:
    """Take folders and load them, until the connection ends."""
    weights: dict[str, Tensor] = {}
    identity: str | None = None
    with socket.create_server((f"{NETWORK}.2", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection = listener.accept()[0]
    with connection, tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        folder = Path(place)
        while message := _line(connection):
            if "file" in message:
                _receive(connection, folder / message["file"], message["size"])
                continue
            answer: dict[str, Any] = {"error": ""}
            if "checksums" in message:
                answer["checksums"] = _checksums(weights)
            else:
                try:
                    identity = _load(folder, weights, identity)
                except ChangesError as error:
                    answer["error"] = str(error)
                for file in folder.iterdir():
                    file.unlink()
            connection.sendall(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    serve()
