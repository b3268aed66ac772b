"""Trinity-RFT 0.6: advantages, policy losses and KL functions. Runs in Trinity's environment."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from trinity.algorithm.advantage_fn.grpo_advantage import GRPOGroupedAdvantage
from trinity.algorithm.advantage_fn.opmd_advantage import OPMDGroupAdvantage
from trinity.algorithm.kl_fn import kl_fn
from trinity.algorithm.policy_loss_fn.chord_policy_loss import MIXCHORDPolicyLossFn
from trinity.algorithm.policy_loss_fn.cispo_policy_loss import CISPOPolicyLossFn
from trinity.algorithm.policy_loss_fn.dpo_loss import DPOLossFn
from trinity.algorithm.policy_loss_fn.gspo_policy_loss import GSPOLossFn
from trinity.algorithm.policy_loss_fn.mix_policy_loss import MIXPolicyLossFn
from trinity.algorithm.policy_loss_fn.opmd_policy_loss import OPMDPolicyLossFn
from trinity.algorithm.policy_loss_fn.ppo_policy_loss import PPOPolicyLossFn
from trinity.algorithm.policy_loss_fn.sapo_policy_loss import SAPOPolicyLossFn
from trinity.algorithm.policy_loss_fn.topr_policy_loss import TOPRPolicyLossFn
from trinity.common.experience import EID, Experience

sys.modules.setdefault("verl", types.ModuleType("verl")).DataProto = object  # type: ignore[attr-defined]
# Annotations of the two modules below name this class; nothing of verl runs.
from trinity.algorithm.advantage_fn.reinforce_plus_plus_advantage import REINFORCEPLUSPLUSAdvantageFn  # noqa: E402
from trinity.algorithm.advantage_fn.rloo_advantage import RLOOAdvantageFn  # noqa: E402

Batch = dict[str, Any]
LOSSES = {
    "cispo": CISPOPolicyLossFn, "gspo": GSPOLossFn, "opmd": OPMDPolicyLossFn, "ppo": PPOPolicyLossFn,
    "sapo": SAPOPolicyLossFn, "topr": TOPRPolicyLossFn,
}  # fmt: skip
MIXED = {"mix": MIXPolicyLossFn, "chord": MIXCHORDPolicyLossFn}
GROUPED = {"grpo": GRPOGroupedAdvantage, "opmd": OPMDGroupAdvantage}
BATCHED = {"rloo": RLOOAdvantageFn, "reinforce_pp": REINFORCEPLUSPLUSAdvantageFn}


def grouped(batch: Batch, *, name: str, **options: Any) -> dict[str, torch.Tensor]:
    """Compute advantages from experiences in groups."""
    experiences = [
        Experience(
            eid=EID(task=str(group), run=i), tokens=torch.zeros(mask.numel() + 1, dtype=torch.int32), prompt_length=1,
            reward=float(reward), logprobs=mask, action_mask=mask,
        )
        for i, (group, reward, mask) in enumerate(zip(batch["group"], batch["rewards"], batch["mask"], strict=True))
    ]  # fmt: skip
    GROUPED[name](**options)(experiences)
    return {"advantages": torch.stack([experience.advantages for experience in experiences])}


def batched(batch: Batch, *, name: str, **options: Any) -> dict[str, torch.Tensor]:
    """Compute advantages from a padded batch."""
    mask = batch["mask"]
    last = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(dim=1)
    rewards = torch.zeros_like(mask).scatter(1, last[:, None], batch["rewards"][:, None])
    fields = {"token_level_rewards": rewards, "response_mask": mask}
    proto = types.SimpleNamespace(batch=fields, non_tensor_batch={"uid": batch["group"]})
    BATCHED[name](**options)(proto)
    return {"advantages": fields["advantages"]}


def loss(batch: Batch, *, name: str, **options: Any) -> dict[str, torch.Tensor]:
    """Call a policy loss."""
    value, _ = LOSSES[name](**options)(
        logprob=batch["logprobs"], old_logprob=batch["old_logprobs"], action_mask=batch["mask"],
        advantages=batch["advantages"],
    )  # fmt: skip
    return {"loss": value}


def kl(batch: Batch, *, name: str) -> dict[str, torch.Tensor]:
    """Take the token mean of a KL function."""
    function = getattr(kl_fn, name)(kl_coef=1.0)
    value, _ = function.calculate_kl_loss(
        batch["logprobs"], batch["ref_logprobs"], batch["mask"], "token-mean", batch["old_logprobs"]
    )
    return {"loss": value}


def dpo(batch: Batch, **options: Any) -> dict[str, torch.Tensor]:
    """Call the DPO loss on pairs of neighbours: chosen, rejected."""
    value, _ = DPOLossFn(**options)(
        logprob=batch["logprobs"], ref_logprob=batch["ref_logprobs"], action_mask=batch["mask"]
    )
    return {"loss": value}


def mixed(batch: Batch, *, name: str, num_demonstrations: int, **options: Any) -> dict[str, torch.Tensor]:
    """Call a loss of rollouts and, behind them, demonstrations, as one minibatch on one GPU."""
    count = len(batch["mask"])
    sizes = {
        "ppo_mini_batch_size": count, "ppo_micro_batch_size_per_gpu": count, "train_batch_size_expert":
        num_demonstrations, "train_batch_size_usual": count - num_demonstrations,
    }  # fmt: skip
    value, _ = MIXED[name](**sizes, **options)(
        logprob=batch["logprobs"], old_logprob=batch["old_logprobs"], action_mask=batch["mask"],
        advantages=batch["advantages"], expert_mask=torch.arange(count) >= count - num_demonstrations,
        step=torch.zeros(count),
    )  # fmt: skip
    return {"loss": value}


OPERATIONS: dict[str, Any] = {
    "grouped": grouped,
    "batched": batched,
    "loss": loss,
    "kl": kl,
    "dpo": dpo,
    "mixed": mixed,
}
