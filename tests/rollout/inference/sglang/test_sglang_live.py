"""The SGLang generator and the weight push against a real SGLang server on the CPU."""

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from helpers.sglang_environment import END, PYTHON, VOCAB, WHY_NOT, Models, settings_for
from rollout.bucket import FlatBucket
from rollout.errors import GeneratorGone
from rollout.inference.sglang.client import SGLangEndpoint
from rollout.inference.sglang.server import SGLangServer
from rollout.types import Completion, GenerateRequest

if PYTHON is None:
    pytest.skip(WHY_NOT, allow_module_level=True)
pytest.importorskip("aiohttp", reason="aiohttp is not installed (extra gpu)")

from safetensors.torch import load_file, save_file  # noqa: E402

from core.config.runtime import Changes  # noqa: E402
from core.weight_sync.buckets import (
    Sender,  # noqa: E402
    make_sender,  # noqa: E402
)
from core.weight_sync.push import (
    PushError,  # noqa: E402
    SenderSettings,  # noqa: E402
)
from helpers.sglang_live import TOLERANCE, models, prompt_of, request, server, update, with_generator  # noqa: E402
from rollout.inference.changes import NOT_THE_BASE  # noqa: E402
from rollout.inference.embedded.model import restrict  # noqa: E402
from rollout.inference.router import Router  # noqa: E402
from rollout.inference.sglang.client import EMPTY, generate_call  # noqa: E402
from rollout.inference.sglang.generator import SGLangGenerator  # noqa: E402

__all__ = ["models", "server"]  # fixtures


@pytest.mark.parametrize("interrupt", ["abort", "retract", "in_place"])
def test_every_token_s_logprob_reproduces_under_the_version_it_carries(server, models, interrupt) -> None:
    """END is ruled out: a request that the server ends there goes on as a new one, on a new cache."""
    prompts = [prompt_of(i // 2, 20 + i) for i in range(10)]

    def uninterrupted(i: int) -> GenerateRequest:
        length = 150 + 25 * i
        return request(f"r{i}", prompts[i], max_new_tokens=length, min_new_tokens=length, stop_token_ids=(END,))

    async def sample_through_updates(generator: SGLangGenerator) -> list[Completion]:
        router = Router([generator])
        await update(generator, models, 1)
        running = [asyncio.create_task(router.generate(uninterrupted(i))) for i in range(10)]
        for version in (2, 3):
            await asyncio.sleep(0.5)
            await update(generator, models, version)
        return await asyncio.gather(*running)

    completions = with_generator(server, interrupt, sample_through_updates)
    across = 0
    for prompt, completion in zip(prompts, completions, strict=True):
        versions, tokens = completion.versions, completion.token_ids
        assert (np.diff(versions) >= 0).all()
        across += versions[0] != versions[-1]
        if interrupt == "in_place":
            expected = models.logprobs_on_old_cache(versions, prompt, tokens, forbidden=(END,))
        else:
            by_version = {v: models.logprobs(v, prompt, tokens, forbidden=(END,)) for v in set(versions.tolist())}
            expected = np.array([by_version[v][i] for i, v in enumerate(versions.tolist())])
        np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)
    assert across >= 3, "the updates came too late to say anything"


@pytest.mark.parametrize("interrupt", ["abort", "retract", "in_place"])
def test_a_cached_prefix_of_older_weights_is_not_used(server: SGLangServer, models: Models, interrupt: str) -> None:
    prompt = prompt_of(7, 300)

    async def same_prompt_twice(generator: SGLangGenerator) -> list[Completion]:
        completions = []
        for version in (4, 5):
            await update(generator, models, version)
            completions += [
                await generator.generate(request(f"v{version}-{i}", prompt, max_new_tokens=8)) for i in range(2)
            ]
        return completions

    for version, completion in zip((4, 4, 5, 5), with_generator(server, interrupt, same_prompt_twice), strict=True):
        assert set(completion.versions.tolist()) == {version}
        expected = models.logprobs(version, prompt, completion.token_ids)
        np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)


