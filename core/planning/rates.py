"""Time of a step: update, log-probabilities, generation and weight update, by operations and measured rates.

Invariant: a time is a count (operations, bytes) over a rate that was measured, which is in calibrations/ or a file of
`slipstream plan --calibrate`; without a calibration there is no time.
"""

from __future__ import annotations

import json
import math
from bisect import bisect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from statistics import NormalDist

from core.planning.host_memory import checkpoint_bytes
from core.planning.memory import (
    usual_level,
)
from core.planning.scene import MOST_GIB, Engine, PlanError, Scene, Servers
from core.planning.server_memory import cache_bytes_per_token, cached_heads, plan_servers, server_weights
from mcore_adapter.settings import LOGITS_BYTES, Level
from model_specs.config import ModelConfig

FOLDER = Path(__file__).with_name("calibrations")
NODE_LINK = 45e9
"""Bytes per second between two GPUs of different nodes (400 Gbit/s each), not measured."""
_WIDTH_PASSES, _HIDDEN_PASSES, _HEAD_PASSES, _COPY_PASSES = 22, 39, 18, 26
"""Elements that are read or written, for each element of the MLP's width, of the residual stream, of queries, keys and
values, and of the copies of tokens for experts: fitted to measured updates."""
_RECOMPUTED_PASSES: dict[Level, float] = {"qkv": 1.2, "linear": 1.45, "offload": 1.45, "full": 1.45}
_RECOMPUTED_BY_EXPERTS = 1.1
_UPDATE_SECONDS = 0.013
"""Of an update, in which the GPU waits: the host packs the batch, and reads losses and the norm of gradients."""
_LAUNCHED_FORWARD = 0.4
"""Share of the launches of a layer in the forward pass."""
_LAUNCHED_BY_NORMS, _LAUNCHED_BY_RECOMPUTING, _LAUNCHED_BY_RANKS = 0.35, 0.09, 0.26
"""Launches of norms of queries and keys, of recomputation, and of tensor-parallel ranks, by those of a layer."""
_OPTIMIZER_BYTES = 49
"""Of each parameter of the shard, read or written: Adam 28, copy to bfloat16 6, norm of gradients 4, clipping 8, zeros
4."""
_OFFLOADED_BYTES, _HOST_LINK = 12, 38e9
"""Of each parameter, in both directions at once; bytes per second in each, measured."""
_WIDE_HEAD = 128
_SAMPLED_BYTES, _CACHED_SAMPLED_BYTES = 140, 114
"""Of each entry of the vocabulary, read or written to sample a token; on a CPU, whose caches hold some of it."""
_WAVE_SECONDS = 0.15
"""In which a wave of requests begins and ends: connections, first small batches, answers. Fitted to measured servers,
as are the bytes of sampling on a GPU and `decode_layer_seconds` of H200."""
_ATTENDED_SECONDS = 12e-9
"""Of a decode step on a GPU, for each request, layer and head of keys and values, in addition to the bytes of its
cache: chosen with measured servers."""
_SLACK = 1.06  # of a step, beside its longer side: waits for the oldest prompts, one measured value
_DRAIN_PARTS, _ROUNDS = 16, 6
Decoding = Callable[[float, float], float]
_TURN_SECONDS = 1.0  # release, reload, offload and resume of colocated sides: 1.5B on one H100


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured rates of a GPU or a host: operations, or bytes, per second."""

    gpu: str
    source: str
    gib: float
    """Memory of a GPU; 0 for a CPU."""
    products: float
    """Operations per second of matrix products of an update."""
    expert_products: float
    attention_forward: float
    attention_backward: float
    attention_half_length: float
    """Tokens of a sequence with which attention has half of its rate."""
    attention_narrow: float
    """Share of that rate with heads of fewer than 128 elements."""
    layer_launch_seconds: float
    """In which the processor launches the kernels of a plain layer, of both passes over a microbatch."""
    memory: float
    """Bytes per second that elementwise operations read or write."""
    link: float
    """Bytes per second to another GPU of the host, in one direction."""
    decode_token_seconds: float
    """Seconds of the server's process for a token of one request, beside the GPU: with many requests a decode step
    waits for it."""
    request_seconds: float
    """Seconds in which a server takes up a request, in addition to those of its prompt."""
    decode_layer_link_seconds: float
    """Seconds of communication per layer in a server of several ranks."""
    decode_layer_seconds: float
    """Seconds of a layer of a decode step beside its products and attention: small kernels, and on a CPU launches."""


_OPERATIONS, _BYTES = (1e8, 1e18, "operations per second"), (1e8, 1e15, "bytes per second")
_SECONDS = (0.0, 10.0, "seconds")
_RANGES = {
    "gib": (0.0, MOST_GIB, "GiB"), "products": _OPERATIONS, "expert_products": _OPERATIONS,
    "attention_forward": _OPERATIONS, "attention_backward": _OPERATIONS, "attention_half_length": (0.0, 1e6, "tokens"),
    "attention_narrow": (0.01, 100.0, "a share"), "memory": _BYTES, "link": _BYTES,
}  # fmt: skip
"""Least, most and unit of a number of a calibration, of any computer; of others _SECONDS."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one training step by a formula."""

    update: float
    passes: float
    """Log-probabilities and values before the update."""
    rollout: float
    push: float
    turn: float
    """Seconds in which colocated trainer and servers hand over GPU memory."""
    checkpoint: float
    """Seconds in which the trainer stops for a recover checkpoint; not in a step, as few steps have one."""
    step: float
    tokens: float

    @property
    def tokens_per_second(self) -> float:
        """Trained tokens, those of prompts too."""
        return self.tokens / self.step

    @property
    def trainer(self) -> float:
        """Seconds in which the trainer computes."""
        return self.update + self.passes


