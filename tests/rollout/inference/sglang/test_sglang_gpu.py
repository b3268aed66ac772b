"""What only a GPU shows: memory shared with a server beside the trainer and given back, NCCL into one elsewhere."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.sglang_environment import END, PYTHON, WHY_NOT, Models, settings_for
from rollout.inference.gpus import query_gpus
from rollout.types import Completion, GenerateRequest, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not query_gpus(), reason="no GPU"),
    pytest.mark.skipif(PYTHON is None, reason=WHY_NOT),
    pytest.mark.timeout(600),
]
pytest.importorskip("aiohttp", reason="aiohttp is not installed (extra gpu)")

from core.weight_sync.ipc import IpcSender  # noqa: E402
from core.weight_sync.nccl import NcclSender  # noqa: E402
from core.weight_sync.push import SenderSettings  # noqa: E402
from rollout.inference.sglang.generator import SGLangGenerator  # noqa: E402

PROMPT = list(range(40))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("model"), num_heads=4, head_dim=64)


def settings_on(gpu: int, models: Models, folder: Path, **changes: Any) -> Any:
    """A server with a cache of 2 GiB, at 1 KiB a token."""
    return settings_for(
        models.folder, folder / "generator-0.log", gpus=(gpu,), dtype="bfloat16", env={},
        startup_timeout_seconds=400.0, flags={"max_total_tokens": 2 << 20}, **changes,
    )  # fmt: skip


def sender_settings(models: Models) -> SenderSettings:
    return SenderSettings(type="ipc", dtype="bfloat16", timeout_seconds=120.0, bucket_bytes=1 << 20, device="cuda:0")


def gpu_buckets(models: Models, version: int) -> Any:
    for bucket in models.buckets(version):
        yield {name: tensor.cuda() for name, tensor in bucket.items()}


async def push(generator: SGLangGenerator, sender: Any, models: Models, version: int) -> None:
    sender.prepare(gpu_buckets(models, version), verify=True)
    await generator.pause()
    assert await asyncio.to_thread(sender.send) is not None
    await generator.resume(version)


async def sample(generator: SGLangGenerator, name: str, length: int) -> Completion:
    sampling = SamplingParams(max_new_tokens=length, min_new_tokens=length, stop_token_ids=(END,))
    return await generator.generate(GenerateRequest(request_id=name, prompt_ids=PROMPT, sampling=sampling))


def assert_reproduced(models: Models, completion: Completion, versions: set[int]) -> None:
    assert set(completion.versions.tolist()) == versions
    for version in versions:
        computed = partial(models.logprobs, version, PROMPT, completion.token_ids, forbidden=(END,))
        assert_as_close_as_bfloat16(completion.logprobs, computed, completion.versions == version)


def assert_as_close_as_bfloat16(
    given: np.ndarray, computed: Callable[..., np.ndarray], which: Any = slice(None)
) -> None:
    """To float32, about as transformers in bfloat16 is: 0.06 nats on average; another version is 2.8 away."""
    exact, rounded = computed(dtype=torch.float32)[which], computed(dtype=torch.bfloat16)[which]
    assert np.abs(given[which] - exact).mean() < 1.5 * np.abs(rounded - exact).mean()


async def test_a_server_beside_the_trainer_takes_weights_from_its_memory_and_gives_its_own_back(
    models: Models, tmp_path: Path
) -> None:
    settings = settings_on(0, models, tmp_path, colocated=True)
    generator = await SGLangGenerator.start(settings)
    try:
        sender = IpcSender(sender_settings(models))
        sender.connect([replace(generator.endpoint, trainer_ranks=(0,))])
        await push(generator, sender, models, 1)
        assert_reproduced(models, await sample(generator, "a", 200), {1})
        running = asyncio.create_task(sample(generator, "b", 1900))
        await asyncio.sleep(0.3)
        await generator.pause()
        assert (await running).finish_reason == "abort"
        held = query_gpus()[0].used_mib
        await generator.release_memory(["kv_cache", "weights"])
        assert query_gpus()[0].used_mib < held - 1000
        await generator.resume_memory(["weights"])
        sender.prepare(gpu_buckets(models, 2), verify=True)
        await asyncio.to_thread(sender.send)
        await generator.resume_memory(["kv_cache"])
        await generator.resume(2)
        assert_reproduced(models, await sample(generator, "c", 200), {2})
    finally:
        await generator.close()


async def test_an_fp8_server_takes_fp8_weights_again_and_again(models: Models, tmp_path: Path) -> None:
    settings = settings_on(0, models, tmp_path, colocated=True, weight_format="fp8_block")
    generator = await SGLangGenerator.start(settings)
    try:
        quantizing = replace(sender_settings(models), quantizes=True)
        sender = IpcSender(quantizing)
        sender.connect([replace(generator.endpoint, trainer_ranks=(0,))])
        for version in (1, 2, 3):
            await push(generator, sender, models, version)  # raises where a checksum or a format differs
            completion = await sample(generator, f"r{version}", 200)
            off = {
                v: np.abs(completion.logprobs - models.logprobs(v, PROMPT, completion.token_ids, forbidden=(END,)))
                for v in (version, version + 1)
            }
            assert off[version].mean() < 0.5 * off[version + 1].mean(), "other weights are further away"
    finally:
        await generator.close()


@pytest.mark.skipif(len(query_gpus()) < 2, reason="needs two GPUs")
@pytest.mark.parametrize("interrupt", ["retract", "in_place"])
def test_nccl_reaches_a_server_on_another_gpu_while_requests_run(models, tmp_path, interrupt, monkeypatch) -> None:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")

    async def main() -> Completion:
        generator = await SGLangGenerator.start(settings_on(1, models, tmp_path, interrupt=interrupt))
        try:
            sender = NcclSender(sender_settings(models))
            await asyncio.to_thread(sender.connect, [generator.endpoint])
            await push(generator, sender, models, 1)
            running = asyncio.create_task(sample(generator, "a", 1900))
            for version in (2, 3):
                await asyncio.sleep(0.5)
                await push(generator, sender, models, version)
            completion = await running
            await asyncio.to_thread(sender.close)
            return completion
        finally:
            await generator.close()

    completion = asyncio.run(main())
    if interrupt == "retract":
        assert_reproduced(models, completion, {1, 2, 3})
    else:
        versions = completion.versions
        assert set(versions.tolist()) == {1, 2, 3}
        computed = partial(models.logprobs_on_old_cache, versions, PROMPT, completion.token_ids, forbidden=(END,))
        assert_as_close_as_bfloat16(completion.logprobs, computed)


def test_the_environment_in_which_a_broadcast_would_hang_is_refused(models: Models) -> None:
    value = os.environ.pop("NCCL_CUMEM_ENABLE", None)
    try:
        with pytest.raises(ValueError, match="NCCL_CUMEM_ENABLE"):
            NcclSender(sender_settings(models))
    finally:
        if value is not None:
            os.environ["NCCL_CUMEM_ENABLE"] = value
