"""`python -m tools.bench`: measurements, each beside its baseline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Figure:
    """A value beside what it is held against, and what was promised, as text."""

    name: str
    value: float
    unit: str
    baseline: float | None = None
    target: str = ""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The folder of the measurements, the interpreters that they may use, and the model of those on GPUs."""

    folder: Path
    trl_python: Path | None
    """Interpreter of an environment that has TRL."""
    sglang_python: Path | None
    """Interpreter that has SGLang; None: this one."""
    shape: str
    """Name of the model."""
    raw: dict[str, object]
    """Its config.json."""


_BASE: dict[str, object] = dict(
    hidden_act="silu",
    initializer_range=0.02,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    torch_dtype="bfloat16",
    eos_token_id=None,
    bos_token_id=None,
    use_sliding_window=False,
    attention_dropout=0.0,
    vocab_size=151936,
)
_QWEN2 = _BASE | dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", max_position_embeddings=32768)
_QWEN3 = _BASE | dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", attention_bias=False, head_dim=128)

SHAPES: dict[str, dict[str, object]] = {
    "1.5B": _QWEN2
    | dict(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "7B": _QWEN2
    | dict(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
        tie_word_embeddings=False,
    ),
    "tiny": _QWEN2
    | dict(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        tie_word_embeddings=True,
    ),
}
"""Those that --shape offers: Qwen2.5's, and one for trying the measurements out."""
DEFAULT_SHAPE = "1.5B"
SLICE = _QWEN3 | dict(
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    max_position_embeddings=40960,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=6,
    num_attention_heads=32,
    num_key_value_heads=4,
    tie_word_embeddings=False,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
)
"""Qwen3-30B-A3B with 6 of its 48 layers."""
WIDTHS = _QWEN3 | dict(
    max_position_embeddings=131072,
    hidden_size=2560,
    intermediate_size=9728,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=True,
)
"""Qwen3-4B."""
SMALL: dict[str, object] = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=512,
)
SMALL_EXPERTS: dict[str, object] = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
"""What differs where there is no GPU."""
_LONG = dict(max_position_embeddings=131072)
PLANNED: dict[str, dict[str, object]] = {
    "0.5B": SHAPES["1.5B"]
    | _LONG
    | dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14),
    "1.5B": SHAPES["1.5B"] | _LONG,
    "0.6B": WIDTHS | dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16),
    "4B": WIDTHS,
    "8 layers of 8B": WIDTHS
    | dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=8, tie_word_embeddings=False),
    "6 layers of 7B": SHAPES["7B"] | _LONG | dict(num_hidden_layers=6),
    "experts": SLICE | _LONG | dict(num_hidden_layers=2),
    "tiny": SHAPES["tiny"] | _LONG | dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4),
    "1.7B": WIDTHS | dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16),
    "3B": SHAPES["1.5B"]
    | _LONG
    | dict(hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16),
    "1.2B": _QWEN2
    | _LONG
    | dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    ),
    "3 layers of 32B": WIDTHS
    | dict(
        hidden_size=5120,
        intermediate_size=25600,
        num_hidden_layers=3,
        num_attention_heads=64,
        tie_word_embeddings=False,
    ),
    "4 layers with experts": SLICE | _LONG | dict(num_hidden_layers=4),
}
"""Those of the measurements `plan`: Qwen2.5-0.5B and -1.5B, Qwen3-0.6B and -4B, slices of Qwen3-8B, Qwen2.5-7B and
Qwen3-30B-A3B, the last of two layers, and a small one; of the later ones: Qwen3-1.7B, Qwen2.5-3B, Llama-3.2-1B, and
slices of Qwen3-32B and Qwen3-30B-A3B."""
MODELS = PLANNED | SHAPES
"""Those that --shape takes."""
