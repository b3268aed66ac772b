"""The section `algorithm`, and what an algorithm reads of it and of `ppo`.

The keys are flat: each part of an algorithm (advantage, loss, correction, ...) has a key of its own, and `needs` of the
others names the parts that read them.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

from config_schema.needs import above, equals, given, refused_without, unlike
from config_schema.section import Section, key
from core.config.parsing.problems import Problem
from core.config.ppo import CLIPPED, PAIRS, REFERENCE, SHOWN, PPOKeys
from core.config.presets import PRESETS
from rollout.inference.backend import FlagValue

Advantage = Literal["gae", "returns", "group", "leave_one_out", "logavgexp", "maxrl"]
Credit = Literal["outcome", "turn_rewards", "turn_gae", "step_groups"]
Loss = Literal["clip", "cispo", "sapo", "topr", "opmd", "kimi", "tv"]
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]
Correction = Literal["none", "bypass", "decoupled", "tis", "mis", "icepop"]
Level = Literal["token", "sequence", "geometric"]
Proximal = Literal["recomputed", "loglinear", "reused"]
KLEstimator = Literal["k1", "k2", "k3", "low_var"]
KLGradient = Literal["own", "k2", "ratio"]
DemonstrationLoss = Literal["nll", "chord", "dpo"]

BOUNDS: Mapping[tuple[str, str], tuple[float, float]] = {
    ("tis", "token"): (0.0, 2.0),
    ("tis", "sequence"): (0.0, 2.0),
    ("mis", "token"): (0.5, 2.0),
    ("mis", "sequence"): (0.0, 3.0),
    ("mis", "geometric"): (0.999, 1.001),
    ("icepop", "token"): (0.5, 5.0),
}
"""(correction, correction_level) -> default (correction_min, correction_max); other pairs do not exist."""


_PROXIMAL = unlike("algorithm.correction", "bypass")
_BOUNDED = equals("algorithm.correction", "tis", "mis", "icepop")


class AlgorithmKeys(Section):
    """The parts of an algorithm. The defaults are those of PPO."""

    advantage: Advantage = key(
        "gae",
        "gae: values of the critic, if there is one. returns: discounted sums. group: reward minus the group's mean. "
        "leave_one_out: minus the mean of the others. logavgexp: minus opmd_tau * log mean exp(reward / opmd_tau). "
        "maxrl: group, divided by the group's mean above the lowest reward",
    )
    advantage_std: Literal["none", "group", "batch"] = key(
        "group",
        "Divide by the standard deviation (n - 1) of the rewards of the group or the batch",
        needs=equals("algorithm.advantage", "group"),
    )
    adv_norm_std: Literal["population", "sample"] = key(
        "population",
        "Divisor of the variance that ppo.adv_norm normalizes to 1: n, or n - 1",
        needs=equals("ppo.adv_norm", True),
    )
    credit: Credit = key(
        "outcome",
        "What a turn of a conversation is credited with. outcome: the whole answer's advantage. turn_rewards: rewards "
        "from it on, each compared with those of all turns of the group. turn_gae: GAE with turns as time steps. "
        "step_groups: outcome, and turn_weight times its return compared with those of turns in the same state (GiGPO)",
    )
    turn_weight: float = key(
        1.0, "Weight of the comparison of turns", ge=0, needs=equals("algorithm.credit", "step_groups")
    )
    turn_discount: float = key(
        0.95, "Discount of rewards per turn", ge=0, le=1, needs=equals("algorithm.credit", "step_groups")
    )
    dynamic_sampling: bool = key(
        False,
        "Drop prompts whose completions all have the same reward, and sample others in their place (DAPO)",
        needs=refused_without("group_size > 1"),
    )
    dynamic_sampling_limit: int = key(
        10,
        "Batches of prompts drawn for a step, at most; groups beyond are kept",
        ge=1,
        needs=equals("algorithm.dynamic_sampling", True),
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
        needs=above("algorithm.overlong_share", 0),
    )
    loss: Loss = key(
        "clip",
        "Policy loss of a token. clip: PPO. cispo: clipped ratios as weights. sapo: smooth gate. topr: tapered "
        "ratios. opmd: no ratio. kimi: opmd and a squared log-ratio. tv: trust region of the binary total variation",
    )
    ratio: Literal["token", "sequence"] = key(
        "token",
        "Ratio of a token, or that of its sequence (GSPO)",
        needs=equals("algorithm.loss", "clip", "cispo", "sapo", "topr", "tv"),
    )
    clip_low: float | None = key(
        None,
        "Lower end of the clip range, 1 - clip_low; tv: largest fall of a probability. null: ppo.eps_clip",
        ge=0,
        needs=CLIPPED,
    )
    clip_high: float | None = key(
        None,
        "Upper end of the clip range, 1 + clip_high; tv: largest rise of a probability. null: ppo.eps_clip",
        ge=0,
        needs=CLIPPED,
    )
    dual_clip: float = key(
        0.0,
        "Bound the loss of negative advantages A by -dual_clip * A, as in 3. 0: off",
        ge=0,
        needs=equals("algorithm.loss", "clip"),
    )
    ratio_cap: float = key(20.0, "Largest ratio", gt=0, needs=equals("algorithm.loss", "tv"))
    sapo_tau_positive: float = key(
        1.0, "Steepness of the gate for positive advantages", gt=0, needs=equals("algorithm.loss", "sapo")
    )
    sapo_tau_negative: float = key(
        1.05, "Steepness of the gate for other advantages", gt=0, needs=equals("algorithm.loss", "sapo")
    )
    opmd_tau: float = key(
        1.0,
        "Temperature tau",
        gt=0,
        needs=equals("algorithm.advantage", "logavgexp") | equals("algorithm.loss", "opmd", "kimi"),
    )
    aggregation: Aggregation = key(
        "token_mean",
        "token_mean: mean over trained tokens. sequence_mean: mean over sequences of the mean over tokens. "
        "sequence_sum: of the sum over tokens. constant: of that sum divided by aggregation_constant",
    )
    aggregation_constant: float | None = key(
        None,
        "Divisor of the sum over a sequence. null: max_new_tokens",
        gt=0,
        needs=equals("algorithm.aggregation", "constant"),
    )
    correction_level: Level | None = key(
        None,
        "Weight w of a token, of its sequence (product), or (mis) tokens whose sequence's geometric mean of w is "
        "within bounds. null: token (tis), sequence (mis)",
        needs=equals("algorithm.correction", "tis", "mis"),
    )
    correction_min: float | None = key(None, "Lower bound of w. null: see docs/algorithms.md", ge=0, needs=_BOUNDED)
    correction_max: float | None = key(None, "Upper bound of w. null: see docs/algorithms.md", gt=0, needs=_BOUNDED)
    correction_veto: float = key(
        0.0, "Exclude sequences with a token whose w is below this, as in 1e-4. 0: none", ge=0, lt=1, needs=_BOUNDED
    )
    behave_imp_weight_cap: float | None = key(
        5.0,
        "Exclude tokens with a larger trainer/generator importance weight. null: no cap",
        gt=0,
        needs=equals("algorithm.correction", "decoupled"),
    )
    proximal: Proximal = key(
        "recomputed",
        "Proximal policy. recomputed: at the start of each step. loglinear: between behaviour and current policy, by "
        "the age of the token. reused: the current policy",
        needs=_PROXIMAL & (unlike("algorithm.loss", "opmd") | unlike("algorithm.correction", "none")),
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
        needs=_PROXIMAL,
    )
    kl_in: Literal["reward", "loss", "both"] = key(
        "reward", "Apply the KL penalty (ppo.kl_ctl) to the rewards, to the loss, or to both", needs=REFERENCE
    )
    kl_estimator: KLEstimator | None = key(
        None,
        "Estimator of the per-token KL divergence, in reward and loss. null: k1 in the reward, k3 in the loss",
        needs=REFERENCE,
    )
    kl_reward_level: Literal["token", "sequence"] = key(
        "token",
        "Subtract each token's penalty from its reward, or their sum from the reward before the baseline",
        needs=REFERENCE & equals("algorithm.kl_in", "reward", "both"),
    )
    kl_loss_coeff: float | None = key(
        None, "Coefficient in the loss. null: ppo.kl_ctl", gt=0, needs=REFERENCE & equals("algorithm.kl_in", "both")
    )
    kl_gradient: KLGradient = key(
        "own",
        "Gradient of the KL divergence in the loss. own: of the estimator. k2: value of the estimator, gradient of k2. "
        "ratio: of the estimator times the ratio",
        needs=REFERENCE & equals("algorithm.kl_in", "loss", "both"),
    )
    kl_target: float | None = key(
        None,
        "Adapt ppo.kl_ctl to this KL divergence per token. null: constant",
        gt=0,
        needs=REFERENCE & equals("algorithm.kl_in", "reward", "both"),
    )
    kl_horizon: float = key(
        10000.0,
        "Sequences in which the coefficient may change by 20 %",
        gt=0,
        needs=REFERENCE & given("algorithm.kl_target"),
    )
    demonstration_weight: float = key(
        0.0,
        "Weight mu of demonstrations in the loss, 1 - mu of rollouts (mix, chord). 0: rollouts alone",
        ge=0,
        lt=1,
        needs=refused_without("demonstrations.path"),
    )
    demonstration_loss: DemonstrationLoss = key(
        "nll",
        "Loss of demonstrations. nll: negative log-likelihood of tokens. chord: times p (1 - p) of the token. dpo: "
        "direct preference optimization on pairs of answers",
        needs=SHOWN,
    )
    demonstration_beta: float = key(
        0.1, "Strength of the KL divergence from the reference in the loss of pairs", gt=0, needs=PAIRS
    )
    demonstration_warmup_steps: int = key(0, "Steps in which mu rises from 0", ge=0, needs=SHOWN)
    demonstration_decay_steps: int = key(
        0, "Steps after them in which mu follows a cosine to its valley", ge=0, needs=SHOWN
    )
    demonstration_valley: float | None = key(
        None,
        "mu after these steps. null: it stays at demonstration_weight",
        ge=0,
        lt=1,
        needs=SHOWN & above("algorithm.demonstration_decay_steps", 0),
    )
    entropy_coeff: float = key(0.0, "Weight of the entropy bonus", ge=0)

    @property
    def uses_values(self) -> bool:
        """True if advantages are those of a critic."""
        return self.advantage == "gae"

    @property
    def credits_turn_rewards(self) -> bool:
        """True if turns are compared by the rewards from them on."""
        return self.credit == "turn_rewards"

    @property
    def has_entropy_bonus(self) -> bool:
        return self.entropy_coeff != 0.0

    @property
    def has_flat_kl(self) -> bool:
        """True if the KL divergence is in the loss with an estimator whose own gradient has zero mean on policy."""
        return self.kl_in != "reward" and self.kl_estimator == "k1" and self.kl_gradient == "own"

    @property
    def most_resampled(self) -> int | None:
        """Batches of prompts drawn for a step at most, to replace prompts whose completions are alike. None: kept."""
        return self.dynamic_sampling_limit if self.dynamic_sampling else None

    @property
    def mixes_demonstrations(self) -> bool:
        """True if steps train on demonstrations beside rollouts."""
        return self.demonstration_weight > 0

    @property
    def mixes_pairs(self) -> bool:
        """True if the demonstrations are pairs of answers."""
        return self.mixes_demonstrations and self.demonstration_loss == "dpo"


class _AlgorithmChoice(Section):
    """The keys of `algorithm` that no algorithm reads: they decide which one there is."""

    name: str | None = key(
        None,
        f"One of {', '.join(PRESETS)}, or your own as package.module:Class. null: PPO with the settings of "
        "ppo.*, which is GRPO with ppo.disable_value and group_adv_norm",
        first=True,
    )
    options: dict[str, FlagValue] = key(
        {},
        "Settings of an algorithm of your own, by name",
        needs=refused_without("algorithm.name=package.module:Class"),
    )
    correction: Correction | None = key(
        None,
        "Weight w = proximal / behaviour policy of tokens. none: 1. bypass: 1, ratios are to the behaviour policy. "
        "decoupled: w up to behave_imp_weight_cap, else 0. tis: w truncated. mis: w within bounds, else 0. icepop: mis "
        "of tokens within 0.5 and 5. null: decoupled if max_staleness > 0, else bypass",
    )


class AlgorithmConfig(AlgorithmKeys, _AlgorithmChoice):
    """Which algorithm, off-policy correction, KL divergence, entropy. The defaults are those of PPO; a name changes
    some of them, and keys that are given win."""

    def stray_options(self) -> Iterator[Problem]:
        """Yield options that an algorithm of PRESETS does not have."""
        if self.options:
            message = ", ".join(self.options)
            message += f": options belong to an algorithm of your own; write algorithm.{[*self.options][0]}"
            yield Problem(key="algorithm.options", message=message)


class AlgorithmSettings(AlgorithmKeys, PPOKeys):
    """What an algorithm reads: the keys of `ppo` and `algorithm`, with what null leaves open filled in.

    The defaults are PPO on plain rewards, with nothing normalized and no correction."""

    ppo_n_minibatches: int = 1
    kl_ctl: float = 0.0
    adv_norm: bool = False
    value_norm: bool = False
    behave_imp_weight_cap: float | None = None
    correction: Correction = "bypass"
    group_adv_norm: bool = False
    max_new_tokens: int = 1

    @property
    def kl_estimator_of_loss(self) -> KLEstimator:
        """kl_estimator with its default in the loss."""
        return self.kl_estimator or "k3"

    @property
    def kl_estimator_of_reward(self) -> KLEstimator:
        """kl_estimator with its default in the reward."""
        return self.kl_estimator or "k1"

    @property
    def proximal_policy(self) -> Literal["behaviour", "recomputed", "reused", "loglinear"]:
        """Where the log-probabilities of the proximal policy come from."""
        return "behaviour" if self.correction == "bypass" else self.proximal

    @property
    def num_updates(self) -> int:
        """Updates of the actor in a step."""
        return self.ppo_n_minibatches * self.sample_reuse[0]

    @property
    def needs_reference(self) -> bool:
        return self.kl_ctl != 0.0 or self.mixes_pairs

    @property
    def kl_in_reward(self) -> bool:
        return self.kl_ctl != 0.0 and self.kl_in in ("reward", "both")

    @property
    def kl_coeff(self) -> float:
        """Weight of the KL divergence in the loss."""
        if self.kl_in == "reward":
            return 0.0
        return self.kl_ctl if self.kl_in == "loss" or self.kl_loss_coeff is None else self.kl_loss_coeff

    @property
    def needs_old_logprobs(self) -> bool:
        """With one update per step the proximal policy is the current one: the update's own forward pass gives it. With
        correction=bypass it is the behaviour policy, which the generators report. loss=opmd has no ratio."""
        if self.correction == "bypass":
            return False
        compared = self.loss != "opmd" or self.correction != "none"
        recomputed = compared and self.proximal == "recomputed" and self.num_updates > 1
        return recomputed or self.kl_in_reward or self.m2po_threshold is not None

    @property
    def compares_groups(self) -> bool:
        """Whether an advantage depends on the other answers to the prompt."""
        return self.group_adv_norm if self.advantage == "gae" else self.advantage != "returns"

    @property
    def clip_range(self) -> tuple[float, float]:
        """(clip_low, clip_high); eps_clip where one is not set."""
        low = self.eps_clip if self.clip_low is None else self.clip_low
        return low, self.eps_clip if self.clip_high is None else self.clip_high

    @property
    def level(self) -> Level:
        """correction_level with its default: mis weighs sequences, the others tokens."""
        return self.correction_level or ("sequence" if self.correction == "mis" else "token")

    @property
    def bounds(self) -> tuple[float, float]:
        """(correction_min, correction_max) with their defaults; inf: no maximum."""
        if self.correction == "decoupled":
            return 0.0, float("inf") if self.behave_imp_weight_cap is None else self.behave_imp_weight_cap
        low, high = BOUNDS[self.correction, self.level]
        low = low if self.correction_min is None else self.correction_min
        return low, high if self.correction_max is None else self.correction_max


def needs_group(what: str) -> Problem:
    """Return that groups of one completion are too small for `what`."""
    return Problem(key="group_size", message=f"{what} compares the answers to one prompt and needs at least 2, got 1")


def part_problems(
    settings: AlgorithmSettings, *, name: str, has_groups: bool, is_synchronous: bool
) -> Iterator[Problem]:
    """Yield combinations of parts of an algorithm of PRESETS that compute nothing sensible. `name`: its key there."""
    if settings.compares_groups and not has_groups and not settings.group_adv_norm:  # which a rule refuses
        by_name = PRESETS[name].values.get("algorithm.advantage") == settings.advantage
        yield needs_group(f"algorithm.name={name}" if by_name else f"algorithm.advantage={settings.advantage}")
    elif settings.dynamic_sampling and not has_groups:
        message = "true, but the only answer to a prompt has no other reward to differ from; write group_size of at "
        yield Problem(key="algorithm.dynamic_sampling", message=message + "least 2, or false")
    yield from _credit_problems(settings)
    if settings.mixes_demonstrations and settings.aggregation not in ("token_mean", "sequence_mean"):
        message = f"{settings.aggregation} has no scale to mix demonstrations with; write token_mean or sequence_mean"
        yield Problem(key="algorithm.aggregation", message=message)
    yield from _correction_problems(settings)
    yield from _proximal_problems(settings, is_synchronous=is_synchronous)
    low, high = settings.clip_range
    if settings.loss == "clip" and not (low < 1.0 and high > 0.0):
        message = (
            f"{low}, but loss=clip keeps ratios in 1 - clip_low to 1 + clip_high; write less than 1, or loss=cispo"
        )
        yield Problem(key="algorithm.clip_low", message=message)
    if 0.0 < settings.dual_clip <= 1.0:
        message = f"must be greater than 1, got {settings.dual_clip}: it bounds the loss above the clip range; write 3"
        yield Problem(key="algorithm.dual_clip", message=message)
    if settings.kl_target is not None and not settings.kl_in_reward:
        message = (
            "needs the KL divergence in the reward, where it is measured; write kl_in=reward or both, and ppo.kl_ctl"
        )
        yield Problem(key="algorithm.kl_target", message=message)


def _credit_problems(settings: AlgorithmSettings) -> Iterator[Problem]:
    """Yield what algorithm.credit needs."""
    if settings.credit == "turn_gae" and (not settings.has_values or settings.compares_groups):
        message = "turn_gae: needs the values of a critic; write ppo.disable_value=false, advantage=gae and "
        yield Problem(key="algorithm.credit", message=message + "group_adv_norm=false, or credit=turn_rewards")
    if settings.credit in ("turn_rewards", "step_groups") and settings.advantage != "group":
        message = f"{settings.credit}: compares turns within a group; write advantage=group (algorithm.name=grpo), got "
        yield Problem(key="algorithm.credit", message=message + f"advantage={settings.advantage}")


def _correction_problems(settings: AlgorithmSettings) -> Iterator[Problem]:
    correction = settings.correction
    if correction in ("tis", "mis", "icepop"):
        if (correction, settings.level) not in BOUNDS:
            levels = " or ".join(level for name, level in BOUNDS if name == correction)
            message = f"{settings.level} does not exist for correction={correction}; write {levels}"
            yield Problem(key="algorithm.correction_level", message=message)
        elif settings.bounds[0] >= settings.bounds[1]:
            low, high = settings.bounds
            message = f"{low} must be less than correction_max={high}"
            yield Problem(key="algorithm.correction_min", message=message)
    if correction == "bypass" and settings.m2po_threshold is not None:
        message = (
            "has nothing to correct: with correction=bypass the proximal policy is the behaviour policy; write none"
        )
        yield Problem(key="algorithm.m2po_threshold", message=f"{message}, or decoupled")


def _proximal_problems(settings: AlgorithmSettings, *, is_synchronous: bool) -> Iterator[Problem]:
    proximal, updates = settings.proximal, settings.num_updates
    if proximal == "recomputed":
        return
    key = "algorithm.proximal"
    if settings.correction == "bypass":
        message = f"{proximal}, but with correction=bypass the behaviour policy takes its place; write recomputed"
        yield Problem(key=key, message=message)
    elif proximal == "reused" and updates > 1:
        message = f"reused needs one update per step, got {updates} (ppo_n_minibatches * actor_sample_reuse)"
        message += "; write recomputed"
        yield Problem(key=key, message=message)
    elif proximal == "loglinear" and is_synchronous:
        message = "loglinear has nothing to interpolate with staleness.max_staleness=0; write recomputed"
        yield Problem(key=key, message=message)
