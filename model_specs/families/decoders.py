"""Decoders of Llama 2 to 3.2, Mistral 7B, GLM-4, Qwen2 and 2.5, Qwen3, and Qwen3 with experts."""

from model_specs.config import ModelConfig, MoEConfig, parse_decoder, parse_experts
from model_specs.family import Family
from model_specs.tensors import DECODER, Rows, ServerParts
from model_specs.untrusted import ModelConfigError, RawConfig, boolean, num_layers, optional, positive

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


def _parse_qwen2(raw: RawConfig) -> ModelConfig:
    # It always has biases of q, k and v and never one of the output, whatever attention_bias is.
    return parse_decoder(raw, qkv_bias=True, attention_bias=None, default_num_kv_heads=32)


QWEN2 = Family(architecture="Qwen2ForCausalLM", parse=_parse_qwen2)


def _parse_qwen3(raw: RawConfig) -> ModelConfig:
    return parse_decoder(raw, qk_norm=True, default_head_dim=128, default_num_kv_heads=32)


QWEN3 = Family(architecture="Qwen3ForCausalLM", parse=_parse_qwen3)


def _parse_qwen3_moe(raw: RawConfig) -> ModelConfig:
    return parse_decoder(raw, qk_norm=True, default_num_kv_heads=4, moe=_experts(raw))


def _experts(raw: RawConfig) -> MoEConfig:
    num_experts, top_k = parse_experts(raw)
    step, dense = positive(raw, "decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ModelConfigError(f"mlp_only_layers={dense!r} must be a list of layers")
    return MoEConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=positive(raw, "moe_intermediate_size"),
        shared_intermediate_size=0,
        sparse_layers=tuple((i + 1) % step == 0 and i not in dense for i in range(num_layers(raw))),
        score_function="softmax",
        normalize=boolean(raw, "norm_topk_prob", False),
        scaling=1.0,
        num_groups=1,
        top_k_groups=1,
        group_score="max",
        correction_bias=False,
    )


def _ignored_by_servers(config: ModelConfig) -> tuple[str, ...]:
    """Return the keys that SGLang ignores: it builds experts in every layer and an output layer of its own."""
    assert config.moe is not None, "_parse_qwen3_moe() sets it"
    dense_layers = () if all(config.moe.sparse_layers) else ("mlp_only_layers, decoder_sparse_step",)
    return dense_layers + (("tie_word_embeddings",) if config.tied else ())


QWEN3_MOE = Family(architecture="Qwen3MoeForCausalLM", parse=_parse_qwen3_moe, ignored_by_servers=_ignored_by_servers)
