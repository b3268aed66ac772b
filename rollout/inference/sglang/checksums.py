"""The expected checksums of a SGLang server's parameters, from full tensors under their Hugging Face names.

A server fuses q, k, v and gate, up, and all experts of a layer, and cuts them over its tensor-parallel ranks.
`position_checksum` is additive over the parts of a tensor, so the expected values add up tensor by tensor in any order,
and no fused tensor is ever built.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from model_specs.config import ModelConfig
from model_specs.families import FAMILIES
from model_specs.tensors import DECODER, Columns, Heads, Rows, ServerParts, Vocabulary, WholeRows
from model_specs.weight_files import BLOCK, SCALE
from rollout.inference.backend import TensorFormat
from rollout.inference.sglang.hooks.checksums import CHECKSUM_CHUNK, as_bits, position_checksum, position_weights


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes that determine how a server cuts its parameters."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    parts: ServerParts = field(default_factory=lambda: DECODER)

    @staticmethod
    def from_config(config: ModelConfig) -> ModelShape:
        return ModelShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            parts=FAMILIES[config.model_type].server_parts(config),
        )


_VOCAB_PADDING = 64
"""SGLang pads the vocabulary to a multiple of this before it cuts it; the padding is zeros and sums to nothing."""
_OF_EXPERT = re.compile(
    r"(?P<layer>.*\.experts)\.(?P<number>\d+)\.(?P<kind>gate|up|down)_proj\.(?P<what>weight(_scale_inv)?)"
)


def position_checksums(parts: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
    """Return position_checksum() of each part, which all have one shape and one format: many small ones at a time."""
    size = parts[0].numel()
    if len(parts) == 1 or 2 * size > CHECKSUM_CHUNK or not size:
        return [position_checksum(part, start) for part, start in zip(parts, starts, strict=True)]
    positions = torch.arange(size, device=parts[0].device)
    sums: list[Tensor] = []
    at_once = CHECKSUM_CHUNK // size
    for i in range(0, len(parts), at_once):
        bits = torch.stack([as_bits(part) for part in parts[i : i + at_once]]).to(torch.int64)
        begins = torch.tensor(starts[i : i + at_once], device=bits.device)
        sums += (bits * position_weights(begins[:, None] + positions)).sum(1).unbind()
    return sums


class ExpectedChecksums:
    """Add every tensor of the model, then compare."""

    def __init__(self, shape: ModelShape, *, tp: int) -> None:
        self._shape, self._tp = shape, tp
        self._sums: dict[tuple[int, str], list[Tensor]] = defaultdict(list)
        self._sent: dict[str, tuple[str, str]] = {}
        """Hugging Face name -> format, and parameter of the server."""

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """See rollout.inference.backend.ExpectedChecksums."""
        alike: dict[tuple[torch.Size, torch.dtype], list[tuple[tuple[int, str], Tensor, int]]] = defaultdict(list)
        for name, tensor in tensors.items():
            for rank in range(self._tp):
                for param, part, start in self._parts(name, tensor, rank):
                    alike[part.shape, part.dtype].append(((rank, param), part, start))
                    self._sent[name] = str(tensor.dtype).removeprefix("torch."), param
        for found in alike.values():
            places, parts, starts = zip(*found, strict=True)
            for place, value in zip(places, position_checksums(parts, starts), strict=True):
                self._sums[place].append(value)

    def formats(self, held: Sequence[Mapping[str, str]]) -> list[TensorFormat]:
        """See rollout.inference.backend.ExpectedChecksums."""
        rows = []
        for name, (sent, param) in self._sent.items():
            on_ranks = [rank.get(param) for rank in held]
            other = next((one for one in on_ranks if one != sent), sent)
            rows.append(TensorFormat(name=name, sent=sent, parameter=param, held=other))
        return rows

    def mismatches(self, received: Sequence[Mapping[str, int]]) -> list[str]:
        """Return the parameters whose checksum differs, is missing, or was not expected, as "name (rank r)". `received`
        are the reports of the tensor-parallel ranks."""
        sums = [torch.stack(of_parts).sum() for of_parts in self._sums.values()]
        expected = dict(zip(self._sums, torch.stack(sums).tolist() if sums else [], strict=True))
        actual = {(rank, name): value for rank, ranks in enumerate(received) for name, value in ranks.items()}
        if not any(name == "lm_head.weight" for _, name in actual):  # tied: the server has it once
            expected = {key: value for key, value in expected.items() if key[1] != "lm_head.weight"}
        return [
            f"{name} (rank {rank})"
            for rank, name in sorted(expected.keys() | actual.keys())
            if expected.get((rank, name)) != actual.get((rank, name))
        ]

    def _parts(self, name: str, tensor: Tensor, rank: int) -> Iterator[tuple[str, Tensor, int]]:
        """Yield (the server's parameter, what `rank` holds of `tensor` in it, the first element's position there)."""
        if found := _OF_EXPERT.fullmatch(name):
            yield self._of_expert(found, tensor, rank)
            return
        module = name.rpartition(".")[0].rpartition(".")[2]
        place = self._shape.parts.get(module)
        if isinstance(place, Heads):
            # Scales have one row for as many rows of the weight.
            start, first, rows = (n // (BLOCK if name.endswith(SCALE) else 1) for n in self._heads(place, rank))
            part = tensor[first : first + rows]
            yield name.replace(module, place.into), part, start * tensor.shape[1:].numel()
        elif isinstance(place, Rows):
            for i, piece in enumerate(tensor.chunk(place.pieces), place.first):
                part = piece.chunk(self._tp)[rank]
                yield name.replace(module, place.into), part, i * part.numel()
        elif isinstance(place, WholeRows):
            yield name.replace(module, place.into), tensor, place.first_row * tensor.shape[1:].numel()
        elif isinstance(place, Columns):
            yield name, tensor.chunk(self._tp, dim=1)[rank], 0
        elif isinstance(place, Vocabulary):
            padded = -(-self._shape.vocab_size // _VOCAB_PADDING) * _VOCAB_PADDING
            rows = padded // self._tp
            yield name, tensor[rank * rows : (rank + 1) * rows], 0
        else:
            yield name, tensor, 0

    def _of_expert(self, found: re.Match[str], tensor: Tensor, rank: int) -> tuple[str, Tensor, int]:
        number = int(found["number"])
        if found["kind"] == "down":
            part = tensor.chunk(self._tp, dim=1)[rank]
            return f"{found['layer']}.w2_{found['what']}", part, number * part.numel()
        part = tensor.chunk(self._tp)[rank]
        return f"{found['layer']}.w13_{found['what']}", part, (2 * number + (found["kind"] == "up")) * part.numel()

    def _heads(self, place: Heads, rank: int) -> tuple[int, int, int]:
        """Return (first row in the rank's parameter, first row of the tensor, number of rows)."""
        s, tp = self._shape, self._tp
        query_rows = s.num_heads // tp * s.head_dim
        if place.kind == "query":
            return 0, rank * query_rows, query_rows
        rows, replicas = max(1, s.num_kv_heads // tp) * s.head_dim, max(1, tp // s.num_kv_heads)
        return query_rows + (rows if place.kind == "value" else 0), rank // replicas * rows, rows
