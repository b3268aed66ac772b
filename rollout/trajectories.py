"""From what generators sampled to what the trainer trains on: seeds, requests and trajectories of a conversation.

Invariant: seeds are a function of (run seed, epoch, prompt, sample, turn) alone, so a prompt that is issued again after
a failure or a restart draws the same samples from the same weights. A token is trained if, and only if, a generator
sampled it, and in one trajectory only.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import struct
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from rollout.types import (
    PROMPT_VERSION,
    REWARD_PART,
    Completion,
    FinishReason,
    GenerateRequest,
    Prompt,
    Sampler,
    SamplingParams,
    Trajectory,
)

if TYPE_CHECKING:  # a --dry-run reads this file, and needs no numpy
    import numpy as np


_TURNS = 2**20
"""Turns of a branch that have seeds of their own."""
_request_numbers = itertools.count()


def sample_seed(run_seed: int, epoch: int, prompt_index: int, sample: int, turn: int = 0) -> int:
    """Return a seed in [0, 2**63) for one turn of one sample of one prompt in one epoch."""
    numbers = (run_seed, epoch, prompt_index, sample, *([turn] if turn else []))
    key = struct.pack(f"<{len(numbers)}q", *numbers)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def turns(loss_mask: np.ndarray) -> list[tuple[int, int]]:
    """Return (first, end) of each turn: a run of trained tokens."""
    import numpy as np

    mask = np.concatenate(([False], loss_mask, [False]))
    edges = np.flatnonzero(mask[1:] != mask[:-1]).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


class TrajectoryBuilder:
    """One sample of a prompt, turn by turn: what the policy sampled, and what a tool, a user or a template added.

    sample = TrajectoryBuilder(prompt, number=0)
    completion = await generator.generate(sample.request(sampling, seed=seed))
    sample.sampled(completion).observed(tokenizer.encode(result, add_special_tokens=False))
    ...
    return [sample.build(reward)]
    """

    def __init__(self, prompt: Prompt, *, number: int, start: Iterable[int] | None = None) -> None:
        """`number`: of the sample in the group of its prompt. Its seeds depend on it, and trajectories with the same
        number are one rollout. `start`: tokens that it begins with; None: those of the prompt."""
        self._prompt, self._number = prompt, number
        self._parts: list[tuple[np.ndarray, Completion | None]] = []
        self._credits: dict[int, tuple[float, str | None]] = {}  # by the number of the part
        self.observed(prompt.token_ids if start is None else start)
        self._finish_reason: FinishReason = "stop"
        self._turn = 0
        self._branches = itertools.count(1)

    @property
    def token_ids(self) -> list[int]:
        """All tokens so far: the prompt of the next request."""
        return [token for tokens, _ in self._parts for token in tokens.tolist()]

    def request(self, sampling: SamplingParams, *, seed: int) -> GenerateRequest:
        """Return the request for the next turn. `seed`: of the run."""
        prompt = self._prompt
        group_id = f"{prompt.query_id}/{prompt.epoch}"
        return GenerateRequest(
            request_id=f"{group_id}/{self._number}/{next(_request_numbers)}",
            group_id=group_id,
            is_turn=True,
            began_at=next((int(c.versions[0]) for _, c in self._parts if c is not None and len(c.versions)), None),
            prompt_ids=self.token_ids,
            sampling=sampling,
            seed=sample_seed(seed, prompt.epoch, prompt.index, self._number, self._turn),
        )

    def sampled(
        self, completion: Completion, *, reward: float | None = None, state: str | None = None
    ) -> TrajectoryBuilder:
        """Append what the policy answered to token_ids; it is trained. `reward`: what this turn earned by itself, which
        is part of the reward of build(). `state`: names what the turn began in, see Trajectory.turn_states. Raises
        RuntimeError on an aborted completion."""
        if completion.finish_reason == "abort":
            raise RuntimeError(
                f"{self._prompt.query_id}: the generator returned an aborted completion; "
                "use a Router, which continues aborted requests"
            )
        if reward is not None or state is not None:
            name = None if state is None else hashlib.blake2b(state.encode(), digest_size=8).hexdigest()
            self._credits[len(self._parts)] = reward or 0.0, name
        self._parts.append((completion.token_ids, completion))
        self._finish_reason = completion.finish_reason
        self._turn += 1
        return self

    def observed(self, token_ids: Iterable[int]) -> TrajectoryBuilder:
        """Append tokens that the policy did not sample: they are context, and are not trained."""
        import numpy as np

        self._parts.append((np.fromiter(token_ids, np.int32), None))
        return self

    def fork(self) -> TrajectoryBuilder:
        """Return a branch of this rollout, to which all tokens so far are context: this builder trains them. Fork in
        the same order in every attempt: the seeds of a branch depend on its number."""
        branch = TrajectoryBuilder(self._prompt, number=self._number)
        branch._parts = [(tokens, None) for tokens, _ in self._parts]
        branch._branches = self._branches
        branch._turn = next(self._branches) * _TURNS
        return branch

    def build(self, reward: float, metrics: Mapping[str, float] | None = None) -> Trajectory:
        """Return the tokens as a trajectory. `metrics`: reported as workflow/{name}/mean, min and max; parts of a Score
        are among them."""
        import numpy as np

        parts = {f"{REWARD_PART}{name}": value for name, value in getattr(reward, "parts", {}).items()}
        total = sum(len(tokens) for tokens, _ in self._parts)
        token_ids = np.concatenate([tokens for tokens, _ in self._parts], dtype=np.int32, casting="same_kind")
        loss_mask = np.zeros(total, dtype=np.bool_)
        logprobs = np.zeros(total, dtype=np.float32)
        versions = np.full(total, PROMPT_VERSION, dtype=np.int32)
        experts: np.ndarray | None = None
        end = 0
        of_turns: list[tuple[float, str | None]] = []
        for number, (tokens, completion) in enumerate(self._parts):
            start, end = end, end + len(tokens)
            if completion is None or not len(tokens):
                continue
            earned, state = self._credits.get(number, (0.0, None))
            if start and loss_mask[start - 1]:  # nothing was observed in between: it is the same turn
                of_turns[-1] = of_turns[-1][0] + earned, of_turns[-1][1]
            else:
                of_turns.append((earned, state))
            loss_mask[start:end] = True
            logprobs[start:end] = completion.logprobs
            versions[start:end] = completion.versions
            experts = _join_experts(experts, completion.routed_experts, total)
        return Trajectory(
            query_id=self._prompt.query_id,
            token_ids=token_ids,
            loss_mask=loss_mask,
            rollout_logprobs=logprobs,
            versions=versions,
            reward=reward,
            finish_reason=self._finish_reason,
            metrics={**parts, **(metrics or {})},
            routed_experts=experts,
            turn_rewards=[earned for earned, _ in of_turns] if self._credits else None,
            turn_states=[state for _, state in of_turns] if self._credits else None,
            rollout=self._number,
        )


def _join_experts(known: np.ndarray | None, reported: np.ndarray | None, total: int) -> np.ndarray | None:
    """Return the experts of `total` tokens, [total, layers, k], -1 where they are not known: those of the forward pass
    that sampled a token, which the first report of it has."""
    import numpy as np

    if reported is None:
        return known
    if known is None:
        known = np.full((total, *reported.shape[1:]), -1, reported.dtype)
    rows = known[: len(reported)]
    rows[:] = np.where(rows < 0, reported, rows)
    return known


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
