"""Measure the rates of this host for the planner: `slipstream plan --calibrate`.

Kernels of updates and servers, one at a time, on the first GPU, or on one core where there is none, the launch of a
layer in real updates of small models, and on a GPU the process of a real server (server_rates.py).
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from allocation import ParallelLayout
from core.planning.rates import Calibration, calibration_of
from core.planning.scene import gpu_of_machine
from core.planning.server_rates import server_times, with_server_rates
from mcore_adapter.data.batch import ModelOutput, PackedBatch
from mcore_adapter.device import get_device
from mcore_adapter.engine import MegatronEngine
from mcore_adapter.parallel import destroy_parallel, initialize_parallel
from mcore_adapter.settings import EngineConfig, EngineModel
from model_specs.families import read_config
from rollout.inference.embedded.engine import Engine
from rollout.inference.embedded.weights import ModelWeights
from rollout.types import GenerateRequest, SamplingParams

_ROUNDS = 3
_LAUNCH_ROUNDS = 21  # milliseconds each, of the processor, which others use too
_WIDTHS = ((1536, 17920), (3584, 37888))  # hidden size and both halves of an MLP, of 1.5B and 7B
_HEADS = 12
_FEW_LAYERS, _MANY_LAYERS = 2, 10
_LAUNCHED_TOKENS = 64  # of an update and of an answer that measure launches: their products take next to no time


def calibrate(begin: Callable[[str], None], *, server_python: str | None = None) -> Calibration:
    """Measure this host, which takes one to three minutes. `begin` gets the name of each phase; `server_python`: an
    interpreter that has the library of servers, None for this one."""
    found = torch.accelerator.current_accelerator()
    on_gpu, gpu = found is not None, None if found is None else gpu_of_machine()
    device = torch.device("cpu") if found is None else torch.device(found.type, 0)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    tokens = 16384 if on_gpu else 1024
    if not on_gpu:
        torch.set_num_threads(1)  # ranks and generators of a small host have one core each
    # Before this process takes memory of the GPU.
    times = server_times(gpu=0, python=server_python, begin=begin) if on_gpu else None
    begin("attention")
    lengths = (1024, 16384) if on_gpu else (256, 1024)
    forward, backward = zip(*(_attention(device, dtype, length, on_gpu) for length in lengths), strict=True)
    half = _half_length(lengths, forward)
    reached = lengths[-1] / (lengths[-1] + half)
    reference = calibration_of("H200")
    assert reference is not None, "it is part of this package"
    narrow = _attention(device, dtype, lengths[-1], on_gpu, head_dim=64)[0] / forward[-1]
    begin("memory, links and products")
    memory = _memory(device, 1 << 28 if on_gpu else 1 << 24)
    link = memory if not on_gpu else _link(device) if torch.accelerator.device_count() > 1 else reference.link
    products = statistics.harmonic_mean([_products(device, dtype, tokens, *widths) for widths in _WIDTHS])
    experts = _experts(device, dtype, tokens)
    begin("launches of a layer in updates")
    launch = _of_a_layer(_update_seconds)
    if not on_gpu:
        begin("launches of a layer in the embedded generator")
    calibration = Calibration(
        gpu=f"CPU of {os.cpu_count()} cores" if gpu is None else gpu.name,
        source="slipstream plan --calibrate",
        gib=0.0 if gpu is None else gpu.gib,
        products=products,
        expert_products=experts,
        attention_forward=forward[-1] / reached,
        attention_backward=backward[-1] / reached,
        attention_half_length=half,
        attention_narrow=narrow,
        layer_launch_seconds=launch,
        memory=memory,
        link=link,
        decode_token_seconds=0.0,
        request_seconds=0.0,
        decode_layer_link_seconds=0.0,
        decode_layer_seconds=0.0 if on_gpu else _of_a_layer(_decode_seconds),
    )
    return with_server_rates(calibration, times) if on_gpu else calibration


def _of_a_layer(seconds: Callable[[Path], float]) -> float:
    """Return what a layer adds to the seconds of a small model in this folder."""
    found = []
    for layers in (_FEW_LAYERS, _MANY_LAYERS):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(_SMALL | {"num_hidden_layers": layers}))
            found.append(seconds(Path(folder)))
    return (found[1] - found[0]) / (_MANY_LAYERS - _FEW_LAYERS)


_SMALL = dict(
    architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_act="silu", hidden_size=64, intermediate_size=128,
    num_attention_heads=1, num_key_value_heads=1, vocab_size=64, max_position_embeddings=1024, rms_norm_eps=1e-6,
    rope_theta=10000.0, tie_word_embeddings=True,
)  # fmt: skip


def _update_seconds(folder: Path) -> float:
    """Return the seconds of an update of a model with random weights on a few tokens, as a run makes it."""
    device = get_device("auto")
    with device.activate():
        parallel = initialize_parallel(
            ParallelLayout(), rank=0, world_size=1, init_method=f"file://{folder}/store", device=device, seed=1
        )
        config = EngineConfig(
            init_from_scratch=True, bf16=torch.accelerator.is_available(), gradient_checkpointing=False
        )
        engine = MegatronEngine(
            EngineModel(config=config, path=str(folder), total_updates=100), parallel=parallel, device=device
        )
        batch = PackedBatch(
            token_ids=torch.arange(_LAUNCHED_TOKENS) % 64, cu_seqlens=torch.tensor([0, _LAUNCHED_TOKENS]),
            loss_mask=torch.arange(_LAUNCHED_TOKENS) > 0,
        )  # fmt: skip
        step = partial(engine.train_step, batch, _likelihood, max_tokens_per_mb=_LAUNCHED_TOKENS)
        found = _seconds(device.torch_device, step, rounds=_LAUNCH_ROUNDS)
        destroy_parallel()
    return found


def _likelihood(output: ModelOutput, fields: Mapping[str, Tensor], _: object) -> tuple[Tensor, dict[str, Tensor]]:
    assert output.logprobs is not None, "a model with an output layer"
    return -(output.logprobs * fields["token_weights"]).sum(), {}


def _decode_seconds(folder: Path) -> float:
    """Return the seconds of a token of the embedded generator."""
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    config = read_config(folder)
    weights = ModelWeights(config, dtype=torch.float32)
    weights.load_folder(folder)
    engine = Engine(config, weights, max_running=1)
    sampling = SamplingParams(max_new_tokens=_LAUNCHED_TOKENS, min_new_tokens=_LAUNCHED_TOKENS, stop_token_ids=())

    def answer() -> None:
        engine.add([GenerateRequest(request_id="one", prompt_ids=[1, 2, 3], seed=1, sampling=sampling)])
        while engine.num_running or engine.num_waiting:
            engine.step()

    return _seconds(torch.device("cpu"), answer) / _LAUNCHED_TOKENS


def _seconds(device: torch.device, step: Callable[[], object], rounds: int = _ROUNDS) -> float:
    """Return the median of so many rounds after a first one."""

    def once() -> float:
        start = time.perf_counter()
        step()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - start

    return statistics.median([once() for _ in range(rounds + 1)][1:])


def _products(device: torch.device, dtype: torch.dtype, tokens: int, hidden: int, width: int) -> float:
    """Return operations per second of a linear layer and of its two gradients."""
    x, w, grad = (torch.randn(*size, device=device, dtype=dtype) for size in _shapes(tokens, hidden, width))

    def step() -> None:
        torch.mm(x, w.t())
        torch.mm(grad, w)
        torch.mm(grad.t(), x)

    return 6.0 * tokens * hidden * width / _seconds(device, step)


def _shapes(tokens: int, hidden: int, width: int) -> tuple[tuple[int, int], ...]:
    return (tokens, hidden), (width, hidden), (tokens, width)


def _experts(device: torch.device, dtype: torch.dtype, tokens: int) -> float:
    """Return the same of 16 experts with the widths of Qwen3-30B-A3B, as one batched product."""
    experts, hidden, width = 16, 2048, 1536
    rows = max(1, tokens // experts)
    x = torch.randn(experts, rows, hidden, device=device, dtype=dtype)
    w = torch.randn(experts, hidden, width, device=device, dtype=dtype)
    return 2.0 * experts * rows * hidden * width / _seconds(device, lambda: torch.bmm(x, w))


def _attention(
    device: torch.device, dtype: torch.dtype, length: int, on_gpu: bool, *, head_dim: int = 128
) -> tuple[float, float]:
    """Return operations per second of causal attention, forward and backward, counted as the planner counts them."""
    count = max(1, 16384 // length) if on_gpu else 1
    shape = (count, _HEADS, length, head_dim)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    grad = torch.randn(shape, device=device, dtype=dtype)
    operations = 2.0 * count * _HEADS * head_dim * length * length

    def run() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with _fastest_attention():
        forward = _seconds(device, run)
        both = _seconds(device, lambda: torch.autograd.grad(run(), (q, k, v), grad))
    return operations / forward, 2.5 * operations / max(both - forward, 1e-9)


def _fastest_attention() -> Any:
    """Prefer cuDNN's kernel, which TransformerEngine calls too."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)


def _half_length(lengths: tuple[int, ...], rates: tuple[float, ...]) -> float:
    """Return h of rate(l) = most * l / (l + h) through two points; 0 where short sequences are as fast."""
    (short, long), (slow, fast) = lengths, rates
    ratio = slow / fast  # short (long + h) / (long (short + h))
    denominator = short - ratio * long
    if ratio >= 1 or denominator >= 0:
        return 0.0
    return short * long * (ratio - 1) / denominator


def _memory(device: torch.device, elements: int) -> float:
    """Return bytes per second of a copy, those that are read and those that are written."""
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    return 8.0 * elements / _seconds(device, lambda: target.copy_(source))


def _link(device: torch.device) -> float:
    """Return bytes per second from the first GPU to the second."""
    source = torch.empty(1 << 28, device=device)
    target = torch.empty_like(source, device=torch.device(device.type, 1))
    return 4.0 * len(source) / _seconds(device, lambda: target.copy_(source))
