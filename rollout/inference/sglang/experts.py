"""The experts that tokens went through, as a SGLang server with enable_return_routed_experts returns them.

An answer covers a request's tokens from `routed_experts_start_len` to its last but one: the last was sampled, but no
forward pass was made of it. A request that continues another's output requests them from where that one's experts end,
so each token has those of the pass that first took it in. Under interrupt=retract a server recomputes running requests,
and returns the new experts.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from model_specs.config import ModelConfig
from rollout.inference.errors import GeneratorCallError
from rollout.inference.sglang.weights import WRITTEN_FOR


class ExpertsOfTokens:
    """Requests and reads the experts of one model's tokens."""

    def __init__(self, model: ModelConfig) -> None:
        """Raises ValueError for a model without experts."""
        if model.moe is None:
            raise ValueError(
                f"actor.moe_routing_replay=true, but a model of type {model.model_type!r} has no experts; write false"
            )
        self._shape = model.num_layers, model.moe.top_k

    def question(self, known: np.ndarray | None) -> dict[str, Any]:
        """Return the fields of a request that request experts, given those of the tokens before."""
        return {"return_routed_experts": True, "routed_experts_start_len": 0 if known is None else len(known)}

    def read(self, meta: Mapping[str, Any], known: np.ndarray | None, num_tokens: int, *, server: str) -> np.ndarray:
        """Return the experts of the first tokens of a request, which has `num_tokens` now, from an answer's meta_info:
        [num_tokens - 1, layers, k] int16. A request aborted while it waited for memory in the server has none: -1.
        Raises GeneratorCallError where experts are missing or too few."""
        before = np.empty((0, *self._shape), np.int16) if known is None else known
        wanted = num_tokens - 1 - len(before)
        encoded = meta.get("routed_experts")
        if encoded is None and meta["finish_reason"]["type"] == "abort":
            return np.concatenate([before, np.full((wanted, *self._shape), -1, np.int16)])
        if encoded is None:
            raise GeneratorCallError(
                f"{server}: a response lacks the experts of its tokens; its SGLang differs from {WRITTEN_FOR}"
            )
        new = np.frombuffer(base64.b64decode(encoded), np.int32)
        if new.size % (self._shape[0] * self._shape[1]) or len(new := new.reshape(-1, *self._shape)) < wanted:
            raise GeneratorCallError(
                f"{server}: a response has {new.size} experts for {wanted} tokens of {self._shape[0]} layers x "
                f"{self._shape[1]}"
            )
        return np.concatenate([before, new[:wanted].astype(np.int16)])
