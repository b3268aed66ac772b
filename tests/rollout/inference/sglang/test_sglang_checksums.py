"""The expected checksums of a server's parameters, against parameters that are fused and cut the plain way."""

import pytest
import torch
from torch import Tensor

from core.weight_sync.buckets import quantize, quantize_bucket
from model_specs.families import parse_config
from rollout.inference.sglang.checksums import ExpectedChecksums, ModelShape
from rollout.inference.sglang.hooks.checksums import position_checksum

MODEL = {
    "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 12, "max_position_embeddings": 4096, "vocab_size": 512,
}  # fmt: skip


def test_a_checksum_adds_up_over_parts_and_sees_place_and_value() -> None:
    tensor = torch.randn(40, 6, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    whole = position_checksum(tensor)
    assert whole == position_checksum(tensor[:13]) + position_checksum(tensor[13:], 13 * 6)
    assert whole == position_checksum(torch.cat([tensor, torch.zeros(5, 6, dtype=torch.bfloat16)]))
    swapped = tensor.clone()
    swapped[3], swapped[4] = tensor[4], tensor[3]
    bit = tensor.clone()
    bit.view(torch.int16)[20, 2] ^= 1
    assert len({int(whole), int(position_checksum(swapped)), int(position_checksum(bit))}) == 3


def small_model(*, tied: bool) -> tuple[ModelShape, dict[str, Tensor]]:
    """Two layers, the second with three experts; 8 heads, 2 key/value heads of 4; a vocabulary that needs padding."""
    shape = ModelShape(num_heads=8, num_kv_heads=2, head_dim=4, vocab_size=70)
    generator = torch.Generator().manual_seed(2)
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (70, 32), "model.norm.weight": (32,)}
    for i in range(2):
        layer = f"model.layers.{i}."
        for part, rows in (("q", 32), ("k", 8), ("v", 8)):
            sizes |= {f"{layer}self_attn.{part}_proj.weight": (rows, 32), f"{layer}self_attn.{part}_proj.bias": (rows,)}
        sizes |= {f"{layer}self_attn.o_proj.weight": (32, 32), f"{layer}self_attn.k_norm.weight": (4,)}
        for mlp, width in (("mlp.", 24),) if i == 0 else ((f"mlp.experts.{e}.", 8) for e in range(3)):
            sizes |= {f"{layer}{mlp}{part}_proj.weight": (width, 32) for part in ("gate", "up")}
            sizes[f"{layer}{mlp}down_proj.weight"] = (32, width)
        sizes |= {f"{layer}mlp.gate.weight": (3, 32)} if i else {}
        sizes[f"{layer}input_layernorm.weight"] = (32,)
    if not tied:
        sizes["lm_head.weight"] = (70, 32)
    return shape, {name: torch.randn(size, generator=generator) for name, size in sizes.items()}