def test_top_p_and_top_k_give_the_logprobs_of_what_is_left(server: SGLangServer, models: Models) -> None:
    prompt = prompt_of(8, 30)

    async def sample(generator: SGLangGenerator) -> Completion:
        await update(generator, models, 1)
        return await generator.generate(request("p", prompt, max_new_tokens=40, top_p=0.8, top_k=50, temperature=0.7))

    completion = with_generator(server, "abort", sample)
    logits = models.logits(1, prompt, completion.token_ids) / 0.7
    left = restrict(logits, torch.full((40,), 50), torch.full((40,), 0.8))  # as the embedded generator
    expected = left.log_softmax(-1)[range(40), completion.token_ids.tolist()]
    np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=TOLERANCE)


def test_a_greedy_request_changes_neither_the_tokens_nor_the_logprobs_of_those_beside_it(server, models) -> None:
    prompt = prompt_of(10, 30)

    async def sample(generator: SGLangGenerator) -> list[Completion]:
        await update(generator, models, 1)
        long = [request(f"l{i}", prompt, max_new_tokens=120) for i in range(3)]
        running = [asyncio.create_task(generator.generate(r)) for r in long]
        await asyncio.sleep(0.2)
        greedy = await generator.generate(request("g", prompt, max_new_tokens=20, temperature=0.0))
        return [greedy, *await asyncio.gather(*running)]

    greedy, *sampled = with_generator(server, "abort", sample)
    assert greedy.token_ids.tolist() == models.logits(1, prompt, greedy.token_ids).argmax(-1).tolist()
    for completion in (greedy, *sampled):
        expected = models.logprobs(1, prompt, completion.token_ids)
        np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)


def test_the_cache_keeps_prompts_while_their_weights_are_there_and_no_answers(server, models) -> None:
    prompt = prompt_of(11, 400)

    async def cached_tokens(generator: SGLangGenerator, name: str, ids: list[int]) -> tuple[int, list[int]]:
        call = generate_call(request(name, ids, max_new_tokens=60), EMPTY, rid=name, vocab_size=VOCAB)
        answer = await generator._client.post(call)
        return answer["meta_info"]["cached_tokens"], answer["output_ids"]

    async def ask(generator: SGLangGenerator) -> list[int]:
        await update(generator, models, 1)
        first, answer = await cached_tokens(generator, "a", prompt)
        again, _ = await cached_tokens(generator, "b", prompt)
        longer, _ = await cached_tokens(generator, "c", [*prompt, *answer, 1])
        await update(generator, models, 2)
        return [first, again, longer, (await cached_tokens(generator, "d", prompt))[0]]

    # Of a prompt that is there as a whole, the last token runs once more.
    assert with_generator(server, "in_place", ask) == [0, 399, 400, 0]


def test_each_turn_of_a_conversation_computes_what_is_new_and_an_update_everything_once(server, models) -> None:
    async def converse(generator: SGLangGenerator) -> list[int]:
        await update(generator, models, 1)
        ids, computed, version = prompt_of(12, 96), [], 1
        for turn in range(8):
            if turn == 4:
                version = 2
                await update(generator, models, version)
            turn_of = replace(request(f"turn{turn}", ids, max_new_tokens=96), is_turn=True)
            answer = await generator._client.post(generate_call(turn_of, EMPTY, rid=f"turn{turn}", vocab_size=VOCAB))
            meta = answer["meta_info"]
            logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
            expected = models.logprobs(version, ids, np.array(answer["output_ids"]))
            np.testing.assert_allclose(logprobs, expected, atol=TOLERANCE)
            computed.append(len(ids) - meta["cached_tokens"])
            ids = [*ids, *answer["output_ids"], *prompt_of(100 + turn, 96)]
        return computed

    first, *rest = with_generator(server, "retract", converse)
    assert first == 96 and rest.pop(3) > 4 * 2 * 96
    assert max(rest) <= 96 + 1  # the last token of an answer may not have run


