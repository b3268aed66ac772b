"""How much memory a rank takes: what it holds between updates (weights, gradients, fp32 masters, moments), the
activations of an update, and the least recomputation that fits into a limit; and what of it is in host memory.

An estimate from the shape of the model, for Megatron's distributed optimizer and TransformerEngine's layers. auto.py
corrects it by what was measured, and the planner (core/planning) reports it. Invariants: it depends on what all ranks
of a pipeline stage have in common, and on nothing else; torch is not imported.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Literal, NamedTuple

from allocation import ParallelLayout, layers_of_chunks
from mcore_adapter.settings import (
    DRAWING_THREADS,
    DRAWN_AHEAD,
    FP32_ROWS,
    LEVELS,
    LOGITS_BYTES,
    MLP_TOKENS,
    SEVERAL_LOGITS_BYTES,
    Level,
)
from model_specs.config import ModelConfig, MoEConfig, gathers_tokens

Kind = Literal["embedding", "attention", "MLP", "experts", "head"]
_ALIGNED = 64
"""Elements at whose multiples Megatron lets each parameter begin."""
_BUCKET = 128
"""Elements that the end of a buffer is padded to a multiple of, as well as to one of the data-parallel ranks."""
_MASTER_BYTES, _MOMENT_BYTES = 4, 8
_MAPPED_BYTES = 32 << 20  # blocks of this size glibc always gives back to the system (M_MMAP_THRESHOLD)


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
    for chunk in _counted(config, layout, pp_rank=pp_rank, is_critic=is_critic):
        for parameter, number in chunk.items():
            counts[parameter.kind] += number * parameter.numel
        if not trains:
            continue
        for parameters, ranks in _buffers(chunk, layout):
            padded += _padded(parameters, ranks)
            held += _numel(parameters) / ranks
    total = sum(counts.values())
    return States(
        weights=(padded if trains else total) * itemsize,
        gradients=padded * gradient_itemsize,
        masters=round(held * _MASTER_BYTES) if itemsize < _MASTER_BYTES else 0,
        moments=round(held * _MOMENT_BYTES),
        parameters=dict(counts),
    )


def _buffers(chunk: Counter[Parameter], layout: ParallelLayout) -> Iterator[tuple[Counter[Parameter], int]]:
    """Yield the parameters of each buffer of a model chunk, and the number of data-parallel ranks that share it."""
    for of_experts, ranks in ((False, layout.dp * layout.cp), (True, layout.expert_dp)):
        yield Counter({p: number for p, number in chunk.items() if (p.kind == "experts") is of_experts}), ranks


def _numel(parameters: Counter[Parameter]) -> int:
    return sum(number * parameter.numel for parameter, number in parameters.items())


@dataclass(frozen=True, kw_only=True)
class HostPiece:
    """A piece of host memory that some ranks of a pipeline stage have."""

    num_bytes: int
    num_ranks: int


@lru_cache(maxsize=4096)
def checkpoint_pieces(
    config: ModelConfig, layout: ParallelLayout, *, pp_rank: int, is_critic: bool = False, itemsize: int = 2
) -> tuple[HostPiece, ...]:
    """Return what a recover checkpoint is copied to by the ranks of a pipeline stage: for each buffer masters and both
    moments, which the first of its data-parallel ranks gathers, and the weights, up to the alignment of tensors."""
    pieces, weights = [], Counter[int]()  # weights by the number of ranks that have them
    for chunk in _counted(config, layout, pp_rank=pp_rank, is_critic=is_critic):
        for parameters, copies in _buffers(chunk, layout):
            ranks = layout.dp * layout.cp * layout.tp // copies
            size = _MASTER_BYTES * _padded(parameters, copies)
            pieces += [HostPiece(num_bytes=size, num_ranks=ranks)] * 3
            weights[ranks] += itemsize * _numel(parameters)
    pieces += [HostPiece(num_bytes=size, num_ranks=ranks) for ranks, size in weights.items()]
    return tuple(piece for piece in pieces if piece.num_bytes)


def drawing_bytes(
    config: ModelConfig, layout: ParallelLayout, *, pp_rank: int, is_critic: bool = False, itemsize: int = 2
) -> float:
    """Return the bytes of host memory in which a rank draws random weights: a whole tensor in float32, a copy of it in
    the format of the weights, and those of the tensors after it that are drawn sooner, as they are not larger. Of the
    tensors before it, which are freed, the allocators of threads keep small pieces."""
    whole = replace(layout, tp=1, dp=layout.dp * layout.tp)
    chunks = chunk_parameters(config, whole, pp_rank=pp_rank, is_critic=is_critic)
    parameters = (one for chunk in chunks for layers, number in chunk for one in layers * number)
    sizes = [_MASTER_BYTES * parameter.numel for parameter in parameters]
    kept = DRAWING_THREADS * _small_pieces(config)
    return max(
        size * (1 + itemsize / _MASTER_BYTES / layout.tp)
        + max(sum(n for n in sizes[i + 1 : i + 1 + DRAWN_AHEAD] if n <= size), min(kept, before - size))
        for i, (size, before) in enumerate(zip(sizes, accumulate(sizes), strict=True))
    )


def _small_pieces(config: ModelConfig) -> int:
    """Return the most bytes of tensors that a thread draws at once and that malloc does not take from the system one by
    one: of queries, keys and values, or of both halves of an MLP."""
    moe, heads = config.moe, (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    widths = [[n * config.head_dim for n in heads], [config.intermediate_size] * 2]
    if moe is not None:
        widths += [[moe.intermediate_size] * 2]
    sizes = ([_MASTER_BYTES * width * config.hidden_size for width in together] for together in widths)
    return max(sum(size for size in together if size < _MAPPED_BYTES) for together in sizes)


def page_locked(num_bytes: float) -> int:
    """Return the bytes of a tensor in page-locked memory, of which torch takes a power of two."""
    return 1 << max(1, math.ceil(num_bytes) - 1).bit_length()


def chunk_parameters(
    config: ModelConfig, layout: ParallelLayout, *, pp_rank: int, is_critic: bool
) -> Iterator[list[tuple[list[Parameter], int]]]:
    """Yield the parameters of each model chunk of a pipeline stage in their order: those of a layer, and how many
    layers in a row have such ones."""
    chunks = layers_of_chunks(config.num_layers, layout)
    sparse = (False,) * config.num_layers if config.moe is None else config.moe.sparse_layers
    shared = config.tied and not is_critic and layout.pp > 1
    embedding = Parameter("embedding", config.vocab_size // layout.tp * config.hidden_size, shared)
    for number in range(pp_rank, len(chunks), layout.pp):
        parameters = [([embedding], 1)] if number == 0 else []
        for is_sparse, layers in groupby(sparse[layer] for layer in chunks[number]):
            parameters.append((list(_layer(config, layout, is_sparse)), len(list(layers))))
        if number == len(chunks) - 1:
            head = [Parameter("head", config.hidden_size)]  # the final norm
            if is_critic:
                head.append(Parameter("head", config.hidden_size))
            elif not config.tied:
                head.append(Parameter("head", embedding.numel))
            elif number > 0:
                head.append(embedding)
            parameters.append((head, 1))
        yield parameters


def _counted(
    config: ModelConfig, layout: ParallelLayout, *, pp_rank: int, is_critic: bool
) -> Iterator[Counter[Parameter]]:
    """Yield how many of each parameter each model chunk of a pipeline stage has."""
    for chunk in chunk_parameters(config, layout, pp_rank=pp_rank, is_critic=is_critic):
        counts = Counter[Parameter]()
        for parameters, number in chunk:
            for parameter in parameters:
                counts[parameter] += number
        yield counts


def _layer(config: ModelConfig, layout: ParallelLayout, is_sparse: bool) -> Iterator[Parameter]:
    hidden, tp, moe = config.hidden_size, layout.tp, config.moe
    yield Parameter("attention", hidden)
    yield from (Parameter("attention", numel) for numel in _attention(config, tp))
    yield Parameter("MLP", hidden)
    if config.post_norms:
        yield Parameter("attention", hidden)
        yield Parameter("MLP", hidden)
    if moe is None or not is_sparse:
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


def _padded(parameters: Counter[Parameter], ranks: int) -> int:
    """Return the elements of a buffer. Parameters that two stages hold have a bucket of their own."""
    multiple = math.lcm(ranks, _BUCKET)
    sizes = Counter[Parameter | None]()  # by bucket
    for parameter, number in parameters.items():
        sizes[parameter if parameter.in_own_bucket else None] += number * _up(parameter.numel, _ALIGNED)
    return sum(_up(size, multiple) for size in sizes.values())


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


SPARE = 0.14
"""Share of the memory that is left to fragmentation, where no limit is given. With 0.12, an update on a sequence of
65,536 tokens ran out of memory on an H200, as did one of 131,072 without host memory."""
SHARE_OF_HOST = 0.6
"""Share of the host memory available before the first update that activations of its ranks may take."""
_ON_THE_WAY = 2  # layers whose tensors are on their way from the host in a backward pass
# For each expert: logits and scores in float32, and their gradient. On GPUs the scores are not kept.
_ROUTER_BYTES = 12
_HEAD_ROWS = 4  # of hidden states beside the logits, as was measured: input of the final norm, the loss's, gradients
_FP8_HIDDEN = 2  # hidden states that a layer keeps in addition with FP8, as was measured


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
    has_embedding: bool = True
    is_critic: bool = False
    fp8: bool = False
    """Whether layers compute in 8-bit floating point."""
    imbalance: float = 1.0
    """Copies of tokens that a rank's experts receive, by the mean of all ranks."""


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
    tokens = correction * shape.in_flight * shape.tokens / shape.layout.cp
    kept = {level: [tokens * sum(_kept_parts(shape, level, i).values()) for i in shape.layers] for level in LEVELS}
    for levels in _ladder(len(shape.layers), _num_on_host(shape, host_limit_bytes)):
        if sum(kept[level][i] for i, level in enumerate(levels)) > limit_bytes:
            continue  # its peak is higher still, and takes long to compute
        size = correction * activation_bytes(shape, levels)
        if size <= limit_bytes:
            break
    else:
        size = correction * activation_bytes(shape, levels)
    return Choice(levels=levels, activation_bytes=size, fits=size <= limit_bytes)


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


