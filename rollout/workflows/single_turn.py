"""The single-turn workflow: one prompt, its group of completions, their rewards."""

import itertools

from rollout.rewards.pool import RewardPool
from rollout.trajectories import TrajectoryBuilder, all_of, sample_seed
from rollout.types import GenerateRequest, Prompt, Sampler, SamplingParams, Tokenizer, Trajectory


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

    async def run(self, prompt: Prompt, generator: Sampler) -> list[Trajectory]:
        """Return the group of `prompt`, in sample order. A sample that fails cancels the others and raises its
        error."""
        completions = await all_of(generator.generate(request) for request in self._requests(prompt))
        texts = [self._tokenizer.decode(c.token_ids.tolist(), skip_special_tokens=True) for c in completions]
        rewards = await self._reward_pool.score_many(prompt, texts)
        return [
            TrajectoryBuilder(prompt, number=sample).sampled(completion).build(reward)
            for sample, (completion, reward) in enumerate(zip(completions, rewards, strict=True))
        ]

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
