"""Mistral: the layers of Llama."""

from __future__ import annotations

from mcore_adapter.models.family import MegatronFamily
from mcore_adapter.models.llama import decoder_layer

MISTRAL = MegatronFamily(layer=decoder_layer)
