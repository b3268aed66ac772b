"""The one reader of a Hugging Face config.json: its family's parser, chosen by model_type."""

from __future__ import annotations

from pathlib import Path

from model_specs.config import Llama3RopeScaling, ModelConfig
from model_specs.families import FAMILIES
from model_specs.untrusted import ModelConfigError, RawConfig, UntrustedFileError, read_json_object

__all__ = ["Llama3RopeScaling", "ModelConfig", "ModelConfigError", "parse_config", "read_config"]


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
