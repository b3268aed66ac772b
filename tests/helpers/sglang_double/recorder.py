"""Send a fixed sequence of calls to a server and return what came back, normalised: the transcript.

The transcript of a real SGLang server is stored beside this file (transcript_tp*.json); the double has to give the
same. It holds status codes, JSON keys with the types of their values, checksums, and facts about the order of events.
Sampled tokens, texts and times differ between runs and are left out.
"""

import base64
import http.client
import json
import pickle
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from helpers.sglang_double import model
from helpers.sglang_double.groups import GlooRank

ALIVE, IN_FLIGHT, VERSIONS = "/slipstream_alive", "/slipstream_in_flight", "slipstream_version"
LITERAL = ("success", "status", "tp_rank", "type", "checksums")
"""Keys whose values are kept."""
OPTIONAL = ("cached_tokens_details",)
"""Keys whose values are of another type in every run."""
LONG = 600
"""Tokens of a request that is to run until something happens to it."""
Entry = dict[str, Any]


def shape_of(value: Any, key: str = "") -> Any:
    """Types in place of values, except under the keys of LITERAL. A list of equal shapes becomes ["...", shape]."""
    if key in LITERAL:
        return value
    if key in OPTIONAL:
        return "any"
    if isinstance(value, dict):
        return {name: shape_of(entry, name) for name, entry in sorted(value.items())}
    if isinstance(value, list):
        shapes = [shape_of(entry) for entry in value]
        return ["...", shapes[0]] if shapes and all(shape == shapes[0] for shape in shapes) else shapes
    return "null" if value is None else type(value).__name__


