"""Texts that end completions: on real embedded generators, on SGLang's double, and with a byte-level tokenizer."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.chat_tokenizer import chat_tokenizer
from helpers.embedded_models import VOCAB, prompt, request, write_model
from helpers.sglang_attached import generator_on
from helpers.sglang_attached import request as server_request
from helpers.sglang_double import model as double_model
from helpers.sglang_double.server import SGLangDouble
from rollout.inference.embedded.generator import EmbeddedGenerator
from rollout.inference.router import Router, StopTexts
from rollout.types import Completion, GenerateRequest, Sampler

NUM_TOKENS, LAST = 24, 11


class Syllables:
    """A tokenizer of `size` tokens of two letters each."""

    def __init__(self, size: int) -> None:
        self._texts = [chr(97 + i % 26) + chr(97 + i // 26 % 26) for i in range(size)]

    def __len__(self) -> int:
        return len(self._texts)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [0]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(self._texts[token] for token in token_ids)


def with_stop(asked: GenerateRequest, stop: StopTexts, **changes: Any) -> GenerateRequest:
    return replace(asked, sampling=replace(asked.sampling, pause_token_ids=stop.token_ids), **changes)


async def check_ends(generator: Sampler, asked: GenerateRequest, tokenizer: Syllables) -> None:
    """The stop text ends within the token number LAST and begins within the one before."""
    free = await Router([generator]).generate(asked)
    assert len(free.token_ids) == NUM_TOKENS
    text = tokenizer.decode(free.token_ids.tolist())
    stop = StopTexts(tokenizer, ["never?", text[2 * LAST - 1 : 2 * LAST + 1]])
    router = Router([generator], stop=stop)
    ended = await router.generate(with_stop(asked, stop, request_id="stopped"))
    end = next(n for n in range(1, LAST + 2) if stop.ends(free.token_ids[:n]))
    assert ended.finish_reason == "stop"
    assert ended.token_ids.tolist() == free.token_ids[:end].tolist()
    np.testing.assert_allclose(ended.logprobs, free.logprobs[:end], atol=2e-5)
    part = replace(free, token_ids=ended.token_ids, logprobs=ended.logprobs, versions=ended.versions)
    interrupted = with_stop(asked, stop, request_id="again", output=replace(part, finish_reason="abort"))
    again: Completion = await router.generate(interrupted)
    assert (again.finish_reason, len(again.token_ids)) == ("stop", end)
    reserved = Router({"one": generator}, stop=stop).reserved("one")
    evaluated = await reserved.generate(with_stop(asked, stop, request_id="evaluated"))
    assert (evaluated.finish_reason, len(evaluated.token_ids)) == ("stop", end)


def test_a_completion_of_an_embedded_generator_ends_with_the_token_that_completes_a_stop_text(tmp_path: Path) -> None:
    async def main() -> None:
        generator = EmbeddedGenerator(tmp_path, max_running=4)
        await check_ends(generator, request(3, prompt(5), max_new_tokens=NUM_TOKENS), Syllables(VOCAB))
        await generator.close()

    write_model("qwen2", tmp_path)
    asyncio.run(asyncio.wait_for(main(), 60))


def test_so_does_one_of_a_sglang_server(tmp_path: Path) -> None:
    async def main(double: SGLangDouble) -> None:
        async with generator_on(double, folder, interrupt="abort") as generator:
            await generator.resume(0)
            await check_ends(generator, server_request("one", max_new_tokens=NUM_TOKENS), Syllables(double_model.VOCAB))

    folder = double_model.write(tmp_path)
    with SGLangDouble() as double:
        asyncio.run(asyncio.wait_for(main(double), 60))


@pytest.mark.parametrize(
    ("text", "stop"),
    [("a</end>", "</end>"), ("one\n\nQ", "\n\nQ"), ("nach Köln", "Köln"), ("x 。", "。"), ("a b", " b")],
)
def test_every_token_that_completes_a_stop_text_pauses_a_request(text: str, stop: str) -> None:
    tokenizer = chat_tokenizer()
    stops = StopTexts(tokenizer, [stop])
    token_ids = np.array(tokenizer.encode(f"{text} and more", add_special_tokens=False))
    first = next(n for n in range(len(token_ids) + 1) if stop in tokenizer.decode(token_ids[:n]))
    assert token_ids[first - 1] in stops.token_ids
    assert stops.ends(token_ids[:first]) and not stops.ends(token_ids[: first - 1])
    assert len(stops.token_ids) < len(tokenizer) / 2


def test_without_stop_texts_no_token_pauses_a_request() -> None:
    assert StopTexts(chat_tokenizer(), []).token_ids == ()
