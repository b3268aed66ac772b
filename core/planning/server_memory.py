"""Memory of a GPU of a server: weights, cache of keys and values, CUDA graphs.

Invariant: a server takes its share of a GPU before it loads its weights.
"""

import math
from dataclasses import dataclass, replace

from allocation import ParallelLayout
from core.planning.scene import Scene, Servers
from mcore_adapter.memory.estimate import rank_states

GIB, _MIB = 2**30, 2**20
CONTEXT_BYTES = 0.7 * GIB
"""CUDA's context with the loaded kernels of a process."""
_DRIVER_MIB = 600  # of a GPU that the driver shows, and torch does not
_META_MIB, _GRAPH_MIB = 512, 2
"""Of a server, and of its CUDA graphs for each request at once (ServerArgs, reserved_mem)."""
RELEASED_BYTES = CONTEXT_BYTES + _META_MIB * _MIB
"""What a server keeps, beside its graphs, that has released its weights and its cache."""


@dataclass(frozen=True, kw_only=True)
class ServerPlan:
    """One GPU of a server."""

    weights: float
    cache: float
    """Bytes of keys and values of tokens; negative: the weights do not fit."""
    tokens: int
    """Tokens whose keys and values fit into the server; 0: it does not start."""
    longest: int
    """Sequences of the longest length that fit."""
    rest: float
    """What is left for CUDA graphs and activations."""
    graphs: float
    """What the server reserves of it for the graphs."""
    context: float
    largest_share: float | None = None
    """Largest mem_fraction_static that leaves room for graphs and activations, where the given one leaves too
    little."""
    trainer: float = 0.0
    """What the trainer keeps on the same GPU while the server samples."""


def plan_servers(scene: Scene, servers: Servers) -> ServerPlan:
    """Return the memory of a GPU of a server: it takes its share of what is free before it loads the weights."""
    weights = server_weights(servers)
    free = scene.gpu.gib * GIB - CONTEXT_BYTES
    share = servers.colocated_share if scene.shares_gpus else servers.share or _usual_share(servers, scene.gpu.gib)
    cache = free * share - weights
    per_token = cache_bytes_per_token(servers)
    most = 2 * servers.max_running * servers.config.max_position_embeddings
    tokens = max(0, min(int(cache / per_token), most))
    largest_share: float | None = None
    graphs = graph_bytes(servers)
    used = graphs + server_activations(servers, scene.gpu.gib)
    # On a shared GPU the phase of sampling has both; what a server chooses itself leaves room.
    if servers.share is not None and not scene.shares_gpus and 0 < free * (1 - share) < used:
        tokens, lower = 0, math.floor(100 * (1 - used / free)) / 100
        largest_share = lower if lower * free > weights + per_token else None
    return ServerPlan(
        weights=weights,
        cache=min(cache, tokens * per_token) if tokens else cache,
        tokens=tokens,
        longest=tokens // max(1, scene.longest),
        rest=free * (1 - share),
        largest_share=largest_share,
        graphs=graphs,
        context=CONTEXT_BYTES,
    )


def _usual_share(servers: Servers, gpu_gib: float) -> float:
    """Return mem_fraction_static as a server chooses it: activations of a chunk of prompts, ranks, CUDA graphs
    (ServerArgs, reserved_mem)."""
    mib = 1024 * gpu_gib + _DRIVER_MIB
    reserved = _META_MIB + 1.5 * _prefill_tokens(gpu_gib) + servers.layout.tp * servers.layout.pp * 128
    reserved += graph_bytes(servers) / _MIB
    return round(1 - max(reserved, 10240 if mib > 60 * 1024 else 0) / mib, 3)


def graph_bytes(servers: Servers) -> float:
    """Return the bytes that a server reserves for its CUDA graphs."""
    return float(_GRAPH_MIB * servers.max_running * _MIB)


def _prefill_tokens(gpu_gib: float) -> int:
    """Return the tokens of prompts that a server computes at once (ServerArgs, chunked_prefill_size)."""
    mib = 1024 * gpu_gib + _DRIVER_MIB
    return 16384 if mib > 160 * 1024 else 8192 if mib > 60 * 1024 else 4096


def server_activations(servers: Servers, gpu_gib: float) -> float:
    """Return the bytes that a server takes for a chunk of prompts, and for the logits of all requests."""
    config, tp, moe = servers.config, servers.layout.tp, servers.config.moe
    width = config.intermediate_size if moe is None else moe.top_k * moe.intermediate_size
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    token = servers.itemsize * (3 * config.hidden_size + max(2 * heads, 3 * width) / tp)
    return _prefill_tokens(gpu_gib) * token + 2 * 4 * servers.max_running * config.vocab_size


def server_weights(servers: Servers) -> float:
    """Return the bytes of the weights of one GPU of a server, of its largest stage."""
    layout = ParallelLayout(tp=servers.layout.tp, pp=servers.layout.pp, ep=servers.layout.ep)
    config = servers.config
    if config.mla is None and config.num_kv_heads % layout.tp:  # each rank has one, several have the same
        config = replace(config, num_kv_heads=layout.tp)
    largest = 0.0
    for stage in range(layout.pp):
        parameters = rank_states(config, layout, pp_rank=stage, trains=False).parameters
        linear = sum(parameters.get(kind, 0) for kind in ("attention", "MLP"))
        experts = parameters.get("experts", 0) * layout.ep / layout.tp  # without ep, each expert is split
        rest = sum(parameters.get(kind, 0) for kind in ("embedding", "head"))
        largest = max(largest, (linear + experts) * (1 if servers.fp8 else servers.itemsize) + rest * servers.itemsize)
    return largest


def cache_bytes_per_token(servers: Servers) -> float:
    """Return the bytes of keys and values that one GPU of a server keeps for a token."""
    config, layout = servers.config, servers.layout
    layers = -(-config.num_layers // layout.pp)
    if config.mla is not None:
        return float(layers * (config.mla.kv_lora_rank + config.mla.qk_rope_head_dim) * servers.itemsize)
    return float(layers * 2 * cached_heads(servers) * config.head_dim * servers.itemsize)


def cached_heads(servers: Servers) -> int:
    """Return how many heads of keys and values one GPU of a server keeps for a layer; of latent attention all share
    one."""
    config = servers.config
    return 1 if config.mla is not None else max(1, config.num_kv_heads // servers.layout.tp)
