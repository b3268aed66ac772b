"""The workflow of `python -m tools.chaos --workflow agent`: turns with an environment, and a tool with effects outside
the run.

An effect is a file, named by the id of its call and made once, as a service with idempotency keys does it. While a call
of the tool or the model runs there is a mark with the process that makes it, so that kills can hit it.
"""

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from config_schema.section import Section, key
from rollout.environments.pool import EnvironmentPool
from rollout.journal import call_id, recorded
from rollout.rewards.pool import RewardPool
from rollout.trajectories import TrajectoryBuilder, sample_seed
from rollout.types import Prompt, Sampler, SamplingParams, Tokenizer, Trajectory

_CALL_SECONDS = 0.05
NUM_TURNS = 3


class Game:
    """An environment whose observations depend on its seed and on all actions before."""

    def reset(self, row: Mapping[str, object], seed: int) -> str:
        """Begin; what is returned is not read."""
        self._past = str(seed)
        return ""

    def step(self, action: str) -> tuple[str, float, bool]:
        """Return a digit, and a reward of 0 or 1."""
        self._past += action
        number = _number_of(self._past)
        return str(number % 10), float(number // 10 % 2), False

    def close(self) -> None:
        """Release nothing."""


class Agent:
    """Three turns of a game, with a call of the tool between two of them."""

    class Config(Section):
        """What workflow.options may contain."""

        effects: str = key(description="Folder outside of the run")

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
        self._tokenizer, self._sampling, self._group_size, self._seed = tokenizer, sampling, group_size, seed
        self._effects = Path(options.effects)
        self._games = EnvironmentPool(f"{__name__}:Game", num_workers=1, setup_seconds=60.0, step_seconds=60.0)

    async def run(self, prompt: Prompt, generator: Sampler) -> list[Trajectory]:
        """Return one trajectory for each sample."""
        return await asyncio.gather(*(self._sample(prompt, generator, i) for i in range(self._group_size)))

    async def _sample(self, prompt: Prompt, generator: Sampler, number: int) -> Trajectory:
        sample, said = TrajectoryBuilder(prompt, number=number), ""
        async with self._games.open() as game:
            await game.reset({}, sample_seed(self._seed, prompt.epoch, prompt.index, number))
            for turn in range(NUM_TURNS):
                with self._marked(f"{prompt.index}-{number}", "sampled"):
                    completion = await generator.generate(sample.request(self._sampling, seed=self._seed))
                asked = self._tokenizer.decode(completion.token_ids)
                said += asked
                observation, reward, _ = await game.step(asked)
                sample.sampled(completion, reward=reward)
                if turn < NUM_TURNS - 1:
                    result = await recorded(f"tool {number}", lambda: self._call(asked), asked=asked)  # noqa: B023
                    sample.observed(self._tokenizer.encode(result + observation, add_special_tokens=False))
        return sample.build(float(sum(map(ord, said)) % 2))  # groups have both rewards

    async def close(self) -> None:
        """End the processes of the games."""
        self._games.close()

    async def _call(self, asked: str) -> str:
        """Have the effect of this call, unless it is there, and return its result: digits."""
        name = hashlib.blake2b(call_id().encode(), digest_size=12).hexdigest()
        with self._marked(name, "called") as mark:
            await asyncio.sleep(_CALL_SECONDS / 2)
            result = str(_number_of(asked) % 100)
            with (self._effects / "executions").open("a") as file:
                file.write(f"{name}\n")
            mark.write_text(f"{asked}\n{result}")
            try:
                os.link(mark, self._effects / name)  # a kill leaves all of the effect or none of it
            except FileExistsError:
                result = (self._effects / name).read_text().rpartition("\n")[2]
            await asyncio.sleep(_CALL_SECONDS / 2)
        return result

    @contextlib.contextmanager
    def _marked(self, name: str, what: str) -> Iterator[Path]:
        """Keep a file of this process while a call runs."""
        mark = self._effects / f"{name}.{os.getpid()}.{what}"
        mark.touch()
        try:
            yield mark
        finally:
            mark.unlink(missing_ok=True)


def _number_of(text: str) -> int:
    return int(hashlib.blake2b(text.encode(), digest_size=2).hexdigest(), 16)


def is_under_way(what: str, effects: Path) -> bool:
    """Return whether a call runs now of the tool ("called") or of the model ("sampled")."""
    return any(psutil.pid_exists(int(mark.name.split(".")[1])) for mark in effects.glob(f"*.{what}"))


def effects_of(effects: Path) -> dict[str, str]:
    """Return the content of each effect, by the name of its call."""
    return {
        path.name: path.read_text() for path in effects.iterdir() if path.suffix == "" and path.name != "executions"
    }


def num_executions(effects: Path) -> int:
    """Return how often the tool was executed: more often than there are effects where kills hit calls."""
    path = effects / "executions"
    return len(path.read_text().splitlines()) if path.exists() else 0
