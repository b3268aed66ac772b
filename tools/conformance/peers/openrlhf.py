"""OpenRLHF 0.11: advantages, policy loss and KL estimators. Runs in OpenRLHF's environment.

flash_attn and vllm need CUDA and have no part in these functions; where one is missing, empty modules take its place.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

import torch

EMPTY = {
    "flash_attn": ("flash_attn", "flash_attn.bert_padding", "flash_attn.utils", "flash_attn.utils.distributed"),
    "vllm": ("vllm", "vllm.inputs", "vllm.utils"),
}
for library, modules in EMPTY.items():
    for module in modules if importlib.util.find_spec(library) is None else ():
        empty = types.ModuleType(module)
        empty.__spec__ = importlib.machinery.ModuleSpec(module, None)
        empty.__getattr__ = lambda name: None  # type: ignore[method-assign]
        sys.modules[module] = empty

from openrlhf.models.loss import DPOLoss, PolicyLoss, aggregate_loss  # noqa: E402
from openrlhf.models.utils import compute_approx_kl  # noqa: E402
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker  # noqa: E402

Batch = dict[str, Any]


def advantage(
    batch: Batch, *, estimator: str, gamma: float = 1.0, lambd: float = 1.0, overlong_buffer: float | None = None
) -> dict[str, torch.Tensor]:
    """Compute advantages from rewards and, for gae, values. `overlong_buffer`: tokens before the longest answer."""
    space = types.SimpleNamespace
    algo = space(advantage=space(estimator=estimator, gamma=gamma, lambd=lambd, no_std_norm=False))
    size = batch["group"].count(batch["group"][0])
    no_penalty = space(
        overlong_buffer_len=overlong_buffer,
        overlong_penalty_factor=1.0,
        stop_properly_penalty_coef=None,
        clip_range=None,
    )
    arguments = space(
        algo=algo,
        rollout=space(n_samples_per_prompt=size, max_new_tokens=batch["mask"].shape[1]),
        reward=no_penalty,
        ds=space(),
    )
    maker = RemoteExperienceMaker.__new__(RemoteExperienceMaker)
    maker.strategy, maker.args, maker.advantage_estimator = space(args=arguments), arguments, estimator
    maker.kl_ctl = space(value=0.0)
    experience = space(
        rewards=batch["rewards"], index=list(range(len(batch["group"]))), info={}, action_mask=batch["mask"],
        kl=torch.zeros_like(batch["mask"]), values=batch["values"], response_length=batch["mask"].sum(1),
    )  # fmt: skip
    (made,) = maker.compute_advantages_and_returns([experience])
    return {"advantages": made.advantages * batch["mask"]}


def loss(batch: Batch, **options: Any) -> dict[str, torch.Tensor]:
    """Call the policy loss."""
    value, *_ = PolicyLoss(**options)(
        batch["logprobs"], batch["old_logprobs"], batch["advantages"], batch["mask"], batch["rollout_logprobs"]
    )
    return {"loss": value}


def weights(batch: Batch, **options: Any) -> dict[str, torch.Tensor]:
    """Read the weight of each token off the policy loss of that token alone, at a ratio and an advantage of 1."""
    mask = batch["mask"]
    policy_loss, kept = PolicyLoss(**options), []
    for row in range(mask.shape[0]):
        for token in range(mask.shape[1]):
            chosen = torch.zeros_like(mask)
            chosen[row, token] = -mask[row, token]
            arguments = (batch["old_logprobs"], batch["old_logprobs"], chosen, mask, batch["rollout_logprobs"])
            kept.append(policy_loss(*arguments)[0] * mask.sum())
    return {"weights": torch.stack(kept).reshape(mask.shape)}


def kl(batch: Batch, *, estimator: str, unbiased: bool = False) -> dict[str, torch.Tensor]:
    """Take the token mean of a KL estimate."""
    value = compute_approx_kl(
        batch["logprobs"], batch["ref_logprobs"], batch["old_logprobs"], kl_estimator=estimator,
        unbiased_gradient=unbiased,
    )  # fmt: skip
    return {"loss": aggregate_loss(value, batch["mask"])}


def dpo(batch: Batch, **options: Any) -> dict[str, torch.Tensor]:
    """Call the DPO loss on pairs of neighbours, chosen and rejected, with sums over tokens as in its trainer."""
    policy, reference = ((batch[name] * batch["mask"]).sum(1) for name in ("logprobs", "ref_logprobs"))
    value, *_ = DPOLoss(beta=0.1, **options)(policy[0::2], policy[1::2], reference[0::2], reference[1::2])
    return {"loss": value}


OPERATIONS: dict[str, Any] = {"advantage": advantage, "loss": loss, "weights": weights, "kl": kl, "dpo": dpo}
