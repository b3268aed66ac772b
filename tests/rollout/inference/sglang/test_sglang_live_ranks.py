"""The same against servers of two ranks on the CPU, each of which holds its part of the weights: tensor-parallel
ranks, and two pipeline stages."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from helpers.sglang_environment import (
    PYTHON,
    TWO_RANKS,
    TWO_STAGES,
    WHY_NOT,
    Models,
    environment,
    running_server,
    settings_for,
)

if PYTHON is None:
    pytest.skip(WHY_NOT, allow_module_level=True)
pytest.importorskip("aiohttp", reason="aiohttp is not installed (extra gpu)")

import test_sglang_live as live  # noqa: E402
import test_sglang_live_in_flight as in_flight  # noqa: E402

from helpers.sglang_live import models  # noqa: E402
from rollout.inference.router import Router  # noqa: E402
from rollout.inference.sglang.generator import SGLangGenerator  # noqa: E402
from rollout.inference.sglang.server import SGLangServer  # noqa: E402
from rollout.types import Completion  # noqa: E402

__all__ = ["models"]  # a fixture


@pytest.fixture(scope="module")
def server(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    log_file = tmp_path_factory.mktemp("log") / "generator-0.log"
    with running_server(settings_for(models.folder, log_file, tp=2, env=environment() | TWO_RANKS)) as server:
        yield server


@pytest.mark.parametrize("interrupt", ["abort", "retract", "in_place"])
def test_every_token_s_logprob_reproduces_under_the_version_it_carries(server, models, interrupt) -> None:
    live.test_every_token_s_logprob_reproduces_under_the_version_it_carries(server, models, interrupt)


def test_top_p_and_top_k_give_the_logprobs_of_what_is_left(server: SGLangServer, models: Models) -> None:
    live.test_top_p_and_top_k_give_the_logprobs_of_what_is_left(server, models)


@pytest.mark.parametrize("kind", ["nccl", "disk"])
def test_a_push_reaches_running_requests_and_every_rank_s_checksums_agree(server, models, tmp_path, kind) -> None:
    live.test_a_push_reaches_running_requests_and_every_checksum_agrees(server, models, tmp_path, kind, None)


def test_changes_make_the_weights_that_everything_makes_on_every_rank(server, models, tmp_path, caplog) -> None:
    live.test_changes_make_the_weights_that_everything_makes_and_only_of_the_push_before(
        server, models, tmp_path, caplog
    )


def test_a_rank_with_other_weights_than_were_sent_is_found(server: SGLangServer, models: Models, tmp_path) -> None:
    live.test_a_server_with_other_weights_than_were_sent_is_found(server, models, tmp_path)


@pytest.mark.parametrize("interrupt", ["in_place", "retract", "abort"])
def test_what_is_told_midway_is_the_beginning_of_the_answer_token_by_token(server, models, interrupt) -> None:
    in_flight.test_what_is_told_midway_is_the_beginning_of_the_answer_token_by_token(server, models, interrupt)


def test_two_pipeline_stages_read_new_weights_and_go_on_with_what_they_handed_back(models: Models, tmp_path) -> None:
    prompts = [live.prompt_of(i, 10 + i) for i in range(4)]

    async def main() -> list[Completion]:
        log_file, env = tmp_path / "generator-0.log", environment() | TWO_STAGES
        flags = {"max_total_tokens": 16384}
        settings = settings_for(models.folder, log_file, pp=2, env=env, interrupt="abort", flags=flags)
        generator = await SGLangGenerator.start(settings)
        try:
            router = Router([generator])
            running = [
                asyncio.create_task(router.generate(live.request(f"r{i}", prompt, max_new_tokens=1500)))
                for i, prompt in enumerate(prompts)
            ]
            for version in (1, 2):
                models[version].save_pretrained(tmp_path / f"v{version}")
                await asyncio.sleep(2.0)
                assert (await generator.health()).version == version - 1
                await generator.pause()
                generator.endpoint.load_folder(str(tmp_path / f"v{version}"), timeout_seconds=60)
                await generator.resume(version)
            return await asyncio.gather(*running)
        finally:
            await generator.close()

    completions = asyncio.run(main())
    assert {0, 1, 2} == {version for c in completions for version in c.versions.tolist()}
    for prompt, completion in zip(prompts, completions, strict=True):
        for version in (0, 1, 2):
            mine = completion.versions == version
            expected = models.logprobs(version, prompt, completion.token_ids)
            np.testing.assert_allclose(completion.logprobs[mine], expected[mine], atol=live.TOLERANCE)
