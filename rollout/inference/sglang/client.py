"""The HTTP interface of a SGLang server: the way of weights from the trainer's ranks, and the client of a generator.

Invariant: a server is paused when a call that changes weights reaches it; otherwise it would first wait for every
running request to end. Such calls do not flush the cache: prefixes are kept apart by version (hooks/scheduler.py), and
a flush with requests waiting would fail and take the server down.

A completion comes with the experts of its tokens. An answer covers those of a request's tokens from
`routed_experts_start_len` to its last but one: the last was sampled, but no forward pass was made of it. A request that
continues another's output requests them from where that one's experts end, so each token has those of the pass that
first took it in. Under interrupt=retract a server recomputes running requests, and returns the new experts.
"""

import asyncio
import base64
import http.client
import json
import resource
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypedDict
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import aiohttp
import numpy as np
import orjson
from torch import Tensor

from model_specs.config import ModelConfig
from model_specs.families import read_config
from rollout.bucket import FlatBucket
from rollout.errors import GeneratorCallError, GeneratorGone
from rollout.inference.backend import GroupMembership
from rollout.inference.sglang.arguments import SGLANG
from rollout.inference.sglang.checksums import ExpectedChecksums, ModelShape
from rollout.inference.sglang.hooks.in_flight import ALIVE, Sampled
from rollout.inference.sglang.hooks.scheduler import BEGAN_AT, KEPT
from rollout.inference.sglang.receivers import RELEASE, broadcast_call, folder_call, share, shared_call
from rollout.types import Completion, FinishReason, GenerateRequest, SamplingParams

Call = tuple[str, dict[str, object]]
"""Path and JSON body of a POST."""

_OPEN_FILES = 65_536
"""Most open files of a process: enough for its requests, and few enough for programs that close every possible one."""


@dataclass(frozen=True, kw_only=True)
class SGLangEndpoint:
    """See rollout.inference.backend.WeightEndpoint. Every call is a POST on a connection of its own."""

    name: str
    url: str
    tp: int
    pp: int = 1
    key: str = field(default="", repr=False)
    """See headers()."""
    model_path: str = ""
    """The server's model folder: its config.json determines how the server fuses and shards parameters."""
    trainer_ranks: tuple[int, ...] = ()
    """Shared slots: the trainer's rank in the place of each tensor-parallel rank."""

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    def beside(self, trainer_ranks: tuple[int, ...]) -> Self:
        return replace(self, trainer_ranks=trainer_ranks)

    def named(self, name: str) -> Self:
        return replace(self, name=name)

    def join_group(self, group: GroupMembership, *, timeout_seconds: float) -> None:
        body = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": group.first_rank,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        self.post(("/init_weights_update_group", body), timeout_seconds=timeout_seconds)

    def receive_bucket(self, bucket: FlatBucket, *, group: str, timeout_seconds: float) -> None:
        self.post(broadcast_call(bucket, group), timeout_seconds=timeout_seconds)

    def leave_group(self, group: str, *, timeout_seconds: float) -> None:
        self.post(("/destroy_weights_update_group", {"group_name": group}), timeout_seconds=timeout_seconds)

    def share(self, bucket: FlatBucket, memory: Tensor | None, *, number: int) -> str:
        return share(bucket, memory, number=number)

    def receive_shared(self, shared: Sequence[str], *, timeout_seconds: float) -> None:
        self.post(shared_call(shared), timeout_seconds=timeout_seconds)

    def release_shared(self, *, timeout_seconds: float) -> None:
        self.post(shared_call([RELEASE] * self.tp), timeout_seconds=timeout_seconds)

    def load_folder(self, path: str, *, timeout_seconds: float) -> None:
        self.post(folder_call(path), timeout_seconds=timeout_seconds)

    def expected_checksums(self) -> ExpectedChecksums:
        return ExpectedChecksums(ModelShape.from_config(read_config(self.model_path)), tp=self.tp)

    def checksums(self, *, timeout_seconds: float) -> list[dict[str, int]]:
        ranks = self._check("checksum", timeout_seconds)
        return [{name: int(value) for name, value in rank.items()} for rank in ranks]

    def formats(self, *, timeout_seconds: float) -> list[dict[str, str]]:
        return self._check("formats", timeout_seconds)

    def _check(self, action: str, timeout_seconds: float) -> list[dict[str, str]]:
        """Return a value for each parameter, of each tensor-parallel rank (hooks/checksums.py)."""
        answer = self.post(("/weights_checker", {"action": action}), timeout_seconds=timeout_seconds)
        ranks = sorted(answer["ranks"], key=lambda rank: rank["parallelism_info"]["tp_rank"])
        return [dict(rank["checksums"]) for rank in ranks]

    def is_healthy(self, *, timeout_seconds: float) -> bool:
        """Return whether the server's scheduler answers in time."""
        try:
            request = Request(f"{self.url}{ALIVE}", headers=headers(self.key))
            with urlopen(request, timeout=timeout_seconds) as response:
                return response.status == 200
        except OSError:
            return False

    def post(self, call: Call, *, timeout_seconds: float) -> dict[str, Any]:
        """Return the JSON answer of a call. Raises GeneratorCallError, GeneratorGone."""
        path, body = call
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout_seconds)
        try:
            connection.request("POST", path, json.dumps(body), headers(self.key))
            response = connection.getresponse()
            raw = response.read()
        except TimeoutError as e:
            raise _late(self.name, self.url, path, timeout_seconds) from e
        except (OSError, http.client.HTTPException) as e:
            raise _unreachable(self.name, self.url, path, e) from e
        finally:
            connection.close()
        return _checked(self.name, path, response.status, raw)


