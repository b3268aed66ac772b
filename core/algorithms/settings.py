"""What algorithms are configured with: the settings that several of them share, and the options of a single one."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class AlgorithmSettings:
    """Settings of the update under the names of the configuration; an algorithm reads those that it needs."""

    ppo_n_minibatches: int
    kl_ctl: float
    kl_in: Literal["reward", "loss"]
    kl_estimator: Literal["k1", "k2", "k3"]
    discount: float
    gae_lambda: float
    eps_clip: float
    value_eps_clip: float
    disable_value: bool
    reward_output_scaling: float
    reward_output_bias: float
    adv_norm: bool
    value_norm: bool
    group_adv_norm: bool
    mask_no_eos_with_zero: bool
    decoupled: bool
    behave_imp_weight_cap: float | None
    entropy_coeff: float

    @property
    def needs_reference(self) -> bool:
        return self.kl_ctl != 0.0

    @property
    def kl_in_reward(self) -> bool:
        return self.needs_reference and self.kl_in == "reward"

    @property
    def kl_coeff(self) -> float:
        """Weight of the KL divergence in the loss."""
        return self.kl_ctl if self.kl_in == "loss" else 0.0

    @property
    def needs_old_logprobs(self) -> bool:
        """With one minibatch the proximal policy is the current one: the update's own forward pass gives it. Without
        the decoupled objective the ratio is taken against the behaviour policy, which the generators report."""
        return self.decoupled and (self.kl_in_reward or self.ppo_n_minibatches > 1)


COMMON = frozenset({
    "ppo_n_minibatches", "kl_ctl", "kl_in", "kl_estimator", "reward_output_scaling", "reward_output_bias",
    "mask_no_eos_with_zero", "decoupled", "behave_imp_weight_cap", "entropy_coeff",
})  # fmt: skip
"""Names of the settings that every algorithm of this folder reads."""


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
