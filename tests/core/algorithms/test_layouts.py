"""Every kind of term on gloo ranks: the same loss and gradient in every layout, cut into microbatches and order."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from allocation import ParallelLayout
from core.algorithms.base import Objective
from core.algorithms.losses import PROXIMAL_SHARE, SMALL_CHANGE, proximal_share, small_changes
from core.algorithms.offline import DPO, SFT
from core.algorithms.policy_gradient import DEMONSTRATION, PolicyGradient
from core.config.presets import PRESETS
from helpers.batches import algorithm
from helpers.engine_cases import make_engine, random_batch
from helpers.mcore_ranks import Rank, RankPool
from helpers.tiny_models import write_model
from mcore_adapter.data.batch import PAIR, sequence_mean, weigh_tokens

LAYOUTS = {
    "tp2": ParallelLayout(tp=2), "cp2": ParallelLayout(cp=2), "pp2": ParallelLayout(pp=2), "dp2": ParallelLayout(dp=2),
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ratios of sequences, mean over sequences": ("gspo", {"clip_low": 0.02, "clip_high": 0.03}),
    "squares and weights of sequences, constant divisor, KL": (
        "opmd_kimi",
        {
            "correction": "tis", "correction_level": "sequence", "correction_max": 1.5, "correction_veto": 0.7,
            "opsm_threshold": 0.02, "aggregation": "constant", "max_new_tokens": 10, "kl_ctl": 0.1, "kl_in": "loss",
            "kl_gradient": "ratio", "entropy_coeff": 0.01,
        },
    ),
    "pairs of sequences": ("dpo", {"beta": 0.5, "label_smoothing": 0.1}),
    "demonstrations": ("chord", {"demonstration_weight": 0.4, "aggregation": "sequence_mean"}),
    "values": ("critic", {"value_eps_clip": 0.15}),
    "proximal policy by the ages of tokens": (
        "ppo", {"correction": "decoupled", "proximal": "loglinear", "behave_imp_weight_cap": 1.1},
    ),
}  # fmt: skip
"""(name of make_objective, changes). The clip range is so wide that some sequences are clipped and others are not."""
GSPO, SUMS, PAIRS, SHOWN, VALUES, LOGLINEAR = CASES
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {"disable_value": True, "max_new_tokens": 10}) for name in PRESETS},
    "decoupled recomputed": ("ppo", {"correction": "decoupled", "behave_imp_weight_cap": 1.1}),
    "decoupled reused": ("ppo", {"correction": "decoupled", "proximal": "reused", "behave_imp_weight_cap": 1.1}),
    "m2po": ("grpo", {"correction": "decoupled", "m2po_threshold": 0.02}),
    "tis token": ("grpo", {"correction": "tis", "correction_max": 1.1}),
    "mis token": ("grpo", {"correction": "mis", "correction_level": "token", "correction_min": 0.9,
                           "correction_max": 1.2}),
    "mis sequence": ("grpo", {"correction": "mis", "correction_max": 1.5}),
    "mis geometric": ("grpo", {"correction": "mis", "correction_level": "geometric", "correction_min": 0.9,
                               "correction_max": 1.1}),
    "icepop": ("dapo", {"correction": "icepop", "correction_min": 0.8, "correction_max": 1.3, "correction_veto": 0.7}),
    "tv": ("grpo", {"loss": "tv"}),
    "ipo": ("dpo", {"beta": 0.5, "kind": "ipo"}),
    "sequence sum, k2": ("rloo", {"aggregation": "sequence_sum", "kl_ctl": 0.1, "kl_in": "loss", "kl_gradient": "k2"}),
    "advantages by turn": ("grpo", {"credit": "step_groups"}),
    "sft": ("sft", {}),
}  # fmt: skip
DROPPING = (
    LOGLINEAR, SUMS, "decoupled recomputed", "decoupled reused", "m2po", "mis token", "mis sequence", "mis geometric",
    "icepop",
)  # fmt: skip
"""Cases whose correction drops some tokens and keeps others."""

Runs = dict[str, list[list[dict[str, float]]]]


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    pool.run(ready, 2, timeout=1200.0)  # before ranks wait for each other, all have imported what they need
    yield pool
    pool.close()


def ready(rank: Rank) -> None:
    import mcore_adapter.engine  # noqa: F401


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("layouts") / "model"
    write_model("qwen2_tied", folder)
    return str(folder)


def make_objective(name: str, changes: Mapping[str, Any]) -> Objective:
    """The objective of "dpo", "sft", "critic" (that of PPO) or a preset, with these changes."""
    if name == "dpo":
        return DPO(**changes)
    if name == "sft":
        return SFT(**changes)
    if name != "critic":
        return algorithm(name, **changes)
    critic = algorithm("ppo", disable_value=False, **changes).critic
    assert critic is not None
    return critic


def one_advantage_each(*, backwards: bool = False, preset: str = "grpo") -> Any:
    """Sequences with one advantage each; one of them has no trained token. Other policies are fixed by their seeds.
    For dpo all have trained tokens, and a partner some places away; for mix and chord three are demonstrations."""
    batch = random_batch(num_sequences=12)
    generator = torch.Generator().manual_seed(9)
    advantages = torch.randn(batch.num_sequences, generator=generator).repeat_interleave(batch.seq_lens)
    old, rollout, ref = 0.2 * torch.randn(3, batch.num_tokens, generator=generator)
    probe = torch.randn(batch.num_tokens, generator=generator)
    ages = torch.randint(4, (batch.num_tokens,), generator=generator)
    batch = batch.with_fields(
        advantages=advantages, old_noise=old, rollout_noise=rollout, ref_noise=ref, probe=probe, ages=ages
    )
    if preset in ("mix", "chord"):
        demonstrated = torch.isin(torch.arange(batch.num_sequences), torch.tensor([2, 7, 9]))
        batch = batch.with_fields(**{DEMONSTRATION: demonstrated.repeat_interleave(batch.seq_lens)})
    if preset == "dpo":
        signed = torch.tensor([1, 2, 3, -1, -2, -3, -4, -5, -6, 6, 5, 4])
        batch = batch.with_fields(**{PAIR: signed.repeat_interleave(batch.seq_lens)})
    else:
        batch.loss_mask[batch.cu_seqlens[5] : batch.cu_seqlens[6]] = False
    return batch.select(list(reversed(range(batch.num_sequences)))) if backwards else batch


def run_cases(
    rank: Rank, layout: ParallelLayout, model: str, cases: dict[str, Any], limits: list[int], backwards: bool = False
) -> Runs:
    """Two updates of each case with each limit of a microbatch, the first from the same weights."""
    runs: Runs = {}
    with rank.joined(layout) as (parallel, device):
        for name, (preset, changes) in cases.items():
            pairs, critic = preset == "dpo", preset == "critic"
            chosen = make_objective(preset, changes)
            batch = with_correction(one_advantage_each(backwards=backwards, preset=preset), chosen)
            if "credit" in changes:
                batch = batch.with_fields(advantages=batch.fields["advantages"] * batch.fields["ages"])
            for limit in limits:
                engine = make_engine(parallel, device, model, is_critic=critic, init_critic_from_actor=critic)
                steps = [
                    engine.train_step(
                        batch, _from_other_policies(chosen), max_tokens_per_mb=max(limit, LONGEST_PAIR * pairs),
                        token_weights=chosen.token_weights, with_entropy=chosen.needs_entropy,
                    )
                    for _ in range(2)
                ]  # fmt: skip
                runs.setdefault(name, []).append(steps)
    return runs


def with_correction(batch: Any, chosen: Objective) -> Any:
    """The batch with the fields that its correction computes from all of it, before it is cut."""
    if not isinstance(chosen, PolicyGradient):
        return batch
    if chosen.settings.proximal == "loglinear":
        batch = batch.with_fields(**{PROXIMAL_SHARE: proximal_share(batch.fields["ages"])})
    if chosen.settings.m2po_threshold is not None:
        log_weights = -batch.fields["rollout_noise"]
        kept = small_changes(log_weights, batch.loss_mask, chosen.settings.m2po_threshold)
        batch = batch.with_fields(**{SMALL_CHANGE: kept})
    return batch


def _from_other_policies(chosen: Objective) -> Any:
    """The loss with other policies, or earlier values, that are the model's own of this pass, moved by the batch's
    noise. Its metric "gradient" is the product of its gradient by the log-probabilities, or values, with a random
    vector."""

    def loss(output: Any, fields: Any, sequences: Any) -> Any:
        outputs = output.logprobs if output.values is None else output.values
        own, mask = outputs.detach(), fields["loss_mask"]
        old = (own + fields["old_noise"]) * mask
        corrected = isinstance(chosen, PolicyGradient) and chosen.settings.correction not in ("bypass", "none")
        others = {
            "old_logprobs": old,
            "old_values": old,
            "rollout_logprobs": (old + fields["rollout_noise"]) * mask if corrected else old,
            "ref_logprobs": (own + fields["ref_noise"]) * mask,
        }
        loss, metrics = chosen.loss(output, {**fields, **others}, sequences)
        (gradient,) = torch.autograd.grad(loss, outputs, retain_graph=True)
        return loss, {**metrics, "gradient": (gradient * fields["probe"]).sum()}

    return loss


LONGEST = int(one_advantage_each().seq_lens.max())
LONGEST_PAIR = 2 * LONGEST


@pytest.fixture(scope="module")
def one_process(ranks: RankPool, model: str) -> Runs:
    """All in one microbatch, a few, and every sequence alone."""
    return ranks.run(run_cases, 1, ParallelLayout(), model, CASES, [10_000, 128, LONGEST], timeout=1200.0)[0]


TOLERANCE = 1e-6


def assert_same(steps: Sequence[dict[str, float]], expected: Sequence[dict[str, float]]) -> None:
    for step, reference in zip(steps, expected, strict=True):
        assert step.keys() == reference.keys()
        for key in step.keys() - {"num_microbatches"}:
            assert step[key] == pytest.approx(reference[key], rel=TOLERANCE, abs=TOLERANCE), key


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_the_same_in_any_cut_into_microbatches(one_process: Runs, case: str) -> None:
    whole, few, alone = one_process[case]
    assert whole[0]["num_microbatches"] == 1 and alone[0]["num_microbatches"] >= (4 if case == PAIRS else 8)
    assert_same(few, whole)
    assert_same(alone, whole)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradient_are_the_same_in_every_layout_and_order_of_sequences(
    ranks: RankPool, model: str, one_process: Runs, layout: str
) -> None:
    backwards = layout in ("tp2", "dp2")
    for runs in ranks.run(run_cases, 2, LAYOUTS[layout], model, CASES, [128], backwards, timeout=1200.0):
        for case in CASES:
            for steps in runs[case]:
                assert_same(steps, one_process[case][0])


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_every_preset_and_correction_is_the_same_in_every_layout_cut_and_order(ranks: RankPool, model: str) -> None:
    every = {**CASES, **OTHERS}
    whole = ranks.run(run_cases, 1, ParallelLayout(), model, every, [10_000], timeout=3600.0)[0]
    for case in DROPPING:
        assert 0.02 < whole[case][0][0]["behave_capped_ratio"] < 0.98, case
    assert whole["tis token"][0][0]["behave_imp_weight"] < 1.0  # above 1 where nothing is truncated
    for layout in (ParallelLayout(), *LAYOUTS.values(), ParallelLayout(dp=2, cp=2)):
        world = layout.dp * layout.tp * layout.cp * layout.pp
        for limits, backwards in (([10_000, LONGEST + 8], False), ([128], True)):
            for runs in ranks.run(run_cases, world, layout, model, every, limits, backwards, timeout=3600.0):
                for case in every:
                    for steps in runs[case]:
                        assert_same(steps, whole[case][0])


def test_one_process_computes_gspo_over_the_outputs_of_transformers(model: str, one_process: Runs) -> None:
    """Each sequence alone through the Hugging Face model: loss and gradient norm of the mean over sequences."""
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(model).float()
    batch, total, counted = one_advantage_each(), torch.zeros(()), 0
    for i in range(batch.num_sequences):
        one = batch.select([i])
        if not one.loss_mask.any():
            continue
        logits = reference(one.token_ids[None]).logits[0, :-1].log_softmax(-1)
        mask = one.loss_mask[1:]
        own = logits.gather(1, one.token_ids[1:, None])[:, 0][mask]
        old = own.detach() + one.fields["old_noise"][1:][mask]
        s, advantage = (own - old).mean().exp(), one.fields["advantages"][0]
        total = total + torch.maximum(-advantage * s, -advantage * s.clamp(1 - 0.02, 1 + 0.03))
        counted += 1
    loss = total / counted
    loss.backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e9)
    assert counted == 11
    first = one_process[GSPO][0][0]
    assert first["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert first["grad_norm"] == pytest.approx(grad_norm.item(), rel=1e-5)
    assert weigh_tokens(batch, sequence_mean)[1].loss == pytest.approx(11, rel=1e-14)
