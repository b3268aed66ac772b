"""Training algorithms: what each computes from a batch, and what its updates minimise. PRESETS names them all."""

from core.algorithms.presets import PRESETS

POLICY_GRADIENT = "core.algorithms.policy_gradient:PolicyGradient"
"""module:class of all PRESETS; it takes (AlgorithmSettings, options) and has the attributes of base.Algorithm."""

__all__ = ["POLICY_GRADIENT", "PRESETS"]
