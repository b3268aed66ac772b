"""Versions of weights inside a server: of every token, of cached prefixes, and at the end of a pause.

Every token carries the version of the weights that its forward pass ran with (`weight_version` of a response is that of
the moment of output, one for the whole response). Cached prefixes of older weights are never used for requests that
start or restart under newer ones, and do not stay.
"""

from __future__ import annotations

from typing import Any

import torch

VERSION_KEY = "slipstream_version"
"""Name of the per-token versions in a response's meta_info."""


class TokenVersions:
    """State of one scheduler process: the version of its weights, as received by continue_generation."""

    def __init__(self) -> None:
        self.version = 0

    def tag_tokens(self, result: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        """Record one version for the next token of each request, after Scheduler.run_batch."""
        output = getattr(result, "logits_output", None)
        if output is not None:
            output.customized_info = {VERSION_KEY: [self.version] * len(batch.reqs)}

    def name_prefix(self, scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> None:
        """Restrict shared prefixes to requests of one version, before Scheduler._add_request_to_queue."""
        req.extra_key = str(self.version)

    def before_continue(self, scheduler: Any, request: Any) -> None:
        """Set the version to the request id, before Scheduler.continue_generation."""
        if request.rid is not None:
            if self.version != int(request.rid):
                empty_prefix_cache(scheduler)
            self.version = int(request.rid)
            for req in scheduler.waiting_queue:
                req.extra_key = request.rid

    def wait_for_device(self, result: Any, *args: Any, **kwargs: Any) -> None:
        """Wait for the device after a pause: in_place leaves a forward pass running."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def drop_answer(cache: Any, req: Any, is_insert: bool = True, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Keep prompts but no answers in the cache, before RadixCache.cache_finished_req. A cache full of answers would
    search for the oldest of tens of thousands at every step."""
    return (cache, req), {**kwargs, "is_insert": False}


def empty_prefix_cache(scheduler: Any) -> None:
    """Give back what no running request uses: prefixes of weights that are gone."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    cache, memory = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
    try:
        size = cache.evictable_size()
    except NotImplementedError:  # several kinds of memory; such a cache makes room by itself
        return
    memory.free_group_begin()
    cache.evict(EvictParams(num_tokens=size))
    memory.free_group_end()
