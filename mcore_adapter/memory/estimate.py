"""How much memory the activations of an update take on a rank, and the least recomputation that fits into a limit.

An estimate from the shape of the model, for TransformerEngine's layers; auto.py corrects it by what was
measured. Invariant: it depends on what all ranks of a pipeline stage have in common, and on nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from allocation import ParallelLayout
from mcore_adapter.data.routing_inputs import gathers_tokens
from mcore_adapter.data.token_chunks import FP32_ROWS, LOGITS_BYTES, MLP_TOKENS, SEVERAL_LOGITS_BYTES
from mcore_adapter.settings import LEVELS, Level
from model_specs.config import ModelConfig
from model_specs.moe import MoEConfig

_ON_THE_WAY = 2  # layers whose tensors are on their way to or from the host
# For each expert: logits and scores in float32, and their gradient. On GPUs the scores are not kept.
_ROUTER_BYTES = 12


@dataclass(frozen=True, kw_only=True)
class UpdateShape:
    """What one rank computes of an update."""

    config: ModelConfig
    layout: ParallelLayout
    itemsize: int
    """Bytes of an element of weights and activations."""
    tokens: int
    """Of the largest microbatch, before context parallelism divides it."""
    in_flight: int
    """Passes through a chunk whose activations are held at once; see in_flight()."""
    layers: range
    """Of the longest chunk of the rank."""
    has_head: bool
    """Whether the rank computes logits (or values)."""
    is_critic: bool = False
    fp8: bool = False
    """Whether layers compute in 8-bit floating point."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the layers of a chunk recompute, in order, and the estimated bytes of activations."""

    levels: tuple[Level, ...]
    activation_bytes: float
    fits: bool

    def __str__(self) -> str:
        counts = ((level, self.levels.count(level)) for level in reversed(LEVELS))
        return ", ".join(f"{level} in {count}" for level, count in counts if count) + f" of {len(self.levels)} layers"


def in_flight(layout: ParallelLayout, pp_rank: int, num_microbatches: int) -> int:
    """Return how many passes through a chunk the 1F1B schedules hold at once on a pipeline stage."""
    if layout.vpp == 1:
        return min(num_microbatches, layout.pp - pp_rank)
    warm_up = 2 * (layout.pp - pp_rank - 1) + (layout.vpp - 1) * layout.pp
    return min(num_microbatches * layout.vpp, warm_up + 1)


def choose(shape: UpdateShape, limit_bytes: float, *, host_limit_bytes: float = 0.0, correction: float = 1.0) -> Choice:
    """Return the least recomputation whose activations fit, raising the level of one layer after the other; where
    nothing fits, that of all layers to the highest. `correction`: measured by estimated bytes."""
    hosted = _num_on_host(shape, host_limit_bytes)
    for levels in _ladder(len(shape.layers), hosted):
        size = correction * activation_bytes(shape, levels)
        if size <= limit_bytes:
            return Choice(levels=levels, activation_bytes=size, fits=True)
    return Choice(levels=levels, activation_bytes=size, fits=False)


def _ladder(num_layers: int, hosted: int) -> Iterator[tuple[Level, ...]]:
    """Yield the choices, from the least recomputation on, with at most so many layers on the host; the levels of a
    choice descend."""
    levels: tuple[Level, ...] = (LEVELS[0],) * num_layers
    yield levels
    for level in LEVELS[1:]:
        lower = levels
        for count in range(1, (hosted if level == "offload" else num_layers) + 1):
            levels = (level,) * count + lower[count:]
            yield levels


def _num_on_host(shape: UpdateShape, host_limit_bytes: float) -> int:
    """Return how many layers fit there. The last one stays on the device: its backward pass follows at once."""
    tokens = shape.tokens / shape.layout.cp
    layer = shape.in_flight * max(_pages(shape, tokens, i) for i in shape.layers)
    return max(0, min(len(shape.layers) - 1, int(host_limit_bytes / layer)))


