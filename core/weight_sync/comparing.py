"""The comparison of what a push has sent with what the servers hold."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from core.weight_sync.buckets import Buckets
from core.weight_sync.calls import Deadline
from core.weight_sync.errors import PushError
from core.weight_sync.formats import format_table, wrong_formats
from rollout.inference.backend import WeightEndpoint
from rollout.inference.errors import GeneratorCallError, GeneratorGone

logger = logging.getLogger(__name__)

_NAMED = 5


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
