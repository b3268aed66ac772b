"""The endpoint: HTTP in front of the sessions, in three dialects.

Each session has a token, which clients send as their API key. Invariant: a request is answered from the session of its
token or refused; the server listens on the loopback interface.
"""

import asyncio
import itertools
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import ModuleType

import numpy as np
from aiohttp import web

from model_specs.untrusted import parse_json
from rollout.sessions import anthropic_messages, openai_chat, openai_responses
from rollout.sessions.bridge import Bridge
from rollout.sessions.calls import Answer, Call, CallError, Event, refuse_unsupported
from rollout.sessions.session import Asked, Limits, Session
from rollout.types import Prompt, Sampler

logger = logging.getLogger(__name__)

_DIALECTS: Mapping[str, ModuleType] = {
    "/v1/chat/completions": openai_chat,
    "/v1/responses": openai_responses,
    "/v1/messages": anthropic_messages,
    "/v1/messages/count_tokens": anthropic_messages,
}
_PING_SECONDS = 10.0
"""Between two comments in a stream that has no answer yet: clients and proxies end silent connections."""
_MAX_BODY_BYTES = 64 * 2**20


class SessionServer:
    """Serves open sessions until close(). `url` is known after start()."""

    def __init__(self, *, host: str = "127.0.0.1", port: int = 0) -> None:
        """`port`: 0 is any free one."""
        self._host, self._port = host, port
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        """Listen."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        for path in _DIALECTS:
            app.router.add_post(path, self._post)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/responses/{id}", self._again)
        app.router.add_route("*", "/{path:.*}", self._unknown)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"http://{self._host}:{port}"

    async def close(self) -> None:
        """End all sessions and stop listening."""
        for session in self._sessions.values():
            await session.close()
        self._sessions.clear()
        if self._runner is not None:
            await self._runner.cleanup()

    def open(self, token: str, session: Session) -> None:
        """Answer requests with this token from `session`."""
        self._sessions[token] = session

    async def end(self, token: str) -> None:
        """Refuse requests with this token from now on, and cancel those under way."""
        await self._sessions.pop(token).close()

    async def _post(self, request: web.Request) -> web.StreamResponse:
        dialect = _DIALECTS[request.path]
        try:
            self._session_of(request)
            body = await _body_of(request)
            session = self._session_of(request)  # it may have ended meanwhile
            call = _call_of(dialect, body)
            if request.path.endswith("/count_tokens"):
                return web.json_response({"input_tokens": session.count(call.messages, call.tools)})
            if body.get("previous_response_id") is not None and dialect is openai_responses:
                call = await openai_responses.continued(call, body, session.find)
        except CallError as error:
            return _refusal(dialect, error)
        if key := request.headers.get("Idempotency-Key"):
            call = replace(call, name=f"{call.name}/{key}")
        is_retry = key is not None or request.headers.get("x-stainless-retry-count", "0") != "0"
        asked = session.ask(call, body, is_retry=is_retry)
        return await self._send(request, dialect, asked, is_stream=bool(body.get("stream")))

    async def _again(self, request: web.Request) -> web.StreamResponse:
        """Send a response once more, or the rest of its stream to a client that has lost the connection."""
        id, after = request.match_info["id"], request.query.get("starting_after", "-1")
        try:
            asked = self._session_of(request).find(openai_responses.name_of(id))
            if asked is None:
                raise CallError(f"Response with id {id!r} not found.", code="not_found", status=404)
            if not after.removeprefix("-").isdecimal():
                raise CallError(f"starting_after must be a number, got {after!r}.", param="starting_after")
        except CallError as error:
            return _refusal(openai_responses, error)
        is_stream = request.query.get("stream") == "true"
        return await self._send(request, openai_responses, asked, is_stream=is_stream, after=int(after))

    async def _send(
        self, request: web.Request, dialect: ModuleType, asked: Asked, *, is_stream: bool, after: int = -1
    ) -> web.StreamResponse:
        try:
            if is_stream:
                return await self._stream(request, dialect, asked, after)
            return await self._respond(request, dialect, asked)
        except ConnectionError:
            asked.was_lost = True
            return web.Response()  # nobody reads it
        finally:
            if request.transport is None or request.transport.is_closing():
                asked.was_lost = True

    async def _respond(self, request: web.Request, dialect: ModuleType, asked: Asked) -> web.StreamResponse:
        await asyncio.wait([asked.answer])
        if (error := _error_of(asked.answer)) is not None:
            return _refusal(dialect, error)
        response = web.json_response(dialect.answer_of(asked.answer.result(), asked.body, created=asked.created))
        await response.prepare(request)
        await response.write_eof()
        return response

    async def _stream(self, request: web.Request, dialect: ModuleType, asked: Asked, after: int) -> web.StreamResponse:
        """Write the answer as server-sent events, those after number `after`: comments while it is sampled, then all of
        it. An error before the first comment has its own status, as without a stream."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        while not (await asyncio.wait([asked.answer], timeout=_PING_SECONDS))[0]:
            if not response.prepared:
                await response.prepare(request)
                if dialect is openai_responses:  # its client can come back, with this id
                    after = await _write_events(
                        response, openai_responses.begun(asked.id, asked.body, asked.created), after
                    )
            await response.write(b": waiting\n\n")
        error = _error_of(asked.answer)
        if error is not None and not response.prepared:
            return _refusal(dialect, error)
        if not response.prepared:
            await response.prepare(request)
        if error is not None:
            await response.write(_event("error", _error_body(dialect, _as_call_error(error))))
        else:
            answer = asked.answer.result()
            await _write_events(response, dialect.stream_of(answer, asked.body, created=asked.created), after)
        await response.write_eof()
        return response

    def _session_of(self, request: web.Request) -> Session:
        session = self._sessions.get(key_of(request))
        if session is None:
            message = "Incorrect API key: no open session has it."
            raise CallError(message, code="invalid_api_key", status=401)
        return session

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "run"}]})

    async def _unknown(self, request: web.Request) -> web.Response:
        dialect = anthropic_messages if "anthropic-version" in request.headers else openai_chat
        paths = ", ".join(_DIALECTS)
        message = f"There is no {request.method} {request.path}; there are POST {paths}, GET /v1/models and responses."
        return _refusal(dialect, CallError(message, status=404))


