"""One rank of a gloo group, made outside torch's registry: one process can hold several ranks of the same group.

A SGLang server makes its ranks of the group with torch's own helper, which puts these prefixes before every key.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

_TIMEOUT = timedelta(seconds=60)


class GlooRank:
    """A rank that has joined. The constructor returns when all ranks have."""

    def __init__(self, host: str, port: int, *, name: str, rank: int, world_size: int) -> None:
        """Rank 0 makes the store that the others connect to."""
        store = dist.TCPStore(host, port, world_size, is_master=rank == 0, wait_for_workers=False, timeout=_TIMEOUT)
        prefixed = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
        self._group = dist.ProcessGroupGloo(prefixed, rank, world_size, _TIMEOUT)

    def receive(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8: what rank 0 broadcasts. Raises RuntimeError when rank 0 is gone."""
        flat = torch.empty(num_bytes, dtype=torch.uint8)
        self._broadcast(flat)
        return flat

    def send(self, flat: Tensor) -> None:
        """Broadcast from rank 0."""
        self._broadcast(flat)

    def _broadcast(self, flat: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([flat], options).wait()
