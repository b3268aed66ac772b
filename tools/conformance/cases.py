"""The cases that were compared with the functions of other projects, and what the code that trains makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from core.algorithms.dpo import DPO
from mcore_adapter.data.batch import PAIR, PackedBatch, sequence_of_token
from mcore_adapter.data.sequences import Sequences
from mcore_adapter.data.weights import weigh_tokens
from mcore_adapter.models.forward import ModelOutput
from tools.conformance.batches import LONGEST, Batch, to_case
from tools.loss.result import compute

Quantity = Literal["advantages", "loss", "weights", "preferences"]
Result = dict[str, Tensor]
NEEDS: Mapping[Quantity, frozenset[str]] = {
    "advantages": frozenset(),
    "loss": frozenset({"old_logprobs", "advantages"}),
    "weights": frozenset({"old_logprobs", "rollout_logprobs", "advantages"}),
}
"""Fields that a case of `python -m tools.loss` needs; preferences are computed by the objective itself."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the matrix in docs/algorithms.md."""

    name: str
    quantity: Quantity
    algorithm: str
    settings: Mapping[str, Any]
    kind: str = "usual"
    fields: frozenset[str] = frozenset()
    """Lists of each token that the case has besides those of its quantity."""


def advantages(name: str, algorithm: str, settings: Mapping[str, Any], **more: Any) -> Case:
    return Case(name=name, quantity="advantages", algorithm=algorithm, settings=settings, **more)


def loss(name: str, algorithm: str, settings: Mapping[str, Any], **more: Any) -> Case:
    settings = {"correction": "none", **settings}
    return Case(name=name, quantity="loss", algorithm=algorithm, settings=settings, **more)


def weights(name: str, settings: Mapping[str, Any]) -> Case:
    return Case(name=name, quantity="weights", algorithm="rloo", settings=settings)


def preferences(name: str, settings: Mapping[str, Any]) -> Case:
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
    preferences("ipo, beta 0.1", {"kind": "ipo"}),
)


def ours(case: Case, batch: Batch) -> Result:
    """Compute a case with the code that trains. Values of tokens are [B, T]."""
    if case.quantity == "preferences":
        return compare_pairs(DPO(**case.settings), batch)
    out = compute(to_case(batch, case.algorithm, case.settings, NEEDS[case.quantity] | case.fields))
    if case.quantity == "loss":
        return {"loss": torch.tensor(out["loss"], dtype=torch.float64), "grads": padded(out["grads"], batch)}
    if case.quantity == "weights":
        return {"weights": padded(out["weights"], batch)}
    rows = [a if isinstance(a, list) else [a] * n for a, n in zip(out["advantages"], batch["lens"], strict=True)]
    return {"advantages": padded(rows, batch)}


def compare_pairs(objective: DPO, batch: Batch) -> Result:
    """Compute the loss of pairs: sequences 0, 2, ... are chosen, each over the one behind it. All tokens are
    trained."""
    lens = torch.tensor([n + 1 for n in batch["lens"]])  # each behind one prompt token
    mask = torch.ones(int(lens.sum()), dtype=torch.bool)
    mask[lens.cumsum(0) - lens] = False

    def flat(name: str) -> Tensor:
        return torch.cat([torch.tensor([0.0, *batch[name][i][:n]]).double() for i, n in enumerate(batch["lens"])])

    numbers = torch.tensor([(i // 2 + 1) * (-1 if i % 2 else 1) for i in range(len(lens))])
    packed = PackedBatch(
        token_ids=torch.zeros(len(mask), dtype=torch.long),
        cu_seqlens=torch.cat((lens.new_zeros(1), lens.cumsum(0))),
        loss_mask=mask,
        fields={PAIR: numbers.repeat_interleave(lens), "ref_logprobs": flat("ref_logprobs")},
    )
    weighed, divisors = weigh_tokens(packed, objective.token_weights)
    logprobs = flat("logprobs").requires_grad_()
    sequences = Sequences(of_token=sequence_of_token(lens), count=len(lens))
    loss, _ = objective.loss(ModelOutput(logprobs=logprobs), {**weighed.fields, "loss_mask": mask}, sequences)
    loss = loss / divisors.loss
    (grad,) = torch.autograd.grad(loss, logprobs)
    rows = [row[1:].tolist() for row in grad.split(lens.tolist())]
    return {"loss": loss.detach(), "grads": padded(rows, batch)}


def padded(rows: list[list[float]], batch: Batch) -> Tensor:
    """Pad to [B, T], 0 where the batch is not trained."""
    mask = torch.tensor(batch["mask"], dtype=torch.float64)
    out = torch.zeros_like(mask)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
    return out * mask
