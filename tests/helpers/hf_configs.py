"""config.json files of model families, as published."""

QWEN2 = dict(
    model_type="qwen2",
    vocab_size=100,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    use_sliding_window=False,
    sliding_window=64,
)

QWEN3_MOE = dict(
    model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True
)

_DEEPSEEK = dict(
    num_key_value_heads=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    n_shared_experts=2,
    first_k_dense_replace=1,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
)

DEEPSEEK_V2 = dict(_DEEPSEEK, model_type="deepseek_v2", q_lora_rank=None)

DEEPSEEK_V3 = dict(_DEEPSEEK, model_type="deepseek_v3", q_lora_rank=8, n_group=2, topk_group=1)
