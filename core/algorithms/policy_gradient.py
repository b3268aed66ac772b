"""Every policy-gradient algorithm: advantages, loss, aggregation, correction, KL and entropy as its settings choose.

The names of algorithms are presets of these settings (core/config/presets.py). Configurations without algorithm.name
are PPO.

Demonstrations (expert data) beside rollouts are fine-tuned on in the same loss:

    loss = (1 - mu) * policy loss, mean over rollouts  +  mu * mean over tokens of demonstrations of -phi * log pi

phi is 1 (mix), or p (1 - p) of the token without gradient (chord). Source: Trinity-RFT 0.6, MIX and MIX-CHORD (Zhang et
al. 2025). Pairs of answers have the loss of offline.DPO in place of the second mean. Invariant: the token weights of a
minibatch sum to 1, mu of it on demonstrations, whatever their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core.algorithms.advantages import (
    BASELINES,
    Turns,
    ValueNorm,
    gae,
    last_trained,
    share_compared,
    turn_advantages,
    turn_gae,
    whiten,
)
from core.algorithms.base import Algorithm, Metrics, Objective, Pass, Unit, check_baseline
from core.algorithms.losses import (
    PROXIMAL_SHARE,
    SMALL_CHANGE,
    AdaptiveKL,
    overlong_penalty,
    policy_loss,
    proximal_share,
    reward_metrics,
    sequence_scores,
    small_changes,
    token_divergence,
    token_rewards,
    trained_weights,
)
from core.algorithms.offline import DPO
from core.config.algorithm import AlgorithmSettings
from mcore_adapter.data.batch import (
    TOKEN_WEIGHTS,
    ModelOutput,
    PackedBatch,
    Sequences,
    sequence_mean,
    sequence_of_token,
    token_mean,
    token_sum,
)

if TYPE_CHECKING:
    from core.data.rollout_batch import RolloutBatch
    from core.runs.checkpoints import State


DEMONSTRATION = "demonstration"
"""The field [T] bool of tokens, prompts included, of sequences that no policy sampled."""


def demonstration_weight(step: int, settings: AlgorithmSettings) -> float:
    """Return mu of a step, counted from 0: a linear warm-up from 0 to demonstration_weight, then a cosine to
    demonstration_valley; constant where no steps are set."""
    peak, valley = settings.demonstration_weight, settings.demonstration_valley
    warmup, decay = settings.demonstration_warmup_steps, settings.demonstration_decay_steps
    if step < warmup:
        return peak * step / warmup
    if valley is None or not decay:
        return peak
    done = min((step - warmup) / decay, 1.0)
    return valley + (peak - valley) * 0.5 * (1.0 + math.cos(math.pi * done))


def mixed_weights(
    minibatch: PackedBatch,
    of_rollouts: Callable[[PackedBatch], Tensor],
    of_demonstrations: Callable[[PackedBatch], Tensor],
    mu: float,
) -> Tensor:
    """Weigh the tokens of rollouts, 1 - mu of all, and those of demonstrations, each by their function: [T] float64.

    A minibatch without one of the two has all its weight on the other."""
    shown = minibatch.fields[DEMONSTRATION][minibatch.cu_seqlens[:-1]].bool()
    weights = torch.zeros(minibatch.num_tokens, dtype=torch.float64)
    parts = ((~shown, of_rollouts, 1.0 - mu), (shown, of_demonstrations, mu))
    weighed = [(chosen.nonzero().flatten().tolist(), weigh, share) for chosen, weigh, share in parts]
    for sequences, weigh, share in weighed:
        if sequences:
            part = weigh(minibatch.select(sequences))
            alone = len(sequences) == minibatch.num_sequences
            weights[minibatch.token_index(sequences)] = part / part.sum().clamp(min=1e-30) * (1.0 if alone else share)
    return weights


def demonstration_loss(
    logprobs: Tensor, weights: Tensor, fields: Mapping[str, Tensor], settings: AlgorithmSettings, mu: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the weighted sum of -phi * log pi over the demonstrations of a microbatch, and their negative
    log-likelihood per token as a metric. `weights` [t] hold mu already, 0 outside loss_mask."""
    shown = torch.where(fields[DEMONSTRATION].bool(), weights, 0.0)
    own = torch.where(shown > 0, logprobs, 0.0)
    phi = torch.ones_like(own)
    if settings.demonstration_loss == "chord":
        p = own.detach().exp()
        phi = p * (1.0 - p)
    loss = -(phi * own * shown).sum()
    return loss, {"demonstration_nll": -(own.detach() * shown).sum() / max(mu, 1e-30)}


