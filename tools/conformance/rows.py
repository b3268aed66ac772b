"""The rows of the matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.conformance import deviations as d
from tools.conformance.batches import LONGEST, NUM_DEMONSTRATIONS
from tools.conformance.checks import Call, Check, Deviation

NONE = {"correction": "none"}
TOKEN, SEQUENCE = "token-mean", "seq-mean-token-mean"
WIDE = 1e6
"""A bound that nothing reaches: verl and Trinity always clip twice."""


def differs(operation: str, text: str, formula: Any, **options: Any) -> Call:
    return Call(operation=operation, options=options, deviation=Deviation(text=text, formula=formula))


def same(operation: str, **options: Any) -> Call:
    return Call(operation=operation, options=options)


def advantages(name: str, algorithm: str, settings: Mapping[str, Any], peers: Mapping[str, Call], **more: Any) -> Check:
    return Check(name=name, quantity="advantages", algorithm=algorithm, settings=settings, peers=peers, **more)


def loss(name: str, algorithm: str, settings: Mapping[str, Any], peers: Mapping[str, Call], **more: Any) -> Check:
    return Check(name=name, quantity="loss", algorithm=algorithm, settings={**NONE, **settings}, peers=peers, **more)


def weights(name: str, settings: Mapping[str, Any], peers: Mapping[str, Call], **more: Any) -> Check:
    return Check(name=name, quantity="weights", algorithm="rloo", settings=settings, peers=peers, **more)


def preferences(name: str, settings: Mapping[str, Any], peers: Mapping[str, Call]) -> Check:
    settings = {"beta": 0.1, **settings}
    return Check(name=name, quantity="preferences", algorithm="dpo", settings=settings, peers=peers, kind="all_trained")


def kl(name: str, estimator: str, gradient: str, peers: Mapping[str, Call]) -> Check:
    settings = {"ppo.kl_ctl": 1.0, "kl_in": "loss", "kl_estimator": estimator, "kl_gradient": gradient}
    return Check(
        name=name, quantity="loss", algorithm="rloo", settings={**NONE, **settings}, peers=peers, kind="no_advantages",
        fields=frozenset({"ref_logprobs"}),
    )  # fmt: skip


POPULATION = "variance of the population, at least 1e-8 (here: of a sample, plus 1e-8)"
ADVANTAGES = (
    advantages("grpo: advantage", "grpo", {}, {
        "trl": differs("advantage", "eps is 1e-4 (here: 1e-6)", d.group_std_eps(1e-4)),
        "verl": same("advantage", estimator="grpo"),
        "trinity": same("grouped", name="grpo"),
        "openrlhf": differs("advantage", "eps is 1e-9 (here: 1e-6)", d.group_std_eps(1e-9), estimator="group_norm"),
    }),
    advantages("grpo, advantage_std=batch", "grpo", {"advantage_std": "batch"}, {
        "trl": differs("advantage", "eps is 1e-4 (here: 1e-6)", d.batch_std_eps, scale_rewards="batch"),
        "trinity": same("grouped", name="grpo", std_cal_level="batch"),
    }),
    advantages("dr_grpo: advantage", "dr_grpo", {}, {
        "trl": same("advantage", scale_rewards="none"),
        "verl": same("advantage", estimator="grpo", norm_adv_by_std_in_grpo=False),
        "trinity": same("grouped", name="opmd"),
        "openrlhf": same("advantage", estimator="dr_grpo"),
    }),
    advantages("dapo: penalty of overlong answers", "dapo",
               {"advantage_std": "none", "overlong_share": 3 / LONGEST, "ppo.gen.max_new_tokens": LONGEST},
               {"openrlhf": same("advantage", estimator="dr_grpo", overlong_buffer=3)}, kind="all_trained"),
    advantages("rloo: advantage", "rloo", {}, {
        "trl": same("rloo_advantage"),
        "verl": same("advantage", estimator="rloo"),
        "trinity": same("batched", name="rloo"),
        "openrlhf": same("advantage", estimator="rloo"),
    }),
    advantages("reinforce_pp: advantage", "reinforce_pp", {"ppo.discount": 0.9}, {
        "verl": same("advantage", estimator="reinforce_plus_plus", gamma=0.9),
        "trinity": differs("batched", "the discount acts over tokens that are not trained as well",
                           d.whitened_returns(0.9, population=False), name="reinforce_pp", gamma=0.9),
        "openrlhf": differs("advantage", "the discount acts over tokens that are not trained as well; " + POPULATION,
                            d.whitened_returns(0.9, population=True), estimator="reinforce", gamma=0.9),
    }),
    advantages("reinforce_pp_baseline: advantage", "reinforce_pp_baseline", {}, {
        "verl": same("advantage", estimator="reinforce_plus_plus_baseline"),
        "openrlhf": differs("advantage", POPULATION, d.whitened_baseline, estimator="reinforce_baseline"),
    }),
    advantages("opmd_logavgexp: advantage", "opmd_logavgexp", {"opmd_tau": 0.5}, {
        "trinity": same("grouped", name="opmd", opmd_baseline="logavgexp", tau=0.5),
    }),
    advantages("ppo: GAE, tokens in between not trained", "ppo",
               {"ppo.discount": 0.9, "ppo.gae_lambda": 0.8, "ppo.adv_norm": True, "adv_norm_std": "sample"},
               {"verl": same("advantage", estimator="gae", gamma=0.9, lam=0.8),
                "openrlhf": differs("advantage", "tokens that are not trained are steps with a value of 0; "
                                    + POPULATION, d.whitened_gae, estimator="gae", gamma=0.9, lambd=0.8)},
               fields=frozenset({"values"})),
)  # fmt: skip

LOSSES = (
    loss("clip 0.2 / 0.2, token mean", "rloo", {}, {
        "trl": same("loss"),
        "verl": same("loss", name="vanilla", aggregation=TOKEN, clip_ratio_c=WIDE),
        "trinity": same("loss", name="ppo", clip_range=0.2, clip_ratio_c=WIDE),
        "openrlhf": same("loss"),
    }),
    loss("dapo: clip 0.2 / 0.28, dual_clip=3", "dapo", {"dual_clip": 3.0}, {
        "verl": same("loss", name="vanilla", aggregation=TOKEN, clip_ratio_high=0.28),
        "trinity": same("loss", name="ppo", clip_range_low=0.2, clip_range_high=0.28),
        "openrlhf": same("loss", clip_eps_high=0.28, dual_clip=3.0),
    }),
    loss("aggregation=sequence_mean", "rloo", {"aggregation": "sequence_mean"}, {
        "trl": same("loss", loss_type="grpo"),
        "verl": same("loss", name="vanilla", aggregation=SEQUENCE, clip_ratio_c=WIDE),
        "trinity": same("loss", name="ppo", clip_range=0.2, clip_ratio_c=WIDE, loss_agg_mode=SEQUENCE),
        "openrlhf": same("loss", token_level_loss=False),
    }),
    loss("aggregation=sequence_mean, one sequence not trained", "rloo", {"aggregation": "sequence_mean"}, {
        "trl": differs("loss", "divides by all sequences", d.mean_of_all_sequences, loss_type="grpo"),
        "verl": same("loss", name="vanilla", aggregation=SEQUENCE, clip_ratio_c=WIDE),
        "trinity": differs("loss", "divides by all sequences", d.mean_of_all_sequences, name="ppo", clip_range=0.2,
                           clip_ratio_c=WIDE, loss_agg_mode=SEQUENCE),
        "openrlhf": same("loss", token_level_loss=False),
    }, kind="one_masked"),
    loss("aggregation=sequence_sum", "rloo", {"aggregation": "sequence_sum"}, {
        "trl": same("loss", loss_type="luspo"),
        "verl": same("loss", name="vanilla", aggregation="seq-mean-token-sum", clip_ratio_c=WIDE),
        "trinity": same("loss", name="ppo", clip_range=0.2, clip_ratio_c=WIDE, loss_agg_mode="seq-mean-token-sum"),
    }),
    loss("dr_grpo: aggregation=constant 7", "dr_grpo", {"aggregation_constant": 7.0}, {
        "trl": same("loss", loss_type="dr_grpo", max_completion_length=7),
        "verl": same("loss", name="vanilla", aggregation="seq-mean-token-sum-norm", scale=7, clip_ratio_c=WIDE),
        "trinity": differs("loss", "sum over all sequences / constant: not divided by their number",
                           d.constant_without_count, name="ppo", clip_range=0.2, clip_ratio_c=WIDE,
                           loss_agg_mode="seq-mean-token-sum-norm"),
    }),
    loss("gspo 0.2 / 0.28", "gspo", {"clip_low": 0.2, "clip_high": 0.28}, {
        "trl": same("loss", loss_type="grpo", importance_sampling_level="sequence", epsilon_high=0.28),
        "verl": same("loss", name="gspo", aggregation=SEQUENCE, clip_ratio_high=0.28),
        "trinity": same("loss", name="gspo", clip_range_low=0.2, clip_range_high=0.28),
        "openrlhf": same("loss", policy_loss_type="gspo", clip_eps_high=0.28),
    }),
    loss("cispo, largest ratio 5", "cispo", {}, {
        "trl": same("loss", loss_type="cispo", epsilon_high=5.0),
        "verl": same("loss", name="cispo", aggregation=TOKEN, clip_ratio_low=1.0, clip_ratio_high=4.0),
        "trinity": same("loss", name="cispo", clip_range_high=4.0),
    }),
    loss("cispo, upper bound set to 4", "cispo", {"clip_high": 4.0}, {
        "trl": differs("loss", "epsilon_high is the largest ratio itself (here: 1 + clip_high)", d.cispo_cap_4,
                       loss_type="cispo", epsilon_high=4.0),
    }),
    loss("sapo", "sapo", {}, {
        "trl": same("loss", loss_type="sapo"),
        "verl": same("loss", name="sapo", aggregation=SEQUENCE),
        "trinity": differs("loss", "the gate is a constant weight of log pi: its gradient is 2 A / tau at r = 1, "
                           "not A, and grows with r", d.sapo_detached, name="sapo", loss_agg_mode=SEQUENCE),
    }),
    loss("topr", "topr", {}, {"trinity": same("loss", name="topr")}),
    loss("opmd", "opmd", {"opmd_tau": 2.0}, {"trinity": same("loss", name="opmd", tau=2.0)}),
    loss("tv 0.2, ratio_cap=3", "rloo", {"loss": "tv", "ratio_cap": 3.0}, {
        "verl": same("loss", name="dppo_tv", aggregation=TOKEN, clip_ratio_c=3.0),
    }),
    loss("mix, mu 0.1", "mix", {"dual_clip": 3.0}, {
        "trinity": same("mixed", name="mix", num_demonstrations=NUM_DEMONSTRATIONS, clip_range=0.2),
    }),
    loss("chord, mu 0.1", "chord", {"dual_clip": 3.0}, {
        "trinity": same("mixed", name="chord", num_demonstrations=NUM_DEMONSTRATIONS, clip_range=0.2,
                        mu_warmup_steps=0, mu_decay_steps=0, mu_peak=0.1, mu_valley=0.1),
    }),
    loss("rloo: loss", "rloo", {}, {
        "trl": differs("rloo_loss", "clips the product of the ratios of a sequence, mean over sequences (here: ratios "
                       "of tokens)", d.rloo_of_sequences),
    }, kind="all_trained"),
)  # fmt: skip

KL = (
    kl("KL in the loss: k1", "k1", "own", {
        "verl": same("kl", estimator="k1"), "trinity": same("kl", name="K1Fn"),
        "openrlhf": same("kl", estimator="k1"),
    }),
    kl("KL in the loss: k2", "k2", "own", {
        "verl": same("kl", estimator="k2"), "trinity": same("kl", name="K2Fn"),
        "openrlhf": same("kl", estimator="k2"),
    }),
    kl("KL in the loss: k3", "k3", "own", {
        "trl": same("loss", beta=1.0), "verl": same("kl", estimator="k3"), "trinity": same("kl", name="K3Fn"),
        "openrlhf": same("kl", estimator="k3"),
    }),
    kl("KL in the loss: low_var", "low_var", "own", {
        "verl": same("kl", estimator="low_var_kl"), "trinity": same("kl", name="LowVarKLFn"),
    }),
    kl("KL in the loss: k3, kl_gradient=k2", "k3", "k2", {"verl": same("kl", estimator="k3+")}),
    kl("KL in the loss: k3, kl_gradient=ratio", "k3", "ratio", {
        "trl": same("loss", beta=1.0, use_bias_correction_kl=True),
        "trinity": differs("kl", "the ratio is at most 2 (here: 10)", d.k3_ratio_to_2, name="CorrectedK3Fn"),
        "openrlhf": differs("kl", "the value of k3 with the gradient sg(min(r, 10)) x", d.k3_with_gradient_of_k2,
                            estimator="k3", unbiased=True),
    }),
)  # fmt: skip

CORRECTIONS = (
    weights("tis, token, 0 to 2", {"correction": "tis"}, {
        "trl": same("weights", mode="token_truncate", high=2.0),
        "verl": same("weights", level="token", threshold=2.0),
        "openrlhf": same("weights", is_correction_level="token", is_correction_mode="clip",
                         is_correction_threshold=[0.0, 2.0]),
    }),
    weights("tis, sequence, 0 to 2", {"correction": "tis", "correction_level": "sequence"}, {
        "trl": same("weights", mode="sequence_truncate", high=2.0),
        "verl": same("weights", level="sequence", threshold=2.0),
    }),
    weights("icepop 0.5 to 5 (mis, token)", {"correction": "icepop"}, {
        "trl": same("weights", mode="token_mask", low=0.5, high=5.0),
        "verl": same("weights", level="token", threshold="0.5_5.0"),
        "openrlhf": same("weights", is_correction_level="token", is_correction_threshold=[0.5, 5.0]),
    }),
    weights("mis, sequence, 0 to 3", {"correction": "mis"}, {
        "trl": same("weights", mode="sequence_mask", high=3.0),
        "verl": same("weights", level="sequence", threshold="1e-30_3.0"),
    }),
    weights("mis, geometric, 0.9 to 1.5",
            {"correction": "mis", "correction_level": "geometric", "correction_min": 0.9, "correction_max": 1.5}, {
        "openrlhf": same("weights", is_correction_level="seq", is_correction_threshold=[0.9, 1.5]),
        "verl": differs("rejection", "seq_mean_k1 bounds 1 / w: 0.9_1.5 keeps w from 0.67 to 1.11",
                        d.inverted_band(0.9, 1.5, of_sequence=True), rule="seq_mean_k1", threshold="0.9_1.5"),
    }),
    weights("rejection of tokens, 0.5 to 5", {"correction": "icepop"}, {
        "verl": differs("rejection", "token_k1 bounds 1 / w: 0.5_5.0 keeps w from 0.2 to 2", d.inverted_band(0.5, 5.0),
                        rule="token_k1", threshold="0.5_5.0"),
    }),
    weights("opsm 0.1", {"correction": "none", "opsm_threshold": 0.1}, {
        "trl": same("opsm", threshold=0.1),
    }),
)  # fmt: skip

PREFERENCES = (
    preferences("dpo, beta 0.1", {}, {"trl": same("dpo", kind="sigmoid"), "openrlhf": same("dpo")}),
    preferences("dpo, label_smoothing=0.1", {"label_smoothing": 0.1}, {
        "trinity": differs("dpo", "log sigmoid of the sum over all pairs of the batch, not the mean over pairs",
                           d.one_pair_of_all, label_smoothing=0.1),
        "openrlhf": same("dpo", label_smoothing=0.1),
    }),
    preferences("ipo, beta 0.1", {"kind": "ipo"}, {
        "trl": same("dpo", kind="ipo"),
        "openrlhf": differs("dpo", "sums over tokens (here: means)", d.ipo_of_sums, ipo=True),
    }),
)  # fmt: skip

ROWS = (*ADVANTAGES, *LOSSES, *KL, *CORRECTIONS, *PREFERENCES)