def _pages(shape: UpdateShape, tokens: float, layer: int) -> float:
    """Return the bytes of page-locked memory for what a layer keeps: torch takes a power of two for each tensor."""
    hidden, output = shape.config.hidden_size / shape.layout.tp, _attention_widths(shape)[1]
    sizes = [tokens * width * shape.itemsize for width in (*[hidden] * _num_residuals(shape), output)]
    rest = tokens * _kept(shape, "linear", layer) - sum(sizes)  # of experts: other ranks' tokens, routing
    return sum(1 << max(1, math.ceil(size) - 1).bit_length() for size in sizes) + 2 * max(0.0, rest)


def activation_bytes(shape: UpdateShape, levels: Sequence[Level]) -> float:
    """Return the peak of the activations: what is kept from forward to backward pass, and the larger of what the
    backward passes of the output layer and of one layer need beside it."""
    tokens = shape.tokens / shape.layout.cp
    kept = sum(_kept(shape, level, layer) for level, layer in zip(levels, shape.layers, strict=True))
    passing = max(
        _passing(shape, level, layer) * tokens + _expert_gradients(shape, layer)
        for level, layer in zip(levels, shape.layers, strict=True)
    )
    head = _head(shape, tokens) if shape.has_head else 0.0
    if "offload" in levels:  # on the way
        passing += _ON_THE_WAY * tokens * max(_kept(shape, "linear", layer) for layer in shape.layers)
    return tokens * shape.in_flight * kept + max(passing, head)


def _kept(shape: UpdateShape, level: Level, layer: int) -> float:
    """Return the bytes of a token that a layer keeps from forward to backward pass."""
    hidden = shape.config.hidden_size / shape.layout.tp  # sequence parallelism is on with tensor parallelism
    if level == "offload":
        return 0.0
    if level == "full":
        return shape.itemsize * hidden
    residuals = shape.itemsize * _num_residuals(shape) * hidden
    return residuals + _kept_by_attention(shape, level) + _kept_by_mlp(shape, level, layer)


def _num_residuals(shape: UpdateShape) -> int:
    """Return how many sums of the residual stream a layer keeps."""
    return 4 if shape.config.post_norms else 2


def _kept_by_attention(shape: UpdateShape, level: Level) -> float:
    inputs, output = _attention_widths(shape)
    recomputed = level in ("qkv", "linear") and shape.config.mla is None
    return shape.itemsize * (output + (0.0 if recomputed else inputs))


def _kept_by_mlp(shape: UpdateShape, level: Level, layer: int) -> float:
    config, size = shape.config, shape.itemsize
    hidden = config.hidden_size / shape.layout.tp
    moe = _moe(shape, layer)
    if moe is None:
        width = config.intermediate_size / shape.layout.tp
        return size * {"none": hidden + 3 * width, "linear": 0.0}.get(level, hidden + 2 * width)
    copies = moe.top_k / shape.layout.tp
    total = hidden + 3 * moe.shared_intermediate_size / shape.layout.tp
    if gathers_tokens(shape.layout.ep, moe.top_k):
        # Tokens, and for each copy its weight in float32 and its row.
        total += shape.layout.ep * (hidden + 8 * copies / size)
    elif shape.layout.ep > 1:  # each copy that came from another rank
        total += copies * config.hidden_size
    if level != "linear":
        total += copies * 2 * moe.intermediate_size
    return size * total + _ROUTER_BYTES * moe.num_experts / shape.layout.tp