def test_in_place_a_conversation_keeps_and_counts_its_prefix_over_an_update_and_a_new_one_does_not(
    server: SGLangServer, models: Models
) -> None:
    prompt, observed = prompt_of(14, 120), prompt_of(15, 40)

    async def converse(generator: SGLangGenerator) -> tuple[list[Completion], Completion, list[int]]:
        def turn(name: str, ids: list[int], began_at: int | None) -> GenerateRequest:
            asked = request(name, ids, max_new_tokens=30, min_new_tokens=30, stop_token_ids=(END,))
            return replace(asked, is_turn=True, began_at=began_at)

        answers, counts, ids = [], [], prompt
        await update(generator, models, 1)
        for number in range(3):
            answers.append(await generator.generate(turn(f"kept{number}", ids, 1 if number else None)))
            counts.append((await generator.health()).num_old_prefix_tokens)
            ids = [*ids, *answers[-1].token_ids.tolist(), *observed]
            if number == 0:
                await update(generator, models, 2)
        return answers, await generator.generate(turn("new", prompt, None)), counts

    answers, new, counts = with_generator(server, "in_place", converse)
    assert [set(answer.versions.tolist()) for answer in answers] == [{1}, {2}, {2}]
    first, kept, kept_later = counts
    # Schedulers differ in whether the last token of an answer runs at once, or with the next turn.
    assert first == 0 and kept in (149, 150) and kept_later - kept == kept + 70
    followed = [token for answer in answers for token in (*answer.token_ids.tolist(), *observed)][: -len(observed)]
    num_old = kept - len(prompt) + 1
    versions = np.array([1] * num_old + [2] * (len(followed) - num_old))
    expected = models.logprobs_on_old_cache(versions, prompt, np.array(followed), forbidden=(END,))
    for number, answer in enumerate(answers):
        np.testing.assert_allclose(answer.logprobs, expected[70 * number :][:30], atol=TOLERANCE)
    expected = models.logprobs(2, prompt, new.token_ids, forbidden=(END,))
    np.testing.assert_allclose(new.logprobs, expected, atol=TOLERANCE)


def test_a_full_server_admits_prompts_when_a_tenth_of_its_places_is_free(server: SGLangServer) -> None:
    log = server.settings.log_file
    before = log.stat().st_size
    lengths = [20 + 7 * i % 61 for i in range(160)]  # they end one by one

    async def sample(generator: SGLangGenerator) -> None:
        requests = [request(f"f{i}", prompt_of(i, 20), max_new_tokens=n) for i, n in enumerate(lengths)]
        await asyncio.gather(*map(generator.generate, requests))

    with_generator(server, "in_place", sample)
    lines = re.findall(r"#new-seq: (\d+),.*#queue-req: (\d+)", log.read_text()[before:])
    batches = [(int(new), int(waiting)) for new, waiting in lines]
    arrived = [sum(new for new, _ in batches[:i]) + waiting for i, (_, waiting) in enumerate(batches, 1)]
    # Before the last has arrived, more places may be free than requests wait.
    first = next(i for i, count in enumerate(arrived, 1) if count >= len(lengths))
    admitted = [new for new, waiting in batches[first:] if waiting]
    # Of 32 places; the first were free, and one prompt SGLang never delays. It would wait for as many as came at first.
    assert len(admitted) >= 15 and all(4 <= new <= 8 for new in admitted[3:]), batches


def test_stop_tokens_end_a_completion_but_not_before_min_new_tokens(server: SGLangServer, models: Models) -> None:
    stop = tuple(range(0, VOCAB, 2))  # half of the vocabulary: it stops soon
    prompt = prompt_of(9, 30)

    async def sample(generator: SGLangGenerator) -> list[Completion]:
        await update(generator, models, 1)
        requests = [
            request(f"s{i}", prompt, max_new_tokens=60, min_new_tokens=25, stop_token_ids=stop) for i in range(8)
        ]
        return await asyncio.gather(*map(generator.generate, requests))

    for completion in with_generator(server, "abort", sample):
        assert completion.finish_reason == "stop"
        is_stop = completion.token_ids % 2 == 0
        assert is_stop[-1] and not is_stop[:-1].any() and len(is_stop) > 25
        logits = models.logits(1, prompt, completion.token_ids)
        logits[:25, list(stop)] = -torch.inf
        expected = logits.log_softmax(-1)[range(len(is_stop)), completion.token_ids.tolist()]
        np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=TOLERANCE)


