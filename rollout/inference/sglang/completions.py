"""One completion as a SGLang server's HTTP interface requests and returns it, with the experts of its tokens.

An answer covers the experts of a request's tokens from `routed_experts_start_len` to its last but one: the last was
sampled, but no forward pass was made of it. A request that continues another's output requests them from where that
one's experts end, so each token has those of the pass that first took it in. Under interrupt=retract a server
recomputes running requests, and returns the new experts.
"""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import TypedDict

import numpy as np

from model_specs.config import ModelConfig
from rollout.errors import GeneratorCallError
from rollout.inference.sglang.arguments import SGLANG
from rollout.inference.sglang.client import Call
from rollout.inference.sglang.hooks.in_flight import Sampled
from rollout.types import Completion, FinishReason, GenerateRequest, SamplingParams


class Meta(TypedDict, total=False):
    """Fields of an answer's meta_info that are read."""

    finish_reason: dict[str, FinishReason]
    output_token_logprobs: list[tuple[float | None, int]]
    slipstream_version: list[int]
    routed_experts: str


class Answer(TypedDict):
    """Fields of an answer to generate_call() that are read."""

    output_ids: list[int]
    meta_info: Meta


_FORBIDDEN = -1e9
"""Added to the logits of tokens that may not be sampled yet."""
EMPTY = Completion(
    token_ids=np.empty(0, np.int32),
    logprobs=np.empty(0, np.float32),
    versions=np.empty(0, np.int32),
    finish_reason="abort",
)


def generate_call(
    request: GenerateRequest, output: Completion, *, rid: str, vocab_size: int, seeded: bool = False
) -> Call:
    """Request the tokens after `output`, under the request id `rid`. `seeded`: the server draws by the seed."""
    sampling, done = request.sampling, len(output.token_ids)
    params: dict[str, object] = {
        "max_new_tokens": sampling.max_new_tokens - done,
        "temperature": sampling.temperature,
        "stop_token_ids": sampling.stop_token_ids + sampling.pause_token_ids,
    }
    if done < sampling.min_new_tokens:
        # The server's own min_new_tokens needs a tokenizer there. Up to that length, stop tokens are ruled out.
        params["max_new_tokens"] = min(sampling.min_new_tokens, sampling.max_new_tokens) - done
        params["ignore_eos"] = True
        params["logit_bias"] = {str(token): _FORBIDDEN for token in sampling.stop_token_ids}
    body: dict[str, object] = {
        "input_ids": np.concatenate([np.asarray(request.prompt_ids, np.int32), output.token_ids]),
        "sampling_params": params,
        "return_logprob": True,
        "rid": rid,
    }
    if seeded:
        params["sampling_seed"] = request.seed & (2**63 - 1)
    if sampling.temperature > 0 and sampling.top_p < 1.0:
        params["top_p"] = sampling.top_p
    if sampling.temperature > 0 and 0 < sampling.top_k < vocab_size:
        params["top_k"] = sampling.top_k
    return "/generate", body


def read_answer(
    answer: Answer, sampling: SamplingParams, *, server: str, log_file: object, one_version: int | None
) -> Completion:
    """Return the tokens of one answer. `one_version`: the version of all of them where the server does not report it
    and only one is possible. Raises GeneratorCallError when the answer lacks versions or log-probabilities, or has some
    that are no numbers."""
    token_ids, meta = answer["output_ids"], answer["meta_info"]
    reason = meta["finish_reason"]["type"]
    logprobs = [entry[0] for entry in meta.get("output_token_logprobs", [])]
    versions = meta.get("slipstream_version")
    if versions is None and one_version is not None:
        versions = [one_version] * len(token_ids)
    if versions is None and reason == "abort":  # it waited for memory in the server: sampled once more
        versions = []
    if versions is None and token_ids:
        raise GeneratorCallError(
            f"{server}: the server does not return token versions; its SGLang differs from {SGLANG}; see "
            f"the warnings of the hooks in {log_file}"
        )
    n = min(len(token_ids), len(logprobs), len(versions or []))
    if n < len(token_ids) and reason != "abort":
        raise GeneratorCallError(f"{server}: a response of {len(token_ids)} tokens is complete for {n} only")
    sampled = Sampled(
        np.array(token_ids[:n], np.int32),
        np.array(logprobs[:n], np.float32),  # null, which is how JSON has no number, becomes one that is not finite
        np.array((versions or [])[:n], np.int32),
    )
    if not np.isfinite(sampled.logprobs).all():
        raise GeneratorCallError(
            f"{server}: log-probabilities of an answer are not finite: its weights are broken, or their activations "
            f"overflow (generator.dtype); see {log_file}"
        )
    return _completion(sampled, sampling, reason)


def so_far(output: Completion, reported: Sampled | None, sampling: SamplingParams) -> Completion:
    """Return a request's tokens: `output`, then those that the server has `reported`. Finished if there is nothing to
    add."""
    whole = output if reported is None else joined(output, _completion(reported, sampling, "abort"))
    return replace(whole, finish_reason=end_of(whole, sampling) or "abort")


def _completion(sampled: Sampled, sampling: SamplingParams, reason: FinishReason) -> Completion:
    token_ids, logprobs, versions = sampled
    if sampling.temperature > 0 and sampling.top_k == 1:
        # The server takes it for greedy, and reports how likely the token was among all.
        logprobs = np.zeros_like(logprobs)
    return Completion(token_ids=token_ids, logprobs=logprobs, versions=versions, finish_reason=reason)


def end_of(output: Completion, sampling: SamplingParams) -> FinishReason | None:
    """Return how `output` ended, if it is complete: an abort may arrive after the last token."""
    if len(output.token_ids) and output.token_ids[-1] in sampling.stop_token_ids:
        return "stop"
    return "length" if len(output.token_ids) >= sampling.max_new_tokens else None


def joined(output: Completion, part: Completion) -> Completion:
    """Append `part` to `output`, with the finish reason of `part`."""
    if not len(output.token_ids):
        return part
    return Completion(
        token_ids=np.concatenate([output.token_ids, part.token_ids]),
        logprobs=np.concatenate([output.logprobs, part.logprobs]),
        versions=np.concatenate([output.versions, part.versions]),
        finish_reason=part.finish_reason,
        routed_experts=output.routed_experts if part.routed_experts is None else part.routed_experts,
    )


class ExpertsOfTokens:
    """Requests and reads the experts of one model's tokens."""

    def __init__(self, model: ModelConfig) -> None:
        """Raises ValueError for a model without experts."""
        if model.moe is None:
            raise ValueError(
                f"actor.moe_routing_replay=true, but a model of type {model.model_type!r} has no experts; write false"
            )
        self._shape = model.num_layers, model.moe.top_k

    def question(self, known: np.ndarray | None) -> dict[str, object]:
        """Return the fields of a request that request experts, given those of the tokens before."""
        return {"return_routed_experts": True, "routed_experts_start_len": 0 if known is None else len(known)}

    def read(self, meta: Meta, known: np.ndarray | None, num_tokens: int, *, server: str) -> np.ndarray:
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
                f"{server}: a response lacks the experts of its tokens; its SGLang differs from {SGLANG}"
            )
        new = np.frombuffer(base64.b64decode(encoded), np.int32)
        if new.size % (self._shape[0] * self._shape[1]) or len(new := new.reshape(-1, *self._shape)) < wanted:
            raise GeneratorCallError(
                f"{server}: a response has {new.size} experts for {wanted} tokens of {self._shape[0]} layers x "
                f"{self._shape[1]}"
            )
        return np.concatenate([before, new[:wanted].astype(np.int16)])
