"""Which arguments of a SGLang server are its user's to set, as far as it is known without SGLang."""

from __future__ import annotations

FROM_ELSEWHERE = {
    "model_path": "actor.path says which model",
    "tp_size": "allocation_mode says the layout",
    "pp_size": "allocation_mode says the layout",
    "dp_size": "allocation_mode says the layout: one server a data-parallel replica",
    "base_gpu_id": "allocation_mode says which GPUs",
    "device": "generator.device says it",
    "nnodes": "a replica is on one node",
    "host": "chosen at start",
    "port": "a free one is chosen at start",
    "nccl_port": "a free one is chosen at start",
    "dtype": "generator.dtype says it",
    "max_running_requests": "generator.max_running says it",
    "skip_tokenizer_init": "requests and answers are token ids",
    "enable_return_routed_experts": "actor.moe_routing_replay says it",
    "enable_memory_saver": "allocation_mode says whether trainer and generators share GPUs",
    "tokenizer_worker_num": "the process that answers requests has calls of this project, and it is one",
    "speculative_algorithm": "a step that samples several tokens cannot tell their versions apart",
}
"""Server arguments that are not the user's to set, and what decides them."""


def decided_elsewhere(key: str) -> str | None:
    """What decides the server argument `key`; None where its user does."""
    return FROM_ELSEWHERE.get(key.replace("-", "_"))
