"""Sections about the algorithm: data, sampling, PPO, and how far off policy it may be."""

from __future__ import annotations

from typing import Literal

from core.algorithms import ALGORITHMS
from core.config.base import Section, key, section
from core.config.models import FlagValue


class PromptOnlyDatasetConfig(Section):
    """Prompts: jsonl rows of {prompt, task, query_id, solutions}, or GSM8K, MATH or MAWPS rows as they are."""

    IGNORED = {"fill_to_max_length": "batches are packed; nothing is padded"}

    path: str = key(description="jsonl file of prompts")
    max_prompt_len: int = key(256, "Longest prompt in tokens; longer ones are left out and counted", ge=1)
    train_bs_n_seqs: int = key(256, "Prompts per training step; each is answered group_size times", ge=1, le=10**9)


class PromptAnswerDatasetConfig(Section):
    """Prompts with answers, for supervised fine-tuning."""

    IGNORED = {"fill_to_max_length": "batches are packed; nothing is padded"}

    train_path: str = key(description="jsonl file to train on")
    valid_path: str = key("", "jsonl file to measure the loss on; empty: none")
    max_seqlen: int = key(1024, "Longest prompt with answer in tokens; longer ones are left out and counted", ge=2)
    train_bs_n_seqs: int = key(256, "Sequences per training step", ge=1, le=10**9)
    valid_bs_n_seqs: int = key(256, "Sequences per batch of the validation", ge=1)


class GenerationHyperparameters(Section):
    """How answers are sampled during training."""

    IGNORED = {
        "use_cuda_graph": "the generator decides",
        "force_cudagraph_recapture": "the generator decides",
        "force_no_logits_mask": "log-probabilities are always those of the distribution sampled from",
    }
    FIXED = {
        "n": (("1",), "group_size says how many answers a prompt gets"),
        "greedy": (("false",), "training needs samples; evaluation.temperature=0 evaluates greedily"),
    }

    max_new_tokens: int = key(16384, "Longest answer in tokens", ge=1)
    min_new_tokens: int = key(0, "An answer cannot stop before this many tokens", ge=0)
    top_p: float = key(1.0, "Sample from the smallest set of tokens with this probability", gt=0, le=1)
    top_k: int = key(-1, "Sample from this many most probable tokens; -1: all", ge=-1)
    temperature: float = key(1.0, "Sampling temperature", gt=0)


class PPOHyperparameters(Section):
    """Proximal policy optimisation."""

    IGNORED = {
        "fuse_rew_ref": "rewards are functions, computed while other answers are sampled",
        "value_norm_type": "the running mean and variance follow value_norm alone",
        "value_norm_beta": "the running mean and variance follow value_norm alone",
        "value_norm_eps": "the running mean and variance follow value_norm alone",
        "early_stop_imp_ratio": "algorithm.behave_imp_weight_cap bounds the weights instead",
        "max_reward_clip": "rewards are not clipped",
        "recompute_logprob": "old log-probabilities always come from the trainer",
    }
    FIXED = {
        "c_clip": (("null",), "dual clipping is not available"),
        "use_adaptive_kl_ctl": (("false",), "kl_ctl stays as it is"),
        "actor_sample_reuse": (("1",), "every sample is trained on once"),
        "critic_sample_reuse": (("1",), "every sample is trained on once"),
    }

    gen: GenerationHyperparameters = section(GenerationHyperparameters, "Sampling of answers")
    ppo_n_minibatches: int = key(4, "Parts that a batch is split into; each is one optimizer update", ge=1)
    eps_clip: float = key(0.2, "The policy ratio is clipped to 1 - eps_clip .. 1 + eps_clip", gt=0, lt=1)
    value_eps_clip: float = key(0.2, "The critic's change in one step is clipped to this", gt=0)
    kl_ctl: float = key(0.1, "Weight of the KL divergence from the reference; 0: no reference model at all", ge=0)
    discount: float = key(1.0, "Discount factor of rewards, per token", ge=0, le=1)
    gae_lambda: float = key(1.0, "Lambda of generalised advantage estimation", ge=0, le=1)
    adv_norm: bool = key(True, "Normalise advantages over the batch")
    value_norm: bool = key(True, "Normalise the critic's targets by their running mean and variance")
    disable_value: bool = key(False, "Train without a critic: the advantage is the (normalised) reward")
    reward_output_scaling: float = key(1.0, "Rewards become (reward - reward_output_bias) * reward_output_scaling")
    reward_output_bias: float = key(0.0, "Subtracted from rewards before they are scaled")
    mask_no_eos_with_zero: bool = key(False, "Answers cut off at max_new_tokens get reward 0")


class StalenessConfig(Section):
    """How old the weights that sampled a batch may be."""

    max_staleness: int = key(1, "Bound in training steps, never exceeded; 0: on policy, nothing overlaps", ge=0)
    over_age: Literal["wait", "mask"] = key(
        "wait",
        "wait: the trainer waits for the oldest answers. mask: tokens over age are not trained on",
    )
    in_order: bool = key(
        False, "Train prompts in the order of the data set, not as they finish: every run has the same batches"
    )


class AlgorithmConfig(Section):
    """Which algorithm, off-policy correction, KL divergence, entropy."""

    name: str | None = key(
        None,
        f"One of {', '.join(ALGORITHMS)}, or your own as package.module:Class. null: PPO as ppo.* says, which is GRPO "
        "with ppo.disable_value and group_adv_norm",
    )
    options: dict[str, FlagValue] = key(
        {}, "Settings of the named algorithm alone, by name, as in clip_low: 3e-4 (gspo); see core/algorithms"
    )
    decoupled: bool | None = key(
        None,
        "Clip around the trainer's policy, weigh by trainer/generator. null: if max_staleness > 0",
    )
    behave_imp_weight_cap: float | None = key(
        5.0, "Tokens whose trainer/generator weight exceeds this are not trained on (decoupled). null: no cap", gt=0
    )
    kl_in: Literal["reward", "loss"] = key("reward", "ppo.kl_ctl is subtracted from rewards, or added to the loss")
    kl_estimator: Literal["k1", "k2", "k3"] | None = key(
        None, "Per-token estimate of the KL divergence. null: k1 in the reward, k3 in the loss"
    )
    entropy_coeff: float = key(0.0, "Weight of the entropy bonus", ge=0)
