"""Simulate what policies of asynchronous and synchronous sampling lose, on prompts with long-tailed lengths.

    python -m tools.experience.policies                                   # 1,000,000 prompts
    python -m tools.experience.policies --prompts 50000 --picture policies.svg

A prompt is hard or easy; the length of its answers is lognormal, and hard ones are longer. SLOTS of them are sampled at
once, one token in a unit of time, and a step trains BATCH of them. `wait` and `dynamic sampling` decide by the rules of
rollout/experience/. A policy decides what may start and what a step takes.
"""

import heapq
import sys
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Self, cast

import numpy as np
from rich.console import Console
from rich.table import Table

from rollout.experience import OldestFirst, Schedule, StalenessAdmission
from rollout.experience.base import Outstanding
from tools.arguments import integer, parser_of
from tools.experience.ledger import distance, draw

SLOTS, BATCH, STALENESS = 1024, 512, 4
MEDIAN_TOKENS, SIGMA, LONGEST_TOKENS = 1000, 0.8, 16_000
OVER_ROLLOUT = 1.25
"""Prompts that a step begins, per prompt that it trains."""


@dataclass(frozen=True)
class Prompts:
    """What there is to sample."""

    lengths: np.ndarray  # [n] int64 tokens
    difficulty: np.ndarray  # [n] float64 in (0, 1): share of wrong answers
    spread: np.ndarray  # [n] bool: not all answers of the group have the same reward

    @classmethod
    def make(cls, count: int, *, seed: int = 0) -> Self:
        """Draw prompts of groups of eight."""
        rng = np.random.default_rng(seed)
        hard = rng.standard_normal(count)
        noise = rng.standard_normal(count)
        lengths = np.exp(np.log(MEDIAN_TOKENS) + SIGMA * (0.6 * hard + 0.8 * noise))
        difficulty = 1.0 / (1.0 + np.exp(-1.5 * hard))
        right = rng.binomial(8, 1.0 - difficulty)
        return cls(np.minimum(lengths, LONGEST_TOKENS).astype(np.int64) + 1, difficulty, (right > 0) & (right < 8))


@dataclass
class State:
    """What a policy decides on. A prompt is its position in the stream."""

    prompts: Prompts
    schedule: Schedule
    version: int = 0
    """Of the weights that sample."""
    step: int = 0
    """The next one that takes a batch."""
    drawn: int = 0
    begun: dict[int, int] = field(default_factory=dict)  # prompt -> version at its start; of those in flight
    ready: dict[int, int] = field(default_factory=dict)  # the same of those that have finished, as they finished
    lost: Counter[str] = field(default_factory=Counter)
    dropped: list[int] = field(default_factory=list)

    def drop(self, prompt: int, reason: str) -> None:
        """Give a prompt up, which is in flight or ready."""
        self.begun.pop(prompt, None)
        self.ready.pop(prompt, None)
        self.lost[reason] += 1
        self.dropped.append(prompt)

    @property
    def by_version(self) -> Mapping[int, int]:
        """Of all that are outstanding, for the rules of rollout/experience/."""
        return Counter(self.begun.values()) + Counter(self.ready.values())

    @property
    def ready_by_version(self) -> Mapping[int, int]:
        """The same for those that are ready."""
        return Counter(self.ready.values())


class Policy:
    """Starts prompts whenever a slot is free, and trains what finished first."""

    interrupts = False
    """A step ends what is in flight, and sampling waits for the update."""
    resumes = False
    """What a step has ended continues in the next one."""

    def admits(self, state: State) -> bool:
        """Return whether another prompt may begin now."""
        return True

    def finished(self, state: State, prompt: int) -> None:
        """Decide on a prompt that has become ready."""

    def take(self, state: State) -> list[int] | None:
        """Return the batch of the next step; None: it waits."""
        return list(islice(state.ready, BATCH)) if len(state.ready) >= BATCH else None


