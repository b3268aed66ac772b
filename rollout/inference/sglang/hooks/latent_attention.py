"""Latent attention in a SGLang server of a DeepSeek model: loading of two fused projections, and prefills on the CPU.

SGLang holds q_a_proj and kv_a_proj_with_mqa in one parameter. Its own loader copies them only where one call brings
both, and drops one that comes alone without an error. A bucket of a push may end between them, and of a folder of
changes one may have none. So each is copied to its rows.
Read by the server's processes, so nothing else of this project is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

FUSED = "fused_qkv_a_proj_with_mqa"
_QUERY, _KEY_VALUE = ".q_a_proj.weight", ".kv_a_proj_with_mqa.weight"


def copy_fused_parts(
    model: Any, weights: Iterable[tuple[str, Tensor]], *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copy q_a_proj and kv_a_proj_with_mqa one by one, before DeepseekV2WeightLoaderMixin.do_load_weights, which gets
    the other weights. Quantized models use SGLang's loader unchanged."""
    if model.quant_config is not None or getattr(model.config, "q_lora_rank", None) is None:
        return (model, weights, *args), kwargs
    return (model, _others(model, weights), *args), kwargs


def compressed_on_cpu(original: Any, registry: Any, backend_name: str) -> Any:
    """Let prefills attend to the compressed keys and values as decoding does, around
    AttentionBackendRegistry.get_handler. torch_native always reads the cache, which holds compressed keys and
    values only."""
    if backend_name != "torch_native":
        return original(registry, backend_name)
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return lambda attention, batch: AttnForwardMethod.MLA


def _others(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
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