def pair_loss(
    output: ModelOutput, fields: Mapping[str, Tensor], sequences: Sequences, settings: AlgorithmSettings, mu: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the weighted sum of the loss of the pairs of a microbatch, and the metrics of `dpo` as means over pairs.
    The weights of `fields` hold mu already."""
    shown = fields["loss_mask"] & fields[DEMONSTRATION].bool()
    of_pairs = {**fields, "loss_mask": shown, TOKEN_WEIGHTS: torch.where(shown, trained_weights(fields), 0.0)}
    loss, metrics = DPO(beta=settings.demonstration_beta).loss(output, of_pairs, sequences)
    return loss, {f"demonstration_{name}": value / max(mu, 1e-30) for name, value in metrics.items()}


class PolicyGradient(Algorithm):
    """Update the policy on advantages of sampled answers, with a critic or without one."""

    def __init__(self, settings: AlgorithmSettings, options: Mapping[str, object] | None = None) -> None:
        """Raises ValueError for options: every setting has a key of its own."""
        if options:
            raise ValueError(f"algorithm.options.{next(iter(options))}: unknown option; write it as a key of algorithm")
        self._settings = settings
        self._value_norm = ValueNorm()
        self._kl = AdaptiveKL(settings.kl_ctl, settings.kl_target, settings.kl_horizon)
        self._steps = 0  # whose advantages were computed

    @property
    def settings(self) -> AlgorithmSettings:
        """The settings, with the present KL coefficient."""
        return self._settings.model_copy(update={"kl_ctl": self._kl.coefficient})

    @property
    def unit(self) -> Unit:  # type: ignore[override]
        return "group" if self._settings.compares_groups else "sequence"

    @property
    def passes(self) -> frozenset[Pass]:
        settings = self._settings
        wanted: dict[Pass, bool] = {
            "old_logprobs": settings.needs_old_logprobs,
            "ref_logprobs": settings.needs_reference,
            "values": settings.has_values,
        }
        return frozenset(name for name, needed in wanted.items() if needed)

    @property
    def needs_entropy(self) -> bool:
        return self._settings.has_entropy_bonus

    @property
    def critic(self) -> Objective | None:
        return None if not self._settings.has_values else Critic(value_eps_clip=self._settings.value_eps_clip)

    def advantages(
        self, batch: RolloutBatch, fields: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        settings, mask = self.settings, fields["loss_mask"]
        self._steps += 1
        trained_on = _policy_fields(settings, fields)
        scores, task_reward, figures = _scores(batch, settings)
        divergence = token_divergence({**fields, **trained_on}, settings)
        kl_penalty = None if divergence is None else settings.kl_ctl * divergence
        rollouts = torch.tensor(batch.rollouts)
        if kl_penalty is not None and settings.kl_reward_level == "sequence":
            scores = scores.index_add(0, rollouts[_sequence_of_token(batch)], -kl_penalty * mask)
        turns = None if settings.credit == "outcome" else Turns.of(batch, scores[rollouts], settings)
        scores = self.baseline(scores, torch.tensor(batch.group_ids_of_rollouts))
        check_baseline(scores, batch.num_rollouts)
        scores = scores[rollouts] if not settings.credits_turn_rewards else torch.zeros(batch.num_sequences)
        per_token = None if settings.kl_reward_level == "sequence" else kl_penalty
        advantages, returns = self._of_tokens(batch, fields, scores, per_token, turns)
        if turns is not None and settings.credit != "turn_gae":
            advantages = advantages + turns.to_tokens(turn_advantages(turns, settings))
            figures["turns_compared"] = share_compared(turns)
        if settings.has_values:
            trained_on["returns"] = self._normalised(returns, mask)
        metrics = figures | reward_metrics(task_reward, kl_penalty, advantages, mask, batch.num_rollouts, settings)
        if divergence is not None:
            metrics["ref_kl"] = float((divergence * mask).sum() / mask.sum().clamp(min=1))
            self._kl.update(metrics["ref_kl"], batch.num_sequences)
        if settings.adv_norm:
            advantages = whiten(advantages, mask, of_sample=settings.adv_norm_std == "sample")
        trained_on["advantages"] = advantages
        if self._mixes:
            metrics["demonstration_weight"] = self._mu
        return trained_on, metrics

    @property
    def _mixes(self) -> bool:
        return self._settings.mixes_demonstrations

    @property
    def _mu(self) -> float:
        """Weight of the demonstrations in the present step."""
        return demonstration_weight(max(self._steps - 1, 0), self._settings)

    def baseline(self, scores: Tensor, group_ids: Tensor) -> Tensor:
        """Compute the advantage of each rollout, or its score where a critic has the baseline: [R] of [R] each. A
        rollout is one sequence, or the branches that a workflow returned of it, with the mean of their scores."""
        return BASELINES[self._settings.advantage](scores, group_ids, self._settings)

    def _of_tokens(
        self,
        batch: RolloutBatch,
        fields: Mapping[str, Tensor],
        scores: Tensor,
        kl_penalty: Tensor | None,
        turns: Turns | None,
    ) -> tuple[Tensor, Tensor]:
        """Compute advantages and returns of every trained token, [T] each, from the scores [N] of its sequences, or
        from the rewards of its turns."""
        settings, mask = self._settings, fields["loss_mask"]
        discount = settings.discount if settings.advantage in ("gae", "returns", "group") else 1.0
        gae_lambda = settings.gae_lambda if settings.advantage in ("gae", "group") else 1.0
        if not settings.has_values and kl_penalty is None and discount == gae_lambda == 1.0:
            advantages = scores[_sequence_of_token(batch)] * mask  # what the scan would give, at once
            return advantages, advantages
        cu_seqlens, no_eos = torch.tensor(batch.cu_seqlens), torch.tensor(batch.no_eos)
        rewards = token_rewards(scores, cu_seqlens, mask, kl_penalty=kl_penalty)
        values = fields.get("old_values", torch.zeros_like(rewards))
        if settings.value_norm:
            values = self._value_norm.denormalize(values) * mask
        bootstrap = torch.where(no_eos, values[last_trained(cu_seqlens, mask)], 0.0)
        if turns is not None and settings.credit == "turn_gae":
            penalties = torch.zeros_like(rewards) if kl_penalty is None else -kl_penalty * mask
            return turn_gae(turns, penalties, values, bootstrap, discount=discount, gae_lambda=gae_lambda)
        return gae(rewards, values, cu_seqlens, mask, bootstrap, discount=discount, gae_lambda=gae_lambda)

    def _normalised(self, returns: Tensor, mask: Tensor) -> Tensor:
        if not self._settings.value_norm:
            return returns
        self._value_norm.update(returns, mask)
        return self._value_norm.normalize(returns) * mask

    @property
    def weighs_alike(self) -> bool:
        overridden = type(self).token_weights is not PolicyGradient.token_weights
        return self._settings.aggregation == "token_mean" and not overridden and not self._mixes

    def token_weights(self, minibatch: PackedBatch) -> Tensor:
        if self._mixes and DEMONSTRATION in minibatch.fields:
            of_shown = sequence_mean if self._settings.mixes_pairs else token_mean
            return mixed_weights(minibatch, self._rollout_weights, of_shown, self._mu)
        return self._rollout_weights(minibatch)

    def _rollout_weights(self, minibatch: PackedBatch) -> Tensor:
        settings = self._settings
        if settings.aggregation == "token_mean":
            return token_mean(minibatch)
        if settings.aggregation == "sequence_mean":
            return sequence_mean(minibatch)
        trained = float(sequence_mean(minibatch).sum())
        constant = 1.0
        if settings.aggregation == "constant":
            constant = settings.aggregation_constant or float(settings.max_new_tokens)
        return token_sum(minibatch, divisor=trained * constant)

    def loss(self, output: ModelOutput, fields: Mapping[str, Tensor], sequences: Sequences) -> tuple[Tensor, Metrics]:
        if not self._mixes or DEMONSTRATION not in fields:
            return policy_loss(output, fields, sequences, self.settings)
        assert output.logprobs is not None, "the actor's engine returns log-probabilities"
        sampled = {**fields, "loss_mask": fields["loss_mask"] & ~fields[DEMONSTRATION].bool()}
        loss, metrics = policy_loss(output, sampled, sequences, self.settings)
        weights, mu = trained_weights(fields), self._mu
        metrics = {name: value / (1.0 - mu) for name, value in metrics.items()}  # means over rollouts alone
        if self._settings.mixes_pairs:
            shown, figures = pair_loss(output, fields, sequences, self._settings, mu)
            return loss + shown, metrics | figures
        shown, figures = demonstration_loss(output.logprobs, weights, fields, self._settings, mu)
        return loss + shown, metrics | figures

    def state_dict(self) -> dict[str, object]:
        state = {"value_norm": asdict(self._value_norm), "kl_coefficient": self._kl.coefficient}
        return {**state, "steps": self._steps}

    def load_state_dict(self, state: State) -> None:
        if "value_norm" in state:
            self._value_norm = replace(self._value_norm, **state["value_norm"])
        self._steps = state.get("steps", self._steps)
        if "kl_coefficient" in state and self._kl.target is not None:
            self._kl.coefficient = state["kl_coefficient"]


@dataclass(frozen=True, kw_only=True)
class Critic(Objective):
    """The clipped squared error of the critic against `returns`, around the values of the start of the batch
    (`old_values`). Source: Schulman et al.'s PPO2 code, 0.5 * max((v - R)^2, (clip(v) - R)^2)."""

    value_eps_clip: float

    def loss(self, output: ModelOutput, fields: Mapping[str, Tensor], sequences: Sequences) -> tuple[Tensor, Metrics]:
        assert output.values is not None, "the critic's engine returns values"
        weights, returns, old_values = trained_weights(fields), fields["returns"], fields["old_values"]
        near = output.values.clamp(old_values - self.value_eps_clip, old_values + self.value_eps_clip)
        unclipped = (output.values - returns).square()
        clipped = (near - returns).square()
        loss = (0.5 * torch.maximum(unclipped, clipped) * weights).sum()
        metrics = {
            "value_loss": loss.detach(),
            "value_clip_ratio": ((clipped > unclipped) * weights).sum(),
            "values": (output.values.detach() * weights).sum(),
        }
        return loss, metrics


def _scores(batch: RolloutBatch, settings: AlgorithmSettings) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Return the score of each rollout [R], the mean reward before penalties, and metrics."""
    scores = batch.of_rollouts(sequence_scores(batch, settings))
    task_reward = scores.mean()
    if not settings.overlong_share:
        return scores, task_reward, {}
    lens = torch.tensor(batch.cu_seqlens).diff() - torch.tensor(batch.prompt_lens)
    penalty = overlong_penalty(
        lens, max_tokens=settings.max_new_tokens, share=settings.overlong_share, factor=settings.overlong_penalty
    )
    return scores + batch.of_rollouts(penalty), task_reward, {"overlong_penalty": float(penalty.mean())}


def _sequence_of_token(batch: RolloutBatch) -> Tensor:
    return sequence_of_token(torch.tensor(batch.cu_seqlens).diff())


def _policy_fields(settings: AlgorithmSettings, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what corrections train on beside the passes: with correction=bypass, the generators' policy as the old
    one."""
    if settings.proximal_policy == "behaviour":
        return {"old_logprobs": fields["rollout_logprobs"]}
    added = {}
    if settings.proximal_policy == "loglinear":
        added[PROXIMAL_SHARE] = proximal_share(fields["ages"])
    if settings.m2po_threshold is not None:
        log_weights = fields["old_logprobs"] - fields["rollout_logprobs"]
        added[SMALL_CHANGE] = small_changes(log_weights, fields["loss_mask"], settings.m2po_threshold)
    return added
