"""The embedded generator as a run uses it: from an event loop, with its engine in another thread."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.embedded_models import (
    VOCAB,
    assert_same,
    bucket_of,
    config_of,
    engine_of,
    oracle_logprobs,
    prompt,
    request,
    run,
    write_model,
)
from rollout.bucket import FlatBucket
from rollout.inference.embedded.generator import EmbeddedGenerator, GeneratorError

pytestmark = pytest.mark.timeout(120)  # of a test that hangs


@asynccontextmanager
async def playing(*args: Any, **settings: Any) -> AsyncIterator[EmbeddedGenerator]:
    generator = EmbeddedGenerator(*args, **{"max_running": 8, **settings})
    try:
        yield generator
    finally:
        await generator.close()


async def progressed(generator: EmbeddedGenerator, n: int = 3) -> None:
    """Return when requests that were sent earlier have at least n tokens (and a free slot is left)."""
    await asyncio.sleep(0)  # let them be sent
    await generator.generate(request(990_000 + n, prompt(3), max_new_tokens=n))


@pytest.mark.parametrize("tied", ["qwen2", "qwen2_tied"])
async def test_a_generator_without_weights_waits_for_all_of_them(tmp_path: Path, tied: str) -> None:
    model = write_model(tied, tmp_path)
    whole = bucket_of(model).tensors()
    names = sorted(whole)
    async with playing(config_of(tmp_path)) as generator:
        r = request(0, prompt(7))
        waiting = asyncio.ensure_future(generator.generate(r))
        await generator.update_weights(FlatBucket.of({name: whole[name] for name in names[:5]}))
        with pytest.raises(ValueError, match=f"{len(names) - 5} parameters were never loaded, among them {names[5]}"):
            await generator.resume(0)
        await generator.update_weights(FlatBucket.of({name: whole[name] for name in names[5:]}))
        assert not waiting.done()
        await generator.resume(11)
        assert_same(await waiting, run(engine_of(model), [r])[0], versions=False)
        assert (await waiting).versions.tolist() == [11] * 16


async def test_submitted_requests_come_out_of_drain_exactly_once(folder: Path, model: Any) -> None:
    requests = [request(i, prompt(4 + i % 3, seed=i % 3), max_new_tokens=1 + i % 40) for i in range(100)]
    async with playing(folder) as generator:
        generator.submit(requests[:60])
        generator.submit(requests[60:])
        drained: list[Any] = []
        while len(drained) < len(requests):
            drained += await generator.drain()
        done = dict(drained)
        assert len(done) == len(drained) == 100
        for r, expected in zip(requests, run(engine_of(model), requests), strict=True):
            assert_same(done[r.request_id], expected)
        health = await generator.health()
        assert (health.num_running, health.num_waiting) == (0, 0)


@pytest.mark.parametrize("interrupt", ["abort", "retract", "in_place"])
async def test_after_pause_no_token_of_the_old_version_appears(folder: Path, model, new_model, interrupt: str) -> None:
    long = [request(i, prompt(6, seed=i), max_new_tokens=250) for i in range(3)]
    async with playing(folder, interrupt=interrupt, version=2) as generator:
        running = [asyncio.ensure_future(generator.generate(r)) for r in long]
        await progressed(generator)
        await generator.pause()
        late = asyncio.ensure_future(generator.generate(request(7, prompt(5))))
        await generator.update_weights(bucket_of(new_model))
        if interrupt == "abort":
            partial = await asyncio.gather(*running)
            again = [replace(r, output=c) for r, c in zip(long, partial, strict=True)]
            running = [asyncio.ensure_future(generator.generate(r)) for r in again]
            assert {c.finish_reason for c in partial} == {"abort"}
        await generator.resume(5)
        for r, c in zip(long, await asyncio.gather(*running), strict=True):
            num_old = int((c.versions == 2).sum())
            assert 3 <= num_old < 250
            assert c.versions.tolist() == [2] * num_old + [5] * (250 - num_old)
            old = oracle_logprobs(model, r.prompt_ids, c.token_ids)
            np.testing.assert_allclose(c.logprobs[:num_old], old[:num_old], atol=1e-4)
            if interrupt != "in_place":
                new = oracle_logprobs(new_model, r.prompt_ids, c.token_ids)
                np.testing.assert_allclose(c.logprobs[num_old:], new[num_old:], atol=1e-4)
        assert (await late).versions.tolist() == [5] * 16
        assert (await generator.health()).version == 5


@pytest.mark.parametrize("interrupt", ["retract", "in_place"])
async def test_the_next_turn_after_an_update_is_computed_anew(folder: Path, model, new_model, interrupt: str) -> None:
    async with playing(folder, interrupt=interrupt, version=2) as generator:
        first = await generator.generate(replace(request(0, prompt(6)), is_turn=True))
        await generator.pause()
        await generator.update_weights(bucket_of(new_model))
        await generator.resume(3)
        ids = [*prompt(6), *first.token_ids.tolist(), *prompt(4)]
        second = await generator.generate(replace(request(1, ids), is_turn=True, began_at=2))
        assert (set(first.versions.tolist()), set(second.versions.tolist())) == ({2}, {3})
        expected = oracle_logprobs(new_model, ids, second.token_ids)
        np.testing.assert_allclose(second.logprobs, expected, atol=1e-4)
        assert (await generator.health()).num_old_prefix_tokens == 0


async def test_pausing_twice_and_updating_in_pieces_is_fine_but_not_without_a_pause(folder: Path, new_model) -> None:
    tensors = bucket_of(new_model).tensors()
    async with playing(folder) as generator:
        running = asyncio.ensure_future(generator.generate(request(0, prompt(6), max_new_tokens=150)))
        with pytest.raises(ValueError, match="needs pause\\(\\) first"):
            await generator.update_weights(bucket_of(new_model))
        await generator.pause()
        await generator.pause()
        for name, tensor in tensors.items():
            await generator.update_weights(FlatBucket.of({name: tensor}))
        with pytest.raises(ValueError, match="no parameter 'nonsense'"):
            await generator.update_weights(FlatBucket.of({"nonsense": torch.ones(1)}))
        await generator.resume(1)
        assert len((await running).token_ids) == 150


async def test_weights_that_give_no_finite_logits_fail_every_waiter_and_nobody_hangs(folder: Path) -> None:
    async with playing(folder) as generator:
        await generator.pause()
        waiting = [asyncio.ensure_future(generator.generate(request(i, prompt(6)))) for i in range(12)]
        generator.submit([request(100, prompt(5))])
        drain = asyncio.ensure_future(generator.drain())
        await generator.update_weights(FlatBucket.of({"model.norm.weight": torch.full((48,), torch.nan)}))
        assert not any(w.done() for w in waiting)
        await generator.resume(1)
        for outcome in await asyncio.gather(*waiting, drain, return_exceptions=True):
            assert isinstance(outcome, GeneratorError)
            assert isinstance(outcome.__cause__, FloatingPointError)
        for call in (
            generator.health(),
            generator.pause(),
            generator.resume(2),
            generator.generate(request(200, prompt(3))),
            generator.drain(),
        ):
            with pytest.raises(GeneratorError, match="logits are not finite"):
                await call
        with pytest.raises(GeneratorError):
            generator.submit([request(201, prompt(3))])


async def test_closing_ends_what_runs_with_an_error(folder: Path) -> None:
    async with playing(folder) as generator:
        running = [
            asyncio.ensure_future(generator.generate(request(i, prompt(6), max_new_tokens=500))) for i in range(9)
        ]
        while not (await generator.health()).num_running:
            await asyncio.sleep(0.001)
        await generator.close()
        for outcome in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(outcome, GeneratorError)
        with pytest.raises(GeneratorError, match="closed"):
            await generator.health()


async def test_a_cancelled_request_makes_room_for_others(folder: Path, model: Any) -> None:
    async with playing(folder, max_running=2) as generator:
        hogs = [asyncio.ensure_future(generator.generate(request(i, prompt(6), max_new_tokens=500))) for i in range(2)]
        while (await generator.health()).num_running < 2:
            await asyncio.sleep(0.001)
        for hog in hogs:
            hog.cancel()
        r = request(50, prompt(9))
        assert_same(await generator.generate(r), run(engine_of(model), [r])[0])
        health = await generator.health()
        assert (health.num_running, health.num_waiting) == (0, 0)


async def test_aborted_requests_are_handed_out_with_what_they_have(folder: Path, model: Any) -> None:
    async with playing(folder) as generator:
        requests = [request(i, prompt(6, seed=i), max_new_tokens=400) for i in range(3)]
        generator.submit(requests)
        await progressed(generator)
        generator.abort(["r0", "r2", "r77"])
        done = dict(await generator.drain())
        assert done.keys() == {"r0", "r2"}
        for r in (requests[0], requests[2]):
            part = done[r.request_id]
            num_tokens = len(part.token_ids)
            assert part.finish_reason == "abort" and 3 <= num_tokens < 400
            shorter = replace(r, sampling=replace(r.sampling, max_new_tokens=num_tokens))
            assert part.token_ids.tolist() == run(engine_of(model), [shorter])[0].token_ids.tolist()
        assert len(dict(await generator.drain())["r1"].token_ids) == 400


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: request(1, [], max_new_tokens=3), "prompt_ids must be one or more numbers .* there is none"),
        (lambda: request(1, [3, VOCAB]), f"in \\[0, {VOCAB}\\), the vocabulary; they reach from 3 to {VOCAB}"),
        (lambda: request(1, [-1]), "they reach from -1"),
        (lambda: request(1, [1] * 500, max_new_tokens=13), "max_new_tokens=13 exceed the 512 positions"),
        (lambda: request(1, [1], max_new_tokens=0), "max_new_tokens=0 must exceed the 0 tokens given"),
        (lambda: request(1, [1], temperature=-1.0), "temperature=-1.0 must be >= 0"),
        (lambda: request(1, [1], top_p=0.0), "top_p=0.0 in \\(0, 1\\]"),
        (lambda: request(1, [1], min_new_tokens=1, stop_token_ids=tuple(range(VOCAB))), "rules out every token"),
        (lambda: request(0, [1]), "request_id='r0' is already in use"),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused_and_harms_no_other(folder: Path, bad, message: str) -> None:
    async with playing(folder) as generator:
        good = asyncio.ensure_future(generator.generate(request(0, prompt(6), max_new_tokens=100)))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match=message):
            await generator.generate(bad())
        with pytest.raises(ValueError, match=message):
            generator.submit([request(3, prompt(3)), bad()])
        assert len((await good).token_ids) == 100
        health = await generator.health()
        assert (health.num_running, health.num_waiting) == (0, 0)


@pytest.mark.parametrize("num_slots", [8, 2])
async def test_what_requests_have_so_far_is_told_and_continued_elsewhere(folder: Path, num_slots: int) -> None:
    requests = [request(i, prompt(5 + i), max_new_tokens=80, min_new_tokens=80) for i in range(4)]
    async with playing(folder, max_running=num_slots) as generator:
        running = [asyncio.ensure_future(generator.generate(r)) for r in requests]
        while not (partial := await generator.partial()) and not all(r.done() for r in running):
            await asyncio.sleep(0.001)
        whole = await asyncio.gather(*running)
        assert partial and await generator.partial() == {}
        for r, expected in zip(requests, whole, strict=True):
            part = partial.get(r.request_id)
            if part is None:
                continue
            n = len(part.token_ids)
            assert part.finish_reason == "abort" and 0 < n < 80
            assert part.token_ids.tolist() == expected.token_ids[:n].tolist()
            assert part.logprobs.tolist() == expected.logprobs[:n].tolist()
            again = await generator.generate(replace(r, request_id=f"{r.request_id} again", output=part))
            assert again.token_ids.tolist() == expected.token_ids.tolist()