class Wait(Policy):
    """The rules of this project."""

    def __init__(self, schedule: Schedule) -> None:
        self._admission = StalenessAdmission(schedule, STALENESS)
        self._selection = OldestFirst(schedule, STALENESS)

    def admits(self, state: State) -> bool:
        """Apply the admission of a store."""
        return self._admission.admits(len(state.begun) + len(state.ready), next_step=state.step, version=state.version)

    def take(self, state: State) -> list[int] | None:
        """Apply the selection of a store."""
        if len(state.ready) < BATCH or not self._selection.is_ready(cast(Outstanding, state), state.step):
            return None
        return sorted(state.ready, key=lambda prompt: (state.ready[prompt], prompt))[:BATCH]


class DynamicSampling(Wait):
    """Wait, and drop groups without spread as they finish: others take their place."""

    def finished(self, state: State, prompt: int) -> None:
        """Drop it where its advantages are 0."""
        if not state.prompts.spread[prompt]:
            state.drop(prompt, "no spread")


class DropOverAge(Policy):
    """Drop what has become too old when its step begins."""

    def take(self, state: State) -> list[int] | None:
        """Drop first, then train what is left."""
        for prompt in [p for p, version in state.ready.items() if state.step - version > STALENESS]:
            state.drop(prompt, "too old")
        return super().take(state)


class AdmissionByBatch(Policy):
    """Begin as many as S more steps train, whatever is in flight, and train what finished first."""

    def admits(self, state: State) -> bool:
        """Count what was drawn, as if steps trained prompts in their order."""
        return state.drawn < (state.version + STALENESS + 1) * BATCH


class FilterAfterwards(AdmissionByBatch):
    """As before, and leave groups without spread out of the batch that they are in."""

    def take(self, state: State) -> list[int] | None:
        """Return a smaller batch."""
        batch = super().take(state)
        for prompt in [p for p in batch or () if not state.prompts.spread[p]]:
            state.drop(prompt, "no spread")
        return None if batch is None else [p for p in batch if p in state.ready]


class OverRollout(Policy):
    """Begin more than a step trains, train the first, and end the others."""

    interrupts = True

    def admits(self, state: State) -> bool:
        """Begin the wave of this step."""
        return len(state.begun) + len(state.ready) < BATCH * OVER_ROLLOUT

    def take(self, state: State) -> list[int] | None:
        """End what has not finished."""
        batch = super().take(state)
        for prompt in [*state.begun, *set(state.ready).difference(batch)] if batch is not None else ():
            state.drop(prompt, "unfinished")
        return batch


class SkipAndResume(OverRollout):
    """Begin more than a step trains, train the first, and continue the others in the next step."""

    resumes = True

    def take(self, state: State) -> list[int] | None:
        """Keep what has not finished."""
        return Policy.take(self, state)


@dataclass(frozen=True)
class Result:
    """What became of the prompts under a policy."""

    trained: np.ndarray  # positions
    ages: np.ndarray  # of those, in steps
    drawn: int
    lost: Counter[str]
    busy: float
    """Share of the slots' time that went into tokens that were trained."""


