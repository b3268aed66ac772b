"""Losses and advantages compared with golden numbers, and gradients with finite differences.

Numbers of the literature are in closed form. Those of other projects (peers.json) are of random cases, on which the
functions of trl 1.16.0, verl 0.9.1, trinity-rft 0.6.0 and openrlhf 0.11.2 gave the same to 1e-6 on 2026-11-23; where
one of them deviates, the file has both numbers at the largest difference. A loss that holds a factor fixed (a ratio in
cispo, topr and tv, p (1 - p) in chord) is not the integral of its gradient; there the finite differences are those of
the integral, in closed form.
"""

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from core.config.presets import PRESETS
from helpers.golden_cases import CASES, SEEDS, Case, Result, make_batch, one_token, ours, to_case
from tools.loss.compute import Case as LossCase
from tools.loss.compute import Result as LossResult
from tools.loss.compute import compute

PEERS = json.loads(Path(__file__).with_name("peers.json").read_text())
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
ADVANTAGES: Sequence[tuple[str, dict[str, object], list[float]]] = (
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
TURNS: Sequence[tuple[str, dict[str, object], list[list[float]]]] = (
    ("grpo", {"credit": "turn_rewards", "advantage_std": "none"}, [[0.5, 0.5, 0, 0.25], [-0.5, 0, 0.25, 0.25]]),
    (
        "grpo",
        {"credit": "step_groups", "advantage_std": "none", "turn_weight": 2.0, "turn_discount": 0.5},
        [[1.5, 1.5, 0, 0.5], [-1.5, 0, -0.5, -0.5]],
    ),
    (
        "ppo",
        {"credit": "turn_gae", "ppo.discount": 0.9, "ppo.gae_lambda": 0.8},
        [[1.256, 1.256, 0, 0.8], [0.492, 0, 0.6, 0.6]],
    ),
)
"""Advantages of the tokens of the conversations in turns()."""
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
        rows: Sequence[tuple[str, Mapping[str, object], float | None, float, float]] = (
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
            assert isinstance(a, float), "all tokens of an answer have one advantage"
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


def turns() -> Iterator[Golden]:
    """Compute what turns are credited with: two conversations of two turns, the first of A and the second of B of two
    tokens."""
    sequences = [
        {"mask": [1, 1, 0, 1], "reward": 2.0, "turn_rewards": [1.0, 0.0], "values": [0.5, 0.1, 0.0, 0.2]},
        {"mask": [1, 0, 1, 1], "reward": 1.0, "turn_rewards": [0.0, 1.0], "values": [0.3, 0.0, 0.4, 0.6]},
    ]
    for name, settings, expected in TURNS:
        case = [{"logprobs": [-1.0] * 4, "group": 0, "turn_states": [0, 1], **s} for s in sequences]
        found = compute({"algorithm": name, "settings": settings, "sequences": case})["advantages"]
        for i, (row, numbers) in enumerate(zip(found, expected, strict=True)):
            assert isinstance(row, list), "tokens of an answer have different advantages"
            for t, (a, b) in enumerate(zip(row, numbers, strict=True)):
                yield Golden(f"advantage {i}, {t} of {settings['credit']}", a, b, 1e-9)


GOLDEN: Mapping[str, Callable[[], Iterator[Golden]]] = {
    "tokens": tokens,
    "advantages": advantages,
    "turns": turns,
    "divergence": divergence,
    "peers": peers,
    "deviations": deviations,
}


STEP = 1e-6
TOLERANCE = 1e-7
FIELDS = frozenset({"old_logprobs", "rollout_logprobs", "ref_logprobs", "values"})

GRADIENT_CASES: Mapping[str, Mapping[str, object]] = {
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


def _case(name: str) -> LossCase:
    chosen, batch = GRADIENT_CASES[name], make_batch("usual", 1)
    if name in PAIRS:
        pairs = replace(batch, group=[i // 2 for i in range(len(batch.lens))])
        return to_case(pairs, "dpo", chosen, frozenset({"ref_logprobs"}))
    settings = chosen if "correction" in chosen else {"correction": "none", **chosen}
    return to_case(batch, name, settings, FIELDS if name == "ppo" else FIELDS - {"values"})


def difference(name: str, case: LossCase, num_directions: int) -> float:
    """Return the largest difference between a gradient and finite differences, along random directions."""
    out, rng, worst = compute(case), random.Random(0), 0.0
    assert any(g for row in out["grads"] for g in row), "a loss without gradients proves nothing"
    for _ in range(num_directions):
        direction = [[rng.gauss(0.0, 1.0) for _ in row] for row in out["grads"]]
        both = zip(out["grads"], direction, strict=True)
        slope = sum(g * d for grads, row in both for g, d in zip(grads, row, strict=True))
        ahead, behind = (_moved(name, case, out, direction, step) for step in (STEP, -STEP))
        worst = max(worst, abs(slope - (ahead - behind) / (2 * STEP)))
    return worst


def _moved(name: str, case: LossCase, out: LossResult, direction: Sequence[Sequence[float]], step: float) -> float:
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
        assert isinstance(advantage, float), "all tokens of an answer have one advantage"
        for start, logprob, old, weight in zip(
            before["logprobs"], after["logprobs"], before["old_logprobs"], weights, strict=True
        ):
            change = math.exp(start) - math.exp(old)  # the trust region of tv holds this fixed
            of_rollout = INTEGRALS[name](advantage, math.exp(logprob - old), change)
            total += weight * (_demonstrated(logprob) if before.get("demonstration") else of_rollout)
    return total


@pytest.mark.parametrize("family", GOLDEN)
def test_the_code_gives_the_golden_numbers(family: str) -> None:
    numbers = list(GOLDEN[family]())
    assert len(numbers) >= 19
    assert [number for number in numbers if not number.holds] == []


def test_gradients_of_every_preset_and_of_preferences_are_checked() -> None:
    assert GRADIENT_CASES.keys() == PRESETS.keys() | {"dpo", "ipo"}


@pytest.mark.parametrize("name", GRADIENT_CASES)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    assert difference(name, _case(name), num_directions=2) <= TOLERANCE


def test_a_peer_deviates_by_more_than_the_tolerance() -> None:
    assert all(abs(row["peer_value"] - row["own_value"]) > 1e-6 for row in PEERS["deviations"])


def test_cases_and_their_golden_numbers_belong_together() -> None:
    assert [case.name for case in CASES] == list(PEERS["rows"])
