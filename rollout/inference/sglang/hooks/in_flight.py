"""The tokens that requests in flight have sampled, on their way out of a SGLang server: packed by its scheduler and
unpacked by the generator.

A few arrays of bytes hold the tokens of all requests: the scheduler does not sample while it answers, and 512 requests
of 2,000 tokens take it some tens of milliseconds. Whether the scheduler works is reported without waiting for a second.
Read by the server's processes too, so nothing else of this project is imported.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypedDict

import numpy as np

PATH = "/slipstream_in_flight"
"""Path of the server's answer."""
ALIVE = "/slipstream_alive"
"""Answered as soon as the first rank's scheduler has received it, which waits for the others at every step. SGLang's
own /health takes a second at least, and samples where nothing runs."""
QUERY = "slipstream_in_flight"
"""Request id of the query to the scheduler."""
PING = "slipstream_alive"
"""Request id of a query that is answered with nothing."""


class Sampled(NamedTuple):
    """Tokens of one request to the server, those after the prompt that it came with."""

    token_ids: np.ndarray  # [n] int32
    logprobs: np.ndarray  # [n] float32
    versions: np.ndarray  # [n] int32


class _Logprob(Protocol):
    output_token_logprobs_val: Sequence[float] | None


class _Request(Protocol):
    """SGLang's Req, as far as it is used."""

    rid: str
    output_ids_through_stop: Sequence[int]
    logprob: _Logprob
    customized_info: Mapping[str, Sequence[int]] | None


class _Batch(Protocol):
    reqs: Sequence[_Request]


class _Scheduler(Protocol):
    running_batch: _Batch | None
    last_batch: _Batch | None
    chunked_req: _Request | None
    waiting_queue: Sequence[_Request]
    ipc_channels: _Channels


class _Output(Protocol):
    socket: object | None


class _Channels(Protocol):
    send_to_tokenizer: _Output


class _StateRequest(Protocol):
    rid: str


class Reported(TypedDict):
    """Tokens of many requests, end to end: base64 of bytes."""

    names: list[str]
    lengths: list[int]
    token_ids: str
    logprobs: str
    versions: str


def pack(requests: Iterable[_Request], version_key: str) -> dict[str, object]:
    """Pack SGLang's own requests into {request ids, numbers of tokens, and as consecutive bytes: tokens,
    log-probabilities, versions}, from the lists that a final answer is made of. Tokens that lack one of the three are
    omitted. A request without tokens is listed; an unlisted one has ended."""
    names: list[str] = []
    lengths: list[int] = []
    parts: list[tuple[bytes, bytes, bytes]] = []
    for request in requests:
        ids = request.output_ids_through_stop
        logprobs = request.logprob.output_token_logprobs_val or ()
        versions = (request.customized_info or {}).get(version_key, ())
        n = min(len(ids), len(logprobs), len(versions))
        names.append(request.rid)
        lengths.append(n)
        # Python's own arrays take numbers out of a list in half of numpy's time.
        tokens = np.array(ids[:n], np.int32)
        parts.append((tokens.tobytes(), array("f", logprobs[:n]).tobytes(), array("i", versions[:n]).tobytes()))
    columns = {column: b"".join(part[i] for part in parts) for i, column in enumerate(Sampled._fields)}
    return {"names": names, "lengths": lengths, **columns}


def to_json(packed: Mapping[str, object]) -> dict[str, object]:
    """Encode bytes in base64."""
    return {k: base64.b64encode(v).decode() if isinstance(v, bytes) else v for k, v in packed.items()}


def unpack(answer: Reported) -> dict[str, Sampled]:
    """Return the sampled tokens by request id, from the result of to_json(); nothing from an empty answer."""
    if not answer:
        return {}
    ends = np.cumsum(answer["lengths"])[:-1]

    def arrays(encoded: str, dtype: type) -> list[np.ndarray]:
        return np.split(np.frombuffer(base64.b64decode(encoded), dtype), ends)

    parts = zip(
        arrays(answer["token_ids"], np.int32),
        arrays(answer["logprobs"], np.float32),
        arrays(answer["versions"], np.int32),
        strict=True,
    )
    # Without requests np.split gives one part, which has no name.
    return {name: Sampled(*part) for name, part in zip(answer["names"], parts, strict=False)}


class InFlight:
    """Tokens that requests have sampled, returned between two steps of the scheduler; without a request it costs
    nothing."""

    def __init__(self, version_key: str) -> None:
        """`version_key`: name of the per-token versions in customized_info."""
        self._version_key = version_key

    def add_routes(self) -> None:
        """Add paths that query the scheduler to the process that answers HTTP."""
        from sglang.srt.entrypoints import http_server
        from sglang.srt.managers.io_struct import GetInternalStateReq
        from sglang.srt.managers.tokenizer_manager import ServerStatus

        async def query(name: str) -> list[dict[str, object]]:
            manager = http_server.get_global_state().tokenizer_manager
            manager.auto_create_handle_loop()
            # Never to be cancelled: the next query would get the answer to this.
            answers = await manager.get_internal_state_communicator(GetInternalStateReq(rid=name))
            return [answer.internal_state for answer in answers]

        async def report() -> dict[str, object]:
            return {"answers": [to_json(answer) for answer in await query(QUERY)]}

        async def respond() -> object:
            manager = http_server.get_global_state().tokenizer_manager
            if manager.gracefully_exit or manager.server_status == ServerStatus.Starting:
                return http_server.Response(status_code=503)
            await query(PING)
            return http_server.Response()

        http_server.app.add_api_route(PATH, report, methods=["POST"])
        http_server.app.add_api_route(ALIVE, respond, methods=["GET"], response_model=None)

    def answer(self, original: Callable[..., object], scheduler: _Scheduler, request: _StateRequest) -> object:
        """Answer queries around Scheduler.get_internal_state, which all ranks run and one answers."""
        if request.rid not in (QUERY, PING):
            return original(scheduler, request)
        from sglang.srt.managers.io_struct import GetInternalStateReqOutput

        reports = request.rid == QUERY and scheduler.ipc_channels.send_to_tokenizer.socket is not None
        packed = pack(known_requests(scheduler), self._version_key) if reports else {}
        return GetInternalStateReqOutput(internal_state=packed)


def known_requests(scheduler: _Scheduler) -> list[_Request]:
    """Return every request that the scheduler has, once. Those that have just ended are among them until the next
    step."""
    batches = [batch.reqs for batch in (scheduler.running_batch, scheduler.last_batch) if batch is not None]
    chunked = [] if scheduler.chunked_req is None else [scheduler.chunked_req]
    return list({req.rid: req for reqs in (*batches, scheduler.waiting_queue, chunked) for req in reqs}.values())