def simulate(policy: Policy, prompts: Prompts, schedule: Schedule) -> Result:
    """Run the stream of prompts through a policy, until it ends. An update takes as long as the slots need for the
    tokens of a batch, on average."""
    state, lengths = State(prompts, schedule), prompts.lengths
    update, count = BATCH * float(lengths.mean()) / SLOTS, len(lengths)
    ends: list[tuple[float, int]] = []  # time, prompt
    left = dict[int, float]()  # tokens that ended prompts still need
    again = deque[int]()
    trained, ages, useful = list[int](), list[int](), 0
    now, updated = 0.0, -1.0  # updated: when the update that runs ends; -1: none runs
    while True:
        is_open = not (policy.interrupts and updated >= 0)
        while is_open and len(state.begun) < SLOTS:
            if again:
                prompt = again.popleft()
            elif state.drawn < count and policy.admits(state):
                prompt = state.drawn
                state.begun[prompt], state.drawn = state.version, state.drawn + 1
            else:
                break
            heapq.heappush(ends, (now + left.pop(prompt, lengths[prompt]), prompt))
        if updated < 0 and (batch := policy.take(state)) is not None:
            trained += batch
            ages += [state.step - state.ready.pop(prompt) for prompt in batch]
            useful += int(lengths[batch].sum())
            state.step, updated = state.step + 1, now + update
            if policy.interrupts:
                rest = {prompt: end - now for end, prompt in ends if prompt in state.begun}
                ends.clear()
                if policy.resumes:
                    left |= rest
                    again.extend(sorted(rest))
        if updated >= 0 and (not ends or updated <= ends[0][0]):
            now, updated = updated, -1.0
            state.version += 1
        elif ends:
            now, prompt = heapq.heappop(ends)
            if prompt in state.begun:
                state.ready[prompt] = state.begun.pop(prompt)
                policy.finished(state, prompt)
        else:
            break
    in_flight = len(state.begun) + len(state.ready)  # less than the last batch needs
    drawn = state.drawn - in_flight
    return Result(np.array(trained), np.array(ages), drawn, state.lost, useful / max(now * SLOTS, 1.0))


def policies(schedule: Schedule) -> dict[str, Policy]:
    """Return every policy by its name."""
    return {
        "wait": Wait(schedule),
        "dynamic sampling": DynamicSampling(schedule),
        "drop over-age": DropOverAge(),
        "admission by batch": AdmissionByBatch(),
        "filter after the fact": FilterAfterwards(),
        "over-rollout": OverRollout(),
        "skip and resume": SkipAndResume(),
    }


def row(name: str, result: Result, prompts: Prompts) -> list[str]:
    """Return the cells of a policy in the table."""
    kept, drawn = prompts.lengths[result.trained], prompts.lengths
    assert len(result.trained) + result.lost.total() == result.drawn, "every prompt is accounted for"
    lost = ", ".join(f"{number / result.drawn:.1%} {reason}" for reason, number in result.lost.items()) or "none"
    return [
        name, lost, f"{kept.mean() / drawn.mean() - 1:+.1%}", f"{distance(drawn, kept):.3f}",
        f"{distance(prompts.difficulty, prompts.difficulty[result.trained]):.3f}", f"{result.ages.max()}",
        f"{(result.ages > STALENESS).mean():.1%}", f"{result.busy:.0%}",
    ]  # fmt: skip


COLUMNS = (
    "policy", "lost", "mean length", "KS length", "KS difficulty", "oldest", "too old", "slots' time trained",
)  # fmt: skip


def _trained_shares(results: Mapping[str, Result], prompts: Prompts) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return for each policy which share of the prompts of each length is trained, by quantile of the length."""
    edges = np.quantile(prompts.lengths, np.linspace(0, 1, 41))
    of_all, _ = np.histogram(prompts.lengths, edges)
    middles = (np.arange(len(of_all)) + 0.5) / len(of_all)
    return {
        name: (middles, np.histogram(prompts.lengths[result.trained], edges)[0] / of_all)
        for name, result in results.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate every policy; return the exit code."""
    parser = parser_of("tools.experience.policies", __doc__)
    parser.add_argument("--prompts", type=integer(least=10 * BATCH), default=1_000_000, metavar="N")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw which lengths are trained")
    given = parser.parse_args(argv)
    prompts = Prompts.make(given.prompts)
    schedule = Schedule(num_prompts=given.prompts, batch_size=BATCH, total_epochs=2)
    results = {name: simulate(policy, prompts, schedule) for name, policy in policies(schedule).items()}
    table = Table(*COLUMNS, title=f"{given.prompts:,} prompts, {BATCH} a step, at most {STALENESS} steps old")
    for name, result in results.items():
        table.add_row(*row(name, result, prompts))
    Console().print(table)
    if given.picture is not None:
        draw(given.picture, {"trained, by quantile of the length": _trained_shares(results, prompts)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
