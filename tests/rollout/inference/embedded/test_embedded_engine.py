"""The engine, stepped by hand: determinism, interruption with exact versions, memory."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from helpers.embedded_models import (
    assert_same,
    bucket_of,
    engine_of,
    make_model,
    oracle_logprobs,
    prompt,
    request,
    run,
    steps,
)
from rollout.inference.embedded.engine import Engine
from rollout.types import Completion, GenerateRequest


def mixed_requests() -> list[GenerateRequest]:
    """Groups of three with prompts from 1 to 85 tokens, outputs from 1 to 66, several settings."""
    settings: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"top_p": 0.9}, {"temperature": 0.0}, {"top_k": 9}]
    return [
        request(i, prompt(1 + 21 * (i // 3), seed=i // 3), max_new_tokens=1 + (i * 37) % 67, **settings[i % 5])
        for i in range(15)
    ]


@pytest.fixture(scope="module")
def alone(model: Any) -> dict[str, Completion]:
    """The mixed requests, each run in an engine by itself, at version 3."""
    return {r.request_id: run_at_version(model, r, 3) for r in mixed_requests()}


@pytest.mark.parametrize("max_running", [3, 64])
def test_what_else_is_in_the_batch_does_not_change_a_completion(model, alone, max_running) -> None:
    requests = mixed_requests()
    for r, c in zip(requests, run(engine_of(model, max_running=max_running), requests), strict=True):
        assert_same(c, alone[r.request_id], versions=False)


def test_requests_that_arrive_while_others_run_are_sampled_as_if_alone(model, alone: dict[str, Completion]) -> None:
    requests = mixed_requests()
    engine, done = engine_of(model, max_running=10), {}
    for i in range(0, len(requests), 4):
        engine.add(requests[i : i + 4])
        done.update(steps(engine, 5))
    done.update(steps(engine))
    for r in requests:
        assert_same(done[r.request_id], alone[r.request_id], versions=False)


def test_different_seeds_give_different_completions_of_one_prompt(model: Any) -> None:
    completions = run(engine_of(model), [request(i, prompt(8)) for i in range(16)])
    assert len({tuple(c.token_ids) for c in completions}) == 16


def partly_run(model: Any, num_steps: int, requests: list[GenerateRequest]) -> tuple[Engine, dict[str, Completion]]:
    engine = engine_of(model, max_running=6)
    engine.version = 3
    engine.add(requests)
    return engine, steps(engine, num_steps)


def interrupt_and_go_on(engine: Engine, how: Any, update: Any = None) -> dict[str, Completion]:
    """Interrupt, update, and finish; aborted requests come back with their output, as a router brings them."""
    with torch.inference_mode():
        aborted = engine.interrupt(how)
        if update is not None:
            engine.update_weights(bucket_of(update).tensors())
            engine.version = 4
        assert (how == "abort") == bool(aborted)
        engine.add(
            GenerateRequest(
                request_id=r.request_id, prompt_ids=r.prompt_ids, sampling=r.sampling, seed=r.seed, output=partial
            )
            for r, partial in aborted
        )
    assert all(partial.finish_reason == "abort" for _, partial in aborted)
    return steps(engine)


@pytest.mark.parametrize(("how", "num_steps"), [("abort", 1), ("abort", 40), ("retract", 7), ("in_place", 40)])
def test_an_interruption_without_new_weights_changes_nothing(model, alone, how, num_steps) -> None:
    requests = mixed_requests()
    engine, done = partly_run(model, num_steps, requests)
    done |= interrupt_and_go_on(engine, how)
    for r in requests:
        assert_same(done[r.request_id], alone[r.request_id])


def run_at_version(model: Any, r: GenerateRequest, version: int) -> Completion:
    engine = engine_of(model)
    engine.version = version
    return run(engine, [r])[0]


def cached_logprobs(old: Any, new: Any, r: GenerateRequest, token_ids: np.ndarray, num_old: int) -> np.ndarray:
    """Log-probabilities of the tokens from num_old on when the new model goes on with the old one's cache."""
    ids = torch.tensor([[*r.prompt_ids, *token_ids]])
    cached = len(r.prompt_ids) + num_old - 1  # the last old token was sampled but not yet run
    cache = DynamicCache()
    with torch.no_grad():
        old(ids[:, :cached], past_key_values=cache, use_cache=True)
        logits = new(ids[:, cached:-1], past_key_values=cache).logits[0]
    return logits.log_softmax(-1).gather(1, ids[0, cached + 1 :, None])[:, 0].numpy()


