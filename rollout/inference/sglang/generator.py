"""A SGLang server behind the `Generator` protocol.

The server returns the version of every token (hooks/scheduler.py): a request may run through any number of updates
under the interrupt modes retract and in_place. Under abort every answer is complete before new weights come. Invariant:
between pause() and resume() no request is handed to the server.
"""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

from model_specs.families import read_config
from rollout.bucket import FlatBucket
from rollout.errors import GeneratorCallError, GeneratorGone
from rollout.inference.backend import BackendSettings, check_request
from rollout.inference.sglang.client import (
    EMPTY,
    Answer,
    Call,
    ExpertsOfTokens,
    SGLangClient,
    SGLangEndpoint,
    end_of,
    generate_call,
    joined,
    read_answer,
    so_far,
)
from rollout.inference.sglang.hooks.in_flight import ALIVE, PATH, Sampled, unpack
from rollout.inference.sglang.receivers import payload_of, shared_call
from rollout.inference.sglang.server import SGLangServer
from rollout.types import Completion, GenerateRequest, Health, SamplingParams

logger = logging.getLogger(__name__)

_CALL_SECONDS = 120.0
"""Time limit for a server to answer a call other than a request for tokens."""
_REPORT_SECONDS = 5.0
"""Time limit for a server to report the tokens of its requests: the trainer waits, and a checkpoint can omit them."""
_ARRIVED_SECONDS = 1.0
"""A request that was sent so long ago is at the server, or has ended there; its answer is here so soon after."""


@dataclass(eq=False)
class _Running:
    """A request in flight: what it has from earlier attempts, and the one under way."""

    request: GenerateRequest
    output: Completion
    rid: str = ""
    """Request id at the server; empty until it is sent there."""
    sent: float = math.inf
    answered: asyncio.Event = field(default_factory=asyncio.Event)


