"""Training algorithms: what each computes from a batch, and what its updates minimise. ALGORITHMS names them all."""

from collections.abc import Mapping
from typing import NamedTuple


class Entry(NamedTuple):
    """Where an algorithm is, and what must be known of it before torch is imported."""

    path: str
    """module:class; the class takes (AlgorithmSettings, options) and has the attributes of base.Algorithm."""
    has_critic: bool = False
    """It trains a critic unless ppo.disable_value=true."""


ALGORITHMS: Mapping[str, Entry] = {
    "ppo": Entry("core.algorithms.ppo:PPO", has_critic=True),
    "grpo": Entry("core.algorithms.grpo:GRPO"),
    "rloo": Entry("core.algorithms.rloo:RLOO"),
    "gspo": Entry("core.algorithms.gspo:GSPO"),
}
