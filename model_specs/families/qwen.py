"""Qwen2 and 2.5 (biases of queries, keys and values), Qwen3 (norms of queries and keys) and Qwen3 with experts."""

from __future__ import annotations

from model_specs.config import ModelConfig, MoEConfig, parse_decoder, parse_experts
from model_specs.family import Family
from model_specs.untrusted import ModelConfigError, RawConfig, boolean, num_layers, positive


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
