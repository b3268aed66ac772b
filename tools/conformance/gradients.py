"""Gradients of every preset, and of preferences, against finite differences.

A loss that holds a factor fixed (a ratio in cispo, topr and tv, p (1 - p) in chord) is not the integral of its
gradient; there the differences are those of the integral, written down here in closed form.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.conformance.cases import make_batch, to_case
from tools.loss.compute import compute

STEP = 1e-6
TOLERANCE = 1e-7
FIELDS = frozenset({"old_logprobs", "rollout_logprobs", "ref_logprobs", "values"})

CASES: Mapping[str, Mapping[str, object]] = {
    "ppo": {"dual_clip": 1.5},
    "grpo": {},
    "dr_grpo": {},
    "dapo": {},
    "gspo": {"clip_low": 0.2, "clip_high": 0.28},
    "cispo": {"clip_low": 1.0, "clip_high": 1.0},
    "sapo": {},
    "topr": {},
    "rloo": {"loss": "tv", "ratio_cap": 2.0},
    "reinforce_pp": {"ppo.kl_ctl": 0.1, "kl_in": "both", "kl_gradient": "ratio", "kl_loss_coeff": 0.5},
    "reinforce_pp_baseline": {
        "correction": "mis",
        "correction_level": "geometric",
        "correction_min": 0.8,
        "correction_max": 1.2,
    },
    "opmd": {},
    "opmd_kimi": {"opmd_tau": 2.0},
    "opmd_logavgexp": {"ppo.kl_ctl": 0.1, "kl_in": "loss", "kl_estimator": "low_var"},
    "maxrl": {"correction": "tis", "correction_level": "sequence"},
    "mix": {"demonstration_weight": 0.4},
    "chord": {"demonstration_weight": 0.4},
    "dpo": {"beta": 0.5, "label_smoothing": 0.1},
    "ipo": {"beta": 0.5, "loss": "ipo"},
}
"""Preset -> settings; corrections are off unless the preset or the settings choose one. dpo and ipo: those of pairs."""
PAIRS = ("dpo", "ipo")


def _capped(cap: float) -> Callable[[float], float]:
    """Return the integral of min(r, cap) over log r."""
    return lambda r: r if r < cap else cap * (1.0 + math.log(r / cap))


INTEGRALS: Mapping[str, Callable[[float, float, float], float]] = {
    "cispo": lambda a, r, p: -a * _capped(2.0)(r),
    "topr": lambda a, r, p: -a * (math.log(r) if a > 0 else _capped(1.0)(r)),
    "rloo": lambda a, r, p: -a * _capped(2.0)(r) * ((p <= 0.2) if a > 0 else (p >= -0.2)),
    "chord": lambda a, r, p: max(-a * r, -a * min(max(r, 0.8), 1.2)),
}
"""Functions of advantage, ratio and change of the probability whose derivative is the gradient of a token."""


def _demonstrated(logprob: float) -> float:
    """Return the integral of -p (1 - p) over log p: of a demonstrated token of chord."""
    p = math.exp(logprob)
    return -(p - p * p / 2.0)


@dataclass(frozen=True)
class Gradient:
    """The largest difference between a gradient and finite differences."""

    name: str
    difference: float

    @property
    def holds(self) -> bool:
        return self.difference <= TOLERANCE


def gradients(names: Sequence[str] = tuple(CASES), num_directions: int = 8) -> Iterator[Gradient]:
    """Compare the gradients of a random batch along random directions in the space of its log-probabilities."""
    for name in names:
        yield Gradient(f"{name} {dict(CASES[name]) or ''}", _difference(name, _case(name), num_directions))


def _case(name: str) -> dict[str, Any]:
    chosen, batch = CASES[name], make_batch("usual", 1)
    if name in PAIRS:
        pairs = {**batch, "group": [i // 2 for i in range(len(batch["lens"]))]}
        return to_case(pairs, "dpo", chosen, frozenset({"ref_logprobs"}))
    settings = chosen if "correction" in chosen else {"correction": "none", **chosen}
    return to_case(batch, name, settings, FIELDS if name == "ppo" else FIELDS - {"values"})


def _difference(name: str, case: dict[str, Any], num_directions: int) -> float:
    out, rng, worst = compute(case), random.Random(0), 0.0
    assert any(g for row in out["grads"] for g in row), "a loss without gradients proves nothing"
    for _ in range(num_directions):
        direction = [[rng.gauss(0.0, 1.0) for _ in row] for row in out["grads"]]
        both = zip(out["grads"], direction, strict=True)
        slope = sum(g * d for grads, row in both for g, d in zip(grads, row, strict=True))
        ahead, behind = (_moved(name, case, out, direction, step) for step in (STEP, -STEP))
        worst = max(worst, abs(slope - (ahead - behind) / (2 * STEP)))
    return worst


def _moved(
    name: str, case: dict[str, Any], out: dict[str, Any], direction: Sequence[Sequence[float]], step: float
) -> float:
    """Return the loss, or its integral, with all log-probabilities moved."""
    moved = [
        {**sequence, "logprobs": [x + step * d for x, d in zip(sequence["logprobs"], row, strict=True)]}
        for sequence, row in zip(case["sequences"], direction, strict=True)
    ]
    if name not in INTEGRALS:
        return compute({**case, "sequences": moved})["loss"]
    total = 0.0
    for before, after, advantage, weights in zip(
        case["sequences"], moved, out["advantages"], out["token_weights"], strict=True
    ):
        for start, logprob, old, weight in zip(
            before["logprobs"], after["logprobs"], before["old_logprobs"], weights, strict=True
        ):
            change = math.exp(start) - math.exp(old)  # the trust region of tv holds this fixed
            of_rollout = INTEGRALS[name](advantage, math.exp(logprob - old), change)
            total += weight * (_demonstrated(logprob) if before.get("demonstration") else of_rollout)
    return total
