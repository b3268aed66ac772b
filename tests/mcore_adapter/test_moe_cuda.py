"""Models with experts on GPUs: against transformers, alone and spread over two, and as Hugging Face tensors again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import (
    ON_A_GPU,
    VOCAB,
    make_engine,
    per_token,
    policy_loss,
    random_batch,
    transformers_logprobs,
    whole,
)
from mcore_ranks import RankPool

pytestmark = ON_A_GPU

MAX_TOKENS = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=4, num_experts_per_tok=2,
        norm_topk_prob=True, max_position_embeddings=512, initializer_range=0.05,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("experts") / "model"
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")
    return path


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


def run(rank: Any, folder: str, sizes: dict[str, int]) -> tuple[dict[str, torch.Tensor], Any, list[dict[str, float]]]:
    """(weights under their Hugging Face names, on rank 0; log-probabilities; three steps)"""
    from allocation import ParallelLayout

    with rank.joined(ParallelLayout(**sizes), kind="cuda") as (parallel, device):
        engine = make_engine(parallel, device, folder, dtype="bfloat16")
        weights = {name: t.cpu() for bucket in engine.iter_hf_weights(1 << 20) for name, t in bucket.items()}
        shard = engine.logprobs(random_batch(), max_tokens_per_mb=MAX_TOKENS, temperature=0.8)
        logprobs = shard and type(shard)(sequences=shard.sequences, values=shard.values.cpu())
        steps = [
            engine.train_step(random_batch(seed=i), policy_loss, max_tokens_per_mb=MAX_TOKENS, temperature=0.8)
            for i in range(3)
        ]
        return weights, logprobs, steps


@pytest.fixture(scope="module")
def one_gpu(folder: Path, pool: RankPool) -> Any:
    return pool.run(run, 1, str(folder), {})[0]


def test_experts_on_one_gpu_compute_what_transformers_does_and_come_back_exactly(folder: Path, one_gpu: Any) -> None:
    import transformers
    from safetensors.torch import load_file

    weights, logprobs, _ = one_gpu
    stored = load_file(folder / "model.safetensors")
    assert weights.keys() == stored.keys() and all(torch.equal(weights[name], stored[name]) for name in stored)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert (per_token(random_batch(), logprobs) - transformers_logprobs(model)).abs().mean() < 0.02


@pytest.mark.parametrize("sizes", [{"dp": 2, "ep": 2}, {"tp": 2}, {"pp": 2}], ids=["ep2", "tp2", "pp2"])
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_experts_on_two_gpus_compute_what_one_does(
    folder: Path, pool: RankPool, one_gpu: Any, sizes: dict[str, int]
) -> None:
    alone, logprobs, expected = one_gpu
    ranks = pool.run(run, 2, str(folder), sizes)
    weights, _, steps = ranks[0]
    assert weights.keys() == alone.keys() and all(torch.equal(weights[name], alone[name]) for name in alone)
    spread = whole([{"shard": shard} for _, shard, _ in ranks])
    assert (spread - per_token(random_batch(), logprobs)).abs().mean() < 0.03  # wrong experts: 0.3
    for step, one in zip(steps, expected, strict=True):
        assert step["nll"] == pytest.approx(one["nll"], rel=0.02)
        assert step["grad_norm"] == pytest.approx(one["grad_norm"], rel=0.1)
