"""`python -m tools.bench`: measurements, each beside its baseline."""

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

_LONG = dict(max_position_embeddings=131072)
_TIED, _UNTIED = dict(tie_word_embeddings=True), dict(tie_word_embeddings=False)


def _size(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> dict[str, object]:
    return dict(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
    )


def _experts(count: int, chosen: int, inner: int) -> dict[str, object]:
    return dict(num_experts=count, num_experts_per_tok=chosen, moe_intermediate_size=inner)


SHAPES: dict[str, dict[str, object]] = {
    "1.5B": _QWEN2 | _TIED | _size(1536, 8960, 28, 12, 2),
    "7B": _QWEN2 | _UNTIED | _size(3584, 18944, 28, 28, 4) | dict(vocab_size=152064),
    "tiny": _QWEN2 | _TIED | _size(256, 512, 2, 4, 2) | dict(vocab_size=512),
}
"""Those that --shape offers: Qwen2.5's, and one for trying the measurements out."""
DEFAULT_SHAPE = "1.5B"
SLICE = (
    _QWEN3
    | _UNTIED
    | _size(2048, 6144, 6, 32, 4)
    | _experts(128, 8, 768)
    | dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", max_position_embeddings=40960)
    | dict(norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])
)
"""Qwen3-30B-A3B with 6 of its 48 layers."""
WIDTHS = _QWEN3 | _LONG | _TIED | _size(2560, 9728, 36, 32, 8)
"""Qwen3-4B."""
SMALL = _size(64, 128, 2, 4, 2) | dict(head_dim=16, vocab_size=512)
SMALL_EXPERTS = _experts(8, 2, 32)
"""What differs where there is no GPU."""
_LLAMA: dict[str, object] = dict(architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=128256)
PLANNED: dict[str, dict[str, object]] = {
    "0.5B": SHAPES["1.5B"] | _LONG | _size(896, 4864, 24, 14, 2),
    "1.5B": SHAPES["1.5B"] | _LONG,
    "0.6B": WIDTHS | _size(1024, 3072, 28, 16, 8),
    "4B": WIDTHS,
    "8 layers of 8B": WIDTHS | _UNTIED | _size(4096, 12288, 8, 32, 8),
    "6 layers of 7B": SHAPES["7B"] | _LONG | dict(num_hidden_layers=6),
    "experts": SLICE | _LONG | dict(num_hidden_layers=2),
    "tiny": SHAPES["tiny"] | _LONG | _size(64, 128, 4, 4, 2),
    "1.7B": WIDTHS | _size(2048, 6144, 28, 16, 8),
    "3B": SHAPES["1.5B"] | _LONG | _size(2048, 11008, 36, 16, 2),
    "1.2B": _QWEN2 | _LLAMA | _LONG | _TIED | _size(2048, 8192, 16, 32, 8),
    "3 layers of 32B": WIDTHS | _UNTIED | _size(5120, 25600, 3, 64, 8),
    "4 layers with experts": SLICE | _LONG | dict(num_hidden_layers=4),
}
"""Those of the measurements `plan`: Qwen2.5-0.5B and -1.5B, Qwen3-0.6B and -4B, slices of Qwen3-8B, Qwen2.5-7B and
Qwen3-30B-A3B, the last of two layers, and a small one; of the later ones: Qwen3-1.7B, Qwen2.5-3B, Llama-3.2-1B, and
slices of Qwen3-32B and Qwen3-30B-A3B."""
MODELS = PLANNED | SHAPES
"""Those that --shape takes."""
