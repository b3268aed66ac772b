"""All-gather and reduce-scatter of tensors with one row for each token, beside what the device computes next.

Invariant: the process group holds what it reads and writes until wait(), which every caller calls; until then nothing
else reads or writes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Pending:
    """A tensor that a collective writes."""

    _tensor: Tensor
    _work: dist.Work | None = None

    def wait(self) -> Tensor:
        """Return it. On a GPU the current stream waits for the collective; the host does not."""
        if self._work is not None:
            self._work.wait()
        return self._tensor


def begin_gather(tensor: Tensor, group: ProcessGroup | None) -> Pending:
    """Begin to gather tensor [t, n] of all ranks, in their order: [size * t, n]; without group, of this one."""
    tensor = tensor.detach().contiguous()
    if group is None:
        return Pending(tensor)
    gathered = tensor.new_empty((group.size() * len(tensor), *tensor.shape[1:]))
    return Pending(gathered, dist.all_gather_into_tensor(gathered, tensor, group=group, async_op=True))


def begin_sum(tensor: Tensor, group: ProcessGroup | None) -> Pending:
    """Begin to add up tensor [size * t, n] over all ranks, of which this one gets its own rows: [t, n]."""
    if group is None:
        return Pending(tensor)
    tensor = tensor.contiguous()
    own = tensor.new_empty((len(tensor) // group.size(), *tensor.shape[1:]))
    return Pending(own, dist.reduce_scatter_tensor(own, tensor, group=group, async_op=True))
