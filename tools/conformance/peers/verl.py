"""verl 0.9: advantage estimators, policy losses, KL penalties and rollout corrections. Runs in verl's environment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig

Batch = dict[str, Any]


def token_rewards(batch: Batch) -> torch.Tensor:
    """Place the reward of each sequence on its last trained token: [B, T]."""
    mask = batch["mask"]
    last = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(dim=1)
    return torch.zeros_like(mask).scatter(1, last[:, None], batch["rewards"][:, None])


def advantage(batch: Batch, *, estimator: str, **options: Any) -> dict[str, torch.Tensor]:
    """Call an advantage estimator by its registered name."""
    given: dict[str, Any] = {"token_level_rewards": token_rewards(batch), "response_mask": batch["mask"]}
    if estimator == "gae":
        given |= {"values": batch["values"]}
    elif estimator == "reinforce_plus_plus":
        given |= {"config": SimpleNamespace(gamma=options.pop("gamma"))}
    else:
        given |= {"index": np.array(batch["group"])}
    advantages, _ = core_algos.get_adv_estimator_fn(estimator)(**given, **options)
    return {"advantages": advantages}


def loss(batch: Batch, *, name: str, aggregation: str, scale: int | None = None, **options: Any) -> dict[str, Any]:
    """Call a policy loss by its registered name; `options` are fields of verl's ActorConfig."""
    config = ActorConfig(strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=1, **options)
    if scale is not None:
        config.global_batch_info["loss_scale_factor"] = scale
    value, _ = core_algos.get_policy_loss_fn(name)(
        old_log_prob=batch["old_logprobs"], log_prob=batch["logprobs"], advantages=batch["advantages"],
        response_mask=batch["mask"], loss_agg_mode=aggregation, config=config,
    )  # fmt: skip
    return {"loss": value}


def kl(batch: Batch, *, estimator: str) -> dict[str, torch.Tensor]:
    """Take the token mean of a KL penalty."""
    penalty = core_algos.kl_penalty(batch["logprobs"], batch["ref_logprobs"], estimator)
    return {"loss": core_algos.agg_loss(penalty, batch["mask"], "token-mean")}


def weights(batch: Batch, *, level: str, threshold: Any) -> dict[str, torch.Tensor]:
    """Compute the weights of a rollout correction."""
    log_ratio = batch["old_logprobs"] - batch["rollout_logprobs"]
    found, _ = rollout_corr_helper.compute_rollout_correction_weights(
        log_ratio, batch["mask"], rollout_is=level, rollout_is_threshold=threshold
    )
    return {"weights": found * batch["mask"]}


def rejection(batch: Batch, *, rule: str, threshold: str) -> dict[str, torch.Tensor]:
    """Multiply the ratio of each token by whether rejection sampling keeps it."""
    log_ratio = batch["old_logprobs"] - batch["rollout_logprobs"]
    kept, _ = rollout_corr_helper.compute_rollout_rejection_mask(
        log_ratio, batch["mask"], rollout_rs=rule, rollout_rs_threshold=threshold
    )
    return {"weights": log_ratio.exp() * kept}


OPERATIONS: dict[str, Any] = {
    "advantage": advantage,
    "loss": loss,
    "kl": kl,
    "weights": weights,
    "rejection": rejection,
}
