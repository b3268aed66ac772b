"""Every family that Megatron builds, and its models' tables: which Hugging Face tensors a parameter is made of."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from mcore_adapter.models.conversions import Conversion, Replicated, Split
from mcore_adapter.models.deepseek_v2 import DEEPSEEK_V2
from mcore_adapter.models.deepseek_v3 import DEEPSEEK_V3
from mcore_adapter.models.family import MegatronFamily
from mcore_adapter.models.glm4 import GLM4
from mcore_adapter.models.llama import LLAMA
from mcore_adapter.models.mistral import MISTRAL
from mcore_adapter.models.parts import Shapes
from mcore_adapter.models.qwen2 import QWEN2
from mcore_adapter.models.qwen3 import QWEN3
from mcore_adapter.models.qwen3_moe import QWEN3_MOE
from model_specs.config import ModelConfig
from model_specs.fits import VALUE_HEAD

FAMILIES: Mapping[str, MegatronFamily] = {
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "glm4": GLM4,
    "qwen3_moe": QWEN3_MOE,
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
}
"""The same model types as in model_specs.families.FAMILIES."""

# Megatron's TransformerEngine layers keep a norm inside the linear layer after it: the same parameter by another name.
_OTHER_SPELLINGS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
# Its experts lie in one grouped layer, with a weight for each.
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)")
# Ours on GPUs have one weight for all of them.
_STACKED = {"mlp.experts.gate_up": "linear_fc1", "mlp.experts.down": "linear_fc2"}
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.*)")

EMBEDDING, FINAL_NORM, OUTPUT = (
    "embedding.word_embeddings.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
)
HF_EMBEDDING, HF_VALUE_HEAD = "model.embed_tokens.weight", VALUE_HEAD


def canonical_name(name: str, first_expert: int = 0) -> str:
    """Return a parameter of a layer ("input_layernorm.weight", ...) in the spelling that the tables use, where experts
    are counted over the whole model. first_expert: the first one that this rank holds."""
    name = _GROUPED_EXPERT.sub(r"mlp.experts.local_experts.\2.\1.weight", _OTHER_SPELLINGS.get(name, name))
    if expert := _EXPERT.fullmatch(name):
        return f"mlp.experts.local_experts.{first_expert + int(expert[1])}.{expert[2]}"
    return name


def unstacked(name: str, param: Tensor) -> list[tuple[str, Tensor]]:
    """Return a parameter of a layer -> itself, or each expert's part of it, in spellings for canonical_name()."""
    if name not in _STACKED:
        return [(name, param)]
    return [(f"mlp.experts.{_STACKED[name]}.weight{i}", part) for i, part in enumerate(param.detach())]


def layer_table(config: ModelConfig, layer: int) -> Mapping[str, Conversion]:
    """Return parameter name inside a layer -> conversion, for layer `layer` (from 0, over the whole model)."""
    return FAMILIES[config.model_type].layer(config, layer).table


def outer_table(config: ModelConfig, *, is_critic: bool) -> dict[str, Conversion]:
    """Return parameter name -> conversion, for the parameters outside the layers, without a tied output layer."""
    table: dict[str, Conversion] = {
        EMBEDDING: Split(HF_EMBEDDING, 0),
        FINAL_NORM: Replicated("model.norm.weight"),
    }
    if is_critic:
        table[OUTPUT] = Replicated(HF_VALUE_HEAD)
    elif not config.tied:
        table[OUTPUT] = Split("lm_head.weight", 0)
    return table


def hf_shapes(config: ModelConfig, *, is_critic: bool) -> Shapes:
    """Return every tensor of the Hugging Face checkpoint, in the order of the network, with its shape."""
    e, v = config.hidden_size, config.vocab_size
    shapes: Shapes = {HF_EMBEDDING: (v, e)}
    for layer in range(config.num_layers):
        shapes |= FAMILIES[config.model_type].layer(config, layer).shapes
    shapes["model.norm.weight"] = (e,)
    if is_critic:
        shapes[HF_VALUE_HEAD] = (1, e)
    elif not config.tied:
        shapes["lm_head.weight"] = (v, e)
    return shapes
