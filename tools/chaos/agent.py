"""The workflow of `python -m tools.chaos --workflow agent`: turns with an environment and a tool, both with effects
outside the run.

An effect is a file, named by the id of its call or by all that led to its step, and made once, as a service with
idempotency keys does it. While a call of the tool, the model or an environment runs there is a mark with the process
that makes it, so that kills can hit it.
"""

import asyncio
import contextlib
import hashlib
import os
import time
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
_STEP_SECONDS = 0.02
NUM_TURNS = 3


class Game:
    """An environment whose observations depend on its seed and on all actions before. A restart runs it again."""

    def reset(self, row: Mapping[str, object], seed: int) -> str:
        """Begin; what is returned is not read. `row`: the folder `effects`."""
        self._effects, self._past = str(row["effects"]), str(seed)
        return ""

    def step(self, action: str) -> tuple[str, float, bool]:
        """Have the effect of this step; return a digit, and a reward of 0 or 1."""
        self._past += action
        number = _number_of(self._past)
        name = _digest(self._past)
        with _marked(Path(self._effects), name, "stepped") as mark:
            time.sleep(_STEP_SECONDS / 2)
            _have_effect(mark, name, f"{action}\n{number}")
            time.sleep(_STEP_SECONDS / 2)
        return str(number % 10), float(number // 10 % 2), False

    def close(self) -> None:
        """Release nothing."""


class SavedGame(Game):
    """The same with snapshots: a restart does not make its earlier steps again."""

    def snapshot(self) -> list[str]:
        """Return all that a game has."""
        return [self._effects, self._past]

    def restore(self, state: list[str]) -> None:
        """Go on from a snapshot."""
        self._effects, self._past = state


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
        self._games = [
            EnvironmentPool(f"{__name__}:{kind}", num_workers=1, setup_seconds=60.0, step_seconds=60.0)
            for kind in ("Game", "SavedGame")
        ]

    async def run(self, prompt: Prompt, generator: Sampler) -> list[Trajectory]:
        """Return one trajectory for each sample."""
        return await asyncio.gather(*(self._sample(prompt, generator, i) for i in range(self._group_size)))

    async def _sample(self, prompt: Prompt, generator: Sampler, number: int) -> Trajectory:
        sample, said = TrajectoryBuilder(prompt, number=number), ""
        async with self._games[number % 2].open(f"sample {number}") as game:
            row = {"effects": str(self._effects)}
            await game.reset(row, sample_seed(self._seed, prompt.epoch, prompt.index, number))
            for turn in range(NUM_TURNS):
                with _marked(self._effects, f"{prompt.index}-{number}", "sampled"):
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
        for games in self._games:
            games.close()

    async def _call(self, asked: str) -> str:
        """Have the effect of this call, unless it is there, and return its result: digits."""
        name = _digest(call_id())
        with _marked(self._effects, name, "called") as mark:
            await asyncio.sleep(_CALL_SECONDS / 2)
            done = _have_effect(mark, name, f"{asked}\n{_number_of(asked) % 100}")
            await asyncio.sleep(_CALL_SECONDS / 2)
        return done.rpartition("\n")[2]


@contextlib.contextmanager
def _marked(effects: Path, name: str, what: str) -> Iterator[Path]:
    """Keep a file of this process while a call runs."""
    mark = effects / f"{name}.{os.getpid()}.{what}"
    mark.touch()
    try:
        yield mark
    finally:
        mark.unlink(missing_ok=True)


def _have_effect(mark: Path, name: str, content: str) -> str:
    """Make the effect of this name, beside the mark of its call, unless it is there; return its content."""
    effect = mark.with_name(name)
    with mark.with_name("executions").open("a") as file:
        file.write(f"{name}\n")
    mark.write_text(content)
    with contextlib.suppress(FileExistsError):
        os.link(mark, effect)  # a kill leaves all of the effect or none of it
    return effect.read_text()


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _number_of(text: str) -> int:
    return int(hashlib.blake2b(text.encode(), digest_size=2).hexdigest(), 16)


def is_under_way(what: str, effects: Path) -> bool:
    """Return whether a call runs now: of the tool ("called"), the model ("sampled") or a game ("stepped")."""
    return any(psutil.pid_exists(int(mark.name.split(".")[1])) for mark in effects.glob(f"*.{what}"))


def effects_of(effects: Path) -> dict[str, str]:
    """Return the content of each effect, by the name of its call."""
    return {
        path.name: path.read_text() for path in effects.iterdir() if path.suffix == "" and path.name != "executions"
    }


def num_executions(effects: Path) -> int:
    """Return how often tools and steps were executed: more often than there are effects where kills hit calls."""
    path = effects / "executions"
    return len(path.read_text().splitlines()) if path.exists() else 0
