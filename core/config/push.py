"""Section `push`: weight updates, sent by the trainer to the generators."""

from __future__ import annotations

from typing import Literal

from config_schema.needs import equals, fact
from config_schema.section import Section, key

Verify = Literal["never", "first", "always"]
Changes = Literal["never", "always"]


class PushConfig(Section):
    """Weight updates, sent by the trainer to the generators."""

    type: Literal["auto", "local", "nccl", "ipc", "disk"] = key(
        "auto",
        "Transport of weights. nccl: broadcast to servers on separate GPUs. ipc: CUDA IPC to servers on the "
        "trainer's GPUs. disk: files that every server can read. local: Ray object store, for "
        "embedded generators. auto: selected from the allocation",
    )
    verify: Verify = key(
        "first",
        "After which updates to compare the checksums of all tensors on the servers with what was sent. first: the "
        "first two after the start of the run or of a server; in the first one a server finds parameters by their "
        "names, in later ones it copies to the same places",
        needs=fact("servers"),
    )
    changes: Changes = key(
        "never",
        "Whether to send only the values that differ from the last update: faster where the folder is on a network. "
        "With always, the first trainer rank keeps a copy of the weights in host memory",
        needs=equals("push.type", "disk") & fact("servers on GPUs of their own"),
    )
    bucket_mib: int = key(
        1024,
        "Bucket size of weight updates in MiB. Larger buckets are faster. With nccl and ipc a trainer GPU needs memory "
        "for at least three of them",
        ge=1,
    )
    timeout_seconds: float = key(120.0, "Timeout of a weight update; a longer one ends the attempt", gt=0)
