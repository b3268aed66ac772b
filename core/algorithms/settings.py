"""Settings of algorithms, and the options of those of users.

Standard library only: the checks of a configuration read them before torch is imported.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

T = TypeVar("T")

Advantage = Literal["gae", "returns", "group", "leave_one_out", "logavgexp", "maxrl"]
Loss = Literal["clip", "cispo", "sapo", "topr", "opmd", "kimi", "tv"]
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]
Correction = Literal["none", "bypass", "decoupled", "tis", "mis", "icepop"]
Level = Literal["token", "sequence", "geometric"]
Proximal = Literal["recomputed", "loglinear", "reused"]
KLEstimator = Literal["k1", "k2", "k3", "low_var"]
KLGradient = Literal["own", "k2", "ratio"]
DemonstrationLoss = Literal["nll", "chord"]

BOUNDS: Mapping[tuple[str, str], tuple[float, float]] = {
    ("tis", "token"): (0.0, 2.0),
    ("tis", "sequence"): (0.0, 2.0),
    ("mis", "token"): (0.5, 2.0),
    ("mis", "sequence"): (0.0, 3.0),
    ("mis", "geometric"): (0.999, 1.001),
    ("icepop", "token"): (0.5, 5.0),
}
"""(correction, correction_level) -> default (correction_min, correction_max); other pairs do not exist."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmSettings:
    """Settings of the update under the names of the configuration; an algorithm reads those that it needs.

    The defaults are PPO on plain rewards, with nothing normalized and no correction."""

    ppo_n_minibatches: int = 1
    actor_sample_reuse: int = 1
    critic_sample_reuse: int = 1
    kl_ctl: float = 0.0
    kl_in: Literal["reward", "loss", "both"] = "reward"
    kl_estimator: KLEstimator | None = None
    discount: float = 1.0
    gae_lambda: float = 1.0
    eps_clip: float = 0.2
    value_eps_clip: float = 0.2
    disable_value: bool = False
    reward_output_scaling: float = 1.0
    reward_output_bias: float = 0.0
    adv_norm: bool = False
    value_norm: bool = False
    group_adv_norm: bool = False
    mask_no_eos_with_zero: bool = False
    correction: Correction = "bypass"
    behave_imp_weight_cap: float | None = None
    entropy_coeff: float = 0.0
    max_new_tokens: int = 1
    advantage: Advantage = "gae"
    advantage_std: Literal["none", "group", "batch"] = "group"
    adv_norm_std: Literal["population", "sample"] = "population"
    dynamic_sampling: bool = False
    dynamic_sampling_limit: int = 10
    overlong_share: float = 0.0
    overlong_penalty: float = 1.0
    loss: Loss = "clip"
    ratio: Literal["token", "sequence"] = "token"
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float = 0.0
    ratio_cap: float = 20.0
    sapo_tau_positive: float = 1.0
    sapo_tau_negative: float = 1.05
    opmd_tau: float = 1.0
    aggregation: Aggregation = "token_mean"
    aggregation_constant: float | None = None
    correction_level: Level | None = None
    correction_min: float | None = None
    correction_max: float | None = None
    correction_veto: float = 0.0
    proximal: Proximal = "recomputed"
    opsm_threshold: float | None = None
    m2po_threshold: float | None = None
    kl_reward_level: Literal["token", "sequence"] = "token"
    kl_loss_coeff: float | None = None
    kl_gradient: KLGradient = "own"
    kl_target: float | None = None
    kl_horizon: float = 10000.0
    demonstration_weight: float = 0.0
    demonstration_loss: DemonstrationLoss = "nll"
    demonstration_warmup_steps: int = 0
    demonstration_decay_steps: int = 0
    demonstration_valley: float | None = None

    @property
    def num_updates(self) -> int:
        """Updates of the actor in a step."""
        return self.ppo_n_minibatches * self.actor_sample_reuse

    @property
    def needs_reference(self) -> bool:
        return self.kl_ctl != 0.0

    @property
    def kl_in_reward(self) -> bool:
        return self.needs_reference and self.kl_in in ("reward", "both")

    @property
    def kl_coeff(self) -> float:
        """Weight of the KL divergence in the loss."""
        if self.kl_in == "reward":
            return 0.0
        return self.kl_ctl if self.kl_in == "loss" or self.kl_loss_coeff is None else self.kl_loss_coeff

    @property
    def reward_kl_estimator(self) -> KLEstimator:
        return self.kl_estimator or "k1"

    @property
    def loss_kl_estimator(self) -> KLEstimator:
        return self.kl_estimator or "k3"

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


def read_options(section: type[T], options: Mapping[str, Any]) -> T:
    """Return the frozen dataclass `section`, filled with algorithm.options. Raises ValueError for unknown names or
    types."""
    known = {field.name: field for field in dataclasses.fields(section)}  # type: ignore[arg-type]
    for name, value in options.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"options are {', '.join(known) or 'none'}"
            raise ValueError(f"algorithm.options.{name}: unknown option; {hint}")
        default = known[name].default
        expected = (int, float) if isinstance(default, float) else (type(default),)
        if isinstance(value, bool) != isinstance(default, bool) or not isinstance(value, expected):
            raise ValueError(f"algorithm.options.{name}: must be a {type(default).__name__}, got {value!r}")
    return section(**options)
