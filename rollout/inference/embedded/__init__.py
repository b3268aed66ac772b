"""A generator inside this process, in plain torch: what a run samples with where there is no GPU."""

from rollout.inference.embedded.config import InferenceConfig
from rollout.inference.embedded.generator import EmbeddedGenerator, GeneratorError

__all__ = ["EmbeddedGenerator", "GeneratorError", "InferenceConfig"]
