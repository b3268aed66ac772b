"""TRL 1.16: advantages, corrections and losses of GRPOTrainer, RLOOTrainer and DPOTrainer. Runs in TRL's environment.

The methods run unchanged on an object that stands for the trainer: its model returns the given log-probabilities, and
its generation returns the given rewards.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from trl import DPOTrainer, GRPOTrainer, RLOOTrainer

Batch = dict[str, Any]


class Accelerator:
    """One process."""

    device = torch.device("cpu")
    num_processes = 1
    process_index = 0
    sync_gradients = True
    is_main_process = True

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    gather_for_metrics = gather

    def reduce(self, tensor: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        return tensor


def trainer(batch: Batch, logprobs: torch.Tensor, **options: Any) -> SimpleNamespace:
    """Make the object that the methods run on; its model returns `logprobs`, [B, T]."""
    lens = [int(n) for n in batch["lens"]]
    configured = {
        "use_bias_correction_kl": False, "delta": None, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
        "steps_per_generation": 1, "gradient_accumulation_steps": 1, "per_device_train_batch_size": len(lens),
        "gradient_checkpointing_kwargs": None,
    }  # fmt: skip
    own = {name: options.pop(name) for name in list(options) if name in configured}
    defaults = {
        "accelerator": Accelerator(), "args": SimpleNamespace(**configured | own),
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "aux_loss_enabled": False, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None,
        "importance_sampling_level": "token", "beta": 0.0, "loss_type": "bnpo", "epsilon_low": 0.2, "epsilon_high": 0.2,
        "use_vllm": False, "vllm_importance_sampling_correction": False, "current_gradient_accumulation_steps": 1,
        "max_completion_length": logprobs.shape[1], "_entropy_bonus_enabled": False,
        "_metrics": {"train": defaultdict(list)}, "_logs": defaultdict(list), "environment_factories": None,
        "environments": None, "tools": None, "_tokenizer": SimpleNamespace(pad_token_id=0), "pad_to_multiple_of": None,
        "mask_truncated_completions": False, "_is_vlm": False, "num_iterations": 1, "ref_model": None,
        "num_generations": batch["group"].count(batch["group"][0]), "reward_weights": torch.ones(1),
        "multi_objective_aggregation": "sum_then_normalize", "scale_rewards": "group", "reward_funcs": [None],
        "reward_func_names": ["given"], "_pending_extra_logs": {}, "_pending_metrics": {}, "log_multimodal": False,
        "vllm_importance_sampling_clip_min": None, "vllm_importance_sampling_clip_max": None,
        "normalize_advantages": False, "reward_clip_range": None,
    }  # fmt: skip
    made = SimpleNamespace(**defaults | options)
    made._logs = {"prompt": [], "completion": [], "advantages": [], "rewards": defaultdict(list), "extra": {}}
    made._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None)
    made._calculate_rewards = lambda *_: batch["rewards"][:, None]
    return made


def scored(batch: Batch, **options: Any) -> Any:
    """Run GRPOTrainer's scoring of completions of the given lengths; its model returns the old log-probabilities."""
    lens = [int(n) for n in batch["lens"]]
    stub = trainer(batch, batch["old_logprobs"], **options)
    tokens = [[1] * n for n in lens]
    sampled = [row[:n].tolist() for row, n in zip(batch["rollout_logprobs"], lens, strict=True)]
    masks = [row[:n].long().tolist() for row, n in zip(batch["mask"], lens, strict=True)]
    stub._generate = lambda _: ([[1]] * len(lens), tokens, masks, [""] * len(lens), sampled, {}, None, None)
    inputs = [{"prompt": ""} for _ in lens]
    return GRPOTrainer._generate_and_score_completions(stub, inputs)


def advantage(batch: Batch, **options: Any) -> dict[str, torch.Tensor]:
    """Compute the advantages of GRPOTrainer."""
    return {"advantages": scored(batch, **options)["advantages"][:, None] * batch["mask"]}


