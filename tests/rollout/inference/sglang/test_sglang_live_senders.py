"""Several senders out of real trainer ranks, two pipeline stages or two expert-parallel ranks, into a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from allocation import ParallelLayout
from helpers.mcore_ranks import Rank, RankPool, build
from helpers.sglang_environment import PYTHON, WHY_NOT, Models, running_server, settings_for

if PYTHON is None:
    pytest.skip(WHY_NOT, allow_module_level=True)
pytest.importorskip("aiohttp", reason="aiohttp is not installed (extra gpu)")

from test_sglang_experts import ExpertModels  # noqa: E402

from helpers.sglang_live import TOLERANCE, prompt_of, request, with_generator  # noqa: E402
from rollout.inference.sglang.generator import SGLangGenerator  # noqa: E402
from rollout.types import Completion  # noqa: E402

pytestmark = pytest.mark.nightly
BUCKET_BYTES = 300_000


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


def push(rank: Rank, layout: ParallelLayout, source: Path, endpoint: Any, name: str) -> Any:
    """Push the weights of `source`, while the server is paused."""
    from core.weight_sync.buckets import SenderSettings
    from core.weight_sync.nccl import NcclSender
    from mcore_adapter.hf.exporting import plan_export, run_export

    with rank.joined(layout) as (parallel, device):
        chunks = build(source, parallel, device)
        settings = SenderSettings(
            rank=rank.rank, world_size=rank.world_size, senders=layout.holders, connection=name, dtype=torch.float32,
            timeout_seconds=60.0, bucket_bytes=BUCKET_BYTES, staged_bytes=2 * BUCKET_BYTES,
        )  # fmt: skip
        sender = NcclSender(settings, torch.device("cpu"))
        sender.connect([endpoint])
        plan = plan_export(chunks, parallel=parallel, bucket_bytes=BUCKET_BYTES, to="holders")
        sender.prepare(run_export(plan, parallel=parallel), verify=True)
        report = sender.send()
        sender.close()
        return report


@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (Models, ParallelLayout(pp=2)),
        (Models, ParallelLayout(tp=2, pp=2)),
        (ExpertModels, ParallelLayout(tp=2, ep=2)),
        (ExpertModels, ParallelLayout(dp=2, pp=2, ep=2)),
    ],
    ids=["pp2", "tp2 pp2", "tp2 ep2", "dp2 pp2 ep2"],
)
def test_a_server_samples_with_what_several_ranks_have_sent(
    ranks: RankPool, tmp_path: Path, make: Callable[[Path], Any], layout: ParallelLayout
) -> None:
    models = make(tmp_path / "model")
    models[1].save_pretrained(tmp_path / "pushed")
    prompt = prompt_of(5, 20)

    async def push_and_sample(generator: SGLangGenerator) -> tuple[Any, Completion]:
        await generator.pause()
        reports = await asyncio.to_thread(
            ranks.run, push, layout.world_size, layout, tmp_path / "pushed", server.endpoint, "first"
        )
        await generator.resume(1)
        return reports, await generator.generate(request("a", prompt, max_new_tokens=20))

    with running_server(settings_for(models.folder, tmp_path / "generator-0.log")) as server:
        (report, *others), completion = with_generator(server, "abort", push_and_sample)
    assert report.compared == "all checksums equal" and report.num_senders == len(layout.holders) > 1
    assert others == [None] * (layout.world_size - 1)
    ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
    with torch.no_grad():
        logprobs = models[1](ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1).gather(1, ids[0, 20:, None])[:, 0]
    np.testing.assert_allclose(completion.logprobs, logprobs.numpy(), atol=TOLERANCE)
