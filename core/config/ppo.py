"""Sections about the algorithm: data, sampling, PPO, and how far off policy it may be."""

from __future__ import annotations

from typing import Literal

from core.config.base import Section, key, section
from rollout.data.preferences import PreferenceFields


class PromptOnlyDatasetConfig(Section):
    """Prompts: jsonl rows of {prompt, task, query_id, solutions}, or GSM8K, MATH or MAWPS rows as they are."""

    IGNORED = {"fill_to_max_length": "batches are packed without padding"}

    path: str = key(description="jsonl file of prompts")
    max_prompt_len: int = key(256, "Maximum tokens per prompt; longer prompts are skipped and counted", ge=1)
    train_bs_n_seqs: int = key(256, "Prompts per training step, with group_size completions each", ge=1, le=10**9)


class PromptAnswerDatasetConfig(Section):
    """Prompts with answers, for supervised fine-tuning."""

    IGNORED = {"fill_to_max_length": "batches are packed without padding"}

    train_path: str = key(description="jsonl file to train on")
    valid_path: str = key("", "jsonl file for the validation loss; empty: none")
    max_seqlen: int = key(1024, "Maximum tokens of prompt and answer; longer rows are skipped and counted", ge=2)
    train_bs_n_seqs: int = key(256, "Sequences per training step", ge=1, le=10**9)
    valid_bs_n_seqs: int = key(256, "Sequences per validation batch", ge=1, needs="dataset.valid_path")


class PreferenceFieldsConfig(Section):
    """Columns of preference pairs."""

    prompt: str = key("prompt", "Column of the prompt")
    chosen: str = key("chosen", "Column of the preferred answer: a text, or a conversation")
    rejected: str = key("rejected", "Column of the other answer")

    @property
    def columns(self) -> PreferenceFields:
        """The same for the reader of the files."""
        return PreferenceFields(prompt=self.prompt, chosen=self.chosen, rejected=self.rejected)


class PreferenceDatasetConfig(Section):
    """Preference pairs, for direct preference optimization."""

    train_path: str = key(description="jsonl file of pairs to train on")
    valid_path: str = key("", "jsonl file of pairs to evaluate on; empty: none")
    fields: PreferenceFieldsConfig = section(PreferenceFieldsConfig, "Columns of preference pairs")
    max_seqlen: int = key(
        1024, "Maximum tokens of prompt and one answer; pairs with a longer one are skipped and counted", ge=2
    )
    train_bs_n_seqs: int = key(64, "Pairs per training step", ge=1, le=10**9)
    valid_bs_n_seqs: int = key(64, "Pairs per validation batch", ge=1, needs="dataset.valid_path")


class DPOHyperparameters(Section):
    """Direct preference optimization."""

    beta: float = key(0.1, "Strength of the KL divergence from the reference", gt=0)
    loss: Literal["sigmoid", "ipo"] = key(
        "sigmoid", "sigmoid: DPO. ipo: squared distance of the margin from 1 / 2 beta"
    )
    label_smoothing: float = key(
        0.0, "Probability that the two answers of a pair are exchanged", ge=0, lt=0.5, needs="dpo.loss=sigmoid"
    )


class DemonstrationConfig(Section):
    """Expert data that is trained on beside rollouts (mix, chord)."""

    path: str = key("", "jsonl file of prompts with answers, as for sft; empty: none")
    share: float = key(
        0.5, "Share of demonstrations among the sequences of a step", gt=0, lt=1, needs="demonstrations.path"
    )


class GenerationHyperparameters(Section):
    """How answers are sampled during training."""

    IGNORED = {
        "use_cuda_graph": "determined by the inference backend",
        "force_cudagraph_recapture": "determined by the inference backend",
        "force_no_logits_mask": "log-probabilities always refer to the sampled distribution",
    }
    FIXED = {
        "n": (("1",), "set group_size for the completions per prompt"),
        "greedy": (("false",), "training requires sampling; evaluation.temperature=0 is greedy"),
    }

    max_new_tokens: int = key(16384, "Maximum tokens per completion", ge=1)
    min_new_tokens: int = key(0, "Minimum tokens per completion", ge=0)
    top_p: float = key(1.0, "Sample from the smallest set of tokens with this total probability", gt=0, le=1)
    top_k: int = key(-1, "Sample from the k most probable tokens; -1: all", ge=-1)
    temperature: float = key(1.0, "Sampling temperature", gt=0)


class PPOHyperparameters(Section):
    """Proximal policy optimisation."""

    IGNORED = {
        "fuse_rew_ref": "rewards are functions that run during generation",
        "value_norm_type": "value_norm uses a running mean and variance",
        "value_norm_beta": "value_norm uses a running mean and variance",
        "value_norm_eps": "value_norm uses a running mean and variance",
        "early_stop_imp_ratio": "algorithm.behave_imp_weight_cap bounds the weights instead",
        "max_reward_clip": "rewards are not clipped",
        "recompute_logprob": "decided by algorithm.correction: bypass (the default with max_staleness=0) takes the "
        "generators' log-probabilities as the old ones, all others those of the trainer",
    }
    FIXED = {
        "c_clip": (("null",), "see algorithm.dual_clip"),
        "use_adaptive_kl_ctl": (("false",), "see algorithm.kl_target"),
    }

    gen: GenerationHyperparameters = section(GenerationHyperparameters, "Sampling of answers")
    ppo_n_minibatches: int = key(4, "Minibatches per batch, with one optimizer step each", ge=1)
    actor_sample_reuse: int = key(1, "Passes of the actor over the minibatches of each batch", ge=1)
    critic_sample_reuse: int = key(
        1, "Passes of the critic over the minibatches of each batch", ge=1, needs="ppo.disable_value=false"
    )
    eps_clip: float = key(0.2, "Clip the policy ratio to the range 1 - eps_clip to 1 + eps_clip", gt=0, lt=1)
    value_eps_clip: float = key(
        0.2, "Clip the change of value predictions in one step to this value", gt=0, needs="ppo.disable_value=false"
    )
    kl_ctl: float = key(0.1, "Coefficient of the KL divergence from the reference; 0: no reference model", ge=0)
    discount: float = key(1.0, "Discount factor of rewards, per token", ge=0, le=1)
    gae_lambda: float = key(1.0, "Lambda of generalized advantage estimation (GAE)", ge=0, le=1)
    adv_norm: bool = key(True, "Normalize advantages over the batch")
    value_norm: bool = key(
        True, "Normalize the targets of the critic by their running mean and variance", needs="ppo.disable_value=false"
    )
    disable_value: bool = key(False, "Train without a critic: the advantage is the (normalized) reward")
    reward_output_scaling: float = key(1.0, "Rewards become (reward - reward_output_bias) * reward_output_scaling")
    reward_output_bias: float = key(0.0, "Subtracted from rewards before they are scaled")
    mask_no_eos_with_zero: bool = key(False, "Set the reward of completions truncated at max_new_tokens to 0")


class StalenessConfig(Section):
    """How old the weights that sampled a batch may be."""

    max_staleness: int = key(1, "Maximum age of sampled tokens in training steps; 0: synchronous, on policy", ge=0)
    over_age: Literal["wait", "mask"] = key(
        "wait",
        "wait: wait for the oldest completions. mask: exclude tokens beyond the bound from training",
        needs="max_staleness > 0",
    )
    in_order: bool = key(
        False, "Train prompts in the order of the data set instead of as they finish: reproducible batches"
    )
