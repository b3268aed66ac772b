"""Prompts, rewards that cost nothing, and answers of random lengths, for measurements with random weights."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from config_schema.section import Section, key
from rollout.rewards.pool import RewardPool
from rollout.trajectories import TrajectoryBuilder, all_of, sample_seed
from rollout.types import GenerateRequest, Prompt, Sampler, SamplingParams, Tokenizer, Trajectory
from rollout.workflows import SingleTurnMathWorkflow
from tools.demo.data import write_jsonl


def additions(folder: Path) -> Path:
    """Return a file of additions as prompts in this folder, which is written once."""
    path = folder / "prompts.jsonl"
    if not path.exists():
        sums = [(a, b) for a in range(10, 100) for b in range(10, 55)]
        write_jsonl(path, [{"prompt": f"{a}+{b}=", "solutions": [f"\\boxed{{{a + b}}}"]} for a, b in sums])
    return path


def coin_reward(prompt: Prompt, text: str) -> float:
    """Return 0 or 1 by the answer's characters: groups with both, so that no gradient is zero."""
    return float(sum(map(ord, text)) % 2)


MEDIAN_TOKENS = 448
SIGMA = 0.95
"""Standard deviation of the logarithm of the length: the 99th percentile is 9.1 times the median."""


class LognormalLengths(SingleTurnMathWorkflow):
    """Each sample's length is drawn from its seed, and cut at ppo.gen.max_new_tokens."""

    def _requests(self, prompt: Prompt) -> list[GenerateRequest]:
        return [
            replace(request, sampling=replace(request.sampling, max_new_tokens=length, stop_token_ids=()))
            for request, length in (
                (request, length_of(request.seed, request.sampling.max_new_tokens))
                for request in super()._requests(prompt)
            )
        ]


def length_of(seed: int, most: int) -> int:
    """Return the tokens of the answer with this seed."""
    return int(np.clip(np.random.default_rng(seed).lognormal(np.log(MEDIAN_TOKENS), SIGMA), 1, most))


NUM_TURNS, _OBSERVED = 8, 128
"""Answers of a sample, and tokens between two."""


class Turns:
    """Answers of ppo.gen.max_new_tokens tokens each, with random tokens between two."""

    class Config(Section):
        """The keys workflow.options.*."""

        resends: bool = key(False, "Every turn is a sample of its own, sent whole, as by a loop that renders messages")

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        reward_pool: RewardPool,
        sampling: SamplingParams,
        group_size: int,
        seed: int,
        options: Config,
    ) -> None:
        most = sampling.max_new_tokens
        self._sampling = replace(sampling, min_new_tokens=most, stop_token_ids=())
        self._group_size, self._seed, self._options = group_size, seed, options

    async def run(self, prompt: Prompt, generator: Sampler) -> list[Trajectory]:
        """Return one trajectory of each sample, or one of each of its turns."""
        groups = await all_of(self._sample(prompt, generator, number) for number in range(self._group_size))
        return [trajectory for group in groups for trajectory in group]

    async def _sample(self, prompt: Prompt, generator: Sampler, number: int) -> list[Trajectory]:
        rng = np.random.default_rng([self._seed, prompt.epoch, prompt.index, number])
        found: list[Trajectory] = []
        sample = TrajectoryBuilder(prompt, number=number)
        for turn in range(NUM_TURNS):
            request = sample.request(self._sampling, seed=self._seed)
            if self._options.resends:
                seed = sample_seed(self._seed, prompt.epoch, prompt.index, number, turn)
                request = replace(request, is_turn=False, seed=seed)
            sample.sampled(await generator.generate(request))
            if self._options.resends or turn == NUM_TURNS - 1:
                found.append(sample.build(float(number % 2)))
            observed = rng.integers(2, 500, _OBSERVED).tolist()
            if self._options.resends:
                sample = TrajectoryBuilder(prompt, number=number, start=[*sample.token_ids, *observed])
            else:
                sample.observed(observed)
        return found
