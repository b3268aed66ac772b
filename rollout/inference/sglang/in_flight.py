"""What the requests in flight have sampled, on its way out of a SGLang server: packed by its scheduler
(hooks.py), unpacked by the generator.

A few arrays of bytes hold the tokens of all requests: the scheduler does not sample while it answers, and 512 requests
of 2,000 tokens take it some tens of milliseconds. Stands alone: nothing of this project is imported.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

PATH = "/slipstream_in_flight"
"""Path of the server's answer."""
ALIVE = "/slipstream_alive"
"""Answered as soon as the first rank's scheduler has received it, which waits for the others at every step. SGLang's
own /health takes a second at least, and samples where nothing runs."""
QUERY = "slipstream_in_flight"
"""Request id of the query to the scheduler."""
PING = "slipstream_alive"
"""The same, to be answered with nothing."""


class Sampled(NamedTuple):
    """Tokens of one request to the server, those after the prompt that it came with."""

    token_ids: np.ndarray  # [n] int32
    logprobs: np.ndarray  # [n] float32
    versions: np.ndarray  # [n] int32


def pack(requests: Iterable[Any], version_key: str) -> dict[str, Any]:
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


def to_json(packed: Mapping[str, Any]) -> dict[str, Any]:
    """Encode bytes in base64."""
    return {k: base64.b64encode(v).decode() if isinstance(v, bytes) else v for k, v in packed.items()}


def unpack(answer: Mapping[str, Any]) -> dict[str, Sampled]:
    """Return the sampled tokens by request id, from the result of to_json(); nothing from an empty answer."""
    if not answer:
        return {}
    ends = np.cumsum(answer["lengths"])[:-1]

    def arrays(name: str, dtype: type) -> list[np.ndarray]:
        return np.split(np.frombuffer(base64.b64decode(answer[name]), dtype), ends)

    parts = zip(
        arrays("token_ids", np.int32), arrays("logprobs", np.float32), arrays("versions", np.int32), strict=True
    )
    # Without requests np.split gives one part, which has no name.
    return {name: Sampled(*part) for name, part in zip(answer["names"], parts, strict=False)}
