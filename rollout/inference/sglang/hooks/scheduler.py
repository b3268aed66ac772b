"""Hooks of SGLang's scheduler: versions of tokens and of cached prefixes, and when prompts are admitted.

Every token carries the version of the weights that its forward pass ran with (`weight_version` of a response is that of
the moment of output, one for the whole response). Cached prefixes of older weights are never used for requests that
start or restart under newer ones, and do not stay. The exception are turns under interrupt=in_place: a conversation
keeps the prefix that it began with.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

VERSION_KEY = "slipstream_version"
"""Name of the per-token versions in a response's meta_info."""
KEPT = "slipstream_kept"
"""Name of the custom parameter of requests whose answer the cache keeps for the next turn."""
BEGAN_AT = "slipstream_began_at"
"""Name of the custom parameter of turns that keep their prefix over updates: the version that their conversation began
with; None: it begins here."""
PREFILL_SHARE = 0.1
"""Share of a server's places that are free before prompts are admitted (BATCHED_PREFILLS in server.py)."""
_DELAYER_INFO = (
    "local_prefillable", "local_token_watermark_force_allow", "running_batch", "max_prefill_bs", "waiting_queue_len",
)  # fmt: skip
"""Values that a rank sends to the others about its prompts, in this order."""


class _SamplingParams(Protocol):
    custom_params: Mapping[str, object] | None


class _Request(Protocol):
    extra_key: str | None
    sampling_params: _SamplingParams


class _Batch(Protocol):
    reqs: Sequence[_Request]


class _Node(Protocol):
    children: Mapping[object, _Node]
    key: Sequence[int]
    last_access_time: float
    lock_ref: int


class _PrefixCache(Protocol):
    root_node: _Node

    def evictable_size(self) -> int: ...
    def evict(self, params: object) -> object: ...


class _CacheMemory(Protocol):
    def free_group_begin(self) -> None: ...
    def free_group_end(self) -> None: ...


class _Scheduler(Protocol):
    waiting_queue: Sequence[_Request]
    tree_cache: _PrefixCache
    token_to_kv_pool_allocator: _CacheMemory


class _Continue(Protocol):
    """The request of continue_generation."""

    rid: str | None


class _Delayer(Protocol):
    _global_info_buffer: Tensor


class TokenVersions:
    """State of one scheduler process: the version of its weights, as received by continue_generation."""

    def __init__(self) -> None:
        self.version = 0
        self._keeps_prefixes = False  # whether turns have asked for it
        self._updated_at = 0.0  # time.monotonic()

    def tag_tokens(self, result: object, scheduler: object, batch: _Batch, *args: object, **kwargs: object) -> None:
        """Record one version for the next token of each request, after Scheduler.run_batch."""
        output = getattr(result, "logits_output", None)
        if output is not None:
            output.customized_info = {VERSION_KEY: [self.version] * len(batch.reqs)}

    def name_prefix(self, scheduler: object, req: _Request, *args: object, **kwargs: object) -> None:
        """Restrict shared prefixes to requests of one version, before Scheduler._add_request_to_queue. A turn under
        in_place is of the version that its conversation began with."""
        params = req.sampling_params.custom_params or {}
        began_at = params.get(BEGAN_AT)
        req.extra_key = str(self.version if began_at is None else began_at)
        self._keeps_prefixes |= BEGAN_AT in params

    def before_continue(self, scheduler: _Scheduler, request: _Continue) -> None:
        """Set the version to the request id, before Scheduler.continue_generation."""
        if request.rid is not None:
            if self.version != int(request.rid):
                drop_prefixes(scheduler, not_used_since=self._updated_at if self._keeps_prefixes else math.inf)
                self._updated_at = time.monotonic()
            self.version = int(request.rid)
            for req in scheduler.waiting_queue:
                self.name_prefix(scheduler, req)

    def keep_or_drop_answer(
        self, cache: object, req: _Request, is_insert: bool = True, **kwargs: object
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Keep the prompt in the cache, and the answer for the next turn, before RadixCache.cache_finished_req: where
        all of it is of one version, or under in_place. Full of other answers, the cache would search for the oldest of
        tens of thousands at every step."""
        params = req.sampling_params.custom_params or {}
        is_kept = KEPT in params and (BEGAN_AT in params or req.extra_key == str(self.version))
        return (cache, req), {**kwargs, "is_insert": is_insert and is_kept}

    def wait_for_device(self, result: object, *args: object, **kwargs: object) -> None:
        """Wait for the device after a pause: in_place leaves a forward pass running."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def drop_prefixes(scheduler: _Scheduler, *, not_used_since: float) -> None:
    """Give back what no running request uses and none has used since a moment (time.monotonic()): prefixes of weights
    that are gone."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    cache, memory = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
    try:
        size = cache.evictable_size()
    except NotImplementedError:  # several kinds of memory; such a cache makes room by itself
        return
    if not size:  # nothing is kept, as with disable_radix_cache
        return
    if not_used_since < math.inf:  # the cache evicts the oldest first
        size = sum(len(node.key) for node in _nodes(cache.root_node) if node.last_access_time < not_used_since)
    memory.free_group_begin()
    cache.evict(EvictParams(num_tokens=size))
    memory.free_group_end()


def _nodes(root: _Node) -> Iterator[_Node]:
    """Yield the nodes below the root that no running request uses."""
    below = [*root.children.values()]
    while below:
        node = below.pop()
        below += node.children.values()
        if not node.lock_ref:
            yield node


def gather_of_one(original: Callable[..., Tensor], delayer: _Delayer, **info: int) -> Tensor:
    """Skip the collective of PrefillDelayer._gather_info, called in every step, where there is a single rank."""
    if delayer._global_info_buffer.numel() != len(_DELAYER_INFO):
        return original(delayer, **info)
    return torch.tensor([[int(info[name]) for name in _DELAYER_INFO]])


def many_at_once(delayer: object, *args: object, **info: int) -> tuple[tuple[object, ...], dict[str, int]]:
    """Set the number of free slots from which a prefill is worthwhile, before
    PrefillDelayer._negotiate_should_allow_prefill. SGLang's own value, the maximum of recent waiting prompts, decays to
    one where slots become free one at a time."""
    return (delayer, *args), {**info, "max_prefill_bs": math.ceil(PREFILL_SHARE * info["max_running_requests"])}
