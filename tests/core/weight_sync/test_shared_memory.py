"""Weight updates through memory that four trainer ranks share with the servers beside them."""

import base64
import io
import pickle
import random
import time
from collections.abc import Iterator, Sequence
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from core.weight_sync.ipc import IpcSender
from core.weight_sync.push import PushError, SenderSettings
from helpers.mcore_ranks import Rank, RankPool
from rollout.bucket import FlatBucket
from rollout.errors import GeneratorCallError


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


class Copying:
    """A server of two ranks, which opens memory of other processes, and refuses the bucket `refused`."""

    tp, pp = 2, 1

    def __init__(self, name: str, trainer_ranks: tuple[int, ...], refused: int | None = None) -> None:
        self.name, self.trainer_ranks, self._refused = name, trainer_ranks, refused
        self.kept: list[tuple[dict[int, Tensor], dict[str, Tensor]]] = [({}, {}) for _ in trainer_ranks]
        self.shared_by_this_rank = False
        self._count = 0

    def share(self, bucket: FlatBucket, memory: Tensor | None, *, number: int) -> str:
        if memory is not None:
            memory.share_memory_()
            self.shared_by_this_rank = True
        layout = {"names": bucket.names, "dtypes": bucket.dtypes, "shapes": bucket.shapes}
        file = io.BytesIO()
        ForkingPickler(file).dump((layout, bucket.num_bytes, memory, number))
        return base64.b64encode(file.getvalue()).decode()

    def receive_shared(self, shared: Sequence[str], *, timeout_seconds: float) -> None:
        self._count += 1
        if self._count == self._refused:
            raise GeneratorCallError(f"{self.name} refuses")
        for (opened, received), text in zip(self.kept, shared, strict=True):
            layout, num_bytes, memory, number = pickle.loads(base64.b64decode(text))
            if memory is not None:
                opened[number] = memory
            first, second = opened[number][:num_bytes].tensor_split(2)
            begun = first.clone()
            time.sleep(0.02 * random.random())  # the trainer must not write what is read
            received |= FlatBucket(**layout, flat=torch.cat([begun, second])).tensors()

    def release_shared(self, *, timeout_seconds: float) -> None:
        for opened, _ in self.kept:
            opened.clear()


SIZES = (1000, 900, 10, 1000, 1500, 1400, 1600, 3)
"""Elements of the buckets; memory for 1000 of them is shared at first."""


def bucket_of(version: int, bucket: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * version + bucket)
    return {f"layers.{bucket}.norm.weight": torch.randn(SIZES[bucket], generator=generator).bfloat16()}


def sharing_rank(rank: Rank) -> tuple[list[str], list[str]]:
    """Push three times on one of four ranks, of which the last has no server beside it. Return the outcomes, and the
    servers with which this rank shares memory."""

    def gather(version: int) -> Iterator[dict[str, Tensor]]:
        for bucket in range(len(SIZES)):
            dist.barrier()
            yield bucket_of(version, bucket)

    mp.set_sharing_strategy("file_system")
    dist.init_process_group("gloo", init_method=rank.init_method, rank=rank.rank, world_size=4)
    settings = SenderSettings(
        type="ipc", rank=rank.rank, world_size=4, dtype="bfloat16", timeout_seconds=60.0, bucket_bytes=2000
    )
    servers = [Copying("generator-0", (1, 0)), Copying("generator-1", (2, 1), refused=11)]
    sender = IpcSender(settings)
    sender._shares_memory = True
    sender.connect(servers)  # type: ignore[arg-type]
    outcomes = []
    try:
        for version in (1, 2, 3):
            sender.prepare(gather(version), verify=False)
            try:
                sender.send()
                outcomes.append("sent")
            except PushError as error:
                outcomes.append(str(error))
            if rank.rank == 0 and outcomes[-1] == "sent":
                for server in servers:
                    for opened, received in server.kept:
                        assert not opened
                        for bucket in range(len(SIZES)):
                            assert all(torch.equal(received[n], t) for n, t in bucket_of(version, bucket).items())
    finally:
        dist.destroy_process_group()
    return outcomes, [server.name for server in servers if server.shared_by_this_rank]


def test_by_ipc_several_ranks_share_two_pieces_of_memory_with_servers_of_different_speeds(ranks: RankPool) -> None:
    """Two servers share one of the ranks' GPUs. The second update is refused on all ranks, the third one goes on."""
    results = ranks.run(sharing_rank, 4)
    assert [outcomes for outcomes, _ in results] == [["sent", "generator-1 refuses", "sent"]] * 4
    # Memory that no server opens and closes could not be freed.
    assert [shared for _, shared in results] == [["generator-0"], ["generator-0"], ["generator-1"], []]
