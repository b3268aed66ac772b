"""What the rollout process answers on addresses of its host: the auxiliary model of a run, and questions."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from core.runs.paths import QUESTIONS
from model_specs.families import read_config
from model_specs.untrusted import is_secret, parse_json
from rollout.data.encoder import Encoder
from rollout.data.rows import Row
from rollout.data.source import DatasetError
from rollout.evaluation import EvaluationSampler
from rollout.inference.router import NoGeneratorError, Routed, Router
from rollout.programs import Endpoint, announce_auxiliary
from rollout.sessions.bridge import Bridge
from rollout.sessions.server import PolicyServer
from rollout.sessions.session import Limits
from rollout.types import GenerateRequest, Sampler, SamplingParams

if TYPE_CHECKING:
    from core.config.experiments import PPOMATHConfig


logger = logging.getLogger(__name__)


class AuxiliaryModel:
    """The auxiliary model of a run, frozen beside the policy: its servers behind an address in the dialects of OpenAI
    and Anthropic. Make it, start() it, and close() it at the end.

    The rollout process has the address, and so has what it starts: reward workers, environments, tools and programs.
    Equal requests get equal answers where the servers compute alike whatever runs beside a request, so that an episode
    which is run again after a restart meets the same opponent.
    """

    def __init__(self, config: PPOMATHConfig, servers: Mapping[str, Routed]) -> None:
        """Raises DatasetError for a tokenizer without a chat template."""
        from rollout.data.tokenizer import load_tokenizer  # imports transformers, which a driver does without

        self._router = Router(servers, config.generator)
        folder = config.auxiliary_model
        encoder = Encoder(load_tokenizer(folder), folder=folder)
        if encoder.chat is None:
            raise DatasetError(f"auxiliary.path={folder}: its tokenizer has no chat template; choose a chat model")
        given = config.merged_flags.get("context_length")
        positions = int(str(given)) if given else read_config(folder).max_position_embeddings
        sampling = SamplingParams(
            max_new_tokens=positions, temperature=config.auxiliary.temperature, stop_token_ids=encoder.end_token_ids
        )
        self._key = secrets.token_urlsafe(16)
        self._server = PolicyServer(
            Bridge(encoder),
            self._router,
            limits=Limits(sampling=sampling, context_tokens=positions),
            host="127.0.0.1",
            port=0,
            api_key=self._key,
            key_hint="that of rollout.programs.auxiliary()",
            seed=config.seed,
            varies=False,
        )
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen, and announce the address. Requests wait until the servers are up."""
        await self._server.start()
        announce_auxiliary(Endpoint(self._server.url, self._key))
        logger.info("The auxiliary model answers at %s/v1", self._server.url)

    def watch(self, fail: Callable[[Exception], None]) -> None:
        """Call `fail` when a server is lost: they are started again with the attempt only."""

        async def watch() -> None:
            lost = await self._router.wait_lost(())
            names = ", ".join(f"{name}: {why}" for name, why in lost.items())
            fail(NoGeneratorError(f"a server of the auxiliary model (auxiliary.path) is lost: {names}"))

        self._watcher = asyncio.create_task(watch())

    async def close(self) -> None:
        """Stop listening."""
        if self._watcher is not None:
            self._watcher.cancel()
        await self._server.close()
        await self._router.close()


class Questions:
    """Answers the questions that the studio asks the current weights (monitor.questions), from start() to close().
    `num_answered` counts them.

    They go through the router of the run, under request ids of an evaluation: nothing of them is trained on. The server
    listens on the loopback. Its port and key are in a file of the log folder that only the user of the run can read.
    """

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
        if not is_secret(request.headers.get("Authorization", ""), f"Bearer {self._key}"):
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
                request_id=str(number), prompt_ids=token_ids, sampling=self._sampling, seed=self._seed + number
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
