"""Questions to the current weights: who may ask, how they are sampled, and that they are counted."""

import asyncio
import json
import stat
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest

from core.explore.servers import Questions
from core.runs.paths import QUESTIONS
from rollout.data.encoder import Encoder
from rollout.types import Completion, GenerateRequest, SamplingParams
from tools.demo.data import make_tokenizer
from tools.studio.folders import NotFound, Run
from tools.studio.processes import ask

TOKENIZER = make_tokenizer()


class Counting:
    """A generator that answers with the digits from 1 on."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        ids = TOKENIZER.convert_tokens_to_ids(list("123456789"))[: request.sampling.max_new_tokens]
        return Completion(
            token_ids=np.array(ids, np.int32), logprobs=np.zeros(len(ids), np.float32),
            versions=np.full(len(ids), 7, np.int32), finish_reason="length",
        )  # fmt: skip


def test_a_question_is_sampled_as_an_evaluation_and_counted_and_only_the_key_opens(tmp_path: Path) -> None:
    generator, run = Counting(), Run(id="a", name="e/t", logs=tmp_path)
    questions = Questions(
        generator, Encoder(TOKENIZER), sampling=SamplingParams(max_new_tokens=8), context_tokens=10, seed=1,
        logs=tmp_path,
    )  # fmt: skip
    said = {"messages": [{"role": "user", "content": "12+34="}]}

    async def talk() -> dict[str, object]:
        await questions.start()
        try:
            answer = await asyncio.to_thread(ask, run, said)
            where = json.loads((tmp_path / QUESTIONS).read_text())
            body = Request(f"http://127.0.0.1:{where['port']}/", json.dumps(said).encode())
            for key in ({}, {"Authorization": "Bearer \xff"}):
                with pytest.raises(HTTPError, match="401"):
                    await asyncio.to_thread(urlopen, Request(body.full_url, body.data, key))
            two = {"messages": said["messages"] * 2}
            with pytest.raises(ValueError, match="no chat template"):
                await asyncio.to_thread(ask, run, two)
            deep = Request(body.full_url, b"[" * 100_000, {"Authorization": f"Bearer {where['key']}"})
            with pytest.raises(HTTPError, match="400"):
                await asyncio.to_thread(urlopen, deep)
            assert stat.S_IMODE((tmp_path / QUESTIONS).stat().st_mode) == 0o600
            return answer
        finally:
            await questions.close()

    answer = asyncio.run(talk())
    assert (answer["text"], answer["tokens"], answer["versions"]) == ("1234", 4, [7, 7]), "the context has room for 4"
    assert [one.request_id for one in generator.requests] == ["eval-questions/0"]
    assert questions.stats() == {"rollout/num_questions": 1.0}
    with pytest.raises(NotFound):
        ask(run, said)
