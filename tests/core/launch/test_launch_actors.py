"""A generator in another process, as the rollout side sees it: what fails is what has failed, and no more."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayActorError, RayTaskError

from core.launch.generator_actor import ActorGenerator, GeneratorActor, completions_from_wire, completions_to_wire
from rollout.inference.mock import MockGenerator
from rollout.types import Completion, GenerateRequest, SamplingParams

COMPLETION = Completion(
    token_ids=np.zeros(1, np.int32),
    logprobs=np.zeros(1, np.float32),
    versions=np.zeros(1, np.int32),
    finish_reason="stop",
)


def outcomes_of(drained: list[Any], *, refusal: Exception | None = None) -> list[Any]:
    """What two requests, "a" and "b", end with when drain() answers so, call by call; an exception is raised.
    `refusal`: what submit() raises."""
    answers = iter(drained)

    async def drain() -> Any:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return completions_to_wire(answer)

    async def submit(requests: list[GenerateRequest]) -> None:
        if refusal is not None:
            raise refusal

    async def run() -> list[Any]:
        actor = SimpleNamespace(drain=SimpleNamespace(remote=drain), submit=SimpleNamespace(remote=submit))
        generator = ActorGenerator(actor)
        requests = [
            GenerateRequest(request_id=name, prompt_ids=[0], sampling=SamplingParams(max_new_tokens=1))
            for name in ("a", "b")
        ]
        calls = (generator.generate(request) for request in requests)
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(run())


def test_a_request_that_fails_fails_alone() -> None:
    refused = ConnectionResetError("the server refused it")
    failed, completion = outcomes_of([[("a", refused)], [("b", COMPLETION)]])
    assert failed is refused and completion.finish_reason == "stop"


def test_requests_that_are_refused_fail_with_the_reason_itself() -> None:
    refusal = RayTaskError("submit", "", ValueError("7 is not a token"))
    for outcome in outcomes_of([], refusal=refusal.as_instanceof_cause()):
        assert type(outcome) is ValueError and str(outcome) == "7 is not a token"


FAILURES = [
    (RayTaskError("drain", "", MemoryError("the engine ran out")), MemoryError, "the engine ran out"),
    (RayActorError(error_msg="killed"), ConnectionError, "the generator process has exited: killed"),
]


@pytest.mark.parametrize(("failure", "kind", "said"), FAILURES)
def test_only_a_process_that_is_gone_is_called_gone(failure: Exception, kind: type[Exception], said: str) -> None:
    for outcome in outcomes_of([failure]):
        assert type(outcome) is kind and said in str(outcome)


@pytest.mark.parametrize(("failure", "kind", "said"), FAILURES)
def test_a_health_check_fails_with_the_error_itself(failure: Any, kind: type[Exception], said: str) -> None:
    async def check() -> None:
        # What Ray raises is of both classes, and its repr lacks the message.
        raise failure.as_instanceof_cause() if isinstance(failure, RayTaskError) else failure

    generator = ActorGenerator(SimpleNamespace(health=SimpleNamespace(remote=check)))
    with pytest.raises(kind) as raised:
        asyncio.run(generator.health())
    assert type(raised.value) is kind and said in repr(raised.value)


async def test_completions_on_their_way_to_the_rollout_side_are_still_told_to_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100}))

    actor = GeneratorActor.__new__(GeneratorActor)
    actor._generator, actor._handed_out = MockGenerator(str(tmp_path)), {}
    names = ("a", "b")
    for name in names:
        await actor.submit(
            [GenerateRequest(request_id=name, prompt_ids=[0], sampling=SamplingParams(max_new_tokens=5))]
        )
        ((drained, completion),) = completions_from_wire(await actor.drain())
        assert drained == name
        np.testing.assert_array_equal((await actor.partial())[name].token_ids, completion.token_ids)
    assert list(await actor.partial()) == ["b"], "whoever asks for more has what was answered before"


async def test_a_request_that_is_cancelled_ends_in_the_process_of_the_generator(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100}))

    actor = GeneratorActor.__new__(GeneratorActor)
    actor._generator, actor._handed_out = MockGenerator(str(tmp_path), seconds_per_token=0.01), {}
    names, ended = ("submit", "drain", "abort"), set[asyncio.Task[Any]]()

    def remote(name: str) -> Any:
        def call(*arguments: Any) -> asyncio.Task[Any]:
            task = asyncio.get_running_loop().create_task(getattr(actor, name)(*arguments))
            ended.add(task)
            return task

        return SimpleNamespace(remote=call)

    generator = ActorGenerator(SimpleNamespace(**{name: remote(name) for name in names}))
    sampling = SamplingParams(min_new_tokens=10**6, max_new_tokens=10**6)
    request = GenerateRequest(request_id="late", prompt_ids=[0], sampling=sampling)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(generator.generate(request), timeout=0.1)
    while await actor.partial():
        await asyncio.sleep(0.01)
    assert (await actor.health()).num_running == 0


MOCK_REPLICA = """
import asyncio, sys
from pathlib import Path

from core.launch.generator_actor import completions_from_wire, completions_to_wire
from core.launch.generator_actor import GeneratorActor
from rollout.inference.backend import BackendSettings

async def receive():
    folder = sys.argv[1]
    settings = BackendSettings(model_path=folder, dtype="float32", device="cpu")
    actor = GeneratorActor("generator-0", f"{folder}/log", "mock", 1, settings)
    await actor.start()
    await actor.receive([], version=3)
    return (await actor.health()).version

version = asyncio.run(receive())  # from now on the output goes to the log file
(Path(sys.argv[1]) / "found").write_text(f"{version} {'torch' in sys.modules}")
"""


def test_a_generator_without_a_model_takes_a_version_and_does_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100}))
    command = [sys.executable, "-c", MOCK_REPLICA, str(tmp_path)]
    subprocess.run(command, check=True)
    assert (tmp_path / "found").read_text() == "3 False"
