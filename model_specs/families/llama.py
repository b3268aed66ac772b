"""Llama 2 to 3.2, and what varies it: Mistral 7B and GLM-4."""

from __future__ import annotations

from model_specs.config import ModelConfig, parse_decoder
from model_specs.family import Family
from model_specs.tensors import DECODER, Rows, ServerParts
from model_specs.untrusted import ModelConfigError, RawConfig, boolean, optional, positive

LLAMA = Family(architecture="LlamaForCausalLM", parse=parse_decoder)


def _parse_mistral(raw: RawConfig) -> ModelConfig:
    window = optional(raw, "sliding_window", 4096)
    context = positive(raw, "max_position_embeddings")
    if window is not None and window < context:
        raise ModelConfigError(
            f"sliding_window={window} is shorter than max_position_embeddings={context}, and only full attention is "
            f"supported; where no sequence is longer than the window both are the same: set max_position_embeddings "
            f"to {window}"
        )
    return parse_decoder(raw, default_num_kv_heads=8)


MISTRAL = Family(architecture="MistralForCausalLM", parse=_parse_mistral)
"""As far as its window covers every position."""

_GLM4_SERVER_PARTS: ServerParts = {
    **{module: place for module, place in DECODER.items() if module not in ("gate_proj", "up_proj")},
    "gate_up_proj": Rows("gate_up_proj", pieces=2),
}


def _parse_glm4(raw: RawConfig) -> ModelConfig:
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


GLM4 = Family(architecture="Glm4ForCausalLM", parse=_parse_glm4, server_parts=lambda config: _GLM4_SERVER_PARTS)
"""GLM-4 of 0414 (9B, 32B): norms before and after attention and MLP, half of each head rotated in pairs."""
