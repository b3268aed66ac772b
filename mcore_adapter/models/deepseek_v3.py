"""DeepSeek-V3: the layers of DeepSeek-V2; its router differs, see MoEConfig."""

from __future__ import annotations

from mcore_adapter.models.deepseek_v2 import latent_layer, latent_overrides
from mcore_adapter.models.family import MegatronFamily

DEEPSEEK_V3 = MegatronFamily(layer=latent_layer, overrides=latent_overrides)