class SGLangClient:
    """POSTs to one server, thousands in flight on one event loop: make it inside that loop. Bodies and answers are
    bytes of orjson; numpy arrays go in without becoming Python lists."""

    def __init__(self, name: str, url: str, *, key: str = "") -> None:
        self.name, self.url = name, url
        # A request is one connection, and one open file, for as long as it samples: no limits on either.
        _allow_open_files()
        self._session = aiohttp.ClientSession(
            url,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30.0),
            headers=headers(key),
        )

    async def post(self, call: Call, *, timeout_seconds: float | None = None) -> dict[str, Any]:
        """Return the JSON answer. Raises GeneratorCallError when the server refuses, GeneratorGone when it is not there
        or (with `timeout_seconds`) does not answer in time."""
        path, body = call
        try:
            async with (
                asyncio.timeout(timeout_seconds),
                self._session.post(path, data=orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)) as response,
            ):
                raw, status = await response.read(), response.status
        except TimeoutError as e:
            raise _late(self.name, self.url, path, timeout_seconds) from e
        except (aiohttp.ClientError, OSError) as e:
            raise _unreachable(self.name, self.url, path, e) from e
        return _checked(self.name, path, status, raw)

    async def answers(self, path: str, *, timeout_seconds: float) -> bool:
        """Return whether a GET of `path` is answered by 200 in time."""
        try:
            async with asyncio.timeout(timeout_seconds), self._session.get(path) as response:
                return response.status == 200
        except (TimeoutError, aiohttp.ClientError, OSError):
            return False

    async def close(self) -> None:
        await self._session.close()


def headers(key: str) -> dict[str, str]:
    """Return the headers of a call to a server that was started with this key as its api_key."""
    return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})


def _checked(server: str, path: str, status: int, raw: bytes) -> dict[str, Any]:
    """Return the JSON answer of a call that succeeded. Raises GeneratorCallError."""
    if status in (404, 405):
        raise GeneratorCallError(
            f"{server}: this SGLang has no {path}; Slipstream is written for SGLang {SGLANG} "
            f"(pip install sglang=={SGLANG})"
        )
    try:
        answer = orjson.loads(raw) if raw else {}
    except orjson.JSONDecodeError:
        answer = raw.decode(errors="replace")
    if not isinstance(answer, dict):
        answer = {"message": str(answer)}
    if status != 200 or answer.get("success") is False:
        message = answer.get("message") or answer.get("error") or answer.get("detail") or answer
        raise GeneratorCallError(f"{server}: {path} failed (HTTP {status}): {message}")
    return answer


def _late(server: str, url: str, path: str, seconds: float | None) -> GeneratorGone:
    return GeneratorGone(f"{server} ({url}) did not respond to {path} within {seconds:g} s")


def _unreachable(server: str, url: str, path: str, error: Exception) -> GeneratorGone:
    return GeneratorGone(f"{server} ({url}) is unreachable ({path}: {type(error).__name__}: {error})")


def _allow_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Meta(TypedDict, total=False):
    """Fields of an answer's meta_info that are read."""

    cached_tokens: int
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
    request: GenerateRequest,
    output: Completion,
    *,
    rid: str,
    vocab_size: int,
    seeded: bool = False,
    keeps_prefix: bool = False,
) -> Call:
    """Request the tokens after `output`, under the request id `rid`. `seeded`: the server draws by the seed.
    `keeps_prefix`: turns keep the keys and values of older weights."""
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
    if request.is_turn:
        params["custom_params"] = {KEPT: True} | ({BEGAN_AT: request.began_at} if keeps_prefix else {})
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