def key_of(request: web.Request) -> str:
    """Return the API key that a client has sent; empty where it sent none."""
    return request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")


async def _body_of(request: web.Request) -> dict[str, object]:
    try:
        body = parse_json(await request.read())
    except ValueError as error:
        raise CallError(f"The body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise CallError("The body must be a JSON object.")
    return body


def _call_of(dialect: ModuleType, body: dict[str, object]) -> Call:
    try:
        refuse_unsupported(body)
        call: Call = dialect.read_call(body)
    except (AttributeError, KeyError, TypeError) as error:
        raise CallError(f"The request is malformed: {error!r}.") from error
    return call


def _error_of(asked: asyncio.Task[Answer]) -> BaseException | None:
    return asyncio.CancelledError("the session has ended") if asked.cancelled() else asked.exception()


def _as_call_error(error: BaseException) -> CallError:
    if isinstance(error, CallError):
        return error
    logger.warning("the policy could not answer: %r", error)
    return CallError(f"The policy could not answer: {error}", status=500)


def _error_body(dialect: ModuleType, refusal: CallError) -> object:
    return dialect.error_of(str(refusal), status=refusal.status, param=refusal.param, code=refusal.code)


def _refusal(dialect: ModuleType, error: BaseException) -> web.Response:
    refusal = _as_call_error(error)
    body = _error_body(dialect, refusal)
    # What failed here fails again: the clients of both vendors would retry 500.
    return web.json_response(body, status=refusal.status, headers={"x-should-retry": "false"})


async def _write_events(response: web.StreamResponse, events: Iterable[Event], after: int) -> int:
    """Write the events whose numbers are above `after`; return the last number."""
    for number, (event, data) in enumerate(events):
        if number > after:
            await response.write(_event(event, data))
            after = number
    return after


def _event(name: str | None, data: object) -> bytes:
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


class PolicyServer(SessionServer):
    """Answers every request that has the key."""

    def __init__(
        self,
        bridge: Bridge,
        sampler: Sampler,
        *,
        limits: Limits,
        host: str,
        port: int,
        api_key: str,
        key_hint: str,
        seed: int,
        varies: bool = True,
    ) -> None:
        """`api_key`: the key that clients must send; empty: none is needed. `key_hint`: where they find it, for those
        that send another. `varies`: equal requests get different samples."""
        super().__init__(host=host, port=port)
        self._bridge, self._sampler, self._limits, self._api_key = bridge, sampler, limits, api_key
        self._key_hint, self._seed, self._varies, self._numbers = key_hint, seed, varies, itertools.count()

    def _session_of(self, request: web.Request) -> Session:
        if self._api_key and self._api_key != key_of(request):
            raise CallError(f"Incorrect API key; it is {self._key_hint}.", code="invalid_api_key", status=401)
        count, empty = next(self._numbers), np.empty(0, np.int32)
        number = count if self._varies else 0  # of the seed; the name is that of a conversation
        prompt = Prompt(query_id=f"served-{count}", index=number, task="", text="", token_ids=empty, solutions=())
        return Session(self._bridge, self._sampler, prompt, number=number, seed=self._seed, limits=self._limits)
