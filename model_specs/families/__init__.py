"""Parsers of config.json by model_type; FAMILIES lists them all.

A family has two places: here, with the standard library alone, what its checkpoint is (how config.json is read, how an
inference server holds its tensors); in mcore_adapter/models, how Megatron builds it (layers, conversion table,
TransformerConfig). Adding one: both places, one line in each of the two dicts, and entries in the tests' MODELS tables.
"""

from __future__ import annotations

from collections.abc import Mapping

from model_specs.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from model_specs.families.llama import GLM4, LLAMA, MISTRAL
from model_specs.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from model_specs.family import Family

FAMILIES: Mapping[str, Family] = {
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "glm4": GLM4,
    "qwen3_moe": QWEN3_MOE,
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
}
"""model_type of config.json -> its family."""
