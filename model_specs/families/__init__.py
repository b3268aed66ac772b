"""The one reader of a Hugging Face config.json, and its parsers by model_type; FAMILIES lists them all.

A family has two places: here, with the standard library alone, what its checkpoint is (how config.json is read, how an
inference server holds its tensors); in mcore_adapter/models, how Megatron builds it (layers, conversion table,
TransformerConfig). Adding one: both places, one line in each of the two dicts, and entries in the tests' MODELS tables.
"""

from collections.abc import Mapping
from pathlib import Path

from model_specs.config import ModelConfig
from model_specs.families.decoders import GLM4, LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE
from model_specs.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from model_specs.family import Family
from model_specs.untrusted import ModelConfigError, RawConfig, UntrustedFileError, read_json_object

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


def read_config(folder: str | Path) -> ModelConfig:
    """Return the ModelConfig of `folder`/config.json. Raises ModelConfigError naming the file."""
    path = Path(folder) / "config.json"
    try:
        return parse_config(read_json_object(path))
    except FileNotFoundError:
        raise ModelConfigError(f"{path}: no such file; expected a Hugging Face model folder") from None
    except UntrustedFileError as error:
        raise ModelConfigError(str(error)) from None
    except ModelConfigError as error:
        raise ModelConfigError(f"{path}: {error}") from None


def parse_config(raw: RawConfig) -> ModelConfig:
    """Return the ModelConfig of a decoded config.json. Raises ModelConfigError naming key, value and what is
    supported."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ModelConfigError(f"model_type={model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type].parse(raw)
