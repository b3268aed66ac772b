"""The auxiliary model answers what the rollout process and its children ask, and its loss ends the run."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest

from core.explore.servers import AuxiliaryModel
from helpers.chat_tokenizer import chat_tokenizer
from helpers.sglang_environment import Models
from rollout.inference.backend import GeneratorConfig
from rollout.inference.embedded.generator import EmbeddedGenerator
from rollout.inference.router import NoGeneratorError
from rollout.programs import Endpoint, auxiliary
from rollout.rewards.judge import Judge, JudgeError
from rollout.types import Prompt

PROMPT = Prompt(query_id="q", index=0, task="t", text="2+2?", token_ids=np.array([5], np.int32), solutions=("4",))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("auxiliary")
    Models(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


def settings(model: Path, temperature: float = 0.0) -> Any:
    generator = GeneratorConfig(health_interval_seconds=0.1)
    return SimpleNamespace(
        auxiliary_model=str(model),
        auxiliary=SimpleNamespace(temperature=temperature),
        generator=generator,
        seed=1,
        merged_flags={},
    )


async def ask(http: aiohttp.ClientSession, endpoint: Endpoint, text: str) -> str:
    body = {"model": "any", "messages": [{"role": "user", "content": text}], "max_tokens": 12}
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    async with http.post(f"{endpoint.openai['base_url']}/chat/completions", json=body, headers=headers) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return str(answer["choices"][0]["message"]["content"])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_equal_requests_get_equal_answers(model: Path, temperature: float, monkeypatch) -> None:

    monkeypatch.setenv("SLIPSTREAM_AUXILIARY_URL", "")  # restored after the test

    servers = {name: EmbeddedGenerator(model, threads=1) for name in ("auxiliary-0", "auxiliary-1")}
    frozen = AuxiliaryModel(settings(model, temperature), servers)
    await frozen.start()
    try:
        async with aiohttp.ClientSession() as http:
            texts = ["One?", "Two?"] * 6
            answers = await asyncio.gather(*(ask(http, auxiliary(), text) for text in texts))
            assert len(set(answers[::2])) == len(set(answers[1::2])) == 1
            assert answers[0] != answers[1]
        with pytest.raises(JudgeError, match="no line 'Points: N'"):  # it was asked, and has random weights
            await asyncio.to_thread(Judge("auxiliary", "judge", max_tokens=8), PROMPT, "4")
        monkeypatch.setenv("SLIPSTREAM_AUXILIARY_KEY", "another")
        with pytest.raises(JudgeError, match=r"401.*it is that of rollout\.programs\.auxiliary"):
            await asyncio.to_thread(Judge("auxiliary", "judge"), PROMPT, "4")
    finally:
        await frozen.close()


def test_a_lost_server_ends_the_run(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> Exception:
        server = EmbeddedGenerator(model, threads=1)
        frozen = AuxiliaryModel(settings(model), {"auxiliary-0": server})
        await frozen.start()
        failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        frozen.watch(failed.set_result)
        try:
            async with aiohttp.ClientSession() as http:
                await ask(http, auxiliary(), "One?")
            await server.close()
            return await asyncio.wait_for(failed, 60)
        finally:
            await frozen.close()

    monkeypatch.setenv("SLIPSTREAM_AUXILIARY_URL", "")
    monkeypatch.setenv("SLIPSTREAM_AUXILIARY_KEY", "")
    error = asyncio.run(main())
    assert isinstance(error, NoGeneratorError) and "auxiliary-0" in str(error)


def test_a_run_without_one_says_which_key_is_missing() -> None:
    with pytest.raises(RuntimeError, match=r"set auxiliary\.path"):
        auxiliary()
