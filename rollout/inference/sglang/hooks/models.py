"""Hooks of SGLang's models: loading of latent attention, FP8 without scales of a cache, and what the CPU lacks.

SGLang holds q_a_proj and kv_a_proj_with_mqa of a DeepSeek model in one parameter. Its own loader copies them only where
one call brings both, and drops one that comes alone without an error. A bucket of a push may end between them, and of a
folder of changes one may have none. So each is copied to its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn


class _LatentAttentionConfig(Protocol):
    q_lora_rank: int | None


class _LatentAttentionModel(Protocol):
    quant_config: object | None
    config: _LatentAttentionConfig

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]: ...


class _Fp8Config(Protocol):
    weight_block_size: list[int] | None


class _ExpertsCache(Protocol):
    buffer: Tensor
    num_tokens: int
    num_layers: int
    topk_size: int
    name: str


class _Captured(Protocol):
    topk: Tensor


FUSED = "fused_qkv_a_proj_with_mqa"
_QUERY, _KEY_VALUE = ".q_a_proj.weight", ".kv_a_proj_with_mqa.weight"


def copy_fused_parts(
    model: _LatentAttentionModel, weights: Iterable[tuple[str, Tensor]], *args: object, **kwargs: object
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Copy q_a_proj and kv_a_proj_with_mqa one by one, before DeepseekV2WeightLoaderMixin.do_load_weights, which gets
    the other weights. Quantized models use SGLang's loader unchanged."""
    if model.quant_config is not None or getattr(model.config, "q_lora_rank", None) is None:
        return (model, weights, *args), kwargs
    return (model, _others(model, weights), *args), kwargs


def _others(model: _LatentAttentionModel, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights that are left."""
    held, num_query_rows = dict(model.named_parameters()), model.config.q_lora_rank
    for name, tensor in weights:
        layer, part = next(
            ((name.removesuffix(end), end) for end in (_QUERY, _KEY_VALUE) if name.endswith(end)), ("", "")
        )
        fused = held.get(f"{layer}.{FUSED}.weight")
        if fused is None:  # also where another pipeline stage has the layer
            yield name, tensor
        elif part == _QUERY:
            fused.data[:num_query_rows].copy_(tensor)
        else:
            fused.data[num_query_rows:].copy_(tensor)


def compressed_on_cpu(original: Callable[..., object], registry: object, backend_name: str) -> object:
    """Let prefills attend to the compressed keys and values as decoding does, around
    AttentionBackendRegistry.get_handler. torch_native always reads the cache, which holds compressed keys and
    values only."""
    if backend_name != "torch_native":
        return original(registry, backend_name)
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return lambda attention, batch: AttnForwardMethod.MLA


def no_cache_scales(
    original: Callable[..., object], config: _Fp8Config, layer: object, *args: object, **kwargs: object
) -> object:
    """Give attention no scales for an FP8 cache, around Fp8Config.get_quant_method, where weights are FP8 in blocks:
    such checkpoints have none. Without weights of its own a server would start with random ones, and attention in
    Triton multiplies with them whatever the format of the cache."""
    if config.weight_block_size is not None and type(layer).__name__ == "RadixAttention":
        return None
    return original(config, layer, *args, **kwargs)


def kept_experts(
    original: Callable[..., None], cache: _ExpertsCache, num_tokens: int, num_layers: int, topk_size: int, name: str
) -> None:
    """Allocate page-locked memory around BaseHostCache.__init__, and other memory without a GPU, for tests."""
    if torch.cuda.is_available():
        original(cache, num_tokens, num_layers, topk_size, name)
        return
    cache.buffer = torch.zeros((num_tokens, num_layers, topk_size), dtype=torch.int32)
    cache.num_tokens, cache.num_layers, cache.topk_size, cache.name = num_tokens, num_layers, topk_size, name


def copy_experts(output: _Captured | None, *args: object, **kwargs: object) -> None:
    """Copy the experts to the host after BaseTopkCapturer.on_forward_end. Without a GPU they would be a view of the
    buffer that the next forward pass overwrites."""
    if output is not None and output.topk.device.type == "cpu":
        output.topk = output.topk.clone()


def moves_experts() -> bool:
    """Return whether the server balances experts between its ranks."""
    from sglang.srt.server_args import get_global_server_args

    return bool(get_global_server_args().enable_eplb)
