"""A generator in another process, as the rollout side sees it: what fails is what has failed, and no more."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayActorError, RayTaskError

from core.launch_actors import ActorGenerator
from rollout.types import Completion, GenerateRequest, SamplingParams

COMPLETION = Completion(
    token_ids=np.zeros(1, np.int32),
    logprobs=np.zeros(1, np.float32),
    versions=np.zeros(1, np.int32),
    finish_reason="stop",
)


def outcomes_of(drained: list[Any]) -> list[Any]:
    """What two requests, "a" and "b", end with when drain() answers so, call by call; an exception is raised."""
    answers = iter(drained)

    async def drain() -> Any:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def submit(requests: list[GenerateRequest]) -> None: ...

    async def run() -> list[Any]:
        actor = SimpleNamespace(drain=SimpleNamespace(remote=drain), submit=SimpleNamespace(remote=submit))
        generator = ActorGenerator(actor)
        requests = [
            GenerateRequest(request_id=name, prompt_ids=[0], sampling=SamplingParams(max_new_tokens=1))
            for name in ("a", "b")
        ]
        calls = (generator.generate(request) for request in requests)
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), timeout=10)

    return asyncio.run(run())


def test_a_request_that_fails_fails_alone() -> None:
    refused = ConnectionResetError("the server refused it")
    assert outcomes_of([[("a", refused)], [("b", COMPLETION)]]) == [refused, COMPLETION]


@pytest.mark.parametrize(
    ("failure", "kind", "said"),
    [
        (RayTaskError("drain", "", MemoryError("the engine ran out")), MemoryError, "the engine ran out"),
        (RayActorError(error_msg="killed"), ConnectionError, "the generator's process is gone: killed"),
    ],
)
def test_only_a_process_that_is_gone_is_called_gone(failure: Exception, kind: type[Exception], said: str) -> None:
    for outcome in outcomes_of([failure]):
        assert type(outcome) is kind and said in str(outcome)
