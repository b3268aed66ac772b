"""What the ranks of test_bench_lanes.py run."""

from __future__ import annotations

import os
import time


def act(rank: int, what: str) -> tuple[int, str]:
    if what == "raise":
        raise ValueError("out of memory")
    if what == "die" and rank == 1:
        os.abort()
    if what in ("hang", "die"):
        time.sleep(60)
    return rank, os.environ["CUDA_VISIBLE_DEVICES"]
