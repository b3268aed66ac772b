"""Unmodified clients talk to a real SGLang server through the endpoint: what is trained is what it sampled."""

from typing import Any

import numpy as np
import pytest

from helpers.sglang_environment import PYTHON, WHY_NOT, Models
from rollout.inference.sglang.server import SGLangServer
from rollout.types import Prompt, SamplingParams

if PYTHON is None:
    pytest.skip(WHY_NOT, allow_module_level=True)
openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

from helpers.chat_tokenizer import chat_tokenizer  # noqa: E402
from helpers.sglang_live import TOLERANCE, models, server, update, with_generator  # noqa: E402
from rollout.data.encoder import Encoder  # noqa: E402
from rollout.inference.router import Router  # noqa: E402
from rollout.inference.sglang.generator import SGLangGenerator  # noqa: E402
from rollout.programs import Endpoint  # noqa: E402
from rollout.sessions.bridge import Bridge  # noqa: E402
from rollout.sessions.server import SessionServer  # noqa: E402
from rollout.sessions.session import Limits, Session  # noqa: E402

__all__ = ["models", "server"]  # fixtures

PROMPT = Prompt(query_id="q", index=1, task="t", text="?", token_ids=np.array([5], np.int32), solutions=())
LIMITS = Limits(sampling=SamplingParams(max_new_tokens=24, stop_token_ids=(0,)), context_tokens=900)


def test_clients_of_both_vendors_train_what_the_server_sampled(server: SGLangServer, models: Models) -> None:
    async def talk(generator: SGLangGenerator) -> Session:
        await update(generator, models, 1)
        bridge = Bridge(Encoder(chat_tokenizer()))
        session = Session(bridge, Router([generator]), PROMPT, number=0, seed=1, limits=LIMITS)
        sessions = SessionServer()
        await sessions.start()
        sessions.open("secret", session)
        endpoint = Endpoint(sessions.url, "secret")
        try:
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
        finally:
            await sessions.close()
        return session

    session = with_generator(server, "abort", talk)
    trajectories = session.trajectories(1.0, {})
    assert (session.num_turns, len(trajectories)) == (6, 3)
    for t in trajectories:
        edges = np.flatnonzero(np.diff(t.loss_mask, prepend=False, append=False)).reshape(-1, 2)
        for start, end in edges.tolist():
            prompt, tokens = t.token_ids[:start].tolist(), t.token_ids[start:end]
            expected = models.logprobs(1, prompt, tokens)
            np.testing.assert_allclose(t.rollout_logprobs[start:end], expected, atol=TOLERANCE)
            assert set(t.versions[start:end].tolist()) == {1}