def on_server(shape: ModelShape, tensors: dict[str, Tensor], *, tp: int, rank: int) -> dict[str, Tensor]:
    """The parameters of one rank as a server holds them, built the plain way: whole heads, fused, cut, padded."""
    held: dict[str, Tensor] = {}
    heads, kv_heads, dim = shape.num_heads // tp, max(1, shape.num_kv_heads // tp), shape.head_dim
    kv_first = rank * shape.num_kv_heads // tp
    experts = "model.layers.1.mlp.experts."
    gate, up, down = (
        [tensors[f"{experts}{e}.{part}_proj.weight"] for e in range(3)] for part in ("gate", "up", "down")
    )
    halves = [torch.cat([g.chunk(tp)[rank], u.chunk(tp)[rank]]) for g, u in zip(gate, up, strict=True)]
    held[f"{experts}w13_weight"] = torch.stack(halves)
    held[f"{experts}w2_weight"] = torch.stack([d.chunk(tp, dim=1)[rank] for d in down])
    for name, tensor in tensors.items():
        if ".experts." in name:
            continue
        if ".q_proj." in name:
            key, value = (tensors[name.replace("q_proj", part)] for part in ("k_proj", "v_proj"))
            kv = slice(kv_first * dim, (kv_first + kv_heads) * dim)
            query = tensor[rank * heads * dim : (rank + 1) * heads * dim]
            held[name.replace("q_proj", "qkv_proj")] = torch.cat([query, key[kv], value[kv]])
        elif ".gate_proj." in name:
            parts = [t.chunk(tp)[rank] for t in (tensor, tensors[name.replace("gate_proj", "up_proj")])]
            held[name.replace("gate_proj", "gate_up_proj")] = torch.cat(parts)
        elif any(part in name for part in (".o_proj.", ".down_proj.")):
            held[name] = tensor.chunk(tp, dim=1)[rank]
        elif "embed_tokens" in name or "lm_head" in name:
            held[name] = torch.cat([tensor, torch.zeros(128 - 70, 32)]).chunk(tp)[rank]
        elif not any(f".{part}_proj." in name for part in ("k", "v", "up")):
            held[name] = tensor
    return held


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_checksums_follow_a_tensor_that_is_fused_in_the_checkpoint(tp: int) -> None:
    glm4 = {"model_type": "glm4", "head_dim": 128, "num_key_value_heads": 2, "intermediate_size": 24}
    shape = ModelShape.from_config(parse_config({**MODEL, **glm4}))
    name, gate_up = "model.layers.0.mlp.gate_up_proj.weight", torch.randn(48, 32)
    expected = ExpectedChecksums(shape, tp=tp)
    expected.add({name: gate_up})
    gate, up = gate_up.split(24)
    held = [torch.cat([gate.chunk(tp)[rank], up.chunk(tp)[rank]]) for rank in range(tp)]
    assert expected.mismatches([{name: int(position_checksum(part))} for part in held]) == []
    if tp > 1:
        plain = gate_up.chunk(tp)
        wrong = expected.mismatches([{name: int(position_checksum(part))} for part in plain])
        assert wrong == [f"{name} (rank {rank})" for rank in range(tp)]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_checksums_of_quantized_tensors_predict_quantized_parameters(tp: int) -> None:
    """Blocks divide every part, so quantizing commutes with fusing and cutting."""
    shape = ModelShape(num_heads=4, num_kv_heads=2, head_dim=128, vocab_size=70)
    generator = torch.Generator().manual_seed(4)
    sizes = {
        **{f"model.layers.0.self_attn.{x}_proj.weight": (n, 512) for x, n in (("q", 512), ("k", 256), ("v", 256))},
        "model.layers.0.self_attn.o_proj.weight": (512, 512),
        **{f"model.layers.0.mlp.{part}_proj.weight": (512, 512) for part in ("gate", "up", "down")},
        **{
            f"model.layers.1.mlp.experts.{e}.{part}_proj.weight": (512, 512)
            for e in range(3) for part in ("gate", "up", "down")
        },
    }  # fmt: skip
    tensors = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    expected = ExpectedChecksums(shape, tp=tp)
    expected.add(quantize_bucket(tensors))
    received, held = [], []
    for rank in range(tp):
        pairs = {name: quantize(t) for name, t in on_server(shape, tensors, tp=tp, rank=rank).items()}
        flat = {name: values for name, (values, _) in pairs.items()}
        flat |= {f"{name}_scale_inv": scales for name, (_, scales) in pairs.items()}
        received.append({name: int(position_checksum(t)) for name, t in flat.items()})
        held.append({name: str(t.dtype).removeprefix("torch.") for name, t in flat.items()})
    assert expected.mismatches(received) == []
    assert {row.held for row in expected.formats(held) if row.name.endswith(".weight")} == {"float8_e4m3fn"}
    held[-1]["model.layers.0.self_attn.qkv_proj.weight"] = "bfloat16"
    wrong = [(row.name.split(".")[-2], row.held) for row in expected.formats(held) if row.held != row.sent]
    assert wrong == [("q_proj", "bfloat16"), ("k_proj", "bfloat16"), ("v_proj", "bfloat16")]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_checksums_of_full_tensors_predict_those_of_fused_and_cut_ones(tp: int, tied: bool) -> None:
    shape, tensors = small_model(tied=tied)
    expected = ExpectedChecksums(shape, tp=tp)
    expected.add(dict(reversed(tensors.items())))
    ranks = [on_server(shape, tensors, tp=tp, rank=rank) for rank in range(tp)]

    def received() -> list[dict[str, int]]:
        return [{name: int(position_checksum(t)) for name, t in rank.items()} for rank in ranks]

    assert expected.mismatches(received()) == []
    ranks[-1]["model.layers.1.self_attn.qkv_proj.weight"].view(-1)[-1] += 1e-3
    ranks[0]["model.layers.1.mlp.experts.w13_weight"][[0, 1]] = ranks[0]["model.layers.1.mlp.experts.w13_weight"][
        [1, 0]
    ]
    missing = "model.layers.0.mlp.down_proj.weight"
    del ranks[0][missing]
    assert expected.mismatches(received()) == sorted(
        [
            f"{missing} (rank 0)",
            "model.layers.1.mlp.experts.w13_weight (rank 0)",
            f"model.layers.1.self_attn.qkv_proj.weight (rank {tp - 1})",
        ]
    )
