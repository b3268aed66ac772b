"""What a SGLang server answers to /generate."""

import time
from typing import Any

from helpers.sglang_double.scheduler import Request, logprob_of

VERSIONS = "slipstream_version"


def answer_of(request: Request, reason: dict[str, Any], begin: float, *, tells_versions: bool) -> dict[str, Any]:
    """Of a request that began at `begin`. One that was aborted in the queue has lost its tokens."""
    meta = _meta(request, reason, begin)
    if request.tokens and tells_versions:
        meta[VERSIONS] = request.versions
    if not request.was_dropped:
        return {"output_ids": request.tokens, "meta_info": meta}
    kept = (
        "id",
        "finish_reason",
        "e2e_latency",
        "input_token_logprobs",
        "response_sent_to_client_ts",
        "weight_version",
    )
    empty = {"completion_tokens": 0, "output_token_logprobs": [], "output_token_logprobs_length": 0}
    return {"output_ids": [], "text": "", "meta_info": {key: meta[key] for key in kept} | empty}


def _meta(request: Request, reason: dict[str, Any], begin: float) -> dict[str, Any]:
    return {
        "id": request.rid,
        "finish_reason": reason,
        "prompt_tokens": len(request.prompt),
        "completion_tokens": len(request.tokens),
        "cached_tokens": 0,
        "cached_tokens_details": None,
        "dp_rank": None,
        "e2e_latency": time.time() - begin,
        "input_token_logprobs": [],
        "num_retractions": 0,
        "output_token_logprobs": [[logprob_of(token), token, None] for token in request.tokens],
        "output_token_logprobs_length": len(request.tokens),
        "reasoning_tokens": 0,
        "response_sent_to_client_ts": time.time(),
        "weight_version": "default",
    }
