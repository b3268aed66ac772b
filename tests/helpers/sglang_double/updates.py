"""The three ways in which new weights reach a server: full tensors for each of its ranks."""

import asyncio
import base64
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from helpers.sglang_double.groups import GlooRank
from rollout.inference.changes import IDENTITY, INDEX, ChangesReader

TENSORS, BROADCAST, DISK = UPDATES = tuple(
    f"/update_weights_from_{source}" for source in ("tensor", "distributed", "disk")
)


def from_tensors(body: dict[str, Any], *, tp: int) -> list[dict[str, Tensor]]:
    """Unpickle a payload a rank. Raises ValueError where there are more or fewer."""
    payloads = body["serialized_named_tensors"]
    if len(payloads) != tp:
        raise ValueError(f"{len(payloads)} payloads for {tp} ranks")
    received = []
    for payload in payloads:
        content = pickle.loads(base64.b64decode(payload))
        names, dtypes, shapes = (content[name] for name in ("names", "dtypes", "shapes"))
        sizes = [dtype.itemsize * torch.Size(shape).numel() for dtype, shape in zip(dtypes, shapes, strict=True)]
        parts = zip(names, dtypes, shapes, content["memory"].split(sizes), strict=True)
        received.append({name: part.view(dtype).view(shape) for name, dtype, shape, part in parts})
    return received


async def from_broadcast(body: dict[str, Any], ranks: Sequence[GlooRank]) -> list[dict[str, Tensor]]:
    """Receive one flat bucket on every rank. Raises RuntimeError when the sender is gone."""
    dtypes = [getattr(torch, name) for name in body["dtypes"]]
    sizes = [dtype.itemsize * torch.Size(shape).numel() for dtype, shape in zip(dtypes, body["shapes"], strict=True)]
    received = []
    for flat in await asyncio.gather(*(asyncio.to_thread(rank.receive, sum(sizes)) for rank in ranks)):
        parts = zip(body["names"], dtypes, body["shapes"], flat.split(sizes), strict=True)
        received.append({name: part.view(dtype).view(shape) for name, dtype, shape, part in parts})
    return received


def from_disk(body: dict[str, Any], *, tp: int, push: str | None) -> tuple[list[dict[str, Tensor]], str | None]:
    """Read a Hugging Face folder, or changes to the weights of `push`, for every rank: (tensors, the new push). Raises
    OSError where there is none, and ChangesError."""
    folder = Path(body["model_path"])
    if (folder / INDEX).exists():
        reader = ChangesReader(folder, push)
        return [dict(reader.tensors(torch.device("cpu")))] * tp, reader.identity
    json.loads((folder / "config.json").read_text(encoding="utf-8"))
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    files = sorted(set(index["weight_map"].values()))
    tensors = {name: tensor for file in files for name, tensor in load_file(folder / file).items()}
    return [tensors] * tp, json.loads((folder / IDENTITY).read_text())["id"] if (folder / IDENTITY).exists() else None