def rloo_advantage(batch: Batch) -> dict[str, torch.Tensor]:
    """Compute the advantages of RLOOTrainer."""
    lens = [int(n) for n in batch["lens"]]
    stub = trainer(batch, batch["old_logprobs"])
    stub._generate = lambda _: ([[1]] * len(lens), [[1] * n for n in lens], [""] * len(lens))
    out = RLOOTrainer._generate_and_score_completions(stub, [{"prompt": ""} for _ in lens])
    return {"advantages": out["advantages"][:, None] * batch["mask"]}


def weights(batch: Batch, *, mode: str, low: float | None = None, high: float | None = None) -> dict[str, torch.Tensor]:
    """Compute the importance sampling ratios of a mode of vllm_importance_sampling_mode."""
    out = scored(
        batch, use_vllm=True, vllm_importance_sampling_correction=True, vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low, vllm_importance_sampling_clip_max=high,
    )  # fmt: skip
    return {"weights": out["importance_sampling_ratio"] * batch["mask"]}


def opsm(batch: Batch, *, threshold: float) -> dict[str, torch.Tensor]:
    """Compute which tokens off-policy sequence masking keeps."""
    kept = GRPOTrainer.get_off_policy_mask(
        batch["advantages"], batch["logprobs"], batch["rollout_logprobs"], batch["mask"], threshold
    )
    return {"weights": kept * batch["mask"]}


def loss(batch: Batch, **options: Any) -> dict[str, torch.Tensor]:
    """Call GRPOTrainer._compute_loss; `options` are attributes of the trainer or of its arguments."""
    stub = trainer(batch, batch["logprobs"], **options)
    present = (torch.arange(batch["mask"].shape[1]) < batch["lens"][:, None]).double()
    ids = torch.ones_like(batch["mask"], dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": present,
        "tool_mask": batch["mask"], "old_per_token_logps": batch["old_logprobs"],
        "ref_per_token_logps": batch["ref_logprobs"], "num_items_in_batch": batch["mask"].sum(),
        "advantages": batch["advantages"], "sampling_per_token_logps": batch["rollout_logprobs"],
    }  # fmt: skip
    return {"loss": GRPOTrainer._compute_loss(stub, None, inputs)}


def rloo_loss(batch: Batch) -> dict[str, torch.Tensor]:
    """Call RLOOTrainer._compute_loss."""
    stub, mask = trainer(batch, batch["logprobs"]), batch["mask"]
    ids = torch.ones_like(mask, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": mask,
        "old_logps": (batch["old_logprobs"] * mask).sum(1), "advantages": batch["advantages"][:, 0],
    }  # fmt: skip
    return {"loss": RLOOTrainer._compute_loss(stub, None, inputs)}


def dpo(batch: Batch, *, kind: str, beta: float = 0.1) -> dict[str, torch.Tensor]:
    """Call DPOTrainer._compute_loss on pairs of neighbours: chosen, rejected."""

    def chosen_first(name: str) -> torch.Tensor:
        """Put the prompt token before each row."""
        rows = torch.cat((batch[name][0::2], batch[name][1::2]))
        return torch.cat((torch.zeros_like(rows[:, :1]), rows), dim=1)

    mask = chosen_first("mask").long()

    def model(name: str) -> Any:
        logprobs = chosen_first(name)[:, 1:]
        zeros = torch.zeros(logprobs.shape)
        output = SimpleNamespace(log_probs=logprobs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
        return lambda **_: output

    stub = trainer(
        batch, batch["logprobs"], loss_types=[kind], loss_weights=[1.0], beta=beta, ld_alpha=None, use_weighting=False,
        precompute_ref_logps=False, f_divergence_type="reverse_kl", label_smoothing=0.0, _total_train_tokens=0,
        _tp_size=1,
    )  # fmt: skip
    stub.ref_model = model("ref_logprobs")
    inputs = {"input_ids": mask, "attention_mask": mask, "completion_mask": mask}
    return {"loss": DPOTrainer._compute_loss(stub, model("logprobs"), inputs, False)}


OPERATIONS: dict[str, Any] = {
    "advantage": advantage, "rloo_advantage": rloo_advantage, "weights": weights, "opsm": opsm, "loss": loss,
    "rloo_loss": rloo_loss, "dpo": dpo,
}  # fmt: skip
