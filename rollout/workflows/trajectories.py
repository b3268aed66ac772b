"""Functions that workflows share: the seed of a sample, and the trajectory of a completion.

Invariant: seeds are a function of (run seed, epoch, prompt, sample) alone, so a prompt that is issued again after a
failure or a restart draws the same samples from the same weights.
"""

from __future__ import annotations

import hashlib
import struct

from rollout.types import PROMPT_VERSION, REWARD_PART, Completion, Prompt, Trajectory


def sample_seed(run_seed: int, epoch: int, prompt_index: int, sample: int) -> int:
    """Return a seed in [0, 2**63) for one sample of one prompt in one epoch."""
    key = struct.pack("<4q", run_seed, epoch, prompt_index, sample)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def build_trajectory(prompt: Prompt, completion: Completion, reward: float) -> Trajectory:
    """Concatenate prompt and completion; the prompt is masked out, and parts of a Score are metrics. Raises
    RuntimeError on an aborted completion."""
    import numpy as np

    if completion.finish_reason == "abort":
        raise RuntimeError(
            f"{prompt.query_id}: the generator returned an aborted completion; "
            "use a Router, which continues aborted requests"
        )
    num_prompt, num_sampled = len(prompt.token_ids), len(completion.token_ids)
    total = num_prompt + num_sampled
    loss_mask = np.zeros(total, dtype=np.bool_)
    loss_mask[num_prompt:] = True
    logprobs = np.zeros(total, dtype=np.float32)
    logprobs[num_prompt:] = completion.logprobs
    versions = np.empty(total, dtype=np.int32)
    versions[:num_prompt] = PROMPT_VERSION
    versions[num_prompt:] = completion.versions
    token_ids = np.empty(total, dtype=np.int32)
    token_ids[:num_prompt] = prompt.token_ids
    token_ids[num_prompt:] = completion.token_ids
    experts = completion.routed_experts
    if experts is not None:
        experts = np.concatenate([experts, np.full((total - len(experts), *experts.shape[1:]), -1, experts.dtype)])
    return Trajectory(
        query_id=prompt.query_id,
        token_ids=token_ids,
        loss_mask=loss_mask,
        rollout_logprobs=logprobs,
        versions=versions,
        reward=reward,
        finish_reason=completion.finish_reason,
        routed_experts=experts,
        metrics={f"{REWARD_PART}{name}": value for name, value in getattr(reward, "parts", {}).items()},
    )
