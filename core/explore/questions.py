"""Questions that the studio asks the current weights (monitor.questions).

They go through the router of the run, under request ids of an evaluation: nothing of them is trained on. The server
listens on the loopback. Its port and key are in a file of the log folder that only the user of the run can read.
"""

from __future__ import annotations

import hmac
import itertools
import json
import os
import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from aiohttp import web

from core.runs.paths import QUESTIONS
from model_specs.untrusted import parse_json
from rollout.data.encoder import Encoder
from rollout.data.rows import Row
from rollout.data.source import DatasetError
from rollout.evaluation import EvaluationSampler
from rollout.types import GenerateRequest, Sampler, SamplingParams


class Questions:
    """Answers questions from start() to close(). `num_answered` counts them."""

    def __init__(
        self, router: Sampler, encoder: Encoder, *, sampling: SamplingParams, context_tokens: int, seed: int, logs: Path
    ) -> None:
        """`context_tokens`: the conversation and the answer have at most this many."""
        self._sampler = EvaluationSampler(router, "eval-questions", context_tokens=context_tokens)
        self._encoder, self._sampling, self._seed, self._file = encoder, sampling, seed, logs / QUESTIONS
        self._key, self._numbers, self.num_answered = secrets.token_urlsafe(24), itertools.count(), 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen, and write port and key into the file."""
        app = web.Application()
        app.router.add_post("/", self._post)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        where = {"host": socket.gethostname(), "port": self._runner.addresses[0][1], "key": self._key}
        with suppress(FileNotFoundError):
            self._file.unlink()  # of an earlier attempt
        with os.fdopen(os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(where, file)

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            self._file.unlink(missing_ok=True)
            await self._runner.cleanup()

    def stats(self) -> dict[str, float]:
        """Return the number of questions that were answered."""
        return {"rollout/num_questions": float(self.num_answered)}

    async def _post(self, request: web.Request) -> web.Response:
        if not hmac.compare_digest(request.headers.get("Authorization", "").encode(), f"Bearer {self._key}".encode()):
            return web.json_response({"error": f"the key is in {self._file}"}, status=401)
        try:
            return web.json_response(await self._answer(parse_json(await request.read())))
        except (DatasetError, ValueError, LookupError, TypeError) as error:
            return web.json_response({"error": str(error)}, status=400)

    async def _answer(self, body: object) -> dict[str, object]:
        """Return the answer to {"messages": [{"role", "content"}]}. One message is rendered as a prompt of the data
        set is."""
        asked = body.get("messages") if isinstance(body, Mapping) else None
        if not isinstance(asked, list):
            raise ValueError('write {"messages": [{"role": "user", "content": "..."}]}')
        messages = tuple({"role": str(one["role"]), "content": str(one["content"])} for one in asked)
        number = next(self._numbers)
        row = Row(
            place="the question",
            query_id=str(number),
            task="",
            prompt=messages[0]["content"],
            solutions=(),
            messages=messages if len(messages) > 1 else None,
        )
        [(prompt, token_ids)] = self._encoder.encode([row])
        completion = await self._sampler.generate(
            GenerateRequest(
                request_id=str(number),
                prompt_ids=token_ids,
                sampling=self._sampling,
                seed=self._seed + number,
            )
        )
        self.num_answered += 1
        versions = completion.versions.tolist()
        return {
            "text": str(self._encoder.tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)),
            "prompt": prompt,
            "tokens": len(versions),
            "finish_reason": completion.finish_reason,
            "versions": [min(versions), max(versions)] if versions else None,
        }
