"""What a trainer rank is to run on the batch that it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcore_adapter.engine import LossFn


@dataclass(frozen=True, kw_only=True)
class InferencePass:
    """An engine's results for every token of the batch."""

    engine: str
    max_tokens_per_mb: int
    max_sequence_tokens: int
    """A limit that was learnt makes way for a sequence of so many tokens."""
    temperature: float = 1.0
    """Of log-probabilities."""
    replay_routing: bool = False
    """Use the experts that the generators report."""


@dataclass(frozen=True, kw_only=True)
class UpdatePass:
    """One optimizer update of an engine on a minibatch."""

    engine: str
    minibatch: int
    loss: LossFn
    max_tokens_per_mb: int
    max_sequence_tokens: int
    temperature: float = 1.0
    with_entropy: bool = False
    replay_routing: bool = False
