"""The workflow of `python -m tools.chaos --workflow agent`: turns, and a tool with effects outside the run.

An effect is a file, named by the id of its call and made once, as a service with idempotency keys does it. While a call
runs there is a mark with the process that makes it, so that kills can hit it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Any

import psutil

from config_schema.section import Section, key
from rollout.journal import call_id, recorded
from rollout.trajectories import TrajectoryBuilder
from rollout.types import Prompt, Sampler, SamplingParams, Trajectory

_CALL_SECONDS = 0.05
NUM_TURNS = 3


class Agent:
    """Three turns, with a call of the tool between two of them."""

    class Config(Section):
        """What workflow.options may contain."""

        effects: str = key(description="Folder outside of the run")

    def __init__(
        self, *, tokenizer: Any, reward_pool: Any, sampling: SamplingParams, group_size: int, seed: int, options: Config
    ) -> None:
        self._tokenizer, self._sampling, self._group_size, self._seed = tokenizer, sampling, group_size, seed
        self._effects = Path(options.effects)

    async def run(self, prompt: Prompt, generator: Sampler) -> list[Trajectory]:
        """Return one trajectory for each sample."""
        return await asyncio.gather(*(self._sample(prompt, generator, i) for i in range(self._group_size)))

    async def _sample(self, prompt: Prompt, generator: Sampler, number: int) -> Trajectory:
        sample, said = TrajectoryBuilder(prompt, number=number), ""
        for turn in range(NUM_TURNS):
            completion = await generator.generate(sample.request(self._sampling, seed=self._seed))
            asked = self._tokenizer.decode(completion.token_ids)
            said += asked
            sample.sampled(completion, reward=float(len(asked) % 2))
            if turn < NUM_TURNS - 1:
                result = await recorded(f"tool {number}", lambda: self._call(asked), asked=asked)  # noqa: B023
                sample.observed(self._tokenizer.encode(result, add_special_tokens=False))
        return sample.build(float(sum(map(ord, said)) % 2))  # groups have both rewards

    async def _call(self, asked: str) -> str:
        """Have the effect of this call, unless it is there, and return its result: digits."""
        name = hashlib.blake2b(call_id().encode(), digest_size=12).hexdigest()
        mark = self._effects / f"{name}.{os.getpid()}.called"
        mark.touch()
        await asyncio.sleep(_CALL_SECONDS / 2)
        result = str(int(hashlib.blake2b(asked.encode(), digest_size=2).hexdigest(), 16) % 100)
        with (self._effects / "executions").open("a") as file:
            file.write(f"{name}\n")
        mark.write_text(f"{asked}\n{result}")
        try:
            os.link(mark, self._effects / name)  # a kill leaves all of the effect or none of it
        except FileExistsError:
            result = (self._effects / name).read_text().rpartition("\n")[2]
        await asyncio.sleep(_CALL_SECONDS / 2)
        mark.unlink(missing_ok=True)
        return result


def is_called(effects: Path) -> bool:
    """Return whether a call of the tool runs now."""
    return any(psutil.pid_exists(int(mark.name.split(".")[1])) for mark in effects.glob("*.called"))


def effects_of(effects: Path) -> dict[str, str]:
    """Return the content of each effect, by the name of its call."""
    return {
        path.name: path.read_text() for path in effects.iterdir() if path.suffix == "" and path.name != "executions"
    }


def num_executions(effects: Path) -> int:
    """Return how often the tool was executed: more often than there are effects where kills hit calls."""
    path = effects / "executions"
    return len(path.read_text().splitlines()) if path.exists() else 0
