"""A SGLang server behind the `Generator` protocol.

Versions are exact because the server tells them per token (sglang_inside.py), not because of when an answer arrives: a
request may run through any number of updates under interrupt modes retract and in_place. Under abort every answer is
complete before new weights come. Invariant: between pause() and resume() no request is handed to the server.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np

from rollout.sglang_client import SGLangClient
from rollout.sglang_experts import ExpertsOfTokens
from rollout.sglang_inside import VERSION_KEY
from rollout.sglang_server import ServerSettings, SGLangServer, read_model_config
from rollout.sglang_weights import (
    CHECKSUMS,
    WRITTEN_FOR,
    Call,
    FlatBucket,
    ServerAddress,
    ServerError,
    ServerGone,
    checksums_of,
    continue_generation,
    pause_generation,
    receive_folder,
    receive_tensors,
)
from rollout.types import Completion, FinishReason, GenerateRequest, Health, SamplingParams, WeightBucket

Interrupt = Literal["abort", "retract", "in_place"]

_FORBIDDEN = -1e9
"""Added to the logits of tokens that may not be sampled yet."""
_EMPTY = Completion(
    token_ids=np.empty(0, np.int32),
    logprobs=np.empty(0, np.float32),
    versions=np.empty(0, np.int32),
    finish_reason="abort",
)


class SGLangGenerator:
    """Samples on one server, inside the event loop that made it. `SGLangGenerator.start(settings)` starts a server of
    its own, which close() ends; the constructor takes one that runs and is somebody else's.

    `interrupt` says what pause() does to running requests: "abort" ends them with what they have, "retract" keeps them
    and computes their keys and values anew under the new weights, "in_place" keeps their keys and values.
    """

    def __init__(
        self, server: SGLangServer, *, interrupt: Interrupt = "retract", control_timeout_seconds: float = 120.0
    ) -> None:
        if interrupt not in get_args(Interrupt):
            raise ValueError(f"interrupt={interrupt!r} is not one of {', '.join(get_args(Interrupt))}")
        settings = server.settings
        if settings.pp > 1 and interrupt != "abort":
            raise ValueError(
                f"generator.interrupt={interrupt} needs p1 on the generator's side: a SGLang server of {settings.pp} "
                "pipeline stages does not tell the versions of single tokens; use abort, or tensor parallelism"
            )
        self._server, self._interrupt, self._timeout = server, interrupt, control_timeout_seconds
        self._owns_server = False
        model = read_model_config(settings.model_path)
        self._vocab_size: int = model["vocab_size"]
        self._max_length = int(settings.flags.get("context_length") or model["max_position_embeddings"])  # type: ignore[arg-type]
        self._experts = ExpertsOfTokens(model) if settings.tells_experts else None
        self._seeded = bool(settings.flags.get("enable_deterministic_inference"))
        self._client = SGLangClient(settings.name, server.address.url)
        self._version = 0
        self._attempts = itertools.count()
        self._partial: dict[str, Completion] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._checking = asyncio.Lock()
        self._in_flight = 0
        self._waiting = 0
        self._answered = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._done: list[tuple[str, Completion | Exception]] = []
        self._something_done = asyncio.Event()

    @classmethod
    async def start(
        cls, settings: ServerSettings, *, interrupt: Interrupt = "retract", **options: Any
    ) -> SGLangGenerator:
        """Start a server and sample one token on it. Raises as SGLangServer.start."""
        server = SGLangServer(settings)
        await server.start()
        generator = None
        try:
            generator = cls(server, interrupt=interrupt, **options)
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
    def address(self) -> ServerAddress:
        return self._server.address

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion. Raises ValueError for a request that cannot be served, ServerGone when the server
        died, ServerError when it refuses. Cancelling it aborts the request."""
        self._check(request)
        output = request.output or _EMPTY
        try:
            return await self._sample(request, output)
        finally:
            self._partial.pop(request.request_id, None)

    async def _sample(self, request: GenerateRequest, output: Completion) -> Completion:
        while True:
            self._partial[request.request_id] = replace(output, finish_reason="abort")
            part = await self._attempt(request, output)
            output = _joined(output, part)
            # An abort may reach a request that had its last token: it is as complete as if it had ended by itself.
            if len(output.token_ids) and output.token_ids[-1] in request.sampling.stop_token_ids:
                return replace(output, finish_reason="stop")
            if len(output.token_ids) >= request.sampling.max_new_tokens:
                return replace(output, finish_reason="length")
            if part.finish_reason == "abort":
                return output
            # What is left: the first min_new_tokens were sampled without stop tokens, or the server stopped at an end
            # token of the model's configuration that the request does not name.

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Take many requests at once; drain() hands out their completions. Raises ValueError if one of them cannot be
        served (then none is taken)."""
        for request in requests:
            self._check(request)
        for request in requests:
            task = asyncio.get_running_loop().create_task(self._run(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def drain(self, *, linger_seconds: float = 0.0) -> list[tuple[str, Completion | Exception]]:
        """(request_id, completion, or what generate() would raise) of what submit() brought and what ended since the
        last call. Waits until there is something, then `linger_seconds` more, which makes fewer and larger answers."""
        await self._something_done.wait()
        if linger_seconds:
            await asyncio.sleep(linger_seconds)
        self._something_done.clear()
        done, self._done = self._done, []
        return done

    async def pause(self) -> None:
        """Return when requests neither run nor reach the server. A token that a running forward pass still samples
        appears after resume(), with the version that sampled it."""
        async with self._checking:
            self._open.clear()
        if self._interrupt == "abort":
            # The server's own mode abort polls once a second. A request that is still on its way there when all are
            # aborted needs another round.
            while self._in_flight:
                await self._post(("/abort_request", {"abort_all": True}))
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._all_answered(), timeout=0.02)
            if self._server.settings.colocated:  # memory can be released only when nothing at all is left to do
                await self._post((f"/flush_cache?timeout={self._timeout:g}", {}))
            await self._post(pause_generation("in_place"))
        else:
            await self._post(pause_generation(self._interrupt))

    async def resume(self, version: int) -> None:
        """Go on sampling; tokens of forward passes from now on carry `version`."""
        await self._post(continue_generation(version))
        self._version = version
        self._open.set()

    async def update_weights(self, bucket: WeightBucket) -> None:
        """Copy a bucket through HTTP: for small models and tests. core/push_nccl.py and its neighbours are faster."""
        self._raise_unless_paused("update_weights()")
        payload = FlatBucket.of(bucket.tensors).payload()
        await self._post(receive_tensors([payload] * self.address.tp))

    async def load_folder(self, path: str) -> None:
        """Take all weights from a Hugging Face folder."""
        self._raise_unless_paused("load_folder()")
        await self._post(receive_folder(path))

    async def checksums(self) -> list[dict[str, int]]:
        """position_checksum of every parameter, by the server's own names, per tensor-parallel rank."""
        return checksums_of(await self._post(CHECKSUMS))

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
        """Version and load. Raises ServerGone when the server does not answer."""
        # To /health the server answers by sampling a token; while it is paused that would wait, and stand in the way of
        # whoever wants its memory.
        async with self._checking:
            await self._check_answers("/health" if self._open.is_set() else "/model_info")
        return Health(version=self._version, num_running=self._in_flight, num_waiting=self._waiting)

    async def partial(self) -> dict[str, Completion]:
        """What the server has answered for requests in flight: all they have under interrupt=abort, up to the last
        update; under the other modes what they came with."""
        done = {name: outcome for name, outcome in self._done if isinstance(outcome, Completion)}
        return {name: part for name, part in self._partial.items() if len(part.token_ids)} | done

    async def _check_answers(self, path: str) -> None:
        if not await self._client.answers(path, timeout_seconds=self._timeout):
            for _ in range(10):  # a process that was killed takes a moment to be gone
                if self._server.explain():
                    break
                await asyncio.sleep(0.1)
            raise ServerGone(f"{self._client.name} ({self._client.url}) is not healthy. {self._server.explain()}")

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

    async def _attempt(self, request: GenerateRequest, output: Completion) -> Completion:
        """Tokens after `output`, as far as one request to the server brings them; experts of all tokens."""
        self._waiting += 1
        try:
            await self._open.wait()
        finally:
            self._waiting -= 1
        version = self._version
        call = self._generate_call(request, output)
        self._in_flight += 1
        try:
            answer = await self._post(call, timeout_seconds=None)
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._answered.set()
        completion = self._completion(answer, version)
        if self._experts is not None and len(completion.token_ids):
            num_tokens = len(request.prompt_ids) + len(output.token_ids) + len(completion.token_ids)
            told = self._experts.read(answer["meta_info"], output.routed_experts, num_tokens, server=self._client.name)
            completion = replace(completion, routed_experts=told)
        if request.sampling.temperature > 0 and request.sampling.top_k == 1:
            # The server takes it for greedy, and tells how likely the token was among all.
            return replace(completion, logprobs=np.zeros_like(completion.logprobs))
        return completion

    def _generate_call(self, request: GenerateRequest, output: Completion) -> Call:
        sampling, done = request.sampling, len(output.token_ids)
        params: dict[str, Any] = {
            "max_new_tokens": sampling.max_new_tokens - done,
            "temperature": sampling.temperature,
            "stop_token_ids": sampling.stop_token_ids,
        }
        if done < sampling.min_new_tokens:
            # The server's own min_new_tokens needs a tokenizer there. Up to that length, stop tokens are ruled out.
            params["max_new_tokens"] = min(sampling.min_new_tokens, sampling.max_new_tokens) - done
            params["ignore_eos"] = True
            params["logit_bias"] = {str(token): _FORBIDDEN for token in sampling.stop_token_ids}
        body: dict[str, Any] = {
            "input_ids": np.concatenate([np.asarray(request.prompt_ids, np.int32), output.token_ids]),
            "sampling_params": params,
            "return_logprob": True,
            "rid": f"{request.request_id}/{next(self._attempts)}",
        }
        if self._experts is not None:
            body |= self._experts.question(output.routed_experts)
        if self._seeded:
            params["sampling_seed"] = request.seed & (2**63 - 1)
        if sampling.temperature > 0 and sampling.top_p < 1.0:
            params["top_p"] = sampling.top_p
        if sampling.temperature > 0 and 0 < sampling.top_k < self._vocab_size:
            params["top_k"] = sampling.top_k
        return "/generate", body

    def _completion(self, answer: Mapping[str, Any], version: int) -> Completion:
        meta = answer["meta_info"]
        token_ids = answer["output_ids"]
        reason: FinishReason = meta["finish_reason"]["type"]
        logprobs = [entry[0] for entry in meta.get("output_token_logprobs", [])]
        versions = meta.get(VERSION_KEY)
        if versions is None and (reason == "abort" or self._server.settings.pp > 1):
            # Aborted while it waited for memory in the server. Under abort no update comes between the first token
            # and the answer; otherwise what was sampled so far is sampled again.
            versions = [version] * len(token_ids) if self._interrupt == "abort" else []
        if versions is None and token_ids:
            raise ServerError(
                f"{self._client.name}: the server does not tell the versions of its tokens; its SGLang differs from "
                f"{WRITTEN_FOR} in ways that the hooks in {self._server.settings.log_file} complain about"
            )
        n = min(len(token_ids), len(logprobs), len(versions or []))
        if n < len(token_ids) and reason != "abort":
            raise ServerError(f"{self._client.name}: an answer of {len(token_ids)} tokens tells of {n} only")
        return Completion(
            token_ids=np.array(token_ids[:n], np.int32),
            logprobs=np.array(logprobs[:n], np.float32),
            versions=np.array((versions or [])[:n], np.int32),
            finish_reason=reason,
        )

    async def _post(self, call: Call, timeout_seconds: float | None = -1.0) -> dict[str, Any]:
        timeout = self._timeout if timeout_seconds == -1.0 else timeout_seconds
        try:
            return await self._client.post(call, timeout_seconds=timeout)
        except ServerGone as e:
            raise ServerGone(f"{e}. {self._server.explain()}") from e

    def _raise_unless_paused(self, what: str) -> None:
        if self._open.is_set():
            raise ValueError(f"{what} needs pause() first: requests are being sampled with these weights")

    def _check(self, request: GenerateRequest) -> None:
        """Raises ValueError if the request cannot be served."""
        sampling, name = request.sampling, f"request {request.request_id!r}"
        ids = np.asarray(request.prompt_ids)
        done = 0 if request.output is None else len(request.output.token_ids)
        if not ids.size or ids.min() < 0 or ids.max() >= self._vocab_size:
            raise ValueError(f"{name}: prompt_ids must be one or more numbers in [0, {self._vocab_size})")
        if len(ids) + sampling.max_new_tokens > self._max_length:
            raise ValueError(
                f"{name}: {len(ids)} prompt tokens + max_new_tokens={sampling.max_new_tokens} exceed the "
                f"{self._max_length} positions of the model; shorten one of them"
            )
        if not done < sampling.max_new_tokens:
            raise ValueError(f"{name}: max_new_tokens={sampling.max_new_tokens} must exceed the {done} tokens given")
        if sampling.temperature < 0 or not 0 < sampling.top_p <= 1:
            raise ValueError(
                f"{name}: temperature={sampling.temperature} must be >= 0, top_p={sampling.top_p} in (0, 1]"
            )


def _joined(output: Completion, part: Completion) -> Completion:
    """`part` after `output`; how it ended is how `part` did."""
    if not len(output.token_ids):
        return part
    return Completion(
        token_ids=np.concatenate([output.token_ids, part.token_ids]),
        logprobs=np.concatenate([output.logprobs, part.logprobs]),
        versions=np.concatenate([output.versions, part.versions]),
        finish_reason=part.finish_reason,
        routed_experts=output.routed_experts if part.routed_experts is None else part.routed_experts,
    )