class Recorder:
    """A conversation with one server."""

    def __init__(self, url: str, *, tp: int, folder: Path) -> None:
        """`folder`: for weights that the server loads from disk."""
        self._address, self._tp, self._folder = urlsplit(url), tp, folder
        self._entries: list[Entry] = []
        self._threads = ThreadPoolExecutor(8)

    def record(self) -> list[Entry]:
        """Run all parts. The server must have started with version 0 of the tiny model's weights."""
        for part in (self._start, self._sampling, self._pauses, self._aborts, self._updates, self._refusals):
            part()
        return self._entries

    def _request(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """(status, JSON or text)."""
        with closing(http.client.HTTPConnection(self._address.hostname or "", self._address.port, timeout=120)) as c:
            c.request(
                method, path, json.dumps(body) if body is not None else None, {"Content-Type": "application/json"}
            )
            response = c.getresponse()
            raw = response.read().decode()
        try:
            return response.status, json.loads(raw) if raw else "empty"
        except ValueError:
            return response.status, "text"

    def _call(self, name: str, path: str, body: Any, *, status_only: bool = False, **facts: Any) -> Any:
        """POST (GET without a body), note it, and return the answer."""
        status, answer = self._request("GET" if body is None else "POST", path, body)
        self._note(name, path, status, None if status_only else answer, **facts)
        return answer

    def _note(self, name: str, path: str, status: int, answer: Any, **facts: Any) -> None:
        shape = {} if answer is None else {"answer": shape_of(answer)}
        self._entries.append({"name": name, "path": path.partition("?")[0], "status": status, **shape, **facts})

    def _generate(self, rid: str, prompt: int = 4, **sampling: Any) -> Future[tuple[int, Any]]:
        body = {"input_ids": list(range(prompt)), "sampling_params": sampling, "return_logprob": True, "rid": rid}
        return self._threads.submit(self._request, "POST", "/generate", body)

    def _note_answer(self, name: str, future: Future[tuple[int, Any]], *, exact: bool = True) -> None:
        """`exact`: the number of tokens is the same in every run."""
        status, answer = future.result()
        num_tokens = len(answer["output_ids"])
        versions = sorted(set(answer["meta_info"].get(VERSIONS, [])))
        self._note(name, "/generate", status, answer, tokens=num_tokens if exact else num_tokens > 0, versions=versions)

    def _in_flight(self) -> dict[str, int]:
        """Number of tokens by request id."""
        answers = self._request("POST", IN_FLIGHT, {})[1]["answers"]
        return {name: n for rank in answers if rank for name, n in zip(rank["names"], rank["lengths"], strict=True)}

    def _until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < end, "the server did not get there within 60 s"
            time.sleep(0.01)

    def _running(self, rid: str) -> Future[tuple[int, Any]]:
        """A long request that has sampled its first tokens."""
        future = self._generate(rid, max_new_tokens=LONG, temperature=1.0)
        self._until(lambda: self._in_flight().get(rid, 0) >= 5)
        return future

    def _start(self) -> None:
        self._call("is the scheduler alive", ALIVE, None)
        self._call("is the HTTP server alive", "/model_info", None, status_only=True)
        self._call("version 0", "/continue_generation", {"rid": "0", "torch_empty_cache": False})
        self._call("freeze", "/freeze_gc", {})
        self._call("nothing in flight", IN_FLIGHT, {})

    def _sampling(self) -> None:
        kinds: dict[str, dict[str, Any]] = {
            "length": {"temperature": 1.0},
            "greedy": {"temperature": 0.0, "stop_token_ids": []},
            "seed of 63 bits": {"temperature": 1.0, "sampling_seed": 2**63 - 1},
            "top_p and top_k": {"temperature": 0.7, "top_p": 0.9, "top_k": 50},
            "stop tokens ruled out": {"ignore_eos": True, "logit_bias": {"7": -1e9}, "stop_token_ids": [7]},
            "stop": {"temperature": 1.0, "stop_token_ids": list(range(model.VOCAB))},
        }
        for name, sampling in kinds.items():
            self._note_answer(name, self._generate(name, max_new_tokens=4, **sampling))

    def _pauses(self) -> None:
        for version, mode in (("1", "in_place"), ("2", "retract")):
            running = self._running(f"running {mode}")
            self._call(f"pause {mode}", "/pause_generation", {"mode": mode})
            before = self._in_flight()
            late = self._generate(f"late {mode}", max_new_tokens=4)
            time.sleep(0.3)
            during = self._in_flight()
            self._call(
                f"in flight in {mode}", IN_FLIGHT, {},
                sampled_while_paused=during != before, late_request_is_named=f"late {mode}" in during,
            )  # fmt: skip
            self._call(f"alive in {mode}", ALIVE, None)
            self._call(f"go on after {mode}", "/continue_generation", {"rid": version, "torch_empty_cache": False})
            self._note_answer(f"ran through {mode}", running)
            self._note_answer(f"came during {mode}", late)

    def _aborts(self) -> None:
        running = self._running("to be aborted")
        self._call("abort all", "/abort_request", {"abort_all": True})
        self._note_answer("aborted", running, exact=False)
        running = self._running("to be retracted")
        self._call("pause", "/pause_generation", {"mode": "retract"})
        self._call("abort all while paused", "/abort_request", {"abort_all": True})
        self._call("go on", "/continue_generation", {"rid": "2", "torch_empty_cache": False})
        self._note_answer("aborted in the queue", running, exact=False)
        self._call("abort nothing", "/abort_request", {"abort_all": True})
        self._disconnect()
        self._call("flush", "/flush_cache?timeout=30", {})
        running = self._running("in the way")
        self._call("flush while a request runs", "/flush_cache?timeout=0", {})
        self._call("abort all", "/abort_request", {"abort_all": True})
        running.result()

    def _disconnect(self) -> None:
        """A client that closes its connection ends its request."""
        connection = http.client.HTTPConnection(self._address.hostname or "", self._address.port)
        body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": LONG}, "return_logprob": True, "rid": "left"}
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        self._until(lambda: self._in_flight().get("left", 0) >= 5)
        connection.close()
        self._until(lambda: "left" not in self._in_flight())

    def _updates(self) -> None:
        self._call("pause", "/pause_generation", {"mode": "in_place"})
        self._checksums("first weights")
        self._call("from tensors", "/update_weights_from_tensor", tensor_body(model.weights(1), tp=self._tp))
        self._checksums("from tensors")
        folder = model.write(self._folder / "v2", 2)
        self._call("from disk", "/update_weights_from_disk", disk_body(folder))
        self._checksums("from disk")
        self._broadcast()
        self._checksums("by broadcast")
        self._call("go on", "/continue_generation", {"rid": "3", "torch_empty_cache": False})
        self._note_answer("after updates", self._generate("after", max_new_tokens=4))

    def _checksums(self, name: str) -> None:
        answer = self._call(f"checksums: {name}", "/weights_checker", {"action": "checksum"})
        assert {rank["parallelism_info"]["tp_rank"] for rank in answer["ranks"]} == set(range(self._tp))

    def _broadcast(self) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        world = 1 + self._tp
        mine = self._threads.submit(GlooRank, "127.0.0.1", port, name="recorder", rank=0, world_size=world)
        self._call("join", "/init_weights_update_group", join_body("recorder", port, world))
        rank = mine.result()
        for name, tensors in (
            ("wrong shape", {"model.norm.weight": torch.ones(5)}),
            ("by broadcast", model.weights(3)),
        ):
            sent = self._threads.submit(rank.send, flat(tensors))
            self._call(name, "/update_weights_from_distributed", broadcast_body("recorder", tensors))
            sent.result()
        self._call("leave", "/destroy_weights_update_group", {"group_name": "recorder"})

    def _refusals(self) -> None:
        self._call("pause", "/pause_generation", {"mode": "in_place"})
        self._call("no such folder", "/update_weights_from_disk", disk_body(self._folder / "absent"))
        self._call("leave a group that is not there", "/destroy_weights_update_group", {"group_name": "absent"})
        self._call("no such path", "/absent", {})
        self._call("go on", "/continue_generation", {"rid": "3", "torch_empty_cache": False})


def flat(tensors: dict[str, Tensor]) -> Tensor:
    """[bytes] uint8, end to end."""
    return torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors.values()])


def tensor_body(tensors: dict[str, Tensor], *, tp: int) -> dict[str, Any]:
    """All of them to every rank."""
    memory = flat(tensors)
    layout = {"names": [*tensors], "dtypes": [t.dtype for t in tensors.values()]}
    layout |= {"shapes": [tuple(t.shape) for t in tensors.values()], "num_bytes": len(memory)}
    payload = pickle.dumps({**layout, "memory": memory, "number": None})
    coded = [base64.b64encode(payload).decode()] * tp
    return {"serialized_named_tensors": coded, "load_format": "flattened_bucket", "flush_cache": False}


def disk_body(folder: Path) -> dict[str, Any]:
    return {"model_path": str(folder), "load_format": "auto", "flush_cache": False}


def join_body(name: str, port: int, world_size: int) -> dict[str, Any]:
    where = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": world_size}
    return where | {"group_name": name, "backend": "gloo"}


def broadcast_body(name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "group_name": name,
        "load_format": "flattened_bucket",
        "flush_cache": False,
    }


def text_of(entries: list[Entry]) -> str:
    """JSON with a line for each entry."""
    return "[\n" + ",\n".join(json.dumps(entry) for entry in entries) + "\n]\n"


def stored(tp: int) -> Path:
    """The file of the real server's transcript."""
    return Path(__file__).with_name(f"transcript_tp{tp}.json")
