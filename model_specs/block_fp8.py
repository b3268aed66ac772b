"""The block-wise FP8 checkpoint format of DeepSeek-V3 and Qwen3-FP8: which tensors it quantizes, and for which models.

The weight of a linear layer, `X.weight`, is float8_e4m3fn; `X.weight_scale_inv`, float32 [ceil(out / 128),
ceil(in / 128)], holds the factor that each block of 128 x 128 values is multiplied by. Embeddings, the output layer,
norms, biases and routers stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from model_specs.config import ModelConfig

BLOCK = 128
SCALE = "_scale_inv"
"""Added to the name of a quantized weight: the name of its scales."""
QUANTIZATION_CONFIG: Mapping[str, object] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [BLOCK, BLOCK],
}
"""The entry `quantization_config` of such a checkpoint's config.json."""
SERVED_FAMILIES = ("qwen2", "qwen3", "qwen3_moe")
"""Model types that SGLang's loaders hold in this format. Its Llama renames the scales to names that it does not have;
latent attention derives other weights from quantized ones."""

_OF_LINEAR_LAYER = re.compile(r"(.*\.)?layers\.\d+\..*_proj\.weight")


def is_quantized(name: str) -> bool:
    """Return whether the tensor of this Hugging Face name is FP8 in the format."""
    return _OF_LINEAR_LAYER.fullmatch(name) is not None


def serving_problems(config: ModelConfig, tp: int) -> Iterator[str]:
    """Yield each reason why servers of `tp` tensor-parallel ranks cannot hold the model in this format."""
    if config.model_type not in SERVED_FAMILIES:
        yield f"fp8_block is for models of type {', '.join(SERVED_FAMILIES)}, got {config.model_type}"
        return
    for name, size in _sizes(config, tp).items():
        if size % BLOCK:
            yield f"fp8_block needs sizes divisible by {BLOCK} on every rank, {name} is {size}"


def _sizes(config: ModelConfig, tp: int) -> Mapping[str, int]:
    """Return rows and columns of the fused weights of one rank; a block must not reach into the next tensor."""
    sizes = {
        "hidden_size": config.hidden_size,
        f"num_attention_heads * head_dim / {tp}": config.num_heads * config.head_dim // tp,
        f"num_key_value_heads * head_dim / {tp}": max(1, config.num_kv_heads // tp) * config.head_dim,
    }
    moe = config.moe
    if moe is None or not all(moe.sparse_layers):
        sizes[f"intermediate_size / {tp}"] = config.intermediate_size // tp
    if moe is not None:
        sizes[f"moe_intermediate_size / {tp}"] = moe.intermediate_size // tp
    return sizes