def host_bytes(shape: UpdateShape, levels: Sequence[Level]) -> float:
    """Return the bytes of page-locked host memory that the activations of a chunk take."""
    tokens = shape.tokens / shape.layout.cp
    moved = (layer for level, layer in zip(levels, shape.layers, strict=True) if level == "offload")
    return shape.in_flight * sum(_pages(shape, tokens, layer) for layer in moved)


def _pages(shape: UpdateShape, tokens: float, layer: int) -> float:
    """Return the bytes of page-locked memory for what a pass through a layer keeps."""
    hidden, output = shape.config.hidden_size / shape.layout.tp, _attention_widths(shape)[1]
    sizes = [tokens * width * shape.itemsize for width in (hidden, hidden, output)]
    rest = tokens * _moved(shape, layer) - sum(sizes)  # of experts: other ranks' tokens, routing
    return sum(map(page_locked, sizes)) + 2 * max(0.0, rest)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What activations take at one point of an update: bytes by purpose."""

    name: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def activation_bytes(shape: UpdateShape, levels: Sequence[Level]) -> float:
    """Return the peak of the activations."""
    return peak(shape, levels).total


def peak(shape: UpdateShape, levels: Sequence[Level]) -> Moment:
    """Return the moment of the update at which activations take most."""
    return max(moments(shape, levels), key=lambda moment: moment.total)


def moments(shape: UpdateShape, levels: Sequence[Level]) -> Iterator[Moment]:
    """Yield the moments of a backward pass that may be its peak: output layer, both halves of each layer from the last
    one on, embedding. At each, what earlier layers keep is still there, and that of later ones is gone."""
    tokens = shape.tokens / shape.layout.cp
    kept = [_kept_parts(shape, level, layer) for level, layer in zip(levels, shape.layers, strict=True)]
    held = {name: tokens * shape.in_flight * sum(parts[name] for parts in kept) for name in _PARTS}
    if shape.layout.pp > 1 and not shape.has_head:  # the output of the stage
        held["residual stream"] += shape.in_flight * tokens * shape.itemsize * _hidden(shape)
    if shape.has_head:
        yield Moment(name="output layer", parts={**held, "logits and loss": _head(shape, tokens)})
    waiting = _tied_gradient(shape)
    for i in reversed(range(len(levels))):
        level, layer = levels[i], shape.layers[i]
        arriving = 0.0
        if level == "offload":  # the layer itself and, with its gradient, the one before
            near = range(max(0, i + 1 - _ON_THE_WAY), i + 1)
            arriving = tokens * sum(_moved(shape, shape.layers[j]) for j in near if levels[j] == "offload")
        extra = {"from the host": arriving, "gradient of the embedding": waiting}
        passing = _passing_mlp(shape, level, layer, tokens)
        yield Moment(name=f"MLP of layer {layer}", parts={**held, **extra, "backward pass": passing})
        held["MLP"] -= tokens * kept[i]["MLP"]
        if level not in ("full", "offload"):
            held["residual stream"] -= tokens * shape.itemsize * _hidden(shape)  # the input of the MLP's norm
        passing = tokens * _passing_attention(shape, level, layer)
        yield Moment(name=f"attention of layer {layer}", parts={**held, **extra, "backward pass": passing})
        for name in ("residual stream", "attention"):
            held[name] -= tokens * kept[i][name]
        if level not in ("full", "offload"):
            held["residual stream"] += tokens * shape.itemsize * _hidden(shape)
    if shape.has_embedding:
        rows = shape.config.vocab_size / shape.layout.tp * shape.config.hidden_size * shape.itemsize
        yield Moment(name="embedding", parts={**held, "gradient of the embedding": rows + waiting})


_PARTS = ("residual stream", "attention", "MLP")


def _hidden(shape: UpdateShape) -> float:
    """Return the elements of a token of the residual stream: sequence parallelism is on with tensor parallelism."""
    return shape.config.hidden_size / shape.layout.tp


def _moved(shape: UpdateShape, layer: int) -> float:
    """Return the bytes of a token of what a layer may keep on the host."""
    return sum(_kept_parts(shape, "linear", layer).values()) - sum(_kept_parts(shape, "offload", layer).values())


def _kept_parts(shape: UpdateShape, level: Level, layer: int) -> dict[str, float]:
    """Return the bytes of a token that a layer keeps from forward to backward pass, by purpose."""
    hidden = shape.itemsize * _hidden(shape)
    if level == "full":
        return {"residual stream": hidden, "attention": 0.0, "MLP": 0.0}
    copies = _copied_keys(shape, level)
    if level == "offload":  # inputs of norms behind attention and MLP stay
        return {"residual stream": (_num_residuals(shape) - 2) * hidden, "attention": copies, "MLP": 0.0}
    return {
        "residual stream": _num_residuals(shape) * hidden + (_FP8_HIDDEN * hidden if shape.fp8 else 0.0),
        "attention": _kept_by_attention(shape, level) + copies,
        "MLP": _kept_by_mlp(shape, level, layer),
    }


def _num_residuals(shape: UpdateShape) -> int:
    """Return how many sums of the residual stream a layer keeps."""
    return 4 if shape.config.post_norms else 2


def _kept_by_attention(shape: UpdateShape, level: Level) -> float:
    inputs, output = _attention_widths(shape)
    recomputed = level in ("qkv", "linear") and shape.config.mla is None
    return shape.itemsize * (output + (0.0 if recomputed else inputs))


def _copied_keys(shape: UpdateShape, level: Level) -> float:
    """Return the bytes of keys and values that context-parallel attention keeps in tensors of its own, which nothing
    drops; without recomputation, those are the only ones."""
    recomputed = level in ("qkv", "linear", "offload") and shape.config.mla is None
    if shape.layout.cp == 1 or not recomputed:
        return 0.0
    return shape.itemsize * 2 * shape.config.num_kv_heads * shape.config.head_dim / shape.layout.tp


def _kept_by_mlp(shape: UpdateShape, level: Level, layer: int) -> float:
    config, size = shape.config, shape.itemsize
    hidden = _hidden(shape)
    moe = _moe(shape, layer)
    if moe is None:
        width = config.intermediate_size / shape.layout.tp
        return size * {"none": hidden + 3 * width, "linear": 0.0}.get(level, hidden + 2 * width)
    copies = _copies(shape, moe)
    total = hidden + 3 * moe.shared_intermediate_size / shape.layout.tp
    if gathers_tokens(shape.layout.ep, moe.top_k):
        # Tokens, and for each copy its weight in float32 and its row.
        total += shape.layout.ep * (hidden + 8 * copies / shape.imbalance / size)
    elif shape.layout.ep > 1:  # each copy that came from another rank
        total += copies * config.hidden_size
    if level != "linear":
        total += copies * 2 * moe.intermediate_size
    return size * total + _ROUTER_BYTES * moe.num_experts / shape.layout.tp


def _copies(shape: UpdateShape, moe: MoEConfig) -> float:
    """Return for how many experts of the rank one of its tokens is computed."""
    return shape.imbalance * moe.top_k / shape.layout.tp


def _passing_mlp(shape: UpdateShape, level: Level, layer: int, tokens: float) -> float:
    """Return the bytes that the backward pass of an MLP takes while it runs: what it computes again, of a long sequence
    for a chunk of tokens at a time, and gradients."""
    config, size, again = shape.config, shape.itemsize, _levels_again(level)
    hidden, moe = size * _hidden(shape), _moe(shape, layer)
    whole, mlp = 0.0, 0.0
    if again == "full":
        whole = hidden * (_num_residuals(shape) - 1) + _kept_by_attention(shape, "none")
        mlp = _kept_by_mlp(shape, "none", layer)
    if moe is not None:  # of the residual stream, there is the gradient of the output alone
        return tokens * (whole + mlp + _stream(shape) - 2 * hidden) + _passing_experts(shape, moe, again, tokens)
    share = _share_of_chunk(shape, again, layer)
    in_place = again == "linear" or share < 1
    # The product is gone when the gradient of the halves is computed.
    mlp += size * (1 if in_place else 2) * config.intermediate_size / shape.layout.tp
    if again != "full":
        mlp += _kept_by_mlp(shape, "none", layer) - _kept_by_mlp(shape, again, layer)
    return tokens * (whole + share * mlp + _stream(shape))


def _passing_experts(shape: UpdateShape, moe: MoEConfig, again: Level, tokens: float) -> float:
    """Return the bytes that the backward pass of stacked experts takes, at the step that takes most; the steps are
    those of mcore_adapter/models/experts.py."""
    copies, ep = tokens * shape.itemsize * _copies(shape, moe), shape.layout.ep
    rows, inner = copies * shape.config.hidden_size, copies * moe.intermediate_size
    down = shape.itemsize * moe.num_experts / ep * moe.intermediate_size * shape.config.hidden_size
    halves = 2 * inner if again == "linear" else 0.0
    if shape.fp8:  # experts are not stacked: an upper bound
        return 2 * rows + 3 * inner + halves + 3 * down
    gathers = gathers_tokens(ep, moe.top_k)
    result = tokens * shape.itemsize * _hidden(shape) * (ep if gathers else 1)  # the gradient of their input
    if ep > 1 and not gathers:
        result = rows
    inputs = rows if gathers or (ep == 1 and again == "linear") else 0.0  # sorted again before gradients are there
    return max(
        inputs + halves + rows + (result if gathers else 0.0),  # gradients of all ranks' tokens are sorted
        inputs + halves + rows + 3 * inner,  # the product, and the gradient of the halves
        inputs + rows + 3 * inner + down,
        inputs + rows + 2 * inner + down + result,
        rows + 2 * inner + result + 3 * down,
    )


def _passing_attention(shape: UpdateShape, level: Level, layer: int) -> float:
    """Return the same of the attention, which comes after the MLP: gradients of its output, of queries (summed in
    float32), keys and values, and of those of every query head where several share them."""
    config, again = shape.config, _levels_again(level)
    inputs, output = _attention_widths(shape)
    kept = 0.0 if again == "full" else _kept_by_attention(shape, again)
    keys = inputs if config.mla is not None else (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    shares_heads = config.mla is None and config.num_kv_heads < config.num_heads
    gradients = (keys if config.mla is not None else keys / shape.layout.tp) + (7 if shares_heads else 3) * output
    return shape.itemsize * gradients + _kept_by_attention(shape, "none") - kept + _stream(shape)


def _stream(shape: UpdateShape) -> float:
    """Return the bytes of a token of gradients of the residual stream, and with tensor parallelism of the gathered
    input of a linear layer and its gradient."""
    gathered = 2 * shape.config.hidden_size if shape.layout.tp > 1 else 0
    return shape.itemsize * (3 * _hidden(shape) + gathered)


def _levels_again(level: Level) -> Level:
    """Return what a layer computes again; whether its activations were on the host makes no difference."""
    return "linear" if level == "offload" else level


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


def _head(shape: UpdateShape, tokens: float) -> float:
    """Return the bytes of the output layer, in its backward pass or, where one row is larger, its forward pass."""
    config, size = shape.config, shape.itemsize
    if shape.is_critic:
        return (size + 4) * 3 * tokens * config.hidden_size
    hidden = (_HEAD_ROWS - 1 + 1 / shape.layout.tp) * tokens * config.hidden_size
    rows = config.vocab_size / shape.layout.tp
    logits, gradient = tokens * rows * size, rows * config.hidden_size * size
    if logits > LOGITS_BYTES:  # the chunks' gradients are summed in float32, and rounded at the end
        total = 4 * rows * config.hidden_size
        return size * hidden + total + max(SEVERAL_LOGITS_BYTES, gradient)
    return size * hidden + logits + max(4 * FP32_ROWS * rows, gradient)


def _tied_gradient(shape: UpdateShape) -> float:
    """Return the bytes of the gradient of the output layer that waits for that of the embedding, the same weight."""
    if not (shape.has_head and shape.has_embedding and shape.config.tied) or shape.is_critic:
        return 0.0
    return shape.itemsize * shape.config.vocab_size / shape.layout.tp * shape.config.hidden_size


def _moe(shape: UpdateShape, layer: int) -> MoEConfig | None:
    """Return the experts of a layer, None for a dense one."""
    moe = shape.config.moe
    return moe if moe is not None and moe.sparse_layers[layer] else None
