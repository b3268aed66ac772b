"""The embedded generator: the engine in a thread of its own, and an asyncio front that implements `Generator`.

The thread alone touches the engine. The front leaves commands in a list that the thread empties between two steps, and
the thread resolves the futures of calls, so neither waits for the other. Invariant: every request gets an answer. If
the thread fails, every pending and every later call raises GeneratorError.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from model_specs.families import parse_config, read_config
from model_specs.untrusted import RawConfig
from rollout.bucket import FlatBucket
from rollout.inference.backend import Interrupt, check_request
from rollout.inference.embedded.engine import Engine, Finished
from rollout.inference.embedded.weights import DTYPES, ModelWeights
from rollout.types import Completion, GenerateRequest, Health

logger = logging.getLogger(__name__)


class GeneratorError(RuntimeError):
    """The generator is closed or its engine failed (then __cause__ is the reason)."""


T = TypeVar("T")
_Waiter = Future[Any]
"""A call of some event loop, resolved from the engine's thread."""


def _resolve(waiter: _Waiter, outcome: object) -> None:
    """Raise an exception in the waiting call, or return the outcome there; the call may have been cancelled."""
    with suppress(InvalidStateError):
        if isinstance(outcome, BaseException):
            waiter.set_exception(outcome)
        else:
            waiter.set_result(outcome)


SMALL_PRODUCT = 2**24
"""With fewer terms than this in every product of a step, sharing them with a second thread costs more than it brings:
64 slots of 0.8M parameters run 1.6 times as fast on one thread as on two."""


