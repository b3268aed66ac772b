"""One model family: what model_type means for config.json, for checkpoints and for inference servers."""

from collections.abc import Callable
from dataclasses import dataclass

from model_specs.config import ModelConfig
from model_specs.tensors import DECODER, ServerParts
from model_specs.untrusted import RawConfig


@dataclass(frozen=True, kw_only=True)
class Family:
    """An entry of families.FAMILIES."""

    architecture: str
    """Class of its language model in transformers."""
    parse: Callable[[RawConfig], ModelConfig]
    """Read a decoded config.json of this model_type. Raises ModelConfigError."""
    server_parts: Callable[[ModelConfig], ServerParts] = lambda config: DECODER
    """Where an inference server holds the checkpoint's tensors."""
    server_keys: Callable[[ModelConfig], RawConfig] = lambda config: {}
    """Keys of config.json, with their values, that SGLang servers need or read otherwise than `parse` does."""
    ignored_by_servers: Callable[[ModelConfig], tuple[str, ...]] = lambda config: ()
    """Keys of this model's config.json that change the model, but that SGLang servers ignore."""
    ignored_tensors: Callable[[ModelConfig], tuple[str, ...]] = lambda config: ()
    """Prefixes of checkpoint tensors that are no part of the model that is trained."""
