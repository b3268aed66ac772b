"""Several generators behind one: a request goes where the least work is outstanding and stays with its group.

Invariant: a request that was accepted ends as a completion or an error, whatever its generator does. One that is
interrupted continues with its tokens; one whose generator fails continues at another, from the tokens that the router
has received; when no generator is left it waits for one to be replaced, then raises NoGeneratorError.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rollout.inference.backend import GeneratorConfig
from rollout.types import Completion, GenerateRequest, Health, ReportingSampler, Sampler
from tracing import frequent_span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_UNSUPERVISED = GeneratorConfig(health_timeout_seconds=60.0, patience_seconds=0.0)
"""Settings of generators that are not restarted, as in an evaluation."""
_MAX_RETRIES = 3
_MAX_IDLE_GROUPS = 4096
"""Conversations between two turns whose generator is remembered."""
_LONGEST_RETRY_WAIT_SECONDS = 1.0
_SLOW_SHARE = 0.5
"""A generator with less than this share of the fastest one's tokens a second is called slow."""
_LEAST_SECONDS_TO_JUDGE = 5.0
_REPORT_SECONDS = 10.0
"""Time limit for a generator to report the tokens of its requests: a checkpoint waits for it, and can omit them."""


def requests_at_once(*, max_running: int, num_generators: int, group_size: int = 1) -> int:
    """Return the number of requests to keep in flight: a quarter more than the generators run together, so that no slot
    stays empty; more requests would only age in the queue. A group stays on one generator, and every generator needs
    one."""
    return max(-(-5 * max_running * num_generators // 4), (num_generators - 1) * group_size + 1)


NO_ANSWER = "no answer to a health check"
"""Beginning of the reason where a generator is lost whose process may still run."""


class NoGeneratorError(RuntimeError):
    """Every generator of the router is gone."""


class _AttemptFailed(Exception):
    """A generator did not complete a request; __cause__ is the reason."""

    def __init__(self, *, generator_died: bool) -> None:
        super().__init__(generator_died)
        self.generator_died = generator_died


class Routed(ReportingSampler, Protocol):
    """What a router needs of a generator. The generator holds back requests while it is paused."""

    async def health(self) -> Health: ...
    async def close(self) -> None: ...


@dataclass(eq=False)
class _Member:
    """One generator and what the router has running there. `Router.lost` has whether it is lost."""

    generator: Routed
    name: str
    outstanding_tokens: int = 0
    sampled_tokens: int = 0
    num_old_prefix_tokens: int = 0
    counted_at: float = field(default_factory=lambda: time.monotonic())
    """Start of the count of sampled_tokens."""
    is_slow: bool = False
    attempts: set[asyncio.Timeout] = field(default_factory=set)
    """Attempts of requests. They have no deadline until the generator is lost, which ends them."""


@dataclass
class _Group:
    """The generator of a group of requests. The next turns of a conversation go where its prefix is in the cache."""

    member: _Member | None = None
    num_in_flight: int = 0


class Router:
    """Samples on `generators`, which its close() closes. Use it in one event loop.

    The router alone decides which generators are lost. A generator gets a health check at the
    interval of `config`, and when a request fails. One that does not answer in time is lost until replace() adds
    another in its place. With no working generator, requests wait for the patience of `config`.
    """

    def __init__(
        self,
        generators: Sequence[Routed] | Mapping[str, Routed],
        config: GeneratorConfig = _UNSUPERVISED,
        *,
        stop: StopTexts | None = None,
    ) -> None:
        """`stop`: stop texts of the requests that have its token_ids as their pause_token_ids."""
        if not generators:
            raise ValueError("a router needs at least one generator")
        if not isinstance(generators, Mapping):
            generators = {f"generator-{i}": generator for i, generator in enumerate(generators)}
        self.lost: dict[str, str] = {}
        """Why each generator that is lost, and was not replaced yet, counts as lost, by its name."""
        self._members: dict[str, _Member] = {}
        self._reserved: set[str] = set()
        self._one_lost = asyncio.Event()
        for name, generator in generators.items():
            self._add(name, generator)
        self._groups: dict[str, _Group] = {}
        self._idle_groups: dict[str, _Group] = {}  # without a request at present, the longest idle first
        self._handed_back: dict[str, Completion] = {}  # by request id: what interrupted requests have
        self._reported: dict[str, Completion] = {}  # by request id: what partial() has found last
        self._config, self._stop = config, stop
        self._none_since: float | None = None
        self._replaced = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion to its end ("stop" or "length"), through interruptions and the death of generators.
        Raises NoGeneratorError when none is left, ValueError for a request that cannot be served, and what a healthy
        generator keeps raising for it."""
        self._watch()
        group = self._join_group(request)
        try:
            return await self._sample(request, lambda: self._member_of(group))
        finally:
            self._leave_group(request)

    async def sample_on(self, member: _Member, request: GenerateRequest) -> Completion:
        """Sample one completion to its end on one generator. Raises as generate()."""

        async def choose() -> _Member:
            if self._is_lost(member):
                raise NoGeneratorError(f"{member.name}, which was reserved, is lost")
            return member

        return await self._sample(request, choose)

    async def _sample(self, request: GenerateRequest, choose: Callable[[], Awaitable[_Member]]) -> Completion:
        """Sample one completion to its end. `choose`: returns the generator of the next attempt."""
        self._reported.pop(request.request_id, None)  # of an earlier request of that name, as evaluations send again
        num_retries = 0  # since the last token
        try:
            while (ended := self._ended(request)) is None:
                given = _num_given(request)
                try:
                    completion = await self._attempt(await choose(), request)
                except _AttemptFailed as e:
                    num_retries += 1
                    if not e.generator_died and num_retries > _MAX_RETRIES:
                        assert e.__cause__ is not None, "raised from what the generator raised"
                        raise e.__cause__ from None
                    reported = self._reported.get(request.request_id)
                    if e.generator_died and reported is not None and len(reported.token_ids) > given:
                        request = replace(request, output=reported)
                        self._handed_back[request.request_id] = reported
                else:
                    request = replace(request, output=completion)
                    self._handed_back[request.request_id] = completion
                    num_retries = 0 if _num_given(request) > given else num_retries + 1
                if num_retries > 1:
                    await asyncio.sleep(min(0.01 * 2**num_retries, _LONGEST_RETRY_WAIT_SECONDS))
            return ended
        finally:
            self._handed_back.pop(request.request_id, None)
            self._reported.pop(request.request_id, None)

    def _ended(self, request: GenerateRequest) -> Completion | None:
        """Return the output of a request if it has ended, by itself or with a stop text."""
        output = request.output
        if output is None:
            return None
        if self._stop is not None and request.sampling.pause_token_ids and self._stop.ends(output.token_ids):
            return replace(output, finish_reason="stop")
        return None if output.finish_reason == "abort" else output

    async def partial(self) -> dict[str, Completion]:
        """Return the tokens so far of requests in flight: those returned at an interruption, or those that the
        generators report now. A request continues with them elsewhere if its generator fails."""

        async def partial_of(member: _Member) -> Mapping[str, Completion]:
            try:
                return await asyncio.wait_for(
                    member.generator.partial(), min(self._config.health_timeout_seconds, _REPORT_SECONDS)
                )
            except Exception as e:  # noqa: BLE001 (its requests are sampled anew, as after its death)
                logger.warning("%s did not return the tokens of its running requests: %r", member.name, e)
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
        """End the health checks, then close every working generator."""
        if self._watcher is not None:
            self._watcher.cancel()
        await asyncio.gather(*(m.generator.close() for m in self._alive()))

    def replace(self, name: str, generator: Routed) -> None:
        """Add a generator in place of the lost one of this name. It must have the current weights."""
        self._lose(self._members[name], "replaced")
        self._add(name, generator)
        self.release(name)
        logger.info("%s has rejoined", name)

    def _add(self, name: str, generator: Routed) -> None:
        self.lost.pop(name, None)
        self._members[name] = _Member(generator, name)

    def reserved(self, name: str) -> Sampler:
        """Return the generator of this name, which gets no other requests from now on but those that it has. What it
        samples raises NoGeneratorError when it is lost."""
        self._reserved.add(name)
        return _Reserved(self, self._members[name])

    def release(self, name: str) -> None:
        """Send requests to a reserved generator again. It must have the current weights."""
        self._reserved.discard(name)
        self._none_since = None
        self._replaced.set()

    async def wait_lost(self, known: Collection[str]) -> dict[str, str]:
        """Return the lost generators with the reasons, when one is lost that is not `known`."""
        while not self.lost.keys() - set(known):
            self._one_lost.clear()
            await self._one_lost.wait()
        return dict(self.lost)

    async def check(self) -> dict[str, str]:
        """Check the health of every generator now; return the lost ones with the reasons."""
        await asyncio.gather(*(self._check(member) for member in self._alive()))
        return dict(self.lost)

    def stats(self) -> dict[str, float]:
        """Return the number of working generators, the slowest one's share of the fastest one's tokens per second since
        the last call, and the prompt tokens of turns that were kept over updates. Logs a slow generator."""
        now, alive = time.monotonic(), self._alive()
        seconds = {member.name: now - member.counted_at for member in alive}
        rates = {m.name: m.sampled_tokens / max(seconds[m.name], 1e-9) for m in alive}
        for member in alive:
            member.sampled_tokens, member.counted_at = 0, now
        fastest = max(rates.values(), default=0.0)
        for member in alive if len(alive) > 1 else ():
            if seconds[member.name] <= _LEAST_SECONDS_TO_JUDGE:
                continue
            slow = rates[member.name] < _SLOW_SHARE * fastest
            if slow and not member.is_slow:
                logger.warning(
                    "%s is slow: %.0f tokens/s, the fastest samples %.0f", member.name,
                    rates[member.name], fastest,
                )  # fmt: skip
            member.is_slow = slow
        return {
            "router/num_generators": float(len(alive)),
            "router/num_old_prefix_tokens": float(sum(member.num_old_prefix_tokens for member in alive)),
            "router/slowest_share": min(rates.values(), default=0.0) / fastest if fastest else 1.0,
        }

    def _alive(self) -> list[_Member]:
        return [member for name, member in self._members.items() if name not in self.lost]

    def _free(self) -> Collection[_Member]:
        """Return the working generators that take any request."""
        if not self.lost and not self._reserved:  # a simulation has hundreds, and asks for each request
            return self._members.values()
        taken = self.lost.keys() | self._reserved
        return [member for name, member in self._members.items() if name not in taken]

    def _is_free(self, member: _Member) -> bool:
        return member.name not in self._reserved and not self._is_lost(member)

    def _is_lost(self, member: _Member) -> bool:
        return self._members[member.name] is not member or member.name in self.lost

    def _join_group(self, request: GenerateRequest) -> _Group:
        """Return the request's group; one without a group is its own."""
        name = request.group_id or f"request {request.request_id}"
        group = self._groups.get(name) or self._idle_groups.pop(name, None) or _Group()
        self._groups[name] = group
        group.num_in_flight += 1
        return group

    def _leave_group(self, request: GenerateRequest) -> None:
        name = request.group_id or f"request {request.request_id}"
        self._groups[name].num_in_flight -= 1
        if self._groups[name].num_in_flight:
            return
        group = self._groups.pop(name)
        if request.group_id:
            self._idle_groups[name] = group
            while len(self._idle_groups) > _MAX_IDLE_GROUPS:
                del self._idle_groups[next(iter(self._idle_groups))]

    async def _member_of(self, group: _Group) -> _Member:
        """Return the group's generator; the least loaded one where it has none, or a dead or reserved one. Raises
        NoGeneratorError."""
        while group.member is None or not self._is_free(group.member):
            if free := self._free():
                group.member = min(free, key=attrgetter("outstanding_tokens"))
            else:
                await self._wait_for_free()
        return group.member

    async def _wait_for_free(self) -> None:
        """Wait where there is no generator at all. Raises NoGeneratorError when patience ends."""
        if self._none_since is None:
            self._none_since = time.monotonic()
            logger.warning("no generator is left; waiting %g s for one to restart", self._config.patience_seconds)
        self._replaced.clear()
        try:
            async with asyncio.timeout(self._none_since + self._config.patience_seconds - time.monotonic()):
                await self._replaced.wait()
        except TimeoutError:
            if not self._free():
                failures = "; ".join(f"{name}: {why}" for name, why in sorted(self.lost.items()))
                raise NoGeneratorError(f"no generator is left: {failures}") from None

    async def _attempt(self, member: _Member, request: GenerateRequest) -> Completion:
        """Send a request to a generator once. Raises _AttemptFailed if it failed or the generator failed meanwhile."""
        tokens = len(request.prompt_ids) + request.sampling.max_new_tokens - _num_given(request)
        logger.debug(
            "request %s: %d prompt tokens and %d sampled ones to %s, which has %d requests",
            request.request_id, len(request.prompt_ids), _num_given(request), member.name, len(member.attempts),
        )  # fmt: skip
        member.outstanding_tokens += tokens
        try:
            async with asyncio.timeout(None) as attempt:
                member.attempts.add(attempt)
                try:
                    with frequent_span("request", lane=member.name) as sampling:
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
                raise _AttemptFailed(generator_died=True) from None
            logger.warning("%s failed %s: %r", member.name, request.request_id, e)
            await self._check(member)
            raise _AttemptFailed(generator_died=self._is_lost(member)) from e
        finally:
            member.outstanding_tokens -= tokens

    async def _check(self, member: _Member) -> None:
        """Check the health of a generator, and mark it as lost if it does not respond."""
        try:
            async with asyncio.timeout(self._config.health_timeout_seconds) as limit:
                health = await member.generator.health()
            member.num_old_prefix_tokens = health.num_old_prefix_tokens
        except Exception as e:  # noqa: BLE001 (no answer is no health, whatever the reason)
            late = f"{NO_ANSWER} within generator.health_timeout_seconds={self._config.health_timeout_seconds:g}"
            self._lose(member, late if limit.expired() else str(e) or repr(e))

    def _lose(self, member: _Member, why: str) -> None:
        """Mark a generator as lost; its requests continue elsewhere."""
        if self._is_lost(member):
            return
        self.lost[member.name] = why
        self._one_lost.set()
        logger.error("%s failed (%s); its requests continue elsewhere", member.name, why)
        for attempt in member.attempts:
            attempt.reschedule(asyncio.get_running_loop().time())

    def _watch(self) -> None:
        """Look after the generators from the first request on."""
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.ensure_future(self._watch_health())

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(self._config.health_interval_seconds)
            await asyncio.gather(*(self._check(member) for member in self._alive()))


class _Reserved:
    """One generator of a router."""

    def __init__(self, router: Router, member: _Member) -> None:
        self._router, self._member = router, member

    async def generate(self, request: GenerateRequest) -> Completion:
        return await self._router.sample_on(self._member, request)


def _num_given(request: GenerateRequest) -> int:
    return 0 if request.output is None else len(request.output.token_ids)


class StopTexts:
    """The stop texts of a run, by the vocabulary of its tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> None:
        self._tokenizer, self._texts = tokenizer, tuple(texts)
        self._tail = 4 + max((len(text.encode()) for text in texts), default=0)  # a token has a byte of text or more
        self.token_ids = tuple(self._candidates()) if texts else ()
        """Every token that may complete one of the texts."""

    def ends(self, token_ids: np.ndarray) -> bool:
        """Return whether the last tokens of a completion hold one of the texts."""
        tail = token_ids[-self._tail :].tolist()
        decoded = self._tokenizer.decode(tail, skip_special_tokens=False)
        return any(text in decoded for text in self._texts)

    def _candidates(self) -> list[int]:
        ends = tuple(text[start:] for text in self._texts for start in range(len(text)))
        before = self._tokenizer.encode("a", add_special_tokens=False)[-1:]  # keeps the space that a token begins with
        length = len(self._tokenizer.decode(before))
        written_in_parts = not all(text.isascii() for text in self._texts)
        found = []
        for token in range(len(self._tokenizer)):
            decoded = self._tokenizer.decode([*before, token], skip_special_tokens=False)[length:]
            part = written_in_parts and "\ufffd" in decoded  # some bytes of a character
            if part or decoded.startswith(ends) or any(text in decoded for text in self._texts):
                found.append(token)
        return found