@pytest.mark.parametrize("how", ["abort", "retract", "in_place"])
def test_versions_and_logprobs_are_exact_across_an_update_of_the_weights(model: Any, new_model: Any, how: str) -> None:
    requests = [request(i, prompt(5 + 9 * (i // 2), seed=i // 2), max_new_tokens=24 + i) for i in range(8)]
    engine, done = partly_run(model, 12, requests)  # 6 of 8 fit
    assert not done
    done = interrupt_and_go_on(engine, how, update=new_model)
    for i, r in enumerate(requests):
        c = done[r.request_id]
        num_old = 12 if i < 6 else 0
        assert c.versions.tolist() == [3] * num_old + [4] * (24 + i - num_old)
        by_old = oracle_logprobs(model, r.prompt_ids, c.token_ids)
        by_new = oracle_logprobs(new_model, r.prompt_ids, c.token_ids)
        np.testing.assert_allclose(c.logprobs[:num_old], by_old[:num_old], atol=1e-4)
        if how == "in_place" and num_old:
            by_new = np.concatenate((by_old[:num_old], cached_logprobs(model, new_model, r, c.token_ids, num_old)))
        np.testing.assert_allclose(c.logprobs[num_old:], by_new[num_old:], atol=1e-4)
        assert c.token_ids[:num_old].tolist() == run_at_version(model, r, 3).token_ids[:num_old].tolist()


def test_retracted_requests_run_again_before_those_that_waited_and_in_their_order(model: Any) -> None:
    requests = [request(i, prompt(5 + i, seed=i), max_new_tokens=20) for i in range(5)]
    engine = engine_of(model, max_running=2)
    engine.add(requests)
    steps(engine, 3)
    before = engine.partial()
    assert before.keys() == {"r0", "r1"}
    with torch.inference_mode():
        engine.interrupt("retract")
    assert list(engine.partial()) == ["r0", "r1"]
    steps(engine, 2)
    after = engine.partial()
    assert after.keys() == {"r0", "r1"}
    assert all(len(after[name].token_ids) > len(before[name].token_ids) for name in after)


def test_a_prompt_run_under_old_weights_is_not_shared_with_later_requests(model: Any, new_model: Any) -> None:
    ids = prompt(20)
    requests = [request(i, ids, max_new_tokens=16) for i in range(12)]
    engine, _ = partly_run(model, 5, requests)
    done = interrupt_and_go_on(engine, "in_place", update=new_model)
    for r in requests[6:]:
        assert_same(done[r.request_id], run_at_version(new_model, r, 4))


def test_aborted_requests_leave_with_what_they_have_and_the_rest_is_undisturbed(model: Any) -> None:
    requests = [request(i, prompt(9, seed=i), max_new_tokens=24) for i in range(9)]
    engine, _ = partly_run(model, 10, requests)
    with torch.inference_mode():
        gone = {r.request_id: c for r, c in engine.abort(["r1", "r4", "r7", "unknown"])}
    assert {i: len(c.token_ids) for i, c in gone.items()} == {"r1": 10, "r4": 10, "r7": 0}
    assert {c.finish_reason for c in gone.values()} == {"abort"}
    done = steps(engine)
    assert done.keys() == {"r0", "r2", "r3", "r5", "r6", "r8"}
    for r in requests:
        whole = run_at_version(model, r, 3)
        if r.request_id in done:
            assert_same(done[r.request_id], whole)
        else:
            n = len(gone[r.request_id].token_ids)
            assert gone[r.request_id].token_ids.tolist() == whole.token_ids[:n].tolist()


def test_cache_memory_follows_what_runs_and_not_what_the_model_could_hold() -> None:
    model = make_model("qwen2")
    model.config.max_position_embeddings = 1_000_000
    engine = engine_of(model, max_running=4096)
    assert engine._cache.num_bytes == 0
    engine.add([request(i, prompt(10, seed=i), max_new_tokens=100) for i in range(4)])
    steps(engine, 1)
    bytes_per_token = 2 * 2 * 2 * 12 * 4  # keys and values, layers, heads, head_dim, float32
    assert engine._cache.num_bytes == 4 * 32 * bytes_per_token
    steps(engine, 98)
    assert engine.num_running == 4
    assert 4 * 128 * bytes_per_token <= engine._cache.num_bytes <= 4 * (128 + 96 + 64 + 32) * bytes_per_token
