"""The section `algorithm`: which algorithm, and each of its parts under a key of its own."""

from __future__ import annotations

from typing import Literal

from core.algorithms import PRESETS
from core.algorithms.settings import (
    Advantage,
    Aggregation,
    Correction,
    DemonstrationLoss,
    KLEstimator,
    KLGradient,
    Level,
    Loss,
    Proximal,
)
from core.config.base import Section, key
from core.config.models import FlagValue


class AlgorithmConfig(Section):
    """Which algorithm, off-policy correction, KL divergence, entropy. The defaults are those of PPO; a name changes
    some of them, and keys that are given win."""

    name: str | None = key(
        None,
        f"One of {', '.join(PRESETS)}, or your own as package.module:Class. null: PPO with the settings of "
        "ppo.*, which is GRPO with ppo.disable_value and group_adv_norm",
    )
    options: dict[str, FlagValue] = key({}, "Settings of an algorithm of your own, by name", needs="algorithm.name")
    advantage: Advantage = key(
        "gae",
        "gae: values of the critic, if there is one. returns: discounted sums. group: reward minus the group's mean. "
        "leave_one_out: minus the mean of the others. logavgexp: minus opmd_tau * log mean exp(reward / opmd_tau). "
        "maxrl: group, divided by the group's mean above the lowest reward",
    )
    advantage_std: Literal["none", "group", "batch"] = key(
        "group",
        "Divide by the standard deviation (n - 1) of the rewards of the group or the batch",
        needs="algorithm.advantage=group",
    )
    adv_norm_std: Literal["population", "sample"] = key(
        "population",
        "Divisor of the variance that ppo.adv_norm normalizes to 1: n, or n - 1",
        needs="ppo.adv_norm=true",
    )
    dynamic_sampling: bool = key(
        False,
        "Drop prompts whose completions all have the same reward, and sample others in their place (DAPO)",
        needs="group_size > 1",
    )
    dynamic_sampling_limit: int = key(
        10,
        "Batches of prompts drawn for a step, at most; groups beyond are kept",
        ge=1,
        needs="algorithm.dynamic_sampling=true",
    )
    overlong_share: float = key(
        0.0,
        "Penalize completions that end in this last share of max_new_tokens, up to overlong_penalty. 0: none",
        ge=0,
        le=1,
    )
    overlong_penalty: float = key(
        1.0,
        "Penalty of a completion of max_new_tokens, in units of the reward",
        gt=0,
        needs="algorithm.overlong_share > 0",
    )
    loss: Loss = key(
        "clip",
        "Policy loss of a token. clip: PPO. cispo: clipped ratios as weights. sapo: smooth gate. topr: tapered "
        "ratios. opmd: no ratio. kimi: opmd and a squared log-ratio. tv: trust region of the binary total variation",
    )
    ratio: Literal["token", "sequence"] = key(
        "token",
        "Ratio of a token, or that of its sequence (GSPO)",
        needs="algorithm.loss=clip, cispo, sapo, topr or tv",
    )
    clip_low: float | None = key(
        None,
        "Lower end of the clip range, 1 - clip_low; tv: largest fall of a probability. null: ppo.eps_clip",
        ge=0,
        needs="algorithm.loss=clip, cispo or tv",
    )
    clip_high: float | None = key(
        None,
        "Upper end of the clip range, 1 + clip_high; tv: largest rise of a probability. null: ppo.eps_clip",
        ge=0,
        needs="algorithm.loss=clip, cispo or tv",
    )
    dual_clip: float = key(
        0.0,
        "Bound the loss of negative advantages A by -dual_clip * A, as in 3. 0: off",
        ge=0,
        needs="algorithm.loss=clip",
    )
    ratio_cap: float = key(20.0, "Largest ratio", gt=0, needs="algorithm.loss=tv")
    sapo_tau_positive: float = key(
        1.0, "Steepness of the gate for positive advantages", gt=0, needs="algorithm.loss=sapo"
    )
    sapo_tau_negative: float = key(
        1.05, "Steepness of the gate for other advantages", gt=0, needs="algorithm.loss=sapo"
    )
    opmd_tau: float = key(1.0, "Temperature tau", gt=0, needs="algorithm.loss=opmd or kimi, or advantage=logavgexp")
    aggregation: Aggregation = key(
        "token_mean",
        "token_mean: mean over trained tokens. sequence_mean: mean over sequences of the mean over tokens. "
        "sequence_sum: of the sum over tokens. constant: of that sum divided by aggregation_constant",
    )
    aggregation_constant: float | None = key(
        None, "Divisor of the sum over a sequence. null: max_new_tokens", gt=0, needs="algorithm.aggregation=constant"
    )
    decoupled: bool | None = key(
        None,
        "Another name of correction=decoupled (true) and correction=bypass (false). null: if max_staleness > 0",
    )
    correction: Correction | None = key(
        None,
        "Weight w = proximal / behaviour policy of tokens. none: 1. bypass: 1, ratios are to the behaviour policy. "
        "decoupled: w up to behave_imp_weight_cap, else 0. tis: w truncated. mis: w within bounds, else 0. icepop: mis "
        "of tokens within 0.5 and 5. null: see decoupled",
    )
    correction_level: Level | None = key(
        None,
        "Weight w of a token, of its sequence (product), or (mis) tokens whose sequence's geometric mean of w is "
        "within bounds. null: token (tis), sequence (mis)",
        needs="algorithm.correction=tis or mis",
    )
    correction_min: float | None = key(
        None, "Lower bound of w. null: see docs/algorithms.md", ge=0, needs="algorithm.correction=tis, mis or icepop"
    )
    correction_max: float | None = key(
        None, "Upper bound of w. null: see docs/algorithms.md", gt=0, needs="algorithm.correction=tis, mis or icepop"
    )
    correction_veto: float = key(
        0.0,
        "Exclude sequences with a token whose w is below this, as in 1e-4. 0: none",
        ge=0,
        lt=1,
        needs="algorithm.correction=tis, mis or icepop",
    )
    behave_imp_weight_cap: float | None = key(
        5.0,
        "Exclude tokens with a larger trainer/generator importance weight. null: no cap",
        gt=0,
        needs="algorithm.correction=decoupled",
    )
    proximal: Proximal = key(
        "recomputed",
        "Proximal policy. recomputed: at the start of each step. loglinear: between behaviour and current policy, by "
        "the age of the token. reused: the current policy",
        needs="algorithm.correction other than bypass",
    )
    opsm_threshold: float | None = key(
        None,
        "Exclude sequences with negative advantages whose mean of log(behaviour / current policy) exceeds this",
        ge=0,
    )
    m2po_threshold: float | None = key(
        None,
        "Exclude the tokens of largest log(w)^2 until the mean over the others is at most this",
        gt=0,
        needs="algorithm.correction other than bypass",
    )
    kl_in: Literal["reward", "loss", "both"] = key(
        "reward", "Apply the KL penalty (ppo.kl_ctl) to the rewards, to the loss, or to both", needs="ppo.kl_ctl > 0"
    )
    kl_estimator: KLEstimator | None = key(
        None, "Estimator of the per-token KL divergence. null: k1 in the reward, k3 in the loss", needs="ppo.kl_ctl > 0"
    )
    kl_reward_level: Literal["token", "sequence"] = key(
        "token",
        "Subtract each token's penalty from its reward, or their sum from the reward before the baseline",
        needs="algorithm.kl_in=reward or both",
    )
    kl_loss_coeff: float | None = key(
        None, "Coefficient in the loss. null: ppo.kl_ctl", gt=0, needs="algorithm.kl_in=both"
    )
    kl_gradient: KLGradient = key(
        "own",
        "Gradient of the KL divergence in the loss. own: of the estimator. k2: value of the estimator, gradient of k2. "
        "ratio: of the estimator times the ratio",
        needs="algorithm.kl_in=loss or both",
    )
    kl_target: float | None = key(
        None,
        "Adapt ppo.kl_ctl to this KL divergence per token. null: constant",
        gt=0,
        needs="algorithm.kl_in=reward or both",
    )
    kl_horizon: float = key(
        10000.0, "Sequences in which the coefficient may change by 20 %", gt=0, needs="algorithm.kl_target"
    )
    demonstration_weight: float = key(
        0.0,
        "Weight mu of demonstrations in the loss, 1 - mu of rollouts (mix, chord). 0: rollouts alone",
        ge=0,
        lt=1,
        needs="demonstrations.path",
    )
    demonstration_loss: DemonstrationLoss = key(
        "nll",
        "Loss of demonstrated tokens. nll: negative log-likelihood. chord: times p (1 - p) of the token",
        needs="algorithm.demonstration_weight > 0",
    )
    demonstration_warmup_steps: int = key(
        0, "Steps in which mu rises from 0", ge=0, needs="algorithm.demonstration_weight > 0"
    )
    demonstration_decay_steps: int = key(
        0, "Steps after them in which mu follows a cosine to its valley", ge=0, needs="algorithm.demonstration_valley"
    )
    demonstration_valley: float | None = key(
        None,
        "mu after these steps. null: it stays at demonstration_weight",
        ge=0,
        lt=1,
        needs="algorithm.demonstration_decay_steps > 0",
    )
    entropy_coeff: float = key(0.0, "Weight of the entropy bonus", ge=0)
