"""GLM-4 (0414: 9B, 32B), dense: norms before and after attention and MLP, half of each head rotated in neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model_specs.config import ModelConfig, parse_decoder
from model_specs.family import Family
from model_specs.server_parts import DECODER, Rows, ServerParts
from model_specs.values import boolean

_SERVER_PARTS: ServerParts = {
    **{module: place for module, place in DECODER.items() if module not in ("gate_proj", "up_proj")},
    "gate_up_proj": Rows("gate_up_proj", pieces=2),
}


def _parse(raw: Mapping[str, Any]) -> ModelConfig:
    return parse_decoder(
        raw,
        attention_bias=None,
        qkv_bias=boolean(raw, "attention_bias", True),
        post_norms=True,
        fused_gate_up=True,
        rope_interleaved=True,
        rope_types=("default",),
        rotary_factors=(0.5,),
        # What transformers takes for keys that a file lacks.
        default_rotary_factor=0.5,
        default_head_dim=128,
        default_num_kv_heads=2,
        default_rms_norm_eps=1.5625e-07,
    )


GLM4 = Family(architecture="Glm4ForCausalLM", parse=_parse, server_parts=lambda config: _SERVER_PARTS)
