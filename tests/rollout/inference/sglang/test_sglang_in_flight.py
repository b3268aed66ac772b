"""What requests in flight have sampled travels out of a server token by token; here without a server."""

import asyncio
import json
import time
from array import array
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollout.errors import GeneratorCallError
from rollout.inference.sglang.client import EMPTY, joined, read_answer, so_far
from rollout.inference.sglang.generator import SGLangGenerator, _Running
from rollout.inference.sglang.hooks.in_flight import Sampled, pack, to_json, unpack
from rollout.types import Completion, GenerateRequest, SamplingParams

RNG = np.random.default_rng(0)


def scheduled(name: str, num_tokens: int, **changes: Any) -> SimpleNamespace:
    """The attributes of SGLang's Req that are read."""
    values: dict[str, Any] = {
        "rid": name,
        "output_ids_through_stop": array("q", RNG.integers(0, 150_000, num_tokens).tolist()),
        "logprob": SimpleNamespace(
            output_token_logprobs_val=(-RNG.random(num_tokens, np.float32)).tolist()  # as tensors' tolist() gives them
        ),
        "customized_info": {"v": (300 + RNG.integers(0, 2, num_tokens).cumsum()).tolist()},
    }
    return SimpleNamespace(**values | changes)


def travelled(requests: list[Any]) -> dict[str, Sampled]:
    return unpack(json.loads(json.dumps(to_json(pack(requests, "v")))))


def test_every_token_arrives_with_its_exact_logprob_and_version() -> None:
    requests = [scheduled(f"g/{i}/0", n) for i, n in enumerate((1, 700, 33))]
    told = travelled(requests)
    assert list(told) == ["g/0/0", "g/1/0", "g/2/0"]
    for request in requests:
        token_ids, logprobs, versions = told[request.rid]
        assert token_ids.dtype == versions.dtype == np.int32 and logprobs.dtype == np.float32
        assert token_ids.tolist() == request.output_ids_through_stop.tolist()
        assert logprobs.tolist() == request.logprob.output_token_logprobs_val
        assert versions.tolist() == request.customized_info["v"]


def test_requests_without_a_token_are_named_and_tokens_that_lack_something_are_left_out() -> None:
    waiting = scheduled("waiting", 0, customized_info=None)
    foreign = scheduled("without logprobs", 5, logprob=SimpleNamespace(output_token_logprobs_val=None))
    short = scheduled("short", 5)
    short.customized_info["v"].pop()
    told = travelled([waiting, foreign, short])
    lengths = {name: [len(part) for part in sampled] for name, sampled in told.items()}
    assert lengths == {"waiting": [0] * 3, "without logprobs": [0] * 3, "short": [4] * 3}
    assert list(travelled([waiting])) == ["waiting"] and travelled([]) == {} == unpack({})


def completion(num_tokens: int, **changes: Any) -> Completion:
    values: dict[str, Any] = {
        "token_ids": np.arange(num_tokens, dtype=np.int32),
        "logprobs": np.full(num_tokens, -0.5, np.float32),
        "versions": np.full(num_tokens, 3, np.int32),
        "finish_reason": "abort",
    }
    return Completion(**values | changes)


@pytest.mark.parametrize(
    ("last", "num_told", "reason"), [(90, 5, "abort"), (99, 5, "stop"), (90, 6, "length"), (99, 6, "stop")]
)
def test_what_is_told_follows_what_the_request_came_with_and_is_finished_if_nothing_can_follow(
    last: int, num_told: int, reason: str
) -> None:
    """A request that has its last token when its server is asked: to continue it would be wrong."""
    told = Sampled(
        np.array([*range(50, 49 + num_told), last], np.int32),
        np.full(num_told, -0.25, np.float32),
        np.full(num_told, 4, np.int32),
    )
    part = so_far(completion(4), told, SamplingParams(max_new_tokens=10, stop_token_ids=(99,)))
    assert part.token_ids.tolist() == [0, 1, 2, 3, *range(50, 49 + num_told), last]
    assert part.logprobs.tolist() == [-0.5] * 4 + [-0.25] * num_told
    assert part.versions.tolist() == [3] * 4 + [4] * num_told
    assert part.finish_reason == reason


@pytest.mark.parametrize("broken", [None, float("nan"), float("-inf")])
def test_an_answer_whose_logprobs_are_no_numbers_is_an_error(broken: float | None) -> None:
    meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": [[-0.5, 7], [broken, 8]]}
    answer = {"meta_info": meta, "output_ids": [7, 8]}
    sampling = SamplingParams(max_new_tokens=2)
    with pytest.raises(GeneratorCallError, match="generator-3: .* not finite"):
        read_answer(answer, sampling, server="generator-3", log_file="a.log", one_version=1)
    meta["output_token_logprobs"][1][0] = -0.25
    assert read_answer(answer, sampling, server="", log_file="", one_version=1).logprobs.tolist() == [-0.5, -0.25]


def test_an_answer_with_fewer_logprobs_than_tokens_is_an_error_unless_it_was_aborted() -> None:
    meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": [[-0.5, 7], [-0.25, 8]]}
    answer = {"meta_info": meta, "output_ids": [7, 8, 9]}
    read = partial(read_answer, answer, SamplingParams(max_new_tokens=3), server="g", log_file="", one_version=1)
    with pytest.raises(GeneratorCallError, match="g: a response of 3 tokens is complete for 2 only"):
        read()
    meta["finish_reason"] = {"type": "abort"}
    assert read().token_ids.tolist() == [7, 8]


def test_a_request_that_the_server_has_finished_is_waited_for_until_its_answer_is_here() -> None:
    """The answer is on its way when the server is asked, and neither side has its tokens."""
    finished = completion(4, finish_reason="stop")

    async def scene() -> dict[str, Completion]:
        running = _Running(
            GenerateRequest(request_id="a", prompt_ids=[1], sampling=SamplingParams(max_new_tokens=9)), EMPTY
        )
        running.rid, running.sent = "a/0", time.monotonic() - 10.0

        async def post(call: Any, *, timeout_seconds: float) -> dict[str, Any]:
            asyncio.get_running_loop().call_soon(asyncio.create_task, arrive())
            return {"answers": [to_json(pack([], "v"))]}

        async def arrive() -> None:
            await asyncio.sleep(0)
            generator._done.append(("a", finished))
            del generator._running["a"]
            running.answered.set()

        generator: Any = SGLangGenerator.__new__(SGLangGenerator)
        generator._server = SimpleNamespace(settings=SimpleNamespace(pp=1))
        generator._client, generator._running, generator._done = SimpleNamespace(post=post), {"a": running}, []
        return await generator.partial()

    assert asyncio.run(scene()) == {"a": finished}


def test_the_experts_of_a_request_stay_when_a_part_without_tokens_follows() -> None:
    experts = np.arange(3 * 2, dtype=np.int16).reshape(3, 2, 1)
    assert joined(completion(4, routed_experts=experts), EMPTY).routed_experts is experts
    more = np.arange(5 * 2, dtype=np.int16).reshape(5, 2, 1)
    whole = joined(completion(4, routed_experts=experts), completion(2, routed_experts=more, finish_reason="stop"))
    assert whole.routed_experts is more and whole.finish_reason == "stop" and len(whole.token_ids) == 6
