"""Small Hugging Face models of every supported family, written as folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_SHAPE = dict(
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
# name -> (family, settings)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": False, "head_dim": 16}),
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama3_tied": ("Llama", {"tie_word_embeddings": True, "rope_parameters": _LLAMA3_ROPE}),
}


def make_model(name: str, *, dtype: torch.dtype = torch.float32) -> Any:
    """The transformers model `name` of MODELS, with biases and norms that matter."""
    import transformers

    family, settings = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**_SHAPE, **settings})
    torch.manual_seed(len(name))
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():
        for key, param in model.named_parameters():
            if key.endswith("bias"):
                param.normal_(0, 0.1)
            elif "norm" in key:
                param.add_(torch.randn_like(param) * 0.1)
    return model


def write_model(name: str, folder: Path, *, dtype: torch.dtype = torch.float32, **save: Any) -> Any:
    """Save make_model(name) to `folder` with the options `save`; returns it."""
    model = make_model(name, dtype=dtype)
    model.save_pretrained(folder, **save)
    return model