def test_the_models_own_end_token_stops_only_where_it_is_named(server: SGLangServer, models: Models) -> None:
    """END is the eos_token_id of config.json; here it is nearly the only token that can be sampled."""
    weights = models.weights(1)
    weights["model.norm.weight"] = torch.ones_like(weights["model.norm.weight"])
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"] * 0.01
    direction = torch.zeros_like(weights["model.embed_tokens.weight"][0])
    direction[:] = 3.0
    weights["model.embed_tokens.weight"][END] = direction

    async def sample(generator: SGLangGenerator) -> list[Completion]:
        await generator.pause()
        await generator.update_weights(FlatBucket.of(weights))
        await generator.resume(6)
        prompt = [END] * 10
        return [
            await generator.generate(request("unnamed", prompt, max_new_tokens=20)),
            await generator.generate(request("named", prompt, max_new_tokens=20, stop_token_ids=(END,))),
        ]

    unnamed, named = with_generator(server, "abort", sample)
    assert END in unnamed.token_ids[:-1] and len(unnamed.token_ids) == 20 and unnamed.finish_reason == "length"
    assert named.token_ids[-1] == END and named.finish_reason == "stop"


def sender_of(kind: str, models: Models, folder: Path, *, changes: Changes = "never", **other: Any) -> Sender:
    values: dict[str, Any] = dict(
        type=kind, dtype="float32", timeout_seconds=60.0, bucket_bytes=1 << 20, folder=folder,
        model_path=str(models.folder), changes=changes,
    )  # fmt: skip
    return make_sender(SenderSettings(**values | other))


def address_of(server: SGLangServer) -> SGLangEndpoint:
    return replace(server.endpoint, trainer_ranks=(0,))


@pytest.mark.parametrize("staged_bytes", [None, 0])
@pytest.mark.parametrize("kind", ["nccl", "ipc", "disk"])
def test_a_push_reaches_running_requests_and_every_checksum_agrees(
    server: SGLangServer, models: Models, tmp_path: Path, kind: str, staged_bytes: int | None
) -> None:
    prompt = prompt_of(11, 16)
    sender = sender_of(kind, models, tmp_path, staged_bytes=staged_bytes)

    async def push_twice(generator: SGLangGenerator) -> Completion:
        await update(generator, models, 1)
        await asyncio.to_thread(sender.connect, [address_of(server)])
        running = asyncio.create_task(generator.generate(request("x", prompt, max_new_tokens=2000)))
        for version in (2, 3):
            while not (part := (await generator.partial()).get("x")) or part.versions[-1] < version - 1:
                await asyncio.sleep(0.01)
            sender.prepare(models.buckets(version), verify=True)
            await generator.pause()
            report = await asyncio.to_thread(sender.send)
            assert report is not None and report.num_buckets == 4
            await generator.resume(version)
        completion = await running
        await asyncio.to_thread(sender.close)
        return completion

    completion = with_generator(server, "retract", push_twice)
    assert set(completion.versions.tolist()) == {1, 2, 3}
    for version in (1, 2, 3):
        mine = completion.versions == version
        expected = models.logprobs(version, prompt, completion.token_ids)
        np.testing.assert_allclose(completion.logprobs[mine], expected[mine], atol=TOLERANCE)
    assert not list(tmp_path.glob("push-*")), "a folder that was read is not needed any more"


