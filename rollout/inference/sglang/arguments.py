"""Which arguments of a SGLang server are its user's to set, as far as it is known without SGLang."""

from __future__ import annotations

FROM_ELSEWHERE = {
    "model_path": "set by actor.path",
    "tp_size": "set by allocation_mode",
    "pp_size": "set by allocation_mode",
    "dp_size": "set by allocation_mode: one server per data-parallel replica",
    "base_gpu_id": "set by allocation_mode",
    "device": "generator.device sets it",
    "nnodes": "a replica is on one node",
    "host": "chosen at start",
    "port": "a free one is chosen at start",
    "nccl_port": "a free one is chosen at start",
    "api_key": "made for each run",
    "admin_api_key": "api_key, made for each run, covers every call",
    "dtype": "set by generator.dtype",
    "max_running_requests": "set by generator.max_running",
    "skip_tokenizer_init": "requests and answers are token ids",
    "enable_return_routed_experts": "set by actor.moe_routing_replay",
    "enable_memory_saver": "set by allocation_mode",
    "tokenizer_worker_num": "the hooks require a single tokenizer process",
    "speculative_algorithm": "a step that samples several tokens has no per-token versions",
}
"""Server arguments that are not the user's to set, and what decides them."""


def decided_elsewhere(key: str) -> str | None:
    """Return the key or mechanism that determines the server argument `key`; None where users may set it."""
    return FROM_ELSEWHERE.get(key.replace("-", "_"))
