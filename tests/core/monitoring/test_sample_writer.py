"""Samples are in their file before what depends on them goes on."""

import asyncio
from pathlib import Path

import numpy as np

from core.config.runtime import SamplesConfig
from core.monitoring.samples import SampleWriter
from rollout.types import PROMPT_VERSION, Trajectory

CONFIG = SamplesConfig(share=1.0, max_file_mib=1, keep_files=2)


def trajectory() -> Trajectory:
    return Trajectory(
        query_id="q", token_ids=np.array([1, 2], np.int32), loss_mask=np.array([False, True]),
        rollout_logprobs=np.zeros(2, np.float32), versions=np.array([PROMPT_VERSION, 0], np.int32), reward=1.0,
        finish_reason="stop",
    )  # fmt: skip


async def test_a_failed_write_is_an_error_of_everyone_who_waits_and_of_nobody_later(tmp_path: Path) -> None:
    def decode(tokens: np.ndarray) -> str:
        raise OSError("no space left")

    writer = SampleWriter(CONFIG, tmp_path, decode)
    writer.begin(0)
    await writer.write([[trajectory()]], ["prompts/q/0"], step=1)
    found = await asyncio.gather(writer.written(), writer.written(), return_exceptions=True)
    assert [str(error) for error in found] == ["no space left"] * 2
    await writer.close()
