"""The samples of a group, which run at the same time, and a sample that is a conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import TypeVar

from rollout.trajectories import TrajectoryBuilder
from rollout.types import Completion, Prompt, Sampler, SamplingParams

T = TypeVar("T")


async def all_of(samples: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results of all samples, in order. One that fails cancels the others and raises its error."""
    running = [asyncio.ensure_future(sample) for sample in samples]
    try:
        return await asyncio.gather(*running)
    finally:
        for sample in running:
            sample.cancel()


class Conversation(TrajectoryBuilder):
    """A sample that ends where its context leaves no room for another answer."""

    def __init__(self, prompt: Prompt, *, number: int, start: Sequence[int], context_tokens: int, opening: str) -> None:
        """`opening`: what `start` is, for the ValueError where it leaves no room for an answer."""
        super().__init__(prompt, number=number, start=start)
        self._room = context_tokens - len(start)
        self.is_full = False
        """The context has cut the last answer, or has no room for another one."""
        if self._room < 1:
            raise ValueError(
                f"{prompt.query_id}: {opening} has {len(start)} tokens, context_tokens={context_tokens} leaves none "
                "for an answer; raise it"
            )

    async def answer(self, generator: Sampler, sampling: SamplingParams, *, seed: int) -> Completion:
        """Sample the next answer, which sampled() appends. `seed`: of the run."""
        completion = await generator.generate(self.request(sampling.at_most(self._room), seed=seed))
        self.is_full = completion.finish_reason == "length" and self._room < sampling.max_new_tokens
        self._room -= len(completion.token_ids)
        return completion

    def continue_with(self, token_ids: Sequence[int]) -> None:
        """Append what the policy reads next, if that leaves room for an answer."""
        self._room -= len(token_ids)
        self.is_full = self._room < 1
        if not self.is_full:
            self.observed(token_ids)
