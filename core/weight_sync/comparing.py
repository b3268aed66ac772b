"""What a push has sent, added up over its senders, and the comparison with what the servers hold.

A checksum of a server's parameter is a sum over the tensors that make it up, whichever rank sent them. So every sender
adds up its own, and two such sums give one: the senders reduce them in a tree (turns.py), and the first one compares.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from core.weight_sync.calls import Deadline
from core.weight_sync.errors import PushError
from core.weight_sync.formats import format_table, wrong_formats
from rollout.inference.backend import ExpectedChecksums, PartialChecksums, WeightEndpoint
from rollout.inference.errors import GeneratorCallError, GeneratorGone

logger = logging.getLogger(__name__)

_NAMED = 5


@dataclass(kw_only=True)
class Sent:
    """What one sender has sent, or several together."""

    expected: Mapping[int, ExpectedChecksums]
    """By tensor-parallel size of the servers; empty where nothing is compared."""
    quantized: bool = False
    """The formats of all tensors are compared too."""
    num_bytes: int = 0
    num_buckets: int = 0
    origins: dict[str, list[int]] = field(default_factory=dict)
    """The server's parameter -> trainer ranks that sent parts of it; empty with one sender."""

    def to_text(self, rank: int) -> str:
        """Return everything as JSON, sent by trainer rank `rank` or, where include() was called, by others too."""
        partials = self._partials()
        self._note_own(rank, partials)
        return json.dumps([self.num_bytes, self.num_buckets, list(partials.items()), self.origins])

    def include(self, text: str, rank: int) -> None:
        """Add what another sender returned from to_text(), on trainer rank `rank`."""
        if not self.origins:  # its own sums alone, before the first of others is added
            self._note_own(rank, self._partials())
        num_bytes, num_buckets, partials, origins = json.loads(text)
        self.num_bytes += num_bytes
        self.num_buckets += num_buckets
        for tp, partial in partials:
            self.expected[tp].include(partial)
        for name, ranks in origins.items():
            self.origins[name] = sorted({*self.origins.get(name, []), *ranks})

    def _partials(self) -> dict[int, PartialChecksums]:
        """Return the sums so far, computed on the device at every call."""
        return {tp: expected.partial() for tp, expected in self.expected.items()}

    def _note_own(self, rank: int, partials: Mapping[int, PartialChecksums]) -> None:
        if not self.origins:
            self.origins = {name: [rank] for partial in partials.values() for _, name, _ in partial["sums"]}

    def from_whom(self, parameter: str) -> str:
        """Return " from trainer rank 2" for "name (rank r)", or nothing with one sender."""
        ranks = self.origins.get(parameter.rpartition(" (rank ")[0], [])
        return f" from trainer rank {' and '.join(map(str, ranks))}" if ranks else ""


def compare_checksums(servers: Sequence[WeightEndpoint], sent: Sent, deadline: Deadline) -> str:
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
            if sent.quantized:
                _compare_formats(server, sent, deadline)
            checksums = server.checksums(timeout_seconds=deadline.left())
        except (GeneratorCallError, GeneratorGone) as error:
            raise PushError(str(error), servers=[server.name]) from error
        found = sent.expected[server.tp].mismatches(checksums)
        if found:
            wrong[server.name] = found
    if wrong:
        raise PushError("; ".join(_differing(name, found, sent) for name, found in wrong.items()), servers=[*wrong])
    if not left_out:
        return "all checksums equal"
    equal = "no checksums compared" if len(left_out) == len(servers) else "all other checksums equal"
    return f"{equal}: {', '.join(left_out)} with pipeline stages cannot compute them"


def _compare_formats(server: WeightEndpoint, sent: Sent, deadline: Deadline) -> None:
    """Log the formats of all tensors as sent and as held. Raises PushError where one is not as it ought to be."""
    rows = sent.expected[server.tp].formats(server.formats(timeout_seconds=deadline.left()))
    if wrong := list(wrong_formats(rows)):
        raise PushError(
            f"{server.name}: {len(wrong)} tensors in a wrong format: {'; '.join(wrong[:_NAMED])}", servers=[server.name]
        )
    logger.info("Formats of the weights as sent, and as %s holds them:\n%s", server.name, format_table(rows))


def _differing(server: str, found: Sequence[str], sent: Sent) -> str:
    named = ", ".join(parameter + sent.from_whom(parameter) for parameter in found[:_NAMED])
    return f"{server}: {len(found)} parameters differ from what was sent: {named}"
