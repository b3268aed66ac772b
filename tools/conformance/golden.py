"""Golden numbers of the literature and of other projects, and where the code that trains misses one.

Numbers of the literature are in closed form. Those of other projects (peers.json) are of random cases, on which the
functions of trl 1.16.0, verl 0.9.1, trinity-rft 0.6.0 and openrlhf 0.11.2 gave the same to 1e-6 on 2026-11-23; where
one of them deviates, the file has both numbers at the largest difference.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tools.conformance.cases import CASES, SEEDS, Case, Result, make_batch, ours
from tools.loss.compute import compute

PEERS = json.loads(Path(__file__).with_name("peers.json").read_text())
P_OLD = 0.3
CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
CISPO = {"clip_low": 1.0, "clip_high": 4.0}
TV = {"loss": "tv", "clip_low": 0.2, "clip_high": 0.2, "advantage": "returns"}

TOKENS = (
    # A, r, clip: loss, gradient; cispo: gradient; sapo: loss, gradient; tv: gradient; topr: gradient
    (1, 0.4, -0.4, -0.4, -0.4, -1.4174, -0.3661, -0.4, -1),
    (1, 1.4, -1.28, 0, -1.4, -2.3948, -1.3455, -1.4, -1),
    (1, 3.2, -1.28, 0, -3.2, -3.6010, -1.1494, 0, -1),
    (-1, 0.4, 0.8, 0, 0.4, 1.3238, 0.3628, 0.4, 0.4),
    (-1, 1.4, 1.4, 1.4, 1.4, 2.2990, 1.3400, 1.4, 1),
    (-1, 3.2, 3.0, 0, 3.2, 3.4655, 1.0514, 3.2, 1),
)
"""Losses and gradients of a token whose old probability is 0.3."""
ADVANTAGES: Sequence[tuple[str, dict[str, Any], list[float]]] = (
    ("grpo", {}, [1.5, -0.5, -0.5, -0.5]),
    ("grpo", {"advantage_std": "batch"}, [1.5, -0.5, -0.5, -0.5]),
    ("grpo", {"advantage_std": "none"}, [0.75, -0.25, -0.25, -0.25]),
    ("dr_grpo", {}, [0.75, -0.25, -0.25, -0.25]),
    ("gspo", {}, [1.5, -0.5, -0.5, -0.5]),
    ("rloo", {}, [1, -1 / 3, -1 / 3, -1 / 3]),
    ("opmd", {}, [0.75, -0.25, -0.25, -0.25]),
    ("opmd_logavgexp", {}, [1 - 0.35737, -0.35737, -0.35737, -0.35737]),
    ("maxrl", {}, [3, -1, -1, -1]),
    ("reinforce_pp", {}, [1.5, -0.5, -0.5, -0.5]),
    ("reinforce_pp_baseline", {}, [1.5, -0.5, -0.5, -0.5]),
)
"""Advantages of four completions with the rewards 1, 0, 0, 0."""
KL = (
    ("k1", "own", 1.0, 1.0),
    ("k2", "own", 0.5, 1.0),
    ("k3", "own", 0.3679, 0.6321),
    ("low_var", "own", 0.3679, 0.6321),
    ("k1", "k2", 1.0, 1.0),
    ("k3", "k2", 0.3679, 1.0),
    ("k3", "ratio", 0.3679, 1.0),  # k3 + its derivative, at a ratio of 1
    ("k1", "ratio", 1.0, 2.0),
)
"""Estimator, kl_gradient, value and gradient where log pi - log pi_ref is 1."""


@dataclass(frozen=True)
class Golden:
    """A number that the code must give."""

    name: str
    found: float
    expected: float
    tolerance: float

    @property
    def holds(self) -> bool:
        return abs(self.found - self.expected) <= self.tolerance


def tokens() -> Iterator[Golden]:
    """Compute loss and gradient of single tokens."""
    for advantage, ratio, clip, clip_grad, cispo, sapo, sapo_grad, tv, topr in TOKENS:
        rows: Sequence[tuple[str, dict[str, Any], float | None, float, float]] = (
            ("dapo", CLIP, clip, clip_grad, 1e-9),
            ("cispo", CISPO, None, cispo, 1e-6),
            ("sapo", {}, sapo, sapo_grad, 5e-5),
            ("ppo", TV, None, tv, 1e-9),
            ("topr", {}, None, topr, 1e-6),
        )
        for name, settings, loss, grad, tolerance in rows:
            found_loss, found_grad = one_token(name, advantage, ratio, settings)
            label = f"{name}{' tv' if settings is TV else ''} at A = {advantage}, r = {ratio}"
            if loss is not None:
                yield Golden(f"loss of {label}", found_loss, loss, tolerance)
            yield Golden(f"gradient of {label}", found_grad, grad, tolerance)


def advantages() -> Iterator[Golden]:
    """Compute the advantages of one success in four."""
    for name, settings, expected in ADVANTAGES:
        sequences = [{"logprobs": [-1.0], "reward": reward, "group": 0} for reward in (1, 0, 0, 0)]
        found = compute({"algorithm": name, "settings": settings, "sequences": sequences})["advantages"]
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            yield Golden(f"advantage {i} of {name} {settings or ''}", a, b, 1e-5)


def divergence() -> Iterator[Golden]:
    """Compute value and gradient of the KL divergence in the loss."""
    for estimator, gradient, value, grad in KL:
        settings = {"ppo.kl_ctl": 1.0, "kl_in": "loss", "kl_estimator": estimator, "kl_gradient": gradient}
        sequences = [{"logprobs": [-1.0], "ref_logprobs": [-2.0], "reward": 1.0, "group": 0}] * 2
        out = compute({"algorithm": "rloo", "settings": {"correction": "none", **settings}, "sequences": sequences})
        yield Golden(f"{estimator} with the gradient {gradient}", out["loss"], value, 5e-5)
        yield Golden(f"ref_kl of {estimator}", out["metrics"]["ref_kl"], value, 5e-5)
        yield Golden(f"gradient of {estimator} with {gradient}", 2 * out["grads"][0][0], grad, 5e-5)


def one_token(name: str, advantage: float, ratio: float, settings: dict[str, Any]) -> tuple[float, float]:
    """Return loss and gradient for one token of probability 0.3 * ratio whose old probability was 0.3."""
    old = math.log(P_OLD)
    given = {"logprobs": [old + math.log(ratio)], "old_logprobs": [old], "advantage": advantage, "reward": 0.0}
    sequences = [{**given, "group": 0}] * 2
    out = compute({"algorithm": name, "settings": {"correction": "none", **settings}, "sequences": sequences})
    return out["loss"], 2 * out["grads"][0][0]  # each of the two tokens weighs 1/2


def peers() -> Iterator[Golden]:
    """Compute the cases on which other projects agree."""
    for case in CASES:
        for seed, expected in zip(SEEDS, PEERS["rows"][case.name], strict=True):
            found = fingerprint(ours(case, make_batch(case.kind, seed)))
            for i, (a, b) in enumerate(zip(found, expected, strict=True)):
                yield Golden(f"{case.name}, seed {seed}, number {i}", a, b, 1e-7 * max(1.0, abs(b)))


def fingerprint(result: Result) -> list[float]:
    """Return the loss, where there is one, the sum of the values of tokens, and the sum weighted by their place."""
    loss = [float(result["loss"])] if "loss" in result else []
    (values,) = (value for name, value in result.items() if name != "loss")
    places = torch.arange(1, values.numel() + 1, dtype=values.dtype).view_as(values)
    return [*loss, float(values.sum()), float((values * places).sum())]


def deviations() -> Iterator[Golden]:
    """Compute the numbers from which a peer deviates the most."""
    cases: Mapping[str, Case] = {case.name: case for case in CASES}
    for row in PEERS["deviations"]:
        case = cases[row["row"]]
        found = ours(case, make_batch(case.kind, row["seed"]))[row["number"]].flatten()[row["index"]]
        label = f"{case.name}, where {row['peer']} gives {row['peer_value']}: {row['text']}"
        yield Golden(label, float(found), row["own_value"], 1e-7)


GOLDEN: Mapping[str, Callable[[], Iterator[Golden]]] = {
    "tokens": tokens,
    "advantages": advantages,
    "divergence": divergence,
    "peers": peers,
    "deviations": deviations,
}
