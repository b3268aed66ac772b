"""The comparison of what a push has sent with what the servers hold: checksums, and formats of FP8 servers.

A tensor that should be FP8 and is not is an error, on either side: a server may copy bfloat16 values into FP8
parameters without an error, and keep their old scales.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from core.weight_sync.buckets import Buckets
from core.weight_sync.calls import Deadline, PushError
from model_specs.block_fp8 import SCALE, is_quantized
from rollout.errors import GeneratorCallError, GeneratorGone
from rollout.inference.backend import TensorFormat, WeightEndpoint

logger = logging.getLogger(__name__)

_NAMED = 5
FP8_NAME, SCALE_NAME = "float8_e4m3fn", "float32"
_TIED = "lm_head.weight"
"""Held once, with the embedding, where the two are tied."""


def compare_checksums(servers: Sequence[WeightEndpoint], sent: Buckets, deadline: Deadline) -> str:
    """Compare every parameter of every server with what was sent, where requested; return the result as text. A server
    of several pipeline stages returns the checksums of its first one alone and is left out. Raises PushError."""
    if not sent.expected:
        return ""
    left_out = [server.name for server in servers if server.pp > 1]
    wrong: dict[str, list[str]] = {}
    for server in servers:
        if server.pp > 1:
            continue
        try:
            if sent.quantizes:
                _compare_formats(server, sent, deadline)
            checksums = server.checksums(timeout_seconds=deadline.left())
        except (GeneratorCallError, GeneratorGone) as error:
            raise PushError(str(error), servers=[server.name]) from error
        found = sent.expected[server.tp].mismatches(checksums)
        if found:
            wrong[server.name] = found
    if wrong:
        raise PushError("; ".join(_differing(name, found) for name, found in wrong.items()), servers=[*wrong])
    if not left_out:
        return "all checksums equal"
    equal = "no checksums compared" if len(left_out) == len(servers) else "all other checksums equal"
    return f"{equal}: {', '.join(left_out)} with pipeline stages cannot compute them"


def _compare_formats(server: WeightEndpoint, sent: Buckets, deadline: Deadline) -> None:
    """Log the formats of all tensors as sent and as held. Raises PushError where one is not as it ought to be."""
    rows = sent.expected[server.tp].formats(server.formats(timeout_seconds=deadline.left()))
    if wrong := list(wrong_formats(rows)):
        raise PushError(
            f"{server.name}: {len(wrong)} tensors in a wrong format: {'; '.join(wrong[:_NAMED])}", servers=[server.name]
        )
    logger.info("Formats of the weights as sent, and as %s holds them:\n%s", server.name, format_table(rows))


def _differing(server: str, found: Sequence[str]) -> str:
    return f"{server}: {len(found)} parameters differ from what was sent: {', '.join(found[:_NAMED])}"


def wrong_formats(rows: Sequence[TensorFormat]) -> Iterator[str]:
    """Yield a message for each tensor that is not held as it was sent, or not in the format that it ought to have."""
    if not any(is_quantized(row.name) for row in rows):
        yield f"no tensor ought to be {FP8_NAME}"
    for row in rows:
        ought = FP8_NAME if is_quantized(row.name) else SCALE_NAME if row.name.endswith(SCALE) else row.sent
        if row.sent != ought:
            yield f"{row.name} was sent as {row.sent}, not as {ought}"
        elif row.held != row.sent and not (row.held is None and row.name == _TIED):
            yield f"{row.name} was sent as {row.sent}, {row.parameter} is {row.held or 'missing'}"


def format_table(rows: Sequence[TensorFormat]) -> str:
    """Return one line for each kind of tensor: how many, their name with * for numbers, both formats."""

    def kind(name: str) -> str:
        return re.sub(r"\.\d+(?=\.)", ".*", name)

    lines = Counter((kind(row.name), row.sent, kind(row.parameter), row.held or "tied") for row in rows)
    cells = [("count", "tensor", "sent as", "parameter of the server", "held as")]
    cells += [(str(count), *line) for line, count in lines.items()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)
