"""Measurements of `python -m tools.bench cpu`: what a durable store and evaluations cost the loop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from rollout.experience import Episode, Experience, MemoryExperience, SQLiteExperience, Tags
from rollout.experience.episode import summary
from rollout.types import PROMPT_VERSION, Trajectory
from tools.bench import Figure, Scene
from tools.bench.cpu import WARM_UP_STEPS, metrics_of, ppo_config, run_ppo, samples_per_second, small_model

_GROUPS, _GROUP_SIZE, _NEW_TOKENS, _PROMPT_TOKENS = 512, 16, 8000, 200
_STEPS, _EVALUATED_EVERY = 40, 4


class _Anything:
    """Admits every episode."""

    def admits(self, num_outstanding: int, *, next_step: int, version: int) -> bool:
        return True


def store(scene: Scene) -> Iterator[Figure]:
    """Yield the rate of the loop with a SQLite store against one in memory, and the time in which a step of 512 prompts
    with 16 answers of 8,000 tokens is stored."""
    model = small_model(scene.folder, "0.8M", hidden_size=128, num_layers=4)
    rates: dict[str, list[float]] = {"memory": [], "sqlite": []}
    for round_, kind in product(range(2), rates):
        path = str(scene.folder / f"loop-{round_}.db") if kind == "sqlite" else ""
        changes = {"experience.store": kind, **({"experience.path": path} if path else {})}
        config = ppo_config(scene, model, new_tokens=64, **changes)
        rates[kind].append(samples_per_second(scene, f"{kind}-{round_}", config, steps=25))
    memory, sqlite = (float(np.mean(of)) for of in rates.values())
    yield Figure("experience.loop_samples_per_second_sqlite", sqlite, "samples/s", memory, ">= 0.97x")
    in_memory = _seconds_to_put(MemoryExperience())
    durable = SQLiteExperience(scene.folder / "large.db")
    seconds = _seconds_to_put(durable)
    durable.close()
    yield Figure("experience.seconds_to_put_512x16x8000_sqlite", seconds, "s", in_memory)


def _seconds_to_put(made: Experience) -> float:
    """Store the episodes of a step."""
    length = _PROMPT_TOKENS + _NEW_TOKENS
    versions = np.full(length, 3, np.int32)
    versions[:_PROMPT_TOKENS] = PROMPT_VERSION
    rng = np.random.default_rng(0)
    group = [
        Trajectory(
            query_id="q",
            token_ids=rng.integers(0, 150_000, length, dtype=np.int32),
            loss_mask=versions != PROMPT_VERSION,
            rollout_logprobs=-rng.random(length, dtype=np.float32),
            versions=versions,
            reward=float(i % 2),
            finish_reason="length",
        )
        for i in range(_GROUP_SIZE)
    ]
    known, seconds = summary(group), 0.0
    for number in range(_GROUPS):
        id = f"q{number}/0"
        tags = Tags(id=id, group_id=id, task="math", row=id, epoch=0, version=3)
        made.open(tags, _Anything())
        episode = Episode(tags=replace(tags, **known), trajectories=group)
        begin = time.perf_counter()
        made.put(episode)
        seconds += time.perf_counter() - begin
    return seconds


def evaluation(scene: Scene) -> Iterator[Figure]:
    """Yield the median time of a step beside which held-out problems are evaluated against one of a run without
    evaluations, and the longest time for which the trainer has waited for one. Generators sample without computing."""
    model = small_model(scene.folder, "8M", hidden_size=384, num_layers=5)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    waited = 0.0
    for round_, evaluates in product(range(2), (False, True)):
        config = ppo_config(
            scene, model, new_tokens=16, allocation_mode="mock.d2m1p1+d1m1p1", n_gpus_per_node=3,
            **{"generator.mock_seconds_per_token": 0.001, "launch.threads_per_process": 1},
        )  # fmt: skip
        config["exp_ctrl.total_train_steps"] = _STEPS
        if evaluates:
            config |= {"evaluation.path": config["dataset.path"], "evaluation.num_prompts": 256}
            config |= {"exp_ctrl.eval_freq_steps": _EVALUATED_EVERY}
        trial = f"evaluation-{evaluates}-{round_}"
        run_ppo(scene.folder, trial, config)
        rows = [row for row in metrics_of(scene.folder, trial) if "time/step" in row]
        waited = max([waited, *(row.get("time/evaluate", 0.0) for row in rows[:-1])])
        seconds[evaluates] += [row["time/step"] for row in rows[WARM_UP_STEPS:-1]]
    alone, beside = (float(np.median(of)) for of in seconds.values())
    yield Figure("evaluation.step_seconds", beside, "s", alone, "<= 1.03x")
    yield Figure("evaluation.longest_wait", waited, "s", None, "0")
