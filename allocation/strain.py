"""A test's way to let memory run out in a chosen place: an allocation that no machine can serve, really tried.

The environment variable SLIPSTREAM_STRAIN holds items PHASE:key=value:..., separated by commas. PHASE is one of init,
generate, logprobs, train, save; the keys select when: rank=0 (on that rank), over=512 (where that many tokens are
exceeded), once=/a/file (only while that file does not exist; it is made then). Without the variable nothing happens.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "SLIPSTREAM_STRAIN"


def strain(phase: str, *, rank: int = 0, tokens: int = 0) -> None:
    """Raise MemoryError where the environment variable asks for it."""
    for item in filter(None, os.environ.get(VARIABLE, "").split(",")):
        name, *given = item.split(":")
        when = dict(part.split("=", 1) for part in given)
        if name != phase or rank != int(when.get("rank", rank)) or tokens <= int(when.get("over", tokens - 1)):
            continue
        if "once" in when:
            marker = Path(when["once"])
            if marker.exists():
                continue
            marker.touch()
        bytearray(1 << 62)
