"""The audit of a push into FP8 servers: the format of every tensor as it was sent and as every server holds it.

A tensor that should be FP8 and is not is an error, on either side: a server may copy bfloat16 values into FP8
parameters without an error, and keep their old scales.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from model_specs.block_fp8 import SCALE, is_quantized
from rollout.inference.backend import TensorFormat

FP8_NAME, SCALE_NAME = "float8_e4m3fn", "float32"
_TIED = "lm_head.weight"
"""Held once, with the embedding, where the two are tied."""


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
