"""Small Hugging Face models of every supported family, written as folders."""

import re
from pathlib import Path
from typing import Any

import torch

SHAPE = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.08,
)
_LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=500_000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
_EXPERTS = dict(moe_intermediate_size=24, num_experts_per_tok=2, initializer_range=0.15)
_DEEPSEEK = dict(
    **_EXPERTS,
    num_key_value_heads=4,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=12,
    n_routed_experts=8,
    first_k_dense_replace=1,
    rope_parameters=dict(
        rope_type="yarn",
        rope_theta=10_000.0,
        factor=4.0,
        original_max_position_embeddings=16,
        mscale=1.0,
        mscale_all_dim=0.7,
        beta_fast=32,
        beta_slow=1,
    ),
)
# name -> (family, settings)
EXPERT_MODELS = ("qwen3_moe", "deepseek_v2", "deepseek_v3")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": False, "head_dim": 16}),
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama2": ("Llama", {"tie_word_embeddings": False, "num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "mistral": ("Mistral", {"tie_word_embeddings": False, "sliding_window": None, "head_dim": 16}),
    "glm4": ("Glm4", {"tie_word_embeddings": False, "head_dim": 16, "pad_token_id": None, "rms_norm_eps": 1e-5}),
    "llama3_tied": ("Llama", {"tie_word_embeddings": True, "rope_parameters": _LLAMA3_ROPE}),
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "head_dim": 16, "num_experts": 4, "norm_topk_prob": True}),
    "deepseek_v2": ("DeepseekV2", {**_DEEPSEEK, "n_shared_experts": 2, "q_lora_rank": None}),
    "deepseek_v3": (
        "DeepseekV3",
        {**_DEEPSEEK, "n_shared_experts": 1, "q_lora_rank": 16, "n_group": 4, "topk_group": 2},
    ),
}


def make_model(name: str, *, dtype: torch.dtype = torch.float32, seed: int | None = None, **shape: Any) -> Any:
    """The transformers model `name` of MODELS, with biases and norms that matter; `shape`: other settings."""
    import transformers

    family, settings = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **settings, **shape})
    torch.manual_seed(len(name) if seed is None else seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():
        for key, param in model.named_parameters():
            if key.endswith("bias"):
                param.normal_(0, 0.1)
            elif "norm" in key:
                param.add_(torch.randn_like(param) * 0.1)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):  # float32 in every checkpoint
                buffer.data = torch.randn(buffer.shape) * 0.1
    return model


def checkpoint_tensors(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters (or gradients) of a transformers model under the names of its checkpoint: one tensor an expert."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in named.items():
        fused = re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj", name)
        if fused is None:
            tensors[name] = value
            continue
        for i, expert in enumerate(value):
            parts = (
                dict(zip(("gate", "up"), expert.chunk(2), strict=True)) if fused[2] == "gate_up" else {"down": expert}
            )
            tensors |= {f"{fused[1]}.{i}.{part}_proj.weight": x for part, x in parts.items()}
    return tensors


def write_model(name: str, folder: Path, *, dtype: torch.dtype = torch.float32, **save: Any) -> Any:
    """Save make_model(name) to `folder` with the options `save`; returns it."""
    model = make_model(name, dtype=dtype)
    model.save_pretrained(folder, **save)
    return model
