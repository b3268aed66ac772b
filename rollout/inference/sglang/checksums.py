"""What the checksums of a SGLang server's parameters must be, from full tensors under their Hugging Face names.

A server fuses q, k, v and gate, up, and all experts of a layer, and cuts them over its tensor-parallel ranks.
`position_checksum` is additive over the parts of a tensor, so the expected values add up tensor by tensor in any order,
and no fused tensor is ever built.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollout.inference.sglang.hooks import position_checksum


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What the cut depends on."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> ModelShape:
        """From a parsed config.json."""
        heads = config["num_attention_heads"]
        return ModelShape(
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab_size=config["vocab_size"],
        )


_VOCAB_PADDING = 64
"""SGLang pads the vocabulary to a multiple of this before it cuts it; the padding is zeros and sums to nothing."""
_OF_EXPERT = re.compile(r"(?P<layer>.*\.experts)\.(?P<number>\d+)\.(?P<kind>gate|up|down)_proj\.weight")


class ExpectedChecksums:
    """Add every tensor of the model, then compare."""

    def __init__(self, shape: ModelShape, *, tp: int) -> None:
        self._shape, self._tp = shape, tp
        self._sums: dict[tuple[int, str], list[Tensor]] = defaultdict(list)

    def add(self, name: str, tensor: Tensor) -> None:
        """`tensor` as the server will hold it (its format included)."""
        for rank in range(self._tp):
            param, part, start = self._part(name, tensor, rank)
            self._sums[rank, param].append(position_checksum(part, start))

    def mismatches(self, received: Sequence[Mapping[str, int]]) -> list[str]:
        """Parameters whose checksum differs, is missing, or was not expected: "name (rank r)" each. `received` is
        what each tensor-parallel rank reports."""
        keys = list(self._sums)
        sums = [torch.stack(self._sums[key]).sum() for key in keys]
        expected = dict(zip(keys, torch.stack(sums).tolist() if sums else [], strict=True))
        actual = {(rank, name): value for rank, ranks in enumerate(received) for name, value in ranks.items()}
        if not any(name == "lm_head.weight" for _, name in actual):  # tied: the server has it once
            expected = {key: value for key, value in expected.items() if key[1] != "lm_head.weight"}
        return [
            f"{name} (rank {rank})"
            for rank, name in sorted(expected.keys() | actual.keys())
            if expected.get((rank, name)) != actual.get((rank, name))
        ]

    def _part(self, name: str, tensor: Tensor, rank: int) -> tuple[str, Tensor, int]:
        """(the server's parameter, the part of `tensor` that rank holds of it, the first element's position there)."""
        if found := _OF_EXPERT.fullmatch(name):
            number = int(found["number"])
            if found["kind"] == "down":
                part = tensor.chunk(self._tp, dim=1)[rank]
                return f"{found['layer']}.w2_weight", part, number * part.numel()
            part = tensor.chunk(self._tp)[rank]
            return f"{found['layer']}.w13_weight", part, (2 * number + (found["kind"] == "up")) * part.numel()
        for i, member in enumerate(("gate_proj", "up_proj")):
            if f".{member}." in name:
                part = tensor.chunk(self._tp)[rank]
                return name.replace(member, "gate_up_proj"), part, i * part.numel()
        start = 0
        for member, rows, replicas in self._of_attention():
            if f".{member}." in name:
                first = rank // replicas * rows
                part = tensor[first : first + rows]
                return name.replace(member, "qkv_proj"), part, start * tensor.shape[1:].numel()
            start += rows
        if ".o_proj." in name or ".down_proj." in name:
            return name, tensor.chunk(self._tp, dim=1)[rank], 0
        if "embed_tokens" in name or "lm_head" in name:
            padded = -(-self._shape.vocab_size // _VOCAB_PADDING) * _VOCAB_PADDING
            rows = padded // self._tp
            return name, tensor[rank * rows : (rank + 1) * rows], 0
        return name, tensor, 0

    def _of_attention(self) -> list[tuple[str, int, int]]:
        """What qkv_proj consists of, in order: (name, rows a rank, ranks that share the same rows)."""
        s, tp = self._shape, self._tp
        kv_rows, replicas = max(1, s.num_kv_heads // tp) * s.head_dim, max(1, tp // s.num_kv_heads)
        return [
            ("q_proj", s.num_heads // tp * s.head_dim, 1),
            ("k_proj", kv_rows, replicas),
            ("v_proj", kv_rows, replicas),
        ]
