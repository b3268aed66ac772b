"""The config.json of the model that a server runs."""

from __future__ import annotations

from model_specs.config import ModelConfig
from model_specs.hf_config import read_config


def read_model_config(path: str) -> ModelConfig:
    """Return the model in a Hugging Face folder. Raises ValueError where its config.json is missing or describes a
    model that is not supported."""
    try:
        return read_config(path)
    except (OSError, ValueError) as e:
        raise ValueError(f"actor.path={path}: {e}") from e
