"""How new weights enter a SGLang server: flat buckets, the calls that announce them, and a plain HTTP client.

The endpoint (endpoint.py) sends these calls from the trainer's ranks, the generator from its event loop. Standard
library, numpy and torch only. Invariant: a server is paused when any of these calls that change weights reaches it;
otherwise it would first wait for every running request to end.
"""

from __future__ import annotations

import base64
import http.client
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from rollout.bucket import FlatBucket
from rollout.inference.backend import GroupMembership
from rollout.inference.errors import GeneratorCallError, GeneratorGone
from rollout.inference.sglang.hooks.in_flight import ALIVE
from rollout.inference.sglang.hooks.table import SGLANG

Call = tuple[str, dict[str, Any]]
"""Path and JSON body of a POST."""


@dataclass(frozen=True, kw_only=True)
class ServerAddress:
    """Where one server answers, and its ranks."""

    name: str
    url: str
    tp: int
    pp: int = 1
    key: str = field(default="", repr=False)
    """Of the run; see headers()."""

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""


def headers(key: str) -> dict[str, str]:
    """Return the headers of a call to a server that was started with this key as its api_key."""
    return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})


def payload_of(bucket: FlatBucket, memory: object | None, *, number: int | None = None) -> str:
    """Return a bucket for receive_tensors, pickled and base64-coded. `memory`: its bytes, or a handle to device memory
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


RELEASE = base64.b64encode(pickle.dumps({})).decode()
"""In place of a bucket: close all memory that was kept."""

# Updates do not flush the cache: prefixes are kept apart by version (hooks/versions.py), and a flush with requests
# waiting would fail and take the server down.
_NO_FLUSH = {"flush_cache": False}


def receive_broadcast(bucket: FlatBucket, *, group: str) -> Call:
    """Receive this bucket as one broadcast from rank 0 of the group."""
    return "/update_weights_from_distributed", {
        "names": bucket.names,
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in bucket.dtypes],
        "shapes": bucket.shapes,
        "group_name": group,
        "load_format": "flattened_bucket",
        **_NO_FLUSH,
    }


def receive_tensors(payloads: Sequence[str]) -> Call:
    """Copy from these payloads, one per tensor-parallel rank."""
    body = {"serialized_named_tensors": list(payloads), "load_format": "flattened_bucket"}
    return "/update_weights_from_tensor", body | _NO_FLUSH


def receive_folder(path: str) -> Call:
    """Load a Hugging Face folder of the same architecture."""
    return "/update_weights_from_disk", {"model_path": path, "load_format": "auto", **_NO_FLUSH}


def join_group(group: GroupMembership) -> Call:
    """Join a process group as ranks [first_rank, first_rank + tp)."""
    return "/init_weights_update_group", {
        "master_address": group.host,
        "master_port": group.port,
        "rank_offset": group.first_rank,
        "world_size": group.world_size,
        "group_name": group.name,
        "backend": group.backend,
    }


def leave_group(group: str) -> Call:
    return "/destroy_weights_update_group", {"group_name": group}


def pause_generation(mode: str) -> Call:
    """Return the call that pauses in mode retract or in_place; later calls reach a paused server."""
    return "/pause_generation", {"mode": mode}


def continue_generation(version: int) -> Call:
    """Resume. The request id of this call carries the version to the schedulers (hooks/versions.py)."""
    return "/continue_generation", {"rid": str(version), "torch_empty_cache": False}


CHECKSUMS: Call = ("/weights_checker", {"action": "checksum"})
FORMATS: Call = ("/weights_checker", {"action": "formats"})


def checksums_of(answer: Mapping[str, Any]) -> list[dict[str, int]]:
    """Return parameter name -> checksum per tensor-parallel rank, from the answer to CHECKSUMS."""
    return [{name: int(value) for name, value in rank.items()} for rank in formats_of(answer)]


def formats_of(answer: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return parameter name -> format per tensor-parallel rank, from the answer to FORMATS."""
    ranks = sorted(answer["ranks"], key=lambda rank: rank["parallelism_info"]["tp_rank"])
    return [dict(rank["checksums"]) for rank in ranks]


def check_answer(server: str, path: str, status: int, answer: object) -> dict[str, Any]:
    """Return the JSON answer of a call that succeeded. Raises GeneratorCallError."""
    if status in (404, 405):
        raise GeneratorCallError(
            f"{server}: this SGLang has no {path}; Slipstream is written for SGLang {SGLANG} "
            f"(pip install sglang=={SGLANG})"
        )
    if not isinstance(answer, dict):
        answer = {"message": str(answer)}
    if status != 200 or answer.get("success") is False:
        message = answer.get("message") or answer.get("error") or answer.get("detail") or answer
        raise GeneratorCallError(f"{server}: {path} failed (HTTP {status}): {message}")
    return answer


def is_healthy(server: ServerAddress, *, timeout_seconds: float) -> bool:
    """Return whether its scheduler answers in time."""
    try:
        request = Request(f"{server.url}{ALIVE}", headers=headers(server.key))
        with urlopen(request, timeout=timeout_seconds) as response:
            return response.status == 200
    except OSError:
        return False


def post(server: ServerAddress, call: Call, *, timeout_seconds: float) -> dict[str, Any]:
    """Send a POST request on a connection of its own and wait for the answer. Raises GeneratorCallError,
    GeneratorGone."""
    path, body = call
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout_seconds)
    try:
        connection.request("POST", path, json.dumps(body), headers(server.key))
        response = connection.getresponse()
        raw = response.read()
    except TimeoutError as e:
        raise GeneratorGone(
            f"{server.name} ({server.url}) did not respond to {path} within {timeout_seconds:g} s"
        ) from e
    except (OSError, http.client.HTTPException) as e:
        raise GeneratorGone(f"{server.name} ({server.url}) is unreachable ({path}: {type(e).__name__}: {e})") from e
    finally:
        connection.close()
    try:
        answer = json.loads(raw) if raw else {}
    except ValueError:
        answer = raw.decode(errors="replace")
    return check_answer(server.name, path, response.status, answer)