class EmbeddedGenerator:
    """Samples in this process, with continuous batching. Implements `Generator`.

    `model` is a Hugging Face folder, or the parsed config.json alone: then the generator starts paused and has no
    weights until update_weights() brought all of them and resume() was called. `interrupt` selects what pause() does to
    running requests: "abort" ends them with what they have, "retract" keeps them and computes their keys and values
    anew under the new weights, "in_place" keeps their keys and values. `threads` are the CPU threads of the engine
    (default: torch's own number, or one where all products of a step have fewer than SMALL_PRODUCT terms); more of them
    than idle cores makes it slower by far, and so does Python that keeps other threads of this process busy: give it a
    process of its own. Raises ValueError for a model that cannot be loaded.
    """

    def __init__(
        self,
        model: str | Path | RawConfig,
        *,
        max_running: int = 256,
        dtype: str = "float32",
        interrupt: Interrupt = "retract",
        threads: int | None = None,
        version: int = 0,
    ) -> None:
        self._config = parse_config(model) if isinstance(model, Mapping) else read_config(model)
        self._weights = ModelWeights(self._config, dtype=DTYPES[dtype])
        if not isinstance(model, Mapping):
            self._weights.load_folder(model)
        self._engine = Engine(self._config, self._weights, max_running=max_running)
        self._engine.version = version
        self._interrupt = interrupt
        largest = max_running * self._config.hidden_size * 2 * self._config.intermediate_size
        self._threads = 1 if threads is None and largest < SMALL_PRODUCT else threads
        self._paused = bool(self._weights.missing)
        self._error: GeneratorError | None = None
        self._changed = threading.Condition()
        self._commands: list[tuple[Callable[[], object], _Waiter | None]] = []
        self._pending: dict[str, _Waiter | None] = {}  # request id -> the waiting call; None: drain() returns it
        self._drained: list[tuple[str, Completion]] = []
        self._drainers: list[_Waiter] = []
        self._thread = threading.Thread(target=self._run, name="embedded-generator", daemon=True)
        self._thread.start()

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion. Raises ValueError for a request that cannot be served, GeneratorError if the engine
        is gone. Cancelling it aborts the request."""
        return (await self.generate_many([request]))[0]

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Sample many completions, in the order of the requests."""
        waiters = [_Waiter() for _ in requests]
        self._enqueue(requests, waiters)
        try:
            return await asyncio.gather(*map(asyncio.wrap_future, waiters))
        finally:
            left = [r.request_id for r, w in zip(requests, waiters, strict=True) if w.cancelled()]
            if left:
                with suppress(GeneratorError):
                    self.abort(left)

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Take many requests at once; drain() hands out their completions. Raises ValueError if one of them cannot be
        served (then none is taken) and GeneratorError if the engine is gone."""
        self._enqueue(requests, [None] * len(requests))

    async def drain(self) -> list[tuple[str, Completion]]:
        """Return (request_id, completion) of requests from submit() that have finished since the last call. Waits until
        there is one."""
        while True:
            with self._changed:
                self._raise_if_gone()
                if self._drained:
                    drained, self._drained = self._drained, []
                    return drained
                waiter = _Waiter()
                self._drainers.append(waiter)
            await asyncio.wrap_future(waiter)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests with what they have: they finish with reason "abort". Unknown ids are passed over."""
        ids = set(request_ids)
        self._send(lambda: self._deliver(self._engine.abort(ids)), None)

    async def pause(self) -> None:
        """Return when no further token of the current version can appear. Requests that arrive now wait."""
        await self._call(self._do_pause)

    async def update_weights(self, bucket: FlatBucket) -> None:
        """Copy full tensors in place. Raises ValueError unless paused, and for a tensor that the model does not
        have."""
        await self._call(lambda: self._do_update(bucket))

    async def resume(self, version: int) -> None:
        """Continue sampling; tokens from now on carry `version`. Raises ValueError while parameters are missing."""
        await self._call(lambda: self._do_resume(version))

    async def health(self) -> Health:
        """Return version and load; raises GeneratorError once the engine is gone."""
        self._raise_if_gone()
        running = self._engine.num_running
        return Health(
            version=self._engine.version, num_running=running, num_waiting=max(0, len(self._pending) - running)
        )

    async def partial(self) -> dict[str, Completion]:
        """Return the tokens so far of the requests in flight, by request id, and completions that drain() has not
        returned yet."""
        partial = await self._call(self._engine.partial)
        with self._changed:
            return partial | dict(self._drained)

    async def close(self) -> None:
        """End the engine. Requests that still run raise GeneratorError."""
        with self._changed:
            self._error = self._error or GeneratorError("the generator is closed")
            self._changed.notify_all()
        await asyncio.to_thread(self._thread.join)

    def _raise_if_gone(self) -> None:
        if self._error is not None:
            raise self._gone()

    def _gone(self) -> GeneratorError:
        """Return the reason, as a separate error for each waiting call: tracebacks grow on the one that is raised."""
        error = GeneratorError(str(self._error))
        error.__cause__ = self._error and self._error.__cause__
        return error

    def _send(self, command: Callable[[], object], waiter: _Waiter | None) -> None:
        with self._changed:
            self._raise_if_gone()
            self._commands.append((command, waiter))
            self._changed.notify_all()

    async def _call(self, command: Callable[[], T]) -> T:
        waiter = _Waiter()
        self._send(command, waiter)
        answer: T = await asyncio.wrap_future(waiter)
        return answer

    def _enqueue(self, requests: Sequence[GenerateRequest], waiters: Sequence[_Waiter | None]) -> None:
        added = list(requests)
        for request in added:
            self._check(request)
        with self._changed:
            self._raise_if_gone()
            ids = [request.request_id for request in added]
            taken = [i for i in ids if i in self._pending] if len(set(ids)) == len(ids) else ids
            if taken:
                raise ValueError(f"request_id={taken[0]!r} is already in use; ids must differ among running requests")
            self._pending.update(zip(ids, waiters, strict=True))
            self._commands.append((lambda: self._engine.add(added), None))
            self._changed.notify_all()

    def _check(self, request: GenerateRequest) -> None:
        """Raise ValueError if the request cannot be served."""
        vocab_size, sampling = self._config.vocab_size, request.sampling
        check_request(request, vocab_size=vocab_size, max_length=self._config.max_position_embeddings)
        if sampling.min_new_tokens and len(set(sampling.stop_token_ids)) >= vocab_size:
            raise ValueError(
                f"request {request.request_id!r}: min_new_tokens rules out every token, because all of them are stop "
                "tokens"
            )

    # What follows runs in the engine's thread.

    def _run(self) -> None:
        try:
            if self._threads is not None:
                torch.set_num_threads(self._threads)
            with torch.inference_mode():
                while self._take_commands():
                    if not self._paused:
                        self._deliver(self._engine.step())
        except BaseException as e:  # noqa: BLE001 (raised in every call that waits, whatever it is)
            logger.exception("the engine failed")
            error = GeneratorError(f"the engine failed: {type(e).__name__}: {e}")
            error.__cause__ = e
            self._error = error
        self._fail_pending()

    def _take_commands(self) -> bool:
        """Run what was sent; wait while there is nothing to do. False: the generator is closed."""
        with self._changed:
            while not self._commands and self._error is None and self._is_idle():
                self._changed.wait()
            if self._error is not None:
                return False
            commands, self._commands = self._commands, []
        outcomes = []
        try:
            while commands:
                command, waiter = commands[0]
                try:
                    outcomes.append((waiter, command()))
                except (ValueError, RuntimeError) as e:
                    if waiter is None:
                        raise
                    outcomes.append((waiter, e))
                commands.pop(0)
        finally:
            with self._changed:
                self._commands[:0] = commands  # what a failure left undone fails with the rest
            for waiter, outcome in outcomes:
                if waiter is not None:
                    _resolve(waiter, outcome)
        return True

    def _is_idle(self) -> bool:
        return self._paused or not (self._engine.num_running or self._engine.num_waiting)

    def _do_pause(self) -> None:
        if not self._paused:
            self._paused = True
            self._deliver(self._engine.interrupt(self._interrupt))

    def _do_update(self, bucket: FlatBucket) -> None:
        if not self._paused:
            raise ValueError("update_weights() needs pause() first: requests are being sampled with these weights")
        self._engine.update_weights(bucket.tensors())

    def _do_resume(self, version: int) -> None:
        if self._weights.missing:
            missing = self._weights.missing
            raise ValueError(f"{len(missing)} parameters were never loaded, among them {min(missing)}")
        self._engine.version = version
        self._paused = False

    def _deliver(self, finished: Finished) -> None:
        if not finished:
            return
        outcomes: list[tuple[_Waiter, Completion | None]] = []
        with self._changed:
            for request, completion in finished:
                waiter = self._pending.pop(request.request_id)
                if waiter is None:
                    self._drained.append((request.request_id, completion))
                else:
                    outcomes.append((waiter, completion))
            if self._drained:
                outcomes += [(waiter, None) for waiter in self._drainers]
                self._drainers = []
        for waiter, outcome in outcomes:
            _resolve(waiter, outcome)

    def _fail_pending(self) -> None:
        with self._changed:
            waiting = [*self._pending.values(), *self._drainers, *(waiter for _, waiter in self._commands)]
            self._pending, self._drainers, self._commands = {}, [], []
        for waiter in waiting:
            if waiter is not None:
                _resolve(waiter, self._gone())
