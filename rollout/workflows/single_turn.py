"""From one prompt to its group of trajectories: between the producer and a generator.

Invariant: seeds are a function of (run seed, epoch, prompt, sample) alone, so a prompt that is issued again after a
failure or a restart draws the same samples from the same weights.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import itertools
import struct
from typing import Any

import numpy as np

from rollout.data.prompts import Tokenizer
from rollout.plugins import PluginError, build_plugin, check_factory
from rollout.rewards.pool import RewardPool
from rollout.types import (
    PROMPT_VERSION,
    Completion,
    GenerateRequest,
    Generator,
    Prompt,
    SamplingParams,
    Trajectory,
    Workflow,
)


class SingleTurnMathWorkflow:
    """Samples `group_size` completions of the prompt, scores their texts, and is done."""

    def __init__(
        self, *, tokenizer: Tokenizer, reward_pool: RewardPool, sampling: SamplingParams, group_size: int, seed: int
    ) -> None:
        self._tokenizer = tokenizer
        self._reward_pool = reward_pool
        self._sampling = sampling
        self._group_size = group_size
        self._seed = seed
        self._attempts = itertools.count()

    async def run(self, prompt: Prompt, generator: Generator) -> list[Trajectory]:
        """The group of `prompt`, in sample order. A sample that fails cancels the others and raises its error."""
        sampling = [asyncio.ensure_future(generator.generate(request)) for request in self._requests(prompt)]
        try:
            completions = await asyncio.gather(*sampling)
        finally:
            for task in sampling:
                task.cancel()
        texts = [self._tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in completions]
        rewards = await self._reward_pool.score_many(prompt, texts)
        return [build_trajectory(prompt, c, reward) for c, reward in zip(completions, rewards, strict=True)]

    def _requests(self, prompt: Prompt) -> list[GenerateRequest]:
        prompt_ids = prompt.token_ids.tolist()
        group_id = f"{prompt.query_id}/{prompt.epoch}/{next(self._attempts)}"
        return [
            GenerateRequest(
                request_id=f"{group_id}/{sample}",
                prompt_ids=prompt_ids,
                sampling=self._sampling,
                seed=sample_seed(self._seed, prompt.epoch, prompt.index, sample),
                group_id=group_id,
            )
            for sample in range(self._group_size)
        ]


WORKFLOWS: dict[str, type] = {"math": SingleTurnMathWorkflow}


def check_workflow(spec: str) -> None:
    """What can be known of `spec` before there are settings for make_workflow. Raises PluginError."""
    if ":" in spec:
        check_factory(spec, kind="workflow", settings=inspect.signature(SingleTurnMathWorkflow).parameters)
    elif spec not in WORKFLOWS:
        known = ", ".join(sorted(WORKFLOWS))
        raise PluginError(f"unknown workflow {spec!r}; use one of {known}, or package.module:Class")


def make_workflow(spec: str, **settings: Any) -> Workflow:
    """The workflow called `spec`: a name in WORKFLOWS or an import path "pkg.mod:Name" of a class or factory.

    `settings` are those of SingleTurnMathWorkflow: tokenizer, reward_pool, sampling, group_size, seed.
    Raises PluginError.
    """
    if spec in WORKFLOWS:
        workflow: Workflow = WORKFLOWS[spec](**settings)
        return workflow
    built: Workflow = build_plugin(spec, kind="workflow", methods={"run": ("prompt", "generator")}, **settings)
    return built


def sample_seed(run_seed: int, epoch: int, prompt_index: int, sample: int) -> int:
    """A seed in [0, 2**63) for one sample of one prompt in one epoch."""
    key = struct.pack("<4q", run_seed, epoch, prompt_index, sample)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def build_trajectory(prompt: Prompt, completion: Completion, reward: float) -> Trajectory:
    """Prompt and completion end to end, the prompt masked out. Raises RuntimeError on an aborted completion."""
    if completion.finish_reason == "abort":
        raise RuntimeError(
            f"{prompt.query_id}: the generator handed back an aborted completion; "
            "put a Router in front of it, which continues those"
        )
    num_prompt, num_sampled = len(prompt.token_ids), len(completion.token_ids)
    total = num_prompt + num_sampled
    loss_mask = np.zeros(total, dtype=np.bool_)
    loss_mask[num_prompt:] = True
    logprobs = np.zeros(total, dtype=np.float32)
    logprobs[num_prompt:] = completion.logprobs
    versions = np.full(total, PROMPT_VERSION, dtype=np.int32)
    versions[num_prompt:] = completion.versions
    token_ids = np.empty(total, dtype=np.int32)
    token_ids[:num_prompt] = prompt.token_ids
    token_ids[num_prompt:] = completion.token_ids
    experts = completion.routed_experts
    if experts is not None:
        experts = np.concatenate([experts, np.full((total - len(experts), *experts.shape[1:]), -1, experts.dtype)])
    return Trajectory(
        query_id=prompt.query_id,
        token_ids=token_ids,
        loss_mask=loss_mask,
        rollout_logprobs=logprobs,
        versions=versions,
        reward=reward,
        finish_reason=completion.finish_reason,
        routed_experts=experts,
    )