def _passing(shape: UpdateShape, level: Level, layer: int) -> float:
    """Return the bytes of a token that the backward pass of a layer takes while it runs: what it computes again, and
    gradients. The MLP comes first; what it alone computed again is gone when attention begins, and of a long sequence
    is there for a chunk of tokens at a time."""
    config, size = shape.config, shape.itemsize
    level = "linear" if level == "offload" else level
    hidden = config.hidden_size / shape.layout.tp
    inputs, output = _attention_widths(shape)
    moe, share = _moe(shape, layer), _share_of_chunk(shape, level, layer)
    in_chunks = share < 1
    if moe is None:
        in_place = level == "linear" or in_chunks
        mlp = size * (1 if in_place else 3) * config.intermediate_size / shape.layout.tp
    else:
        copies = moe.top_k / shape.layout.tp
        inner = 3 * copies * moe.intermediate_size
        if gathers_tokens(shape.layout.ep, moe.top_k):  # a gradient of all ranks' tokens, before these and after
            kept = 0 if level == "linear" else 2 * copies * moe.intermediate_size
            inner = max(inner, kept + shape.layout.ep * hidden)
        mlp = size * (2 * copies * config.hidden_size + inner)
    attention = size * (inputs + 3 * output)  # gradients of queries (summed in float32), keys and values
    if level == "full":
        again = _kept(shape, "none", layer) - _kept(shape, "full", layer)
        if in_chunks:
            again -= _kept_by_mlp(shape, "none", layer)
            mlp += _kept_by_mlp(shape, "none", layer)
        return again + max(share * mlp, attention) + 3 * size * hidden
    mlp += _kept_by_mlp(shape, "none", layer) - _kept_by_mlp(shape, level, layer)
    attention += _kept_by_attention(shape, "none") - _kept_by_attention(shape, level)
    return max(share * mlp, attention) + 3 * size * hidden


def _share_of_chunk(shape: UpdateShape, level: Level, layer: int) -> float:
    """Return the share of the tokens that pass through the MLP of a layer at once."""
    computes_whole = level not in ("linear", "full") or (level == "full" and shape.config.post_norms)
    if computes_whole or shape.fp8 or _moe(shape, layer) is not None:
        return 1.0
    return min(1.0, MLP_TOKENS * shape.layout.cp * shape.layout.tp / shape.tokens)


def _attention_widths(shape: UpdateShape) -> tuple[float, float]:
    """Return the elements of a token that are the core attention's input or lead to it, and those of its output."""
    config, tp = shape.config, shape.layout.tp
    hidden = config.hidden_size / tp
    if config.mla is not None:
        heads = config.num_heads / tp
        inner = heads * (2 * config.mla.qk_head_dim + config.mla.v_head_dim)
        latent = 2 * (config.mla.kv_lora_rank + (config.mla.q_lora_rank or 0))
        return hidden + inner + latent, heads * config.mla.v_head_dim
    queries, keys = (n * config.head_dim / tp for n in (config.num_heads, config.num_kv_heads))
    normed = queries + keys if config.qk_norm else 0  # its input, which is a copy
    return hidden + normed + queries + 2 * keys, queries


def _expert_gradients(shape: UpdateShape, layer: int) -> float:
    """Return the bytes of the gradients of a layer's experts before they are added to those of other microbatches."""
    moe = _moe(shape, layer)
    if moe is None:
        return 0.0
    return shape.itemsize * 3 * moe.num_experts / shape.layout.ep * moe.intermediate_size * shape.config.hidden_size


def _head(shape: UpdateShape, tokens: float) -> float:
    """Return the bytes of the backward pass of the output layer."""
    config, size = shape.config, shape.itemsize
    if shape.is_critic:
        return (size + 4) * 3 * tokens * config.hidden_size
    hidden = 7 * tokens * config.hidden_size  # as was measured: the final norm's, the loss's, and their gradients
    rows = config.vocab_size / shape.layout.tp
    logits = tokens * rows * size
    gradient = rows * config.hidden_size * size
    if logits > LOGITS_BYTES:  # beside the sum of the chunks in float32
        logits, gradient = SEVERAL_LOGITS_BYTES, gradient + 4 * rows * config.hidden_size
    return size * hidden + logits + 4 * FP32_ROWS * rows + gradient


def _moe(shape: UpdateShape, layer: int) -> MoEConfig | None:
    """Return the experts of a layer, None for a dense one."""
    moe = shape.config.moe
    return moe if moe is not None and moe.sparse_layers[layer] else None
