"""Several generators behind one: a request goes where the least work is outstanding and stays with its group.

Invariant: a request that was accepted ends as a completion or an error, whatever its generator does. One that is
interrupted continues with its tokens; one whose generator fails continues at another, from the tokens that the router
has received; when no generator is left it waits for one to be replaced, then raises NoGeneratorError.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

from rollout.types import Completion, GenerateRequest, Generator, Health, WeightBucket
from tracing import frequent_span

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_RETRIES = 3
_LONGEST_RETRY_WAIT_SECONDS = 1.0
_SLOW_SHARE = 0.5
"""A generator with less than this share of the fastest one's tokens a second is called slow."""
_LEAST_SECONDS_TO_JUDGE = 5.0
_REPORT_SECONDS = 10.0
"""For a generator to report the tokens of its requests: a checkpoint waits for that, and can do without."""


def requests_at_once(*, max_running: int, num_generators: int, group_size: int = 1) -> int:
    """Return the number of requests to keep in flight: a quarter more than the generators run together, so that no slot
    stays empty; more requests would only age in the queue. A group stays on one generator, and every generator needs
    one."""
    return max(-(-5 * max_running * num_generators // 4), (num_generators - 1) * group_size + 1)


class NoGeneratorError(RuntimeError):
    """Every generator of the router is gone."""


class _AttemptFailed(Exception):
    """A generator did not complete a request; __cause__ is the reason."""

    def __init__(self, *, generator_died: bool) -> None:
        super().__init__(generator_died)
        self.generator_died = generator_died


@dataclass(eq=False)
class _Member:
    """One generator and what the router has running there. `failure` is set once it is gone."""

    generator: Generator
    index: int
    outstanding_tokens: int = 0
    sampled_tokens: int = 0
    counted_at: float = field(default_factory=lambda: time.monotonic())
    """Since when sampled_tokens is counted."""
    is_slow: bool = False
    attempts: set[asyncio.Timeout] = field(default_factory=set)
    """Without a deadline until the generator is gone, which then ends them."""
    failure: BaseException | None = None


@dataclass
class _Group:
    """Where a group's requests go while some of them are in flight."""

    member: _Member | None
    num_in_flight: int = 0


class Router:
    """Implements `Generator` over `generators`. Use it in one event loop.

    Every `health_interval_seconds`, and whenever a request fails, a generator with work gets a health check; one
    that does not answer within `health_timeout_seconds` is marked dead until replace() adds another in its place, as is
    one that fails an update. With no working generator, requests wait for `patience_seconds`.
    """

    def __init__(
        self,
        generators: Sequence[Generator],
        *,
        health_interval_seconds: float = 5.0,
        health_timeout_seconds: float = 60.0,
        patience_seconds: float = 0.0,
    ) -> None:
        if not generators:
            raise ValueError("a router needs at least one generator")
        self._members = [_Member(generator, index) for index, generator in enumerate(generators)]
        self._groups: dict[str, _Group] = {}
        self._handed_back: dict[str, Completion] = {}  # by request id: what interrupted requests have
        self._reported: dict[str, Completion] = {}  # by request id: what partial() has found last
        self._interval = health_interval_seconds
        self._timeout = health_timeout_seconds
        self._patience = patience_seconds
        self._none_since: float | None = None
        self._replaced = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._sampling = asyncio.Event()
        self._sampling.set()

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion to its end ("stop" or "length"), through interruptions and the death of generators.
        Raises NoGeneratorError when none is left, ValueError for a request that cannot be served, and what a healthy
        generator keeps raising for it."""
        self._watch()
        self._reported.pop(request.request_id, None)  # of an earlier request of that name, as evaluations send again
        group = self._join_group(request)
        num_retries = 0  # since the last token
        try:
            while True:
                await self._member_of(group)  # with none left there may be no generator to resume either
                await self._sampling.wait()
                given = _num_given(request)
                try:
                    completion = await self._attempt(await self._member_of(group), request)
                except _AttemptFailed as e:
                    num_retries += 1
                    if not e.generator_died and num_retries > _MAX_RETRIES:
                        assert e.__cause__ is not None, "raised from what the generator raised"
                        raise e.__cause__ from None
                    reported = self._reported.get(request.request_id)
                    if e.generator_died and reported is not None and len(reported.token_ids) > given:
                        if reported.finish_reason != "abort":
                            return reported
                        request = replace(request, output=reported)
                        self._handed_back[request.request_id] = reported
                else:
                    if completion.finish_reason != "abort":
                        return completion
                    request = replace(request, output=completion)
                    self._handed_back[request.request_id] = completion
                    num_retries = 0 if _num_given(request) > given else num_retries + 1
                if num_retries > 1:
                    await asyncio.sleep(min(0.01 * 2**num_retries, _LONGEST_RETRY_WAIT_SECONDS))
        finally:
            self._handed_back.pop(request.request_id, None)
            self._reported.pop(request.request_id, None)
            self._leave_group(request)

    async def pause(self) -> None:
        """Pause every generator. Interrupted requests wait here for resume()."""
        self._sampling.clear()
        await self._everywhere(lambda generator: generator.pause())

    async def update_weights(self, bucket: WeightBucket) -> None:
        """Copy a bucket into every generator."""
        await self._everywhere(lambda generator: generator.update_weights(bucket))

    async def resume(self, version: int) -> None:
        """Resume every generator."""
        await self._everywhere(lambda generator: generator.resume(version))
        self._sampling.set()

    async def health(self) -> Health:
        """Return the oldest version and the summed load of the working generators."""
        answers = await self._everywhere(lambda generator: asyncio.wait_for(generator.health(), self._timeout))
        return Health(
            version=min(h.version for h in answers),
            num_running=sum(h.num_running for h in answers),
            num_waiting=sum(h.num_waiting for h in answers),
        )

    async def partial(self) -> dict[str, Completion]:
        """Return the tokens so far of requests in flight: those returned at an interruption, or those that the
        generators report now. A request continues with them elsewhere if its generator fails."""

        async def partial_of(member: _Member) -> Mapping[str, Completion]:
            try:
                return await asyncio.wait_for(member.generator.partial(), min(self._timeout, _REPORT_SECONDS))
            except Exception as e:  # noqa: BLE001 (its requests are sampled anew, as after its death)
                logger.warning("generator %d did not return the tokens of its running requests: %r", member.index, e)
                return {}

        answers = await asyncio.gather(*(partial_of(member) for member in self._alive()))
        known = dict(self._handed_back)
        for name, part in (item for answer in answers for item in answer.items()):
            # A generator may have handed back more than it had when it answered.
            if name not in known or len(part.token_ids) >= len(known[name].token_ids):
                known[name] = part
        self._reported = known
        return dict(known)

    async def close(self) -> None:
        """Close every working generator."""
        if self._watcher is not None:
            self._watcher.cancel()
        await asyncio.gather(*(m.generator.close() for m in self._alive()))

    def replace(self, index: int, generator: Generator) -> None:
        """Replace generator number `index`, which has failed. The new one must have the current weights."""
        self._mark_dead(self._members[index], RuntimeError("replaced"))
        self._members[index] = _Member(generator, index)
        self._none_since = None
        self._replaced.set()
        logger.info("generator %d has rejoined", index)

    def lost(self) -> dict[int, str]:
        """Return the failed generators with the reasons."""
        return {m.index: repr(m.failure) for m in self._members if m.failure is not None}

    def stats(self) -> dict[str, float]:
        """Return the number of working generators, and the slowest one's share of the fastest one's tokens per second
        since the last call. Logs a slow generator."""
        now, alive = time.monotonic(), self._alive()
        seconds = {member.index: now - member.counted_at for member in alive}
        rates = {m.index: m.sampled_tokens / max(seconds[m.index], 1e-9) for m in alive}
        for member in alive:
            member.sampled_tokens, member.counted_at = 0, now
        fastest = max(rates.values(), default=0.0)
        for member in alive if len(alive) > 1 else ():
            if seconds[member.index] <= _LEAST_SECONDS_TO_JUDGE:
                continue
            slow = rates[member.index] < _SLOW_SHARE * fastest
            if slow and not member.is_slow:
                logger.warning(
                    "generator %d is slow: %.0f tokens/s, the fastest samples %.0f", member.index,
                    rates[member.index], fastest,
                )  # fmt: skip
            member.is_slow = slow
        return {
            "router/num_generators": float(len(alive)),
            "router/slowest_share": min(rates.values(), default=0.0) / fastest if fastest else 1.0,
        }

    def _alive(self) -> list[_Member]:
        return [member for member in self._members if member.failure is None]

    def _join_group(self, request: GenerateRequest) -> _Group:
        """Return the request's group, with a generator chosen for it if it is the first; one without a group is its
        own."""
        name = request.group_id or f"request {request.request_id}"
        if name not in self._groups:
            self._groups[name] = _Group(self._least_loaded() if self._alive() else None)
        self._groups[name].num_in_flight += 1
        return self._groups[name]

    def _leave_group(self, request: GenerateRequest) -> None:
        name = request.group_id or f"request {request.request_id}"
        self._groups[name].num_in_flight -= 1
        if not self._groups[name].num_in_flight:
            del self._groups[name]

    def _least_loaded(self) -> _Member:
        alive = self._alive()
        if not alive:
            failures = "; ".join(f"generator {m.index}: {m.failure!r}" for m in self._members)
            raise NoGeneratorError(f"no generator is left: {failures}") from self._members[-1].failure
        return min(alive, key=lambda member: member.outstanding_tokens)

    async def _member_of(self, group: _Group) -> _Member:
        """Return the group's generator; another one where that is dead. Waits where there is none at all."""
        while group.member is None or group.member.failure is not None:
            if self._alive():
                group.member = self._least_loaded()
                break
            if self._none_since is None:
                self._none_since = time.monotonic()
                logger.warning("no generator is left; waiting %g s for one to restart", self._patience)
            self._replaced.clear()
            try:
                async with asyncio.timeout(self._none_since + self._patience - time.monotonic()):
                    await self._replaced.wait()
            except TimeoutError:
                self._least_loaded()  # raises
        return group.member

    async def _attempt(self, member: _Member, request: GenerateRequest) -> Completion:
        """Send a request to a generator once. Raises _AttemptFailed if it failed or the generator failed meanwhile."""
        tokens = len(request.prompt_ids) + request.sampling.max_new_tokens - _num_given(request)
        logger.debug(
            "request %s: %d prompt tokens and %d sampled ones to generator %d, which has %d requests",
            request.request_id, len(request.prompt_ids), _num_given(request), member.index, len(member.attempts),
        )  # fmt: skip
        member.outstanding_tokens += tokens
        try:
            async with asyncio.timeout(None) as attempt:
                member.attempts.add(attempt)
                try:
                    with frequent_span("request", lane=f"generator-{member.index}") as sampling:
                        completion = await member.generator.generate(request)
                        num_sampled = len(completion.token_ids) - _num_given(request)
                        sampling.note(tokens=num_sampled, end=completion.finish_reason)
                finally:
                    member.attempts.discard(attempt)
            member.sampled_tokens += num_sampled
            logger.debug(
                "request %s: %s after %d tokens", request.request_id, completion.finish_reason,
                len(completion.token_ids),
            )  # fmt: skip
            return completion
        except ValueError:
            raise
        except Exception as e:
            if attempt.expired():
                raise _AttemptFailed(generator_died=True) from member.failure
            logger.warning("generator %d failed %s: %r", member.index, request.request_id, e)
            await self._check(member)
            raise _AttemptFailed(generator_died=member.failure is not None) from e
        finally:
            member.outstanding_tokens -= tokens

    async def _check(self, member: _Member) -> None:
        """Check the health of a generator, and mark it dead if it does not respond."""
        try:
            await asyncio.wait_for(member.generator.health(), self._timeout)
        except Exception as e:  # noqa: BLE001 (no answer is no health, whatever the reason)
            self._mark_dead(member, e)

    def _mark_dead(self, member: _Member, failure: BaseException) -> None:
        """Mark a generator dead; its requests continue elsewhere."""
        if member.failure is not None:
            return
        member.failure = failure
        logger.error("generator %d failed (%r); its requests continue elsewhere", member.index, failure)
        for attempt in member.attempts:
            attempt.reschedule(asyncio.get_running_loop().time())

    def _watch(self) -> None:
        """Look after the generators for as long as requests run."""
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.ensure_future(self._watch_health())

    async def _watch_health(self) -> None:
        while self._groups:
            await asyncio.sleep(self._interval)
            await asyncio.gather(*(self._check(member) for member in self._alive() if member.attempts))

    async def _everywhere(self, call: Callable[[Generator], Awaitable[T]]) -> list[T]:
        """Return the results of a call at every working generator; one that fails is marked dead. Raises ValueError as
        the call does, and NoGeneratorError when none is left."""

        async def one(member: _Member) -> T | None:
            try:
                return await call(member.generator)
            except ValueError:
                raise
            except Exception as e:  # noqa: BLE001 (a generator that missed an update must not sample on)
                self._mark_dead(member, e)
                return None

        members = self._alive()
        answers = await asyncio.gather(*(one(member) for member in members))
        self._least_loaded()  # raises when none is left
        return [cast(T, a) for a, member in zip(answers, members, strict=True) if member.failure is None]


def _num_given(request: GenerateRequest) -> int:
    return 0 if request.output is None else len(request.output.token_ids)
