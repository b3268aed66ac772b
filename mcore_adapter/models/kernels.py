"""Which library computes each part of an engine, read from what was built: fused kernels that are missing show here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from megatron.core.models.common.embeddings import rope_utils
from megatron.core.optimizer import clip_grads
from megatron.core.transformer import mlp as megatron_mlp
from torch import nn

from mcore_adapter.models.router import Router
from mcore_adapter.optimizer.training import TrainOptimizer, addition

if TYPE_CHECKING:
    from mcore_adapter.models.gpt import ModelChunk

PARTS = {
    "core_attention": "attention",
    "linear_qkv": "query, key, value",
    "linear_proj": "attention output",
    "input_layernorm": "norm",
    "linear_fc1": "MLP input",
    "linear_fc2": "MLP output",
    "router": "routing",
    "token_dispatcher": "dispatch",
    "experts": "experts",
    "output_layer": "head",
}
"""Last names of Megatron's modules, in the order of the network -> how the log calls them."""
LIBRARIES = {
    "megatron.core.extensions.transformer_engine": "TransformerEngine",
    "transformer_engine": "TransformerEngine",
    "transformer_engine_torch": "TransformerEngine",
    "apex": "apex",
    "amp_C": "apex",
    "megatron": "Megatron",
    "mcore_adapter": "Slipstream",
    "torch": "torch",
}
"""First names of modules, the longest match first."""


def computed_by(chunks: Sequence[ModelChunk], optimizer: TrainOptimizer | None) -> dict[str, str]:
    """Return part -> "library (class)", the parts that every layer has from its first one. Without experts or optimizer
    there is no such part; a norm that another module computes is left out."""
    found = dict(_of_modules(chunks))
    ordered = {title: found[title] for title in PARTS.values() if title in found}
    first = chunks[0]
    fused = first.config.apply_rope_fusion
    rotary = rope_utils.fused_apply_rotary_pos_emb_thd if fused else rope_utils._apply_rotary_pos_emb_thd
    ordered["rotary embedding"] = _named(rotary)
    if "MLP input" in found:
        ordered["SwiGLU"] = _named(inspect.unwrap(megatron_mlp.bias_swiglu_impl))
    if optimizer is not None:
        weight = next(first.parameters())
        ordered["sums of gradients"] = _named(addition(weight.main_grad, weight.dtype))
        inner = optimizer.megatron.chained_optimizers[0].optimizer
        ordered["Adam"] = _named(type(inner))
        ordered["gradient norm"] = _named(clip_grads.l2_norm_impl)
        ordered["gradient scale"] = _named(clip_grads.multi_tensor_scale_impl)
    return ordered


def _of_modules(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, str]]:
    seen = set()
    for chunk in chunks:
        for name, module in chunk.named_modules():
            part = PARTS.get(name.rpartition(".")[2])
            if part is not None and part not in seen and type(module).__name__ != "IdentityOp":
                seen.add(part)
                yield part, _named(module.route if isinstance(module, Router) else type(module))
            dispatch = PARTS["token_dispatcher"]
            if dispatch not in seen and hasattr(module, "token_dispatcher"):  # which is no module
                seen.add(dispatch)
                yield dispatch, _named(type(module.token_dispatcher))


def _named(thing: type | Callable[..., object]) -> str:
    """Return "library (name)" of a class or function."""
    of = getattr(thing, "__objclass__", thing)  # a method of a class that is written in C
    module = getattr(of, "__module__", None) or type(of).__module__
    names = [name for name in LIBRARIES if f"{module}.".startswith(f"{name}.")]
    library = LIBRARIES[max(names, key=len)] if names else module.partition(".")[0]
    return f"{library} ({getattr(thing, '__name__', type(thing).__name__)})"
