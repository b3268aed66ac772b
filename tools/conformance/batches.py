"""Random cases that every side computes: sequences of unequal lengths in groups of four, padded to [B, T]."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

GROUP_SIZE = 4
NUM_GROUPS = 2
SEEDS = (1, 2, 3)
LONGEST = 7
NUM_DEMONSTRATIONS = GROUP_SIZE
"""The last sequences of a batch, for algorithms that mix demonstrations and rollouts."""
KINDS = ("usual", "all_trained", "one_masked", "no_advantages")
"""usual: some tokens in between are not trained; all_trained: all are; one_masked: a whole sequence is not trained;
no_advantages: as usual, and all advantages are 0."""

Batch = Mapping[str, Any]


def make_batch(kind: str, seed: int) -> Batch:
    """Draw lists [B, T] of log-probabilities, values, advantages and the mask, and lists [B] of lens, rewards, group.

    Ratios reach from about 0.1 to 10, on both sides of every bound; padding is 0 everywhere."""
    rng = random.Random(seed)
    lens = [LONGEST, *(rng.randint(2, LONGEST) for _ in range(GROUP_SIZE * NUM_GROUPS - 1))]
    rows: dict[str, list[list[float]]] = {}

    def fill(name: str, values: list[list[float]]) -> None:
        rows[name] = [row + [0.0] * (LONGEST - len(row)) for row in values]

    def near(values: list[list[float]], spread: float) -> list[list[float]]:
        return [[min(x + rng.gauss(0.0, spread), -0.01) for x in row] for row in values]

    rollout = [[-0.2 - 2.5 * rng.random() for _ in range(n)] for n in lens]
    old = near(rollout, 0.5)
    fill("rollout_logprobs", rollout)
    fill("old_logprobs", old)
    fill("logprobs", near(old, 0.8))
    fill("ref_logprobs", near(old, 0.5))
    fill("values", [[rng.gauss(0.0, 1.0) for _ in range(n)] for n in lens])
    fill("mask", [[1.0] * n for n in lens])
    if kind in ("usual", "no_advantages"):
        for row, n in zip(rows["mask"], lens, strict=True):
            row[rng.randrange(n - 1)] = 0.0  # never the last token, which carries the reward
    if kind == "one_masked":
        rows["mask"][3] = [0.0] * LONGEST
    advantages = [0.0 if kind == "no_advantages" else rng.gauss(0.0, 1.5) for _ in lens]
    rows["advantages"] = [[a * m for m in row] for a, row in zip(advantages, rows["mask"], strict=True)]
    rewards = [round(rng.random() + i % 2, 3) for i in range(len(lens))]
    return {**rows, "lens": lens, "rewards": rewards, "group": [i // GROUP_SIZE for i in range(len(lens))]}


def to_case(batch: Batch, algorithm: str, settings: Mapping[str, Any], fields: frozenset[str]) -> dict[str, Any]:
    """Turn a batch into the input of `python -m tools.loss`, with these lists of each token and no others."""
    sequences = []
    for i, n in enumerate(batch["lens"]):
        sequence = {name: batch[name][i][:n] for name in ("logprobs", "mask", *sorted(fields - {"advantages"}))}
        if "advantages" in fields:
            sequence["advantage"] = batch["advantages"][i][:n]
        if algorithm in ("mix", "chord") and i >= len(batch["lens"]) - NUM_DEMONSTRATIONS:
            sequence["demonstration"] = True
        sequences.append({**sequence, "reward": batch["rewards"][i], "group": batch["group"][i]})
    return {"algorithm": algorithm, "settings": dict(settings), "sequences": sequences}
