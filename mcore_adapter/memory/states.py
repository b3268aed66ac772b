"""How many bytes a trainer rank holds between updates: weights, gradients, fp32 masters and moments.

What Megatron's distributed optimizer allocates, computed from the shape of the model and the layout. Invariant: torch
is not imported.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from allocation import ParallelLayout, layers_of_chunks
from model_specs.config import ModelConfig

Kind = Literal["embedding", "attention", "MLP", "experts", "head"]
_ALIGNED = 64
"""Elements at whose multiples Megatron lets each parameter begin."""
_BUCKET = 128
"""Elements that the end of a buffer is padded to a multiple of, as well as to one of the data-parallel ranks."""
_MASTER_BYTES, _MOMENT_BYTES = 4, 8


class Parameter(NamedTuple):
    """A parameter as a rank holds it."""

    kind: Kind
    numel: int
    in_own_bucket: bool = False
    """The embedding of a tied model, which two pipeline stages hold."""


@dataclass(frozen=True, kw_only=True)
class States:
    """Bytes that an engine holds on a rank between two updates, its padding included."""

    weights: int
    gradients: int
    masters: int
    """fp32 copies of the weights; 0 where these are fp32. The mean of the data-parallel ranks, as moments are."""
    moments: int
    parameters: dict[Kind, int]
    """Number of parameters of the rank by kind."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.masters + self.moments


@lru_cache(maxsize=4096)  # the search of the planner asks for few stages, each many times
def rank_states(
    config: ModelConfig,
    layout: ParallelLayout,
    *,
    pp_rank: int,
    is_critic: bool = False,
    itemsize: int = 2,
    gradient_itemsize: int = 4,
    trains: bool = True,
) -> States:
    """Return what the ranks of a pipeline stage hold of a model. `itemsize`, `gradient_itemsize`: bytes of an element.
    An engine that does not train holds weights alone."""
    counts: Counter[Kind] = Counter()
    padded = 0
    held = 0.0
    for chunk in chunk_parameters(config, layout, pp_rank=pp_rank, is_critic=is_critic):
        for parameter in chunk:
            counts[parameter.kind] += parameter.numel
        if not trains:
            continue
        of_experts = [p for p in chunk if p.kind == "experts"]
        others = [p for p in chunk if p.kind != "experts"]
        for parameters, ranks in ((others, layout.dp * layout.cp), (of_experts, layout.expert_dp)):
            padded += _padded(parameters, ranks)
            held += sum(p.numel for p in parameters) / ranks
    total = sum(counts.values())
    return States(
        weights=(padded if trains else total) * itemsize,
        gradients=padded * gradient_itemsize,
        masters=round(held * _MASTER_BYTES) if itemsize < _MASTER_BYTES else 0,
        moments=round(held * _MOMENT_BYTES),
        parameters=dict(counts),
    )


def chunk_parameters(
    config: ModelConfig, layout: ParallelLayout, *, pp_rank: int, is_critic: bool
) -> Iterator[list[Parameter]]:
    """Yield the parameters of each model chunk of a pipeline stage."""
    chunks = layers_of_chunks(config.num_layers, layout)
    shared = config.tied and not is_critic and layout.pp > 1
    embedding = Parameter("embedding", config.vocab_size // layout.tp * config.hidden_size, shared)
    for number in range(pp_rank, len(chunks), layout.pp):
        parameters = [embedding] if number == 0 else []
        for layer in chunks[number]:
            parameters += _layer(config, layout, layer)
        if number == len(chunks) - 1:
            parameters.append(Parameter("head", config.hidden_size))  # the final norm
            if is_critic:
                parameters.append(Parameter("head", config.hidden_size))
            elif not config.tied:
                parameters.append(Parameter("head", embedding.numel))
            elif number > 0:
                parameters.append(embedding)
        yield parameters


def _layer(config: ModelConfig, layout: ParallelLayout, layer: int) -> Iterator[Parameter]:
    hidden, tp, moe = config.hidden_size, layout.tp, config.moe
    yield Parameter("attention", hidden)
    yield from (Parameter("attention", numel) for numel in _attention(config, tp))
    yield Parameter("MLP", hidden)
    if config.post_norms:
        yield Parameter("attention", hidden)
        yield Parameter("MLP", hidden)
    if moe is None or not moe.sparse_layers[layer]:
        yield Parameter("MLP", 2 * config.intermediate_size // tp * hidden)
        yield Parameter("MLP", config.intermediate_size // tp * hidden)
        return
    yield Parameter("MLP", moe.num_experts * hidden)  # the router
    if moe.shared_intermediate_size:
        yield Parameter("MLP", 2 * moe.shared_intermediate_size // tp * hidden)
        yield Parameter("MLP", moe.shared_intermediate_size // tp * hidden)
    for _ in range(moe.num_experts // layout.ep):
        yield Parameter("experts", 2 * moe.intermediate_size * hidden)
        yield Parameter("experts", moe.intermediate_size * hidden)


def _attention(config: ModelConfig, tp: int) -> Iterator[int]:
    hidden, mla = config.hidden_size, config.mla
    heads, kv_heads = config.num_heads // tp, config.num_kv_heads // tp
    if mla is not None:
        if mla.q_lora_rank is None:
            yield heads * mla.qk_head_dim * hidden
        else:
            yield from (mla.q_lora_rank * hidden, mla.q_lora_rank, heads * mla.qk_head_dim * mla.q_lora_rank)
        yield from ((mla.kv_lora_rank + mla.qk_rope_head_dim) * hidden, mla.kv_lora_rank)
        yield heads * (mla.qk_nope_head_dim + mla.v_head_dim) * mla.kv_lora_rank
        yield hidden * heads * mla.v_head_dim
        return
    rows = (heads + 2 * kv_heads) * config.head_dim
    yield rows * hidden
    if config.qkv_bias:
        yield rows
    if config.qk_norm:
        yield from (config.head_dim, config.head_dim)
    yield hidden * heads * config.head_dim


def _padded(parameters: list[Parameter], ranks: int) -> int:
    """Return the elements of a buffer. Parameters that two stages hold have a bucket of their own."""
    multiple = math.lcm(ranks, _BUCKET)
    buckets = ([p for p in parameters if not p.in_own_bucket], *([p] for p in parameters if p.in_own_bucket))
    sizes = (sum(_up(p.numel, _ALIGNED) for p in bucket) for bucket in buckets)
    return sum(_up(size, multiple) for size in sizes)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
