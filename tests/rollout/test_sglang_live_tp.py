"""The same against a server of two tensor-parallel ranks on the CPU, each of which holds its part of the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from sglang_environment import PYTHON, TWO_RANKS, WHY_NOT, Models, environment, settings_for

if PYTHON is None:
    pytest.skip(WHY_NOT, allow_module_level=True)
pytest.importorskip("aiohttp", reason="aiohttp is not installed (extra gpu)")

import test_sglang_live as live  # noqa: E402
import test_sglang_live_in_flight as in_flight  # noqa: E402
from test_sglang_live import models  # noqa: E402

from rollout.sglang_server import SGLangServer  # noqa: E402

__all__ = ["models"]  # a fixture


@pytest.fixture(scope="module")
def server(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    log_file = tmp_path_factory.mktemp("log") / "generator-0.log"
    server = SGLangServer(settings_for(models.folder, log_file, tp=2, env=environment() | TWO_RANKS))
    asyncio.run(server.start())
    yield server
    server.stop()


@pytest.mark.parametrize("interrupt", ["abort", "retract", "in_place"])
def test_every_token_s_logprob_reproduces_under_the_version_it_carries(
    server: SGLangServer, models: Models, interrupt: str
) -> None:
    live.test_every_token_s_logprob_reproduces_under_the_version_it_carries(server, models, interrupt)


def test_top_p_and_top_k_give_the_logprobs_of_what_is_left(server: SGLangServer, models: Models) -> None:
    live.test_top_p_and_top_k_give_the_logprobs_of_what_is_left(server, models)


@pytest.mark.parametrize("kind", ["nccl", "disk"])
def test_a_push_reaches_running_requests_and_every_rank_s_checksums_agree(
    server: SGLangServer, models: Models, tmp_path: Path, kind: str
) -> None:
    live.test_a_push_reaches_running_requests_and_every_checksum_agrees(server, models, tmp_path, kind, None)


def test_a_rank_with_other_weights_than_were_sent_is_found(
    server: SGLangServer, models: Models, tmp_path: Path
) -> None:
    live.test_a_server_with_other_weights_than_were_sent_is_found(server, models, tmp_path)


@pytest.mark.parametrize("interrupt", ["in_place", "retract", "abort"])
def test_what_is_told_midway_is_the_beginning_of_the_answer_token_by_token(
    server: SGLangServer, models: Models, interrupt: str
) -> None:
    in_flight.test_what_is_told_midway_is_the_beginning_of_the_answer_token_by_token(server, models, interrupt)


def test_a_server_whose_scheduler_hangs_is_not_healthy(server: SGLangServer) -> None:
    live.test_a_server_whose_scheduler_hangs_is_not_healthy(server)
