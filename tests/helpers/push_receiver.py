"""A process that receives weights by the calls of a SGLang server, and does nothing else.

It joins groups, takes broadcasts, payloads and folders, and tells checksums. Past `refuse_from` updates it answers each
further one with HTTP 400.
"""

import base64
import json
import pickle
from collections.abc import Sequence
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from rollout.bucket import join_group
from rollout.inference.sglang.hooks.checksums import position_checksum
from rollout.inference.sglang.hooks.recorded_copies import RecordedCopies
from rollout.inference.sglang.receivers import BroadcastBuckets, SharedBuckets


class Receiver(nn.Module):
    def __init__(self, refuse_from: int) -> None:
        super().__init__()
        self.tensors: dict[str, Tensor] = {}
        self.groups: dict[str, dist.ProcessGroup] = {}
        copies = RecordedCopies()
        self.broadcast, self.shared = BroadcastBuckets(copies), SharedBuckets(copies)
        self.updates, self.refuse_from = 0, refuse_from

    def init_weights_update_group(self, body: dict[str, Any]) -> None:
        name = body["group_name"]
        store = dist.TCPStore(body["master_address"], body["master_port"], timeout=timedelta(seconds=60))
        self.groups[name] = join_group(
            store, name, backend=body["backend"], rank=body["rank_offset"], world=body["world_size"],
            timeout=timedelta(seconds=60),
        )  # fmt: skip

    def destroy_weights_update_group(self, body: dict[str, Any]) -> None:
        dist.destroy_process_group(self.groups.pop(body["group_name"]))

    def update_weights_from_distributed(self, body: dict[str, Any]) -> None:
        updater = SimpleNamespace(device="cpu", _model_update_group=self.groups, get_model=lambda: self)
        arguments = (body[name] for name in ("names", "dtypes", "shapes", "group_name"))
        succeeded, message = self.broadcast.receive(None, updater, *arguments)
        if not succeeded:
            raise ValueError(message)

    def load_weights(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        self._count()
        self.tensors |= {name: tensor.clone() for name, tensor in tensors}

    def update_weights_from_tensor(self, body: dict[str, Any]) -> None:
        (payload,) = body["serialized_named_tensors"]
        updater = SimpleNamespace(get_model=lambda: self)
        succeeded, message = self.shared.copy(None, updater, pickle.loads(base64.b64decode(payload)))
        if not succeeded:
            raise ValueError(message)

    def update_weights_from_disk(self, body: dict[str, Any]) -> None:
        self._count()
        index = json.loads((Path(body["model_path"]) / "model.safetensors.index.json").read_text())
        for file in set(index["weight_map"].values()):
            self.tensors |= load_file(Path(body["model_path"]) / file)

    def weights_checker(self, body: dict[str, Any]) -> dict[str, Any]:
        sums = {name: str(int(position_checksum(tensor))) for name, tensor in self.tensors.items()}
        return {"ranks": [{"checksums": sums, "parallelism_info": {"tp_rank": 0}}]}

    def _count(self) -> None:
        self.updates += 1
        if self.updates > self.refuse_from:
            raise ValueError("no more of these")


def serve(port_file: Path, receiver: Receiver) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                answer = getattr(receiver, self.path.removeprefix("/"))(body) or {"success": True}
                status = 200
            except ValueError as e:
                status, answer = 400, {"success": False, "message": str(e)}
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *args: Any) -> None:
            """Silence."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        partial = port_file.with_suffix(".partial")
        partial.write_text(str(server.server_port))
        partial.rename(port_file)
        server.serve_forever()


def receive(port_file: Path, refuse_from: int) -> None:
    """Be such a process."""
    torch.set_num_threads(1)
    serve(port_file, Receiver(refuse_from))
