"""A workflow that takes (virtual) time in proportion to lognormal lengths, and prompts for it."""

import asyncio

import numpy as np

from rollout.data.prompts import PromptDataset
from rollout.data.task_sets import TaskSets
from rollout.trajectories import TrajectoryBuilder
from rollout.types import PROMPT_VERSION, Completion, GenerateRequest, Generator, Prompt, SamplingParams, Trajectory

SECONDS_PER_TOKEN = 0.02


def make_prompts(num: int) -> list[Prompt]:
    token_ids = np.arange(2, dtype=np.int32)
    return [
        Prompt(query_id=f"q{i}", index=i, task="math", text="?", token_ids=token_ids, solutions=("\\boxed{1}",))
        for i in range(num)
    ]


def make_dataset(num: int, *, seed: int = 0) -> TaskSets:
    return TaskSets.of(PromptDataset(make_prompts(num), seed=seed), "train")


class LognormalWorkflow:
    """Token j of a sample appears (j + 1) * SECONDS_PER_TOKEN after its prompt's start, under the version of then."""

    def __init__(self, *, group_size: int, seed: int = 0, sigma: float = 1.0) -> None:
        self.asked: dict[tuple[int, int], np.ndarray] = {}  # (epoch, index) -> lengths
        self._group_size = group_size
        self._seed = seed
        self._sigma = sigma
        self._push_times: list[float] = []  # entry v: when version v + 1 took over

    def push(self) -> None:
        self._push_times.append(asyncio.get_running_loop().time())

    async def run(self, prompt: Prompt, generator: Generator) -> list[Trajectory]:
        began = asyncio.get_running_loop().time()
        rng = np.random.default_rng([self._seed, prompt.epoch, prompt.index])
        lengths = np.ceil(rng.lognormal(3.0, self._sigma, self._group_size)).astype(np.int64)
        self.asked[prompt.epoch, prompt.index] = lengths
        await asyncio.sleep(float(lengths.max()) * SECONDS_PER_TOKEN)
        token_times = began + SECONDS_PER_TOKEN * np.arange(1, lengths.max() + 1)
        versions = np.searchsorted(self._push_times, token_times, side="right")
        longest = trajectory(prompt, versions)
        return [_cut(longest, len(prompt.token_ids) + n) for n in lengths.tolist()]


class ToolWorkflow:
    """Four answers of one token; between two a tool runs, for a lognormal time: median 1 s, 99 % within 20 s."""

    def __init__(self, *, group_size: int) -> None:
        self._group_size = group_size

    async def run(self, prompt: Prompt, generator: Generator) -> list[Trajectory]:
        return await asyncio.gather(*(self._sample(prompt, generator, number) for number in range(self._group_size)))

    async def _sample(self, prompt: Prompt, generator: Generator, number: int) -> Trajectory:
        rng = np.random.default_rng([prompt.epoch, prompt.index, number])
        sample, sampling = TrajectoryBuilder(prompt, number=number), SamplingParams(max_new_tokens=1)
        for seconds in (*rng.lognormal(0.0, np.log(20.0) / 2.326, 3), 0.0):
            sample.sampled(await generator.generate(sample.request(sampling, seed=0)))
            await asyncio.sleep(seconds)
            sample.observed([0])
        return sample.build(1.0)


class Places:
    """A generator that answers `num_places` requests at once, each in `seconds`."""

    def __init__(self, num_places: int, seconds: float) -> None:
        self.version = 0
        self.busy_seconds = 0.0
        """Of all places together."""
        self._seconds, self._free = seconds, asyncio.Semaphore(num_places)

    async def generate(self, request: GenerateRequest) -> Completion:
        async with self._free:
            version = self.version
            await asyncio.sleep(self._seconds)
            self.busy_seconds += self._seconds
        one = np.zeros(1, np.int32)
        return Completion(
            token_ids=one, logprobs=one.astype(np.float32), versions=one + version, finish_reason="length"
        )


def trajectory(prompt: Prompt, versions: np.ndarray) -> Trajectory:
    """One completion whose token j was sampled by versions[j]."""
    num_prompt = len(prompt.token_ids)
    total = num_prompt + len(versions)
    all_versions = np.full(total, PROMPT_VERSION, dtype=np.int32)
    all_versions[num_prompt:] = versions
    return Trajectory(
        query_id=f"{prompt.query_id}@{prompt.epoch}",
        token_ids=np.zeros(total, dtype=np.int32),
        loss_mask=all_versions != PROMPT_VERSION,
        rollout_logprobs=np.zeros(total, dtype=np.float32),
        versions=all_versions,
        reward=1.0,
        finish_reason="stop",
    )


def _cut(longest: Trajectory, n: int) -> Trajectory:
    return Trajectory(
        query_id=longest.query_id,
        token_ids=longest.token_ids[:n],
        loss_mask=longest.loss_mask[:n],
        rollout_logprobs=longest.rollout_logprobs[:n],
        versions=longest.versions[:n],
        reward=longest.reward,
        finish_reason=longest.finish_reason,
    )
