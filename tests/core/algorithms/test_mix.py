"""Demonstrations beside rollouts: the weight of each in the loss, its course over steps, and where they are dealt."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from core.algorithms.policy_gradient import DEMONSTRATION, PolicyGradient, demonstration_weight
from core.data.rollout_batch import RolloutBatch
from core.data.stored_batch import RankBatch
from core.train.step_batch import BatchRequest, Scoring, StepBatch
from helpers.batches import algorithm, batch_of, settings
from mcore_adapter.data.batch import (
    PAIR,
    ROUTED_EXPERTS,
    ModelOutput,
    PackedBatch,
    Sequences,
    sequence_of_token,
    weigh_tokens,
)

MU = 0.25


def mix(name: str = "mix", **changes: Any) -> PolicyGradient:
    return algorithm(name, **{"demonstration_weight": MU, "max_new_tokens": 10, **changes})


def shown(*lens: int) -> PackedBatch:
    """Demonstrations with a prompt of one token and answers of these lengths."""
    sizes = torch.tensor(lens) + 1
    ends = sizes.cumsum(0)
    mask = torch.ones(int(ends[-1]), dtype=torch.bool)
    mask[ends - sizes] = False
    return PackedBatch(
        token_ids=torch.full((int(ends[-1]),), 7), cu_seqlens=torch.cat((ends.new_zeros(1), ends)), loss_mask=mask
    )


def test_the_weight_rises_to_its_peak_and_falls_to_its_valley() -> None:
    course = settings(demonstration_weight=0.8, demonstration_warmup_steps=4, demonstration_decay_steps=10,
                      demonstration_valley=0.2)  # fmt: skip
    found = [demonstration_weight(step, course) for step in (0, 1, 4, 9, 14, 99)]
    assert found == pytest.approx([0.0, 0.2, 0.8, 0.5, 0.2, 0.2])
    assert demonstration_weight(11, course) == pytest.approx(0.2 + 0.6 * 0.5 * (1 + math.cos(0.7 * math.pi)))
    constant = settings(demonstration_weight=0.1)
    assert [demonstration_weight(step, constant) for step in (0, 5)] == [0.1, 0.1]


def parts(name: str, **changes: Any) -> tuple[float, torch.Tensor, dict[str, float], PackedBatch, torch.Tensor]:
    """Two rollouts of 2 and 3 tokens with advantages 1 and -1, and demonstrations of 4 and 2 tokens."""
    chosen = mix(name, **changes)
    batch, _ = batch_of([1.0, 0.0], lens=[2, 3])
    rollouts = batch.to_packed()
    beside = shown(4, 2)
    lens = torch.cat((rollouts.seq_lens, beside.seq_lens))
    demonstration = torch.arange(4).repeat_interleave(lens) >= 2
    generator = torch.Generator().manual_seed(1)
    own = -torch.rand(len(demonstration), generator=generator).double() - 0.1
    mask = torch.cat((rollouts.loss_mask, beside.loss_mask))
    advantages = torch.tensor([1.0, -1.0, 0.0, 0.0]).repeat_interleave(lens).double()
    packed = PackedBatch(
        token_ids=torch.zeros_like(advantages, dtype=torch.int64),
        cu_seqlens=torch.cat((lens.new_zeros(1), lens.cumsum(0))),
        loss_mask=mask,
        fields={
            DEMONSTRATION: demonstration, "advantages": advantages,
            # What no policy sampled has no meaning here: it must not be read.
            **dict.fromkeys(("old_logprobs", "rollout_logprobs"), torch.where(demonstration, torch.nan, own)),
        },
    )  # fmt: skip
    weighed, divisors = weigh_tokens(packed, chosen.token_weights)
    logprobs = own.clone().requires_grad_()
    sequences = Sequences(of_token=sequence_of_token(lens), count=4)
    loss, metrics = chosen.loss(ModelOutput(logprobs=logprobs), {**weighed.fields, "loss_mask": mask}, sequences)
    (loss / divisors.loss).backward()
    assert logprobs.grad is not None
    means = {k: v.item() / divisors.metrics for k, v in metrics.items()}
    return loss.item() / divisors.loss, logprobs.grad, means, packed, own


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_mix_is_the_weighted_sum_of_policy_loss_and_negative_log_likelihood(aggregation: str) -> None:
    loss, grad, metrics, packed, own = parts("mix", aggregation=aggregation)
    mask, demonstration = packed.loss_mask, packed.fields[DEMONSTRATION]
    nll = -own[mask & demonstration].mean().item()
    policy = -(2 * 1.0 - 3 * 1.0) / 5 if aggregation == "token_mean" else 0.0
    assert loss == pytest.approx((1 - MU) * policy + MU * nll, abs=1e-6)
    assert metrics["actor_loss"] == pytest.approx(policy, abs=1e-6), "a mean over rollouts alone"
    assert metrics["demonstration_nll"] == pytest.approx(nll, abs=1e-6)
    assert metrics["importance_weight"] == pytest.approx(1.0, abs=1e-6)
    expected = torch.zeros_like(own)
    expected[mask & demonstration] = -MU / 6
    each = (5, 5) if aggregation == "token_mean" else (4, 6)
    expected[1:3], expected[4:7] = -(1 - MU) / each[0], (1 - MU) / each[1]
    assert torch.allclose(grad, expected, atol=1e-6)


def test_chord_weighs_demonstrated_tokens_by_p_times_1_minus_p_without_a_gradient_through_it() -> None:
    loss, grad, metrics, packed, own = parts("chord")
    chosen = packed.loss_mask & packed.fields[DEMONSTRATION]
    p = own[chosen].exp()
    assert torch.allclose(grad[chosen], -MU / 6 * p * (1 - p), atol=1e-6)
    assert loss == pytest.approx((1 - MU) * 0.2 - MU * (p * (1 - p) * own[chosen]).mean().item(), abs=1e-6)
    assert metrics["demonstration_nll"] == pytest.approx(-own[chosen].mean().item(), abs=1e-6)


def pairs(*lens: int) -> PackedBatch:
    """Pairs of answers of these lengths, each behind a prompt of one token; the first of a pair is the chosen one."""
    packed = shown(*lens)
    signed = torch.tensor([sign * (i + 1) for i in range(len(lens) // 2) for sign in (1, -1)])
    return packed.with_fields(**{PAIR: signed.repeat_interleave(packed.seq_lens)})


def test_pairs_have_the_loss_of_dpo_in_their_share_and_stay_together() -> None:
    chosen = mix(demonstration_loss="dpo", demonstration_beta=0.5)
    assert "ref_logprobs" in chosen.passes
    batch = replace(rollouts(), demonstrations=pairs(4, 2, 3, 5))
    request = BatchRequest(unit=chosen.unit, num_minibatches=2, seed=3, version=0, uses=[])
    step = StepBatch(batch, request, put=lambda arrays: arrays)
    num_tokens = int(step.stored.shape.seq_lens.sum())
    ref = -torch.rand(num_tokens, generator=torch.Generator().manual_seed(1)) - 0.1
    results = {"ref_logprobs": [(np.arange(step.stored.shape.num_sequences), ref.numpy())]}
    fields, _ = step.score(Scoring(algorithm=chosen, objectives={"actor": chosen}), results)
    held = RankBatch(step.stored, ("g", 0), lambda refs: list(refs))
    held.add_fields(fields)
    assert sorted(i for part in step.stored.minibatches for i in part) == list(range(12))
    units = step.stored.shape.units
    assert units is not None and units[8] == units[9] != units[10] == units[11] and len(set(units[:8].tolist())) == 8
    for index, part in enumerate(step.stored.minibatches):
        assert {i ^ 1 for i in part} == set(part), "groups and pairs stay whole"
        shard = held.minibatch(index, "actor", replay_routing=False)
        found = shard.select(range(len(part)))
        lens, sequences = found.seq_lens, Sequences(of_token=sequence_of_token(found.seq_lens), count=len(part))
        logprobs = (found.fields["ref_logprobs"].double() + 0.3 * (found.fields[PAIR] > 0)).requires_grad_()
        loss, metrics = chosen.loss(
            ModelOutput(logprobs=logprobs), {**found.fields, "loss_mask": found.loss_mask}, sequences
        )
        (loss / shard.divisors.loss).backward()
        first = part.index(next(i for i in part if i >= 8))
        margin = 0.5 * 0.3 * (int(lens[first]) - 1)
        assert float(metrics["demonstration_margin"]) / shard.divisors.metrics == pytest.approx(margin, abs=1e-6)
        slope = MU * 0.5 / (1 + math.exp(margin))
        grads = logprobs.grad.split(lens.tolist())  # type: ignore[union-attr]
        assert torch.allclose(grads[first][1:], torch.full_like(grads[first][1:], -slope), atol=1e-6)
        assert torch.allclose(grads[first + 1][1:], torch.full_like(grads[first + 1][1:], slope), atol=1e-6)


def rollouts() -> RolloutBatch:
    return batch_of([1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0])[0]


def score(chosen: PolicyGradient, demonstrations: PackedBatch | None) -> tuple[StepBatch, RankBatch, dict[str, float]]:
    batch = replace(rollouts(), demonstrations=demonstrations)
    request = BatchRequest(unit=chosen.unit, num_minibatches=2, seed=3, version=0, uses=[])
    step = StepBatch(batch, request, put=lambda arrays: arrays)
    fields, scored = step.score(Scoring(algorithm=chosen, objectives={"actor": chosen}), {})
    held = RankBatch(step.stored, ("g", 0), lambda refs: list(refs))
    held.add_fields(fields)
    return step, held, scored.metrics


def test_every_minibatch_has_rollouts_and_demonstrations_in_their_shares() -> None:
    step, held, metrics = score(mix(), shown(4, 2, 3, 3, 5))
    assert metrics["demonstration_weight"] == MU and step.facts().metrics["n_demonstrations"] == 5
    assert step.facts().metrics["n_seqs"] == 8 and step.facts().metrics["avg_seq_len"] == 3
    dealt = step.stored.minibatches
    assert sorted(i for part in dealt for i in part) == list(range(13))
    assert sorted(sum(i >= 8 for i in part) for part in dealt) == [2, 3]
    for index, part in enumerate(dealt):
        assert all(i ^ 1 in part for i in part if i < 8), "groups stay whole"
        shard = held.minibatch(index, "actor", replay_routing=False)
        batch = shard.select(range(len(part)))
        demonstration, weights = batch.fields[DEMONSTRATION].bool(), batch.fields["token_weights"]
        assert shard.divisors.loss == pytest.approx(1.0)
        assert weights[demonstration].sum() == pytest.approx(MU)
        assert (batch.token_ids[demonstration] == 7).all() and not (batch.token_ids[~demonstration] == 7).any()
        assert not batch.fields["advantages"][demonstration].any()


def test_the_router_chooses_the_experts_of_demonstrations_and_no_rollout_has_another_ones() -> None:
    known, demonstrations = rollouts(), shown(4, 2, 3)
    experts = 1 + np.arange(len(known.token_ids) * 4, dtype=np.int16).reshape(-1, 2, 2)
    batch = replace(known, demonstrations=demonstrations, routed_experts=experts)
    request = BatchRequest(unit="group", num_minibatches=1, seed=3, version=0, uses=[])
    step = StepBatch(batch, request, put=lambda arrays: arrays)
    held = RankBatch(step.stored, ("g", 0), lambda refs: list(refs)).whole(replay_routing=True)
    replayed = held.select(range(held.shape.num_sequences)).fields[ROUTED_EXPERTS]
    assert torch.equal(replayed[: len(experts)], torch.from_numpy(experts))
    assert (replayed[len(experts) :] == -1).all() and len(replayed) == len(experts) + demonstrations.num_tokens


def test_the_course_of_the_weight_continues_after_a_restart() -> None:
    changes = {"demonstration_warmup_steps": 4}
    first = mix(**changes)
    seen = [score(first, shown(2, 2))[2]["demonstration_weight"] for _ in range(3)]
    again = mix(**changes)
    again.load_state_dict(first.state_dict())
    seen += [score(again, shown(2, 2))[2]["demonstration_weight"] for _ in range(3)]
    assert seen == pytest.approx([0.0, MU / 4, MU / 2, 3 * MU / 4, MU, MU])
    assert np.isfinite(seen).all()
