"""Estimated activations against the tensors that autograd saves in a forward pass of the real model on the CPU."""

from typing import Any

import pytest

from allocation import ParallelLayout
from helpers.mcore_ranks import Rank, RankPool
from mcore_adapter.memory.estimate import UpdateShape, moments
from mcore_adapter.settings import Level
from model_specs.families import parse_config

TOKENS, LENGTH, LAYERS = 1024, 256, 3
QWEN2: dict[str, Any] = dict(
    model_type="qwen2", hidden_act="silu", max_position_embeddings=4096, rms_norm_eps=1e-6, rope_theta=1e6,
    hidden_size=128, intermediate_size=384, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=512, tie_word_embeddings=False,
)  # fmt: skip
MODELS = {"qwen2": QWEN2, "qwen3": {**QWEN2, "model_type": "qwen3", "attention_bias": False, "head_dim": 64}}


def saved_bytes(rank: Rank, raw: dict[str, Any], level: Level) -> int:
    """Return the bytes of every storage that the graph of a forward pass holds, without weights."""
    import torch

    from mcore_adapter.data.batch import PackedBatch
    from mcore_adapter.data.packing import PackingLayout, pack_microbatch
    from mcore_adapter.hf.weights import init_from_scratch
    from mcore_adapter.models.gpt import build_model

    with rank.joined(ParallelLayout()) as (parallel, device):
        chunks = build_model(parse_config(raw), parallel=parallel, device=device, dtype=torch.float32, recompute=level)
        init_from_scratch(chunks, parallel=parallel, seed=1)
        weights = {p.untyped_storage().data_ptr() for p in chunks[0].parameters()}
        batch = PackedBatch(
            token_ids=torch.arange(TOKENS) % 500,
            cu_seqlens=LENGTH * torch.arange(TOKENS // LENGTH + 1),
            loss_mask=torch.ones(TOKENS, dtype=torch.bool),
        )
        packed = pack_microbatch(batch, list(range(TOKENS // LENGTH)), PackingLayout(), device=torch.device("cpu"))
        saved: dict[int, Any] = {}

        def pack(tensor: Any) -> Any:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                saved.setdefault(storage._cdata, storage)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            chunks[0](packed.token_ids, packed.position_ids, None, packed_seq_params=packed.packed_seq_params)
        return sum(storage.nbytes() for storage in saved.values())  # 0 of what is dropped to be computed again


def more_on_the_cpu(raw: dict[str, Any], level: Level) -> float:
    """Return the elements of a token that the CPU's layers keep, and TransformerEngine's do not."""
    config = parse_config(raw)
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    # The values are a view of the product with queries and keys; so is the input of the keys' norm, where there is one.
    view = queries if config.qk_norm else queries + keys
    norms = {"qkv": 1, "linear": 2}.get(level, 0) * config.hidden_size  # outputs of norms, which lie in linear layers
    layer = norms + (view if level in ("none", "selective") else 0)
    if level in ("none", "selective", "qkv"):
        layer += config.intermediate_size  # SwiGLU keeps a factor of its gradient
    return config.num_layers * layer + config.hidden_size  # the input of the final norm, part of the output layer


@pytest.mark.parametrize(
    ("name", "level"),
    [("qwen2", "none"), *(("qwen3", level) for level in ("none", "selective", "qkv", "linear", "full"))],
)
def test_what_layers_keep_is_what_autograd_saves(ranks: RankPool, name: str, level: Level) -> None:
    raw = MODELS[name]
    shape = UpdateShape(
        config=parse_config(raw), layout=ParallelLayout(), itemsize=4, tokens=TOKENS, in_flight=1,
        layers=range(LAYERS), has_head=True,
    )  # fmt: skip
    parts = next(moments(shape, [level] * LAYERS)).parts
    kept = sum(parts[part] for part in ("residual stream", "attention", "MLP"))
    (saved,) = ranks.run(saved_bytes, 1, raw, level)
    expected = kept + 4 * TOKENS * more_on_the_cpu(raw, level)
    small = 4 * TOKENS * (LAYERS * 2 * (2 + 2 * 4) + 64)  # statistics of norms and softmax, angles
    assert expected <= saved <= expected + small
