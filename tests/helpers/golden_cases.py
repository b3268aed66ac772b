"""Cases of losses and advantages for which there are golden numbers, computed by the code that trains."""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypedDict, Unpack

import torch
from torch import Tensor

from tools.loss.compute import Case as LossCase
from tools.loss.compute import compute

GROUP_SIZE = 4
NUM_GROUPS = 2
SEEDS = (1, 2, 3)
LONGEST = 7
NUM_DEMONSTRATIONS = GROUP_SIZE
"""The last sequences of a batch, for algorithms that mix demonstrations and rollouts."""
Kind = Literal["usual", "all_trained", "one_masked", "no_advantages"]
"""usual: some tokens in between are not trained; all_trained: all are; one_masked: a whole sequence is not trained;
no_advantages: as usual, and all advantages are 0."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences with a prompt and an answer each, padded at the end."""

    tokens: Mapping[str, list[list[float]]]
    """Log-probabilities, values, advantages and the mask: [B, T]."""
    lens: list[int]
    rewards: list[float]
    group: list[int]


def make_batch(kind: Kind, seed: int) -> Batch:
    """Draw a batch. Ratios reach from about 0.1 to 10, on both sides of every bound; padding is 0 everywhere."""
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
    return Batch(tokens=rows, lens=lens, rewards=rewards, group=[i // GROUP_SIZE for i in range(len(lens))])


def to_case(batch: Batch, algorithm: str, settings: Mapping[str, object], fields: frozenset[str]) -> LossCase:
    """Turn a batch into the input of `python -m tools.loss`, with these lists of each token and no others."""
    sequences = []
    for i, n in enumerate(batch.lens):
        names = ("logprobs", "mask", *sorted(fields - {"advantages"}))
        sequence: dict[str, object] = {name: batch.tokens[name][i][:n] for name in names}
        if "advantages" in fields:
            sequence["advantage"] = batch.tokens["advantages"][i][:n]
        if algorithm in ("mix", "chord") and i >= len(batch.lens) - NUM_DEMONSTRATIONS:
            sequence["demonstration"] = True
        sequences.append({**sequence, "reward": batch.rewards[i], "group": batch.group[i]})
    return {"algorithm": algorithm, "settings": dict(settings), "sequences": sequences}


Quantity = Literal["advantages", "loss", "weights", "preferences"]
Result = dict[str, Tensor]
NEEDS: Mapping[Quantity, frozenset[str]] = {
    "advantages": frozenset(),
    "loss": frozenset({"old_logprobs", "advantages"}),
    "weights": frozenset({"old_logprobs", "rollout_logprobs", "advantages"}),
    "preferences": frozenset({"ref_logprobs"}),
}
"""Fields that a case of `python -m tools.loss` needs."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the matrix in docs/algorithms.md."""

    name: str
    quantity: Quantity
    algorithm: str
    settings: Mapping[str, object]
    kind: Kind = "usual"
    fields: frozenset[str] = frozenset()
    """Lists of each token that the case has besides those of its quantity."""


class Options(TypedDict, total=False):
    """The last fields of a case."""

    kind: Kind
    fields: frozenset[str]


def advantages(name: str, algorithm: str, settings: Mapping[str, object], **more: Unpack[Options]) -> Case:
    return Case(name=name, quantity="advantages", algorithm=algorithm, settings=settings, **more)


def loss(name: str, algorithm: str, settings: Mapping[str, object], **more: Unpack[Options]) -> Case:
    settings = {"correction": "none", **settings}
    return Case(name=name, quantity="loss", algorithm=algorithm, settings=settings, **more)


def weights(name: str, settings: Mapping[str, object]) -> Case:
    return Case(name=name, quantity="weights", algorithm="rloo", settings=settings)


def preferences(name: str, settings: Mapping[str, object]) -> Case:
    settings = {"beta": 0.1, **settings}
    return Case(name=name, quantity="preferences", algorithm="dpo", settings=settings, kind="all_trained")


def kl(name: str, estimator: str, gradient: str) -> Case:
    settings = {"ppo.kl_ctl": 1.0, "kl_in": "loss", "kl_estimator": estimator, "kl_gradient": gradient}
    return loss(name, "rloo", settings, kind="no_advantages", fields=frozenset({"ref_logprobs"}))


CASES = (
    advantages("grpo: advantage", "grpo", {}),
    advantages("grpo, advantage_std=batch", "grpo", {"advantage_std": "batch"}),
    advantages("dr_grpo: advantage", "dr_grpo", {}),
    advantages(
        "dapo: penalty of overlong answers",
        "dapo",
        {"advantage_std": "none", "overlong_share": 3 / LONGEST, "ppo.gen.max_new_tokens": LONGEST},
        kind="all_trained",
    ),
    advantages("rloo: advantage", "rloo", {}),
    advantages("reinforce_pp: advantage", "reinforce_pp", {"ppo.discount": 0.9}),
    advantages("reinforce_pp_baseline: advantage", "reinforce_pp_baseline", {}),
    advantages("opmd_logavgexp: advantage", "opmd_logavgexp", {"opmd_tau": 0.5}),
    advantages(
        "ppo: GAE, tokens in between not trained",
        "ppo",
        {"ppo.discount": 0.9, "ppo.gae_lambda": 0.8, "ppo.adv_norm": True, "adv_norm_std": "sample"},
        fields=frozenset({"values"}),
    ),
    loss("clip 0.2 / 0.2, token mean", "rloo", {}),
    loss("dapo: clip 0.2 / 0.28, dual_clip=3", "dapo", {"dual_clip": 3.0}),
    loss("aggregation=sequence_mean", "rloo", {"aggregation": "sequence_mean"}),
    loss(
        "aggregation=sequence_mean, one sequence not trained",
        "rloo",
        {"aggregation": "sequence_mean"},
        kind="one_masked",
    ),
    loss("aggregation=sequence_sum", "rloo", {"aggregation": "sequence_sum"}),
    loss("dr_grpo: aggregation=constant 7", "dr_grpo", {"aggregation_constant": 7.0}),
    loss("gspo 0.2 / 0.28", "gspo", {"clip_low": 0.2, "clip_high": 0.28}),
    loss("cispo, largest ratio 5", "cispo", {}),
    loss("cispo, upper bound set to 4", "cispo", {"clip_high": 4.0}),
    loss("sapo", "sapo", {}),
    loss("topr", "topr", {}),
    loss("opmd", "opmd", {"opmd_tau": 2.0}),
    loss("tv 0.2, ratio_cap=3", "rloo", {"loss": "tv", "ratio_cap": 3.0}),
    loss("mix, mu 0.1", "mix", {"dual_clip": 3.0}),
    loss("chord, mu 0.1", "chord", {"dual_clip": 3.0}),
    loss("rloo: loss", "rloo", {}, kind="all_trained"),
    kl("KL in the loss: k1", "k1", "own"),
    kl("KL in the loss: k2", "k2", "own"),
    kl("KL in the loss: k3", "k3", "own"),
    kl("KL in the loss: low_var", "low_var", "own"),
    kl("KL in the loss: k3, kl_gradient=k2", "k3", "k2"),
    kl("KL in the loss: k3, kl_gradient=ratio", "k3", "ratio"),
    weights("tis, token, 0 to 2", {"correction": "tis"}),
    weights("tis, sequence, 0 to 2", {"correction": "tis", "correction_level": "sequence"}),
    weights("icepop 0.5 to 5 (mis, token)", {"correction": "icepop"}),
    weights("mis, sequence, 0 to 3", {"correction": "mis"}),
    weights(
        "mis, geometric, 0.9 to 1.5",
        {"correction": "mis", "correction_level": "geometric", "correction_min": 0.9, "correction_max": 1.5},
    ),
    weights("rejection of tokens, 0.5 to 5", {"correction": "icepop"}),
    weights("opsm 0.1", {"correction": "none", "opsm_threshold": 0.1}),
    preferences("dpo, beta 0.1", {}),
    preferences("dpo, label_smoothing=0.1", {"label_smoothing": 0.1}),
    preferences("ipo, beta 0.1", {"loss": "ipo"}),
)


def ours(case: Case, batch: Batch) -> Result:
    """Compute a case with the code that trains. Values of tokens are [B, T]."""
    if case.quantity == "preferences":  # sequences 0, 2, ... are chosen, each over the one behind it
        count = range(len(batch.lens))
        batch = replace(batch, group=[i // 2 for i in count], rewards=[1.0 - i % 2 for i in count])
    out = compute(to_case(batch, case.algorithm, case.settings, NEEDS[case.quantity] | case.fields))
    if case.quantity in ("loss", "preferences"):
        return {"loss": torch.tensor(out["loss"], dtype=torch.float64), "grads": padded(out["grads"], batch)}
    if case.quantity == "weights":
        return {"weights": padded(out["weights"], batch)}
    rows = [a if isinstance(a, list) else [a] * n for a, n in zip(out["advantages"], batch.lens, strict=True)]
    return {"advantages": padded(rows, batch)}


def padded(rows: list[list[float]], batch: Batch) -> Tensor:
    """Pad to [B, T], 0 where the batch is not trained."""
    mask = torch.tensor(batch.tokens["mask"], dtype=torch.float64)
    out = torch.zeros_like(mask)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
    return out * mask


P_OLD = 0.3


def one_token(name: str, advantage: float, ratio: float, settings: Mapping[str, object]) -> tuple[float, float]:
    """Return loss and gradient for one token of probability 0.3 * ratio whose old probability was 0.3."""
    old = math.log(P_OLD)
    given = {"logprobs": [old + math.log(ratio)], "old_logprobs": [old], "advantage": advantage, "reward": 0.0}
    sequences = [{**given, "group": 0}] * 2
    out = compute({"algorithm": name, "settings": {"correction": "none", **settings}, "sequences": sequences})
    return out["loss"], 2 * out["grads"][0][0]  # each of the two tokens weighs 1/2
