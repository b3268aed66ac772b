"""Unmodified clients talk to a real SGLang server through the endpoint: what is trained is what it sampled."""

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from helpers.frameworks import FRAMEWORKS
from helpers.sglang_environment import PYTHON, WHY_NOT, Models, running_server, settings_for
from rollout.inference.sglang.server import SGLangServer
from rollout.types import Prompt, SamplingParams

if PYTHON is None:
    pytest.skip(WHY_NOT, allow_module_level=True)
openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

from helpers.chat_tokenizer import chat_tokenizer  # noqa: E402
from helpers.sglang_live import TOLERANCE, update, with_generator  # noqa: E402
from rollout.data.encoder import Encoder  # noqa: E402
from rollout.inference.router import Router  # noqa: E402
from rollout.inference.sglang.generator import SGLangGenerator  # noqa: E402
from rollout.programs import Endpoint  # noqa: E402
from rollout.sessions.bridge import Bridge  # noqa: E402
from rollout.sessions.server import SessionServer  # noqa: E402
from rollout.sessions.session import Limits, Session  # noqa: E402

PROMPT = Prompt(query_id="q", index=1, task="t", text="?", token_ids=np.array([5], np.int32), solutions=())
POSITIONS = 32_768  # a system prompt of smolagents has 10,000 tokens of one byte
LIMITS = Limits(sampling=SamplingParams(max_new_tokens=24, stop_token_ids=(0,)), context_tokens=POSITIONS - 1024)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("model"), positions=POSITIONS)


@pytest.fixture(scope="module")
def server(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    flags = {"max_total_tokens": 2 * POSITIONS, "sleep_on_idle": True}
    settings = settings_for(models.folder, tmp_path_factory.mktemp("log") / "generator-0.log", flags=flags)
    with running_server(settings) as server:
        yield server


def session_of(
    server: SGLangServer, models: Models, program: Callable[[Endpoint], Awaitable[object]]
) -> tuple[Session, list[Any]]:
    """What a program does with the server, whose weights have version 1: session and trajectories. All trained tokens
    have the log-probabilities of the model."""

    async def talk(generator: SGLangGenerator) -> Session:
        await update(generator, models, 1)
        session = Session(
            Bridge(Encoder(chat_tokenizer())), Router([generator]), PROMPT, number=0, seed=1, limits=LIMITS
        )
        sessions = SessionServer()
        await sessions.start()
        sessions.open("secret", session)
        try:
            await program(Endpoint(sessions.url, "secret"))
        finally:
            await sessions.close()
        return session

    session = with_generator(server, "abort", talk)
    trajectories = session.trajectories(1.0, {})
    for t in trajectories:
        edges = np.flatnonzero(np.diff(t.loss_mask, prepend=False, append=False)).reshape(-1, 2)
        for start, end in edges.tolist():
            prompt, tokens = t.token_ids[:start].tolist(), t.token_ids[start:end]
            expected = models.logprobs(1, prompt, tokens)
            np.testing.assert_allclose(t.rollout_logprobs[start:end], expected, atol=TOLERANCE)
            assert set(t.versions[start:end].tolist()) == {1}
    return session, trajectories


def test_clients_of_both_vendors_train_what_the_server_sampled(server: SGLangServer, models: Models) -> None:
    async def program(endpoint: Endpoint) -> None:
        async with openai.AsyncOpenAI(**endpoint.openai) as client:
            messages: list[Any] = [{"role": "user", "content": "One?"}]
            for _ in range(3):
                answer = await client.chat.completions.create(model="m", messages=messages)
                messages += [answer.choices[0].message, {"role": "user", "content": "And?"}]
            stream = await client.chat.completions.create(model="m", messages=messages, stream=True)
            assert [chunk async for chunk in stream]
            await client.responses.create(model="m", input="Two?")
        async with anthropic.AsyncAnthropic(**endpoint.anthropic) as client:
            turns: list[Any] = [{"role": "user", "content": "Three?"}]
            await client.messages.create(model="m", max_tokens=20, messages=turns)

    session, trajectories = session_of(server, models, program)
    assert (session.num_turns, len(trajectories)) == (6, 3)


@pytest.mark.parametrize("framework", list(FRAMEWORKS))
def test_agents_of_frameworks_train_what_the_server_sampled(framework: str, server: SGLangServer, models) -> None:
    pytest.importorskip(framework)
    session, trajectories = session_of(server, models, FRAMEWORKS[framework])
    assert session.num_turns >= 1 and trajectories and all(t.loss_mask.any() for t in trajectories)