def test_changes_make_the_weights_that_everything_makes_and_only_of_the_push_before(
    server: SGLangServer, models: Models, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sender = sender_of("disk", models, tmp_path, changes="always")
    sender.connect([address_of(server)])

    async def push(generator: SGLangGenerator, version: int) -> float | None:
        for tensor in models.weights(60).values():
            tensor.view(-1)[version::50] += 0.01
        sender.prepare(models.buckets(60), verify=True)
        await generator.pause()
        report = await asyncio.to_thread(sender.send)
        await generator.resume(version)
        assert report is not None and report.compared == "all checksums equal"
        for held in await asyncio.to_thread(address_of(server).formats, timeout_seconds=30.0):
            assert held["model.embed_tokens.weight"] == "float32" and set(held.values()) == {"float32"}
        return report.changed

    async def run(generator: SGLangGenerator) -> Completion:
        assert await push(generator, 3) is None
        assert await push(generator, 4) == pytest.approx(0.02, abs=0.002)
        await generator.pause()
        generator.endpoint.load_folder(str(models.folder), timeout_seconds=60)
        await generator.resume(5)
        with caplog.at_level("WARNING"):
            assert await push(generator, 6) == pytest.approx(0.02, abs=0.002)
        assert NOT_THE_BASE in caplog.text
        assert await push(generator, 7) == pytest.approx(0.02, abs=0.002)
        return await generator.generate(request("x", prompt_of(3, 16), max_new_tokens=20))

    completion = with_generator(server, "abort", run)
    assert caplog.text.count(NOT_THE_BASE) == 1
    expected = models.logprobs(60, prompt_of(3, 16), completion.token_ids)
    np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)


def test_a_server_with_other_weights_than_were_sent_is_found(server: SGLangServer, models: Models, tmp_path) -> None:
    sender = sender_of("disk", models, tmp_path)
    sender.connect([address_of(server)])
    sender.prepare(models.buckets(2), verify=True)
    file = next(tmp_path.glob("push-*/model-00001.safetensors"))
    tensors = load_file(file)
    name = next(name for name in tensors if "down_proj" in name)
    tensors[name].view(-1)[5] += 1e-6
    save_file(tensors, file)

    async def push(generator: SGLangGenerator) -> None:
        await generator.pause()
        with pytest.raises(PushError, match=rf"generator-0: 1 parameters differ from what was sent: {name} \(rank 0\)"):
            await asyncio.to_thread(sender.send)
        await generator.resume(2)

    with_generator(server, "abort", push)


@contextmanager
def stopped_scheduler() -> Iterator[None]:
    """The server's schedulers hang."""
    family = psutil.Process().children(recursive=True)
    schedulers = [process for process in family if "scheduler" in " ".join(process.cmdline())]
    assert schedulers
    for process in schedulers:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in schedulers:
            os.kill(process.pid, signal.SIGCONT)


async def test_a_server_whose_scheduler_hangs_is_not_healthy(server: SGLangServer, monkeypatch) -> None:
    monkeypatch.setattr("rollout.inference.sglang.generator._CALL_SECONDS", 3.0)

    generator = SGLangGenerator(server)
    try:
        await generator.resume(1)
        await generator.health()
        with stopped_scheduler(), pytest.raises(GeneratorGone, match="is not healthy"):
            await generator.health()
        await generator.health()
    finally:
        await generator.close()


async def test_requests_of_a_killed_server_fail_with_its_last_words(models: Models, tmp_path: Path) -> None:
    generator = await SGLangGenerator.start(settings_for(models.folder, tmp_path / "generator-0.log"))
    try:
        running = asyncio.create_task(generator.generate(request("k", [1, 2, 3], max_new_tokens=2000)))
        await asyncio.sleep(0.5)
        for process in psutil.Process().children():
            if "hooks/main.py" in " ".join(process.cmdline()):
                process.kill()
        with pytest.raises(GeneratorGone, match="generator-0 .* is unreachable"):
            await running
        with pytest.raises(
            GeneratorGone, match=r"is not healthy. the server process ended with code -9; its last lines"
        ):
            await generator.health()
    finally:
        await generator.close()
