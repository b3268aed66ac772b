"""The parameters of the double's tensor-parallel ranks: fused, cut and padded as a SGLang server holds them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from helpers.sglang_double.model import HEAD_DIM, HEADS, INTERMEDIATE, KV_HEADS, VOCAB

_VOCAB_PADDING = 64
_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)


class Parameters:
    """Of all ranks of one server."""

    def __init__(self, tensors: Mapping[str, Tensor], *, tp: int, dtype: torch.dtype = torch.float32) -> None:
        self._tp, self._shapes = tp, {name: tensor.shape for name, tensor in tensors.items()}
        self.ranks: list[dict[str, Tensor]] = [{} for _ in range(tp)]
        for rank, held in enumerate(self.ranks):
            for name, tensor in tensors.items():
                param, start, rows = self._place(name, tensor, rank)
                before = held.get(param, rows[:0].to(dtype))
                end = max(start + len(rows), self._padded() if "embed_tokens" in name else 0)
                missing = torch.zeros(max(0, end - len(before)), *rows.shape[1:], dtype=dtype)
                held[param] = torch.cat([before, missing])
            self.load(tensors, rank)

    def load(self, tensors: Mapping[str, Tensor], rank: int) -> None:
        """Copy full tensors under Hugging Face names. Raises ValueError for an unknown name or another shape."""
        for name, tensor in tensors.items():
            if self._shapes.get(name) != tensor.shape:
                raise ValueError(f"{name}: shape {list(tensor.shape)} does not fit {self._shapes.get(name)}")
            param, start, rows = self._place(name, tensor, rank)
            self.ranks[rank][param][start : start + len(rows)] = rows

    def checksums(self, rank: int) -> dict[str, str]:
        return {name: str(checksum(tensor)) for name, tensor in self.ranks[rank].items()}

    def flip(self, *, rank: int, name: str, byte: int) -> None:
        """Change the lowest bit of one byte of a parameter."""
        self.ranks[rank][name].view(-1).view(torch.uint8)[byte] ^= 1

    def _padded(self) -> int:
        return -(-VOCAB // _VOCAB_PADDING) * _VOCAB_PADDING // self._tp

    def _place(self, name: str, tensor: Tensor, rank: int) -> tuple[str, int, Tensor]:
        """(parameter, its first row that is taken, what the rank takes of `tensor`)."""
        tp, start = self._tp, 0
        for member, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS), ("v_proj", KV_HEADS)):
            rows = heads // tp * HEAD_DIM
            if f".{member}." in name:
                return name.replace(member, "qkv_proj"), start, tensor[rank * rows : (rank + 1) * rows]
            start += rows
        width = INTERMEDIATE // tp
        for i, member in enumerate(("gate_proj", "up_proj")):
            if f".{member}." in name:
                part = tensor[rank * width : (rank + 1) * width]
                return name.replace(member, "gate_up_proj"), i * width, part
        if ".o_proj." in name or ".down_proj." in name:
            return name, 0, tensor.chunk(tp, dim=1)[rank]
        if "embed_tokens" in name:
            return name, 0, tensor[rank * self._padded() : (rank + 1) * self._padded()]
        return name, 0, tensor


def checksum(tensor: Tensor) -> int:
    """Sum over elements of bits x weight(position), modulo 2^64, as a signed number."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.contiguous().view(-1).view(integers).to(torch.int64)
    weight = torch.arange(len(bits)) * _MULTIPLIER
    return int((bits * ((weight ^ (weight >> 29)) | 1)).sum())
