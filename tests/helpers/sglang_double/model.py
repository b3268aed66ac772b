"""A tiny model whose weights are exact numbers on every machine: its config.json, and a version of weights per number.

Four heads, two key/value heads, and a vocabulary that a server pads before it cuts it over tensor-parallel ranks.
"""

import json
import zlib
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB = 500
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 128, 64, 4, 2, 32
MAX_LENGTH = 2048

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": MAX_LENGTH,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": None,
}


def weights(version: int) -> dict[str, Tensor]:
    """Hugging Face names to float32 tensors. Every element is a multiple of 1/512 in [-1/4, 1/4)."""
    layer = "model.layers.0."
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for part, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        shapes[f"{layer}self_attn.{part}_proj.weight"] = (rows * HEAD_DIM, HIDDEN)
        shapes[f"{layer}self_attn.{part}_proj.bias"] = (rows * HEAD_DIM,)
    shapes |= {
        f"{layer}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        f"{layer}mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        f"{layer}mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        f"{layer}mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        f"{layer}input_layernorm.weight": (HIDDEN,),
        f"{layer}post_attention_layernorm.weight": (HIDDEN,),
        "model.norm.weight": (HIDDEN,),
    }
    return {name: _numbers(f"{name} {version}", shape) for name, shape in shapes.items()}


def _numbers(seed: str, shape: tuple[int, ...]) -> Tensor:
    count = torch.Size(shape).numel()
    mixed = (torch.arange(count) + zlib.crc32(seed.encode())) * 2654435761 >> 7
    return ((mixed % 256 - 128).to(torch.float32) / 512).view(shape)


def write(folder: Path, version: int = 0) -> Path:
    """Make a Hugging Face folder of one file, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    tensors = weights(version)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder
