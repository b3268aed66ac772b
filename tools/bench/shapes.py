"""Shapes of the models that measurements on GPUs build, with random weights."""

from __future__ import annotations

from typing import Any

_QWEN2 = dict(
    architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_act="silu", initializer_range=0.02,
    max_position_embeddings=32768, rms_norm_eps=1e-6, rope_theta=1000000.0, torch_dtype="bfloat16",
    eos_token_id=None, bos_token_id=None, use_sliding_window=False, attention_dropout=0.0,
)  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "1.5B": dict(
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
        vocab_size=151936, tie_word_embeddings=True,
    ),
    "7B": dict(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        vocab_size=152064, tie_word_embeddings=False,
    ),
    "tiny": dict(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, tie_word_embeddings=True,
    ),
}  # fmt: skip
"""Qwen2.5's shapes, and one for trying the measurements out."""


def config_of(shape: str) -> dict[str, Any]:
    """Return the config.json of a shape."""
    return {**_QWEN2, **SHAPES[shape]}