def calibration_of(gpu: str) -> Calibration | None:
    """Return the calibration of a GPU that is part of this package, or None."""
    path = FOLDER / f"{gpu}.json"
    return read_calibration(path) if path.is_file() else None


def usual_calibration(scene: Scene) -> Calibration | None:
    """Return the calibration of what the trainer of a scene computes on, or None."""
    return calibration_of(scene.gpu.name if scene.on_gpu else "CPU")


def read_calibration(path: Path) -> Calibration:
    """Return what write_calibration() has written. Raises PlanError."""

    def refused(why: str) -> PlanError:
        return PlanError(f"--calibration {path}: {why}; write a new one with slipstream plan --calibrate FILE")

    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise refused(error.strerror or str(error) if isinstance(error, OSError) else f"no JSON: {error}") from None
    known = {one.name: one for one in fields(Calibration)}
    if not isinstance(rows, dict):
        raise refused(f"must be an object with the keys of a calibration, not {rows!r:.60}")
    if missing := [name for name, one in known.items() if name not in rows and one.default is MISSING]:
        raise refused(f"{', '.join(missing)}: missing")
    for name, value in rows.items():
        if name not in known:
            raise refused(f"{name}: unknown key")
        if known[name].type == "str":
            if not isinstance(value, str):
                raise refused(f"{name}: must be a text, not {value!r:.60}")
            continue
        least, most, unit = _RANGES.get(name, _SECONDS)
        if type(value) not in (int, float) or not least <= value <= most:
            raise refused(f"{name}: must be a number from {least:g} to {most:g} ({unit}), not {value!r:.60}")
    return Calibration(**rows)


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write a calibration as JSON."""
    rows = {name: float(f"{value:.4g}") if isinstance(value, float) else value
            for name, value in vars(calibration).items()}  # fmt: skip
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def step_time(scene: Scene, calibration: Calibration, answers: Lengths) -> StepTime | None:
    """Return the time of a step whose answers, or whole sequences without generators, have such lengths; None with one
    side on GPUs and the other on the CPU. `step` is what steps would take if all were alike: simulation.forecast() runs
    them."""
    servers = scene.servers
    if servers is not None and servers.on_gpu != scene.on_gpu:
        return None
    prompt = 0.0 if servers is None else scene.prompt_tokens / 2
    tokens = scene.sequences * (prompt + answers.mean)
    update, passes = trainer_seconds(scene, calibration, answers)
    checkpoint = checkpoint_bytes(scene) / _HOST_LINK if scene.writes_checkpoints and scene.on_gpu else 0.0
    if servers is None:
        return StepTime(
            update=update, passes=passes, rollout=0.0, push=0.0, turn=0.0, checkpoint=checkpoint, step=update + passes,
            tokens=tokens,
        )  # fmt: skip
    allowed = scene.sequences * (scene.max_staleness + 1) / servers.layout.dp
    running = max(1, int(min(most_running(scene, servers, answers), allowed)))
    decode = decoding(servers, calibration)
    usual = decode(running, prompt + answers.mean_begun)
    rollout = scene.sequences * answers.mean * usual / (running * servers.layout.dp)
    prefill = prefill_seconds(
        servers, calibration, prompts=scene.prompts / servers.layout.dp, length=prompt, answers=scene.group_size
    )
    rollout += prefill
    push = 0.03 + server_weights(servers) / calibration.link
    turn = _TURN_SECONDS if scene.shares_gpus and scene.on_gpu else 0.0
    trainer = update + passes

    def batch(every: float) -> float:
        return prefill + _batch_seconds(scene, servers, decode, answers, running=running, every=every)

    if scene.max_staleness == 0:
        rollout = batch(math.inf)
    overlaps = not scene.shares_gpus and scene.max_staleness > 0
    # The longest answers have max_staleness + 1 steps; a trainer beside them takes a part of the last one.
    beside = trainer if overlaps else 0.0
    step = lag = max(rollout, beside)
    for _ in range(_ROUNDS if scene.max_staleness else 0):  # the longer a step is, the later others join them
        lag = (lag + (batch(step) + beside) / (scene.max_staleness + 1)) / 2
        step = max(rollout, beside, lag)
    step = step * _SLACK + push if overlaps else step + trainer + push + turn
    return StepTime(
        update=update, passes=passes, rollout=rollout, push=push, turn=turn, checkpoint=checkpoint, step=step,
        tokens=tokens,
    )  # fmt: skip


def trainer_seconds(scene: Scene, calibration: Calibration, answers: Lengths) -> tuple[float, float]:
    """Return the seconds of the updates of a step, and of the passes before them."""
    prompt = 0.0 if scene.servers is None else scene.prompt_tokens / 2
    length = prompt + answers.mean
    tokens = scene.sequences * length
    # Attention grows with the square of the length.
    square = (answers.mean_square + 2 * prompt * answers.mean + prompt**2) / length
    update = sum(
        e.sample_reuse
        * update_seconds(scene, e, calibration, tokens=tokens, length=square, level=usual_level(scene, e))
        for e in scene.engines
        if e.trains
    )
    passes = sum(pass_seconds(scene, e, calibration, tokens=tokens, length=length) for e in scene.engines if e.has_pass)
    return update, passes


def _batch_seconds(
    scene: Scene, servers: Servers, decode: Decoding, answers: Lengths, *, running: int, every: float
) -> float:
    """Return the seconds in which servers decode a batch to the end of its longest answer. Once its last request has
    begun, fewer and fewer of them are left. `every`: seconds from the begin of one batch to that of the next, whose
    requests run beside them; infinity: no other batch runs."""
    share, prompt = scene.sequences / servers.layout.dp, scene.prompt_tokens / 2
    together = min(running, share)
    usual = prompt + answers.mean_begun
    first = (share - together) * answers.mean * decode(together, usual) / together
    part = answers.longest_of(scene.sequences) / _DRAIN_PARTS
    begun = [(number + 0.5) * part for number in range(_DRAIN_PARTS)]
    left = [max(1.0, together * answers.share_beyond(tokens)) for tokens in begun]
    alone = [*accumulate((part * decode(n, prompt + t) for n, t in zip(left, begun, strict=True)), initial=first)]

    def others(age: float) -> float:
        """Return the requests of the batches that began later, when this one has such an age."""
        count, age = 0.0, age - every
        while age > 0:
            number = bisect(alone, age)
            count += together if number == 0 else left[number - 1] if number <= len(left) else 0.0
            age -= every
        return count

    seconds = first
    for own, tokens in zip(left, begun, strict=True):
        if (more := min(running - own, others(seconds))) > 0:
            context = (own * (prompt + tokens) + more * usual) / (own + more)
            seconds += part * decode(own + more, context)
        else:
            seconds += part * decode(own, prompt + tokens)
    return seconds


def most_running(scene: Scene, servers: Servers, answers: Lengths) -> int:
    """Return how many requests a server decodes at once: as many as it may and as its cache holds, each with the tokens
    that one under way has on average; 0 without a cache."""
    if not servers.on_gpu:
        return servers.max_running
    tokens = plan_servers(scene, servers).tokens
    held = max(1, int(tokens / (scene.prompt_tokens / 2 + answers.mean_begun)))
    return min(servers.max_running, held) if tokens else 0


def update_seconds(
    scene: Scene, engine: Engine, calibration: Calibration, *, tokens: float, length: float, level: Level
) -> float:
    """Return the seconds of one pass of updates over a batch of `tokens` in sequences of `length`."""
    exchange = scene.minibatches * _exchange_seconds(scene, engine, calibration)
    return _seconds(scene, engine, calibration, tokens, length, level, exchange)


def _seconds(
    scene: Scene, engine: Engine, c: Calibration, tokens: float, length: float, level: Level, exchange: float
) -> float:
    """Return the seconds of updates. `exchange`: those of the exchange of gradients and weights."""
    layout, config = engine.layout, engine.config
    ranks = layout.dp * layout.cp * layout.tp * layout.pp
    layer, experts = layer_operations(config)
    experts_again = {"full": 1.0, "linear": 2 / 3, "offload": 2 / 3}.get(level, 0.0)
    seconds = (3 + _computed_again(config, level)) * (layer - experts) * config.num_layers / c.products
    seconds += (3 + experts_again) * experts * config.num_layers / c.expert_products
    attention = 2.0 * _attention_width(config) * length * config.num_layers
    block = length / layout.cp**2  # queries and keys of one product of context-parallel ranks
    reached = block / (block + c.attention_half_length) * (c.attention_narrow if _has_narrow_heads(config) else 1.0)
    seconds += attention * (2 if level == "full" else 1) / (c.attention_forward * reached)
    seconds += 2.5 * attention / (c.attention_backward * reached)
    seconds += elementwise_bytes(engine, level) / c.memory
    head = 3 * 2.0 * config.hidden_size * (1 if engine.is_critic else config.vocab_size)
    if engine.tokens / layout.cp * config.vocab_size / layout.tp * engine.itemsize > LOGITS_BYTES:
        head *= 4 / 3  # logits are computed again
    microbatches = max(1.0, tokens / layout.dp / scene.minibatches / engine.tokens)
    of_layers = seconds * tokens / ranks + _communication(scene, engine, c, tokens)
    launched = scene.minibatches * microbatches * config.num_layers / layout.pp * _launch_seconds(engine, c, level)
    forward = 1 / (3 + experts_again)

    def both_passes(computed: float) -> float:
        if not scene.on_gpu:  # the processor that launches computes
            return computed + launched
        passes = max(computed * forward, launched * _LAUNCHED_FORWARD)
        return passes + max(computed * (1 - forward), launched * (1 - _LAUNCHED_FORWARD))

    total = both_passes(of_layers + exchange)
    total += both_passes(of_layers) * (layout.pp - 1) / layout.vpp / microbatches  # the bubble
    # The last stage computes the output layer; the others wait for it.
    total += head / c.products * tokens / ranks * layout.pp
    held = sum(engine.states(0).parameters.values()) / (layout.dp * layout.cp)
    step = held * _OPTIMIZER_BYTES / c.memory
    if engine.offload:
        step += held * _OFFLOADED_BYTES / _HOST_LINK
    return total + scene.minibatches * (step + _UPDATE_SECONDS)


def _launch_seconds(engine: Engine, calibration: Calibration, level: Level) -> float:
    """Return in which time the processor launches the kernels of a layer, for both passes over a microbatch."""
    more = _LAUNCHED_BY_NORMS if engine.config.qk_norm else 0.0
    more += _LAUNCHED_BY_RECOMPUTING if level != "none" else 0.0
    more += _LAUNCHED_BY_RANKS if engine.layout.tp > 1 else 0.0
    return calibration.layer_launch_seconds * (1 + more)


def _has_narrow_heads(config: ModelConfig) -> bool:
    return config.mla is None and config.head_dim < _WIDE_HEAD


def pass_seconds(scene: Scene, engine: Engine, calibration: Calibration, *, tokens: float, length: float) -> float:
    """Return the seconds of a pass without gradients over a batch."""
    return 0.29 * _seconds(replace(scene, minibatches=1), engine, calibration, tokens, length, "none", exchange=0.0)


def layer_operations(config: ModelConfig) -> tuple[float, float]:
    """Return the operations of the matrix products of a layer for one token, forward, and those of its experts."""
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    if config.mla is not None:
        mla = config.mla
        heads = config.num_heads * (2 * mla.v_head_dim + mla.qk_head_dim + mla.qk_nope_head_dim)
    attention = 2.0 * config.hidden_size * heads
    if config.moe is None:
        return attention + 6.0 * config.hidden_size * config.intermediate_size, 0.0
    shared = 6.0 * config.hidden_size * config.moe.shared_intermediate_size
    experts = 6.0 * config.hidden_size * config.moe.top_k * config.moe.intermediate_size
    return attention + shared + experts + 2.0 * config.hidden_size * config.moe.num_experts, experts


def _attention_width(config: ModelConfig) -> float:
    if config.mla is not None:
        return config.num_heads * (config.mla.qk_head_dim + config.mla.v_head_dim) / 2
    return float(config.num_heads * config.head_dim)


def _computed_again(config: ModelConfig, level: Level) -> float:
    """Return the share of a layer's products, without experts, that the backward pass computes again."""
    if level in ("none", "selective"):
        return 0.0
    if level == "full":
        return 1.0
    layer, experts = layer_operations(config)
    inputs = 2.0 * config.hidden_size * (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    first = 4.0 * config.hidden_size * config.intermediate_size if config.moe is None and level != "qkv" else 0.0
    return (inputs + first) / (layer - experts)


def elementwise_bytes(engine: Engine, level: Level) -> float:
    """Return the bytes that operations other than products read and write for one token of an update."""
    config, moe = engine.config, engine.config.moe
    width = config.intermediate_size if moe is None else moe.top_k * moe.intermediate_size
    copies = 0 if moe is None else moe.top_k * config.hidden_size
    heads: float = config.num_heads + 2 * config.num_kv_heads
    if config.qk_norm:
        heads += (config.num_heads + config.num_kv_heads) / 2
    elements: float = _WIDTH_PASSES * width + _HIDDEN_PASSES * config.hidden_size + _COPY_PASSES * copies
    elements += _HEAD_PASSES * heads * config.head_dim
    again = _RECOMPUTED_PASSES.get(level, 1.0)
    if moe is not None:
        again = min(again, _RECOMPUTED_BY_EXPERTS)
    return engine.itemsize * config.num_layers * elements * again


def _communication(scene: Scene, engine: Engine, c: Calibration, tokens: float) -> float:
    """Return the seconds of communication between layers that no computation hides."""
    layout, config = engine.layout, engine.config
    rows = tokens / layout.dp / layout.cp * config.hidden_size * engine.itemsize
    per_node = scene.n_gpus_per_node
    seconds = 0.0
    if layout.tp > 1:  # nine gathers or sums of each layer
        link = c.link if layout.tp <= per_node else NODE_LINK
        seconds += 9 * config.num_layers / layout.pp * rows * (layout.tp - 1) / layout.tp / link
    if layout.ep > 1 and config.moe is not None:  # gathers and sums of tokens, half of them hidden
        link = c.link if layout.ep <= per_node else NODE_LINK
        sent = min(layout.ep - 1, config.moe.top_k)
        seconds += 2 * config.num_layers / layout.pp * rows / layout.tp * sent / link
    if layout.pp > 1:
        seconds += 2 * rows / layout.tp / (c.link if layout.world_size <= per_node else NODE_LINK)
    return seconds


def _exchange_seconds(scene: Scene, engine: Engine, c: Calibration) -> float:
    """Return the seconds in which data-parallel ranks exchange gradients and weights of an update, which slows the
    kernels beside it."""
    layout, states = engine.layout, engine.states(0)
    size = layout.dp * layout.cp
    link = c.link if layout.world_size <= scene.n_gpus_per_node else NODE_LINK
    return (size - 1) / size * (states.gradients + states.weights) / link


def wave_seconds(servers: Servers, calibration: Calibration, *, running: int, prompt: int, answer: int) -> float:
    """Return the seconds in which a server answers so many requests that begin at once: prompts, then one decode step
    for each token of an answer."""
    context = prompt + answer / 2
    begin = prefill_seconds(servers, calibration, prompts=running, length=prompt, answers=1)
    around = _WAVE_SECONDS if servers.on_gpu else 0.0
    return around + begin + answer * decoding(servers, calibration)(running, context)


def prefill_seconds(
    servers: Servers, calibration: Calibration, *, prompts: float, length: float, answers: int
) -> float:
    """Return the seconds in which a server computes prompts of `length` tokens, with so many answers to each."""
    c, config = calibration, servers.config
    layer, experts = layer_operations(config)
    attention = 2.0 * _attention_width(config) * length
    seconds = (layer - experts) / c.products + experts / c.expert_products
    seconds += attention / (c.attention_forward * length / (length + c.attention_half_length))
    return prompts * (length * config.num_layers * seconds / servers.layout.tp + answers * c.request_seconds)


def decoding(servers: Servers, calibration: Calibration) -> Decoding:
    """Return a function of requests and of the mean tokens of their context: the seconds of a decode step of a
    server."""
    c, config = calibration, servers.config
    tp = servers.layout.tp
    layer, _ = layer_operations(config)
    products = (layer * config.num_layers + 2.0 * config.hidden_size * config.vocab_size) / tp / c.products
    # Of an embedding of its own, a step reads the rows of its tokens alone.
    embedding = 0 if config.tied else servers.itemsize * config.hidden_size * config.vocab_size / tp
    reading = (server_weights(servers) * servers.layout.pp - embedding) / c.memory
    sampled = _SAMPLED_BYTES if servers.on_gpu else _CACHED_SAMPLED_BYTES
    sampling = sampled * config.vocab_size / tp / c.memory
    token = cache_bytes_per_token(servers) / c.memory
    attended = _ATTENDED_SECONDS * config.num_layers * cached_heads(servers) if servers.on_gpu else 0.0
    layers = config.num_layers * (c.decode_layer_seconds + (c.decode_layer_link_seconds if tp > 1 else 0.0))

    def seconds(running: float, context: float) -> float:
        # Weights are read while others are multiplied; the overlap is not complete.
        gpu = layers + math.hypot(reading, running * products) + running * (sampling + attended + context * token)
        return max(gpu, running * c.decode_token_seconds)

    return seconds


SPREAD = 0.8
"""Standard deviation of the logarithm, where none is given."""
_NORMAL = NormalDist()


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """A distribution of lengths with a given mean."""

    mean: float
    longest: int
    spread: float = SPREAD
    """Standard deviation of the logarithm before the cut; 0: all have the mean."""

    @cached_property
    def median(self) -> float:
        """The median that has this mean after the cut."""
        if self.are_alike:
            return min(self.mean, float(self.longest))
        low, high = math.log(self.mean) - self.spread**2, math.log(self.longest) + 20 * self.spread
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._power(1, math.exp(middle)) < self.mean else (low, middle)
        return math.exp(low)

    @property
    def are_alike(self) -> bool:
        """Whether all have the same length."""
        return not self.spread or self.mean >= self.longest

    @property
    def mean_square(self) -> float:
        return self.median**2 if self.are_alike else self._power(2, self.median)

    @property
    def mean_begun(self) -> float:
        """Tokens that an answer under way has on average: long ones are under way for longer."""
        return self.mean_square / self.mean / 2

    def of_normal(self, drawn: float) -> float:
        """Return the length that belongs to a number drawn from the standard normal distribution."""
        return self.median if self.are_alike else min(float(self.longest), self.median * math.exp(self.spread * drawn))

    def share_beyond(self, tokens: float) -> float:
        """Return the share of answers that have more than so many tokens, above 0 and below `longest`."""
        if self.are_alike:
            return float(tokens < self.median)
        return 1 - _NORMAL.cdf(math.log(tokens / self.median) / self.spread)

    def _power(self, power: int, median: float) -> float:
        """Return the mean of length ** power."""
        s, cut = self.spread, (math.log(self.longest) - math.log(median)) / self.spread
        below = median**power * math.exp((power * s) ** 2 / 2) * _NORMAL.cdf(cut - power * s)
        return below + self.longest**power * (1 - _NORMAL.cdf(cut))

    def longest_of(self, count: int) -> float:
        """Return about the longest of so many answers."""
        return self.of_normal(_NORMAL.inv_cdf(1 - 1 / max(2, count)))