class SGLangGenerator:
    """Samples on one server, inside the event loop that made it. `SGLangGenerator.start(settings)` starts a server of
    its own, which close() ends; the constructor takes one that runs already, which close() leaves open.

    The server's `interrupt` setting selects what pause() does to running requests: "abort" ends them with what they
    have, "retract" keeps them and computes their keys and values anew under the new weights, "in_place" keeps these.
    """

    def __init__(self, server: SGLangServer) -> None:
        settings = server.settings
        if settings.pp > 1 and settings.interrupt != "abort":
            raise ValueError(
                f"generator.interrupt={settings.interrupt} needs p1 on the generator's side: a SGLang server of "
                f"{settings.pp} pipeline stages does not return per-token versions; use abort, or tensor parallelism"
            )
        self._server, self._interrupt = server, settings.interrupt
        self._owns_server = False
        model = read_config(settings.model_path)
        self._vocab_size = model.vocab_size
        self._max_length = int(settings.flags.get("context_length") or model.max_position_embeddings)  # type: ignore[arg-type]
        self._experts = ExpertsOfTokens(model) if settings.reports_experts else None
        self._seeded = bool(settings.flags.get("enable_deterministic_inference"))
        self._client = SGLangClient(settings.name, server.endpoint.url, key=settings.key)
        self._version = self._num_old_prefix_tokens = 0
        self._attempts = itertools.count()
        self._running: dict[str, _Running] = {}  # by the requests' own ids
        self._open = asyncio.Event()
        self._open.set()
        self._in_flight = 0
        self._waiting = 0
        self._answered = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._done: list[tuple[str, Completion | Exception]] = []
        self._something_done = asyncio.Event()

    @classmethod
    async def start(cls, settings: BackendSettings) -> Self:
        """Start a server and sample one token on it. Raises as SGLangServer.start."""
        server = SGLangServer(settings)
        await server.start()
        generator = None
        try:
            generator = cls(server)
            generator._owns_server = True
            await generator.resume(0)
            probe = SamplingParams(max_new_tokens=1)
            await generator.generate(GenerateRequest(request_id="probe", prompt_ids=[0], sampling=probe))
            # Otherwise its processes look for garbage among all modules, now and then, for half a second.
            await generator._post(("/freeze_gc", {}))
        except BaseException:
            await (generator.close() if generator else asyncio.to_thread(server.stop))
            raise
        return generator

    @property
    def endpoint(self) -> SGLangEndpoint:
        return self._server.endpoint

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion. Raises ValueError for a request that cannot be served, GeneratorGone when the server
        has exited, GeneratorCallError when it refuses. Cancelling it aborts the request."""
        check_request(request, vocab_size=self._vocab_size, max_length=self._max_length)
        output = request.output or EMPTY
        try:
            return await self._sample(request, output)
        finally:
            self._running.pop(request.request_id, None)

    async def _sample(self, request: GenerateRequest, output: Completion) -> Completion:
        while True:
            running = self._running[request.request_id] = _Running(request, output)
            part = await self._attempt(running)
            output = joined(output, part)
            if (end := end_of(output, request.sampling)) is not None:
                return replace(output, finish_reason=end)
            if part.finish_reason == "abort":
                return output
            if len(output.token_ids) and output.token_ids[-1] in request.sampling.pause_token_ids:
                return replace(output, finish_reason="abort")
            # What is left: the first min_new_tokens were sampled without stop tokens, or the server stopped at an end
            # token of the model's configuration that the request does not name.

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Take many requests at once; drain() hands out their completions. Raises ValueError if one of them cannot be
        served (then none is taken)."""
        for request in requests:
            check_request(request, vocab_size=self._vocab_size, max_length=self._max_length)
        for request in requests:
            task = asyncio.get_running_loop().create_task(self._run(request), name=request.request_id)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests from submit() without a completion. Unknown ids are passed over."""
        for task in self._tasks:
            if task.get_name() in request_ids:
                task.cancel()

    async def drain(self) -> list[tuple[str, Completion | Exception]]:
        """Return (request_id, completion or error) of requests from submit() that have ended since the last call. Waits
        until there is one."""
        await self._something_done.wait()
        self._something_done.clear()
        done, self._done = self._done, []
        return done

    async def pause(self) -> None:
        """Return when requests neither run nor reach the server. A token that a running forward pass still samples
        appears after resume(), with the version that sampled it."""
        self._open.clear()
        if self._interrupt == "abort":
            # The server's own mode abort polls once a second. A request that is still on its way there when all are
            # aborted needs another round.
            while self._in_flight:
                await self._post(("/abort_request", {"abort_all": True}))
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._all_answered(), timeout=0.02)
            if self._server.settings.colocated:  # memory can be released only when nothing at all is left to do
                await self._post((f"/flush_cache?timeout={_CALL_SECONDS:g}", {}))
            await self._post(("/pause_generation", {"mode": "in_place"}))
        else:
            await self._post(("/pause_generation", {"mode": self._interrupt}))

    async def resume(self, version: int) -> None:
        """Continue sampling; tokens of forward passes from now on carry `version`."""
        # The request id carries the version to the schedulers (hooks/scheduler.py).
        await self._post(("/continue_generation", {"rid": str(version), "torch_empty_cache": False}))
        self._version = version
        self._open.set()

    async def update_weights(self, bucket: FlatBucket) -> None:
        """Copy a bucket through HTTP, for small models and tests; the senders of core/weight_sync are faster."""
        self._raise_unless_paused("update_weights()")
        payload = payload_of(bucket, bucket.flat.cpu())
        await self._post(shared_call([payload] * self.endpoint.tp))

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Give GPU memory back: weights, kv_cache, cuda_graph. Needs a colocated server and interrupt=abort: requests
        that wait inside the server would lose their cache."""
        self._raise_unless_paused("release_memory()")
        if self._interrupt != "abort":
            raise ValueError(f"release_memory() needs interrupt=abort, this generator has {self._interrupt}")
        await self._post(("/release_memory_occupation", {"tags": list(tags)}))

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Take it again. The content of weights and kv_cache is undefined afterwards."""
        await self._post(("/resume_memory_occupation", {"tags": list(tags)}))

    async def health(self) -> Health:
        """Return version and load. Raises GeneratorGone when the server does not answer."""
        # While it is paused its scheduler may be busy with weights for as long as these take.
        await self._check_answers(ALIVE if self._open.is_set() else "/model_info")
        return Health(
            version=self._version, num_running=self._in_flight, num_waiting=self._waiting,
            num_old_prefix_tokens=self._num_old_prefix_tokens,
        )  # fmt: skip

    async def partial(self) -> dict[str, Completion]:
        """Return the sampled tokens of requests in flight, each with its version, and completions that drain() has not
        returned yet. If a server does not respond within 5 s, or has several pipeline stages, its requests have the
        tokens that they started with, or that the last update under interrupt=abort returned."""
        reported = await self._query_in_flight()
        # From here on nothing is awaited: a request is either still running or done.
        running = {name: so_far(r.output, reported.get(r.rid), r.request.sampling) for name, r in self._running.items()}
        done = {name: outcome for name, outcome in self._done if isinstance(outcome, Completion)}
        return {name: part for name, part in running.items() if len(part.token_ids)} | done

    async def _query_in_flight(self) -> dict[str, Sampled]:
        """Return the sampled tokens by request id of the server; waiting requests have none. Returns when every request
        is reported or answered, or when the time is over."""
        sent = [running for running in self._running.values() if running.rid]
        if not sent or self._server.settings.pp > 1:
            return {}
        begin = time.monotonic()
        try:
            answer = await self._client.post((PATH, {}), timeout_seconds=_REPORT_SECONDS)
        except (GeneratorGone, GeneratorCallError) as error:
            logger.warning("A checkpoint lacks the new tokens of %d running requests: %s", len(sent), error)
            return {}
        reported = {rid: sampled for rank in answer["answers"] for rid, sampled in unpack(rank).items()}
        # What the server no longer has is finished: its answer is on the way.
        ended = [r for r in sent if r.rid not in reported and begin - r.sent > _ARRIVED_SECONDS]
        with suppress(TimeoutError):
            async with asyncio.timeout(_ARRIVED_SECONDS):
                for running in ended:
                    await running.answered.wait()
        return reported

    async def _check_answers(self, path: str) -> None:
        if not await self._client.answers(path, timeout_seconds=_CALL_SECONDS):
            for _ in range(10):  # a process that was killed takes a moment to be gone
                if self._server.explain():
                    break
                await asyncio.sleep(0.1)
            raise GeneratorGone(f"{self._client.name} ({self._client.url}) is not healthy. {self._server.explain()}")

    async def close(self) -> None:
        """End the requests, and the server if start() made it."""
        for task in list(self._tasks):
            task.cancel()
        await self._client.close()
        if self._owns_server:
            await asyncio.to_thread(self._server.stop)

    async def _run(self, request: GenerateRequest) -> None:
        outcome: Completion | Exception
        try:
            outcome = await self.generate(request)
        except Exception as error:  # noqa: BLE001 (drain() hands it out)
            outcome = error
        self._done.append((request.request_id, outcome))  # drain() puts a new list there while requests run
        self._something_done.set()

    async def _all_answered(self) -> None:
        while self._in_flight:
            self._answered.clear()
            await self._answered.wait()

    async def _attempt(self, running: _Running) -> Completion:
        """Return the tokens after `running.output`, as far as one request to the server brings them; experts of all
        tokens."""
        self._waiting += 1
        try:
            await self._open.wait()
        finally:
            self._waiting -= 1
        version, request = self._version, running.request
        rid = f"{request.request_id}/{next(self._attempts)}"
        path, body = generate_call(
            request, running.output, rid=rid, vocab_size=self._vocab_size, seeded=self._seeded,
            keeps_prefix=self._interrupt == "in_place",
        )  # fmt: skip
        if self._experts is not None:
            body |= self._experts.question(running.output.routed_experts)
        self._in_flight += 1
        running.rid, running.sent = rid, time.monotonic()
        try:
            answer = cast(Answer, await self._post((path, body), timeout_seconds=None))
        finally:
            running.answered.set()
            self._in_flight -= 1
            if not self._in_flight:
                self._answered.set()
        settings, aborted = self._server.settings, answer["meta_info"]["finish_reason"]["type"] == "abort"
        # Under abort no update comes between the first token and the answer.
        unversioned = self._interrupt == "abort" and (settings.pp > 1 or aborted)
        completion = read_answer(
            answer, request.sampling, server=self._client.name, log_file=settings.log_file,
            one_version=version if unversioned else None,
        )  # fmt: skip
        if self._interrupt == "in_place" and request.began_at is not None and request.began_at < version:
            self._num_old_prefix_tokens += answer["meta_info"].get("cached_tokens", 0)
        if self._experts is None or not len(completion.token_ids):
            return completion
        known = running.output.routed_experts
        num_tokens = len(request.prompt_ids) + len(running.output.token_ids) + len(completion.token_ids)
        experts = self._experts.read(answer["meta_info"], known, num_tokens, server=self._client.name)
        return replace(completion, routed_experts=experts)

    async def _post(self, call: Call, timeout_seconds: float | None = _CALL_SECONDS) -> dict[str, Any]:
        try:
            return await self._client.post(call, timeout_seconds=timeout_seconds)
        except GeneratorGone as e:
            raise GeneratorGone(f"{e}. {self._server.explain()}") from e

    def _raise_unless_paused(self, what: str) -> None:
        if self._open.is_set():
            raise ValueError(f"{what} needs pause() first: requests are being sampled with these weights")
