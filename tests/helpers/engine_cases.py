"""Batches, losses and engines that the tests of engine and checkpoint share; importable by spawned ranks."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from allocation import ParallelLayout
from helpers.mcore_ranks import Rank

ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(600),
]
"""Marks of a file of such tests."""
VOCAB = 96  # of tiny_models
MAX_TOKENS = 192
BF16_NATS = 0.02
"""Mean difference between two bfloat16 computations of the same log-probabilities, at the most."""
STEPS = 2


def random_batch(num_sequences: int = 12, seed: int = 0, *, shortest: int = 5, longest: int = 40) -> Any:
    from mcore_adapter.data.batch import PackedBatch

    generator = torch.Generator().manual_seed(seed)
    lens = torch.randint(shortest, longest + 1, (num_sequences,), generator=generator)
    cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.int64), lens.cumsum(0)))
    total = int(cu_seqlens[-1])
    loss_mask = torch.rand(total, generator=generator) < 0.7
    loss_mask[cu_seqlens[:-1]] = False
    return PackedBatch(
        token_ids=torch.randint(VOCAB, (total,), generator=generator),
        cu_seqlens=cu_seqlens,
        loss_mask=loss_mask,
        fields={
            "advantages": torch.randn(total, generator=generator),
            "returns": torch.randn(total, generator=generator),
        },
    )


def policy_loss(output: Any, fields: Mapping[str, Tensor], sequences: Any) -> tuple[Tensor, dict[str, Tensor]]:
    mask = fields["loss_mask"]
    nll = -(output.logprobs * mask).sum()
    loss = -(fields["advantages"] * output.logprobs * mask).sum()
    if output.entropy is None:
        return loss, {"nll": nll.detach()}
    entropy = (output.entropy * mask).sum()
    return loss - 0.1 * entropy, {"nll": nll.detach(), "entropy": entropy.detach(), "tokens": mask.sum()}


def value_loss(output: Any, fields: Mapping[str, Tensor], sequences: Any) -> tuple[Tensor, dict[str, Tensor]]:
    error = ((output.values - fields["returns"]).square() * fields["loss_mask"]).sum()
    return error, {"mean_value": (output.values * fields["loss_mask"]).sum().detach()}


def make_engine(parallel: Any, device: Any, folder: str, *, train: bool = True, **settings: Any) -> Any:
    """`settings`: those of EngineConfig, `recompute` and `dtype` as the engine resolves them, and of OptimizerConfig
    under "optimizer"."""
    from mcore_adapter.engine import MegatronEngine
    from mcore_adapter.settings import EngineConfig, EngineModel, OptimizerConfig

    adam = {"lr": 1e-3, "weight_decay": 0.01, "warmup_steps_proportion": 0.0, **settings.pop("optimizer", {})}
    updates, is_critic, seed = adam.pop("total_steps", 100), settings.pop("is_critic", False), settings.pop("seed", 1)
    level = settings.pop("recompute", "none")  # any, also those that "auto" alone chooses
    bf16 = settings.pop("dtype", "float32") == "bfloat16"
    config = EngineConfig(bf16=bf16, optimizer=OptimizerConfig(**adam), **settings)
    model = EngineModel(
        config=config.model_copy(update={"gradient_checkpointing": level}), path=folder, is_critic=is_critic, seed=seed,
        total_updates=updates if train else None,
    )  # fmt: skip
    return MegatronEngine(model, parallel=parallel, device=device)


def write_bfloat16(config: Any, folder: Path) -> Path:
    """A Hugging Face folder with random weights as `config` says."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def one_by_one(model: Any) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """Each sequence of random_batch() on its own through a Hugging Face model, at temperature 0.8: (sequence,
    log-probabilities [t, V], those of the tokens of its loss_mask [t], 0 elsewhere), on the CPU."""
    batch = random_batch()
    for i in range(batch.num_sequences):
        one = batch.select([i])
        logp = (model(one.token_ids[None].to(model.device)).logits[0] / 0.8).log_softmax(-1).cpu()
        chosen = torch.cat((torch.zeros(1), logp[:-1].gather(1, one.token_ids[1:, None])[:, 0])) * one.loss_mask
        yield one, logp, chosen


@torch.no_grad()
def transformers_logprobs(model: Any) -> Tensor:
    """[T] of random_batch()."""
    return torch.cat([chosen for _, _, chosen in one_by_one(model)])


def transformers_step(model: Any) -> tuple[float, float, Tensor]:
    """The first step on random_batch() at temperature 0.8, each sequence on its own through a Hugging Face model: loss
    of policy_loss, gradient norm, log-probabilities [T]."""
    batch = random_batch()
    loss, logprobs = torch.zeros(()), []
    for one, logp, chosen in one_by_one(model):
        entropy = torch.cat((torch.zeros(1), -(logp.exp() * logp).sum(-1)[:-1])) * one.loss_mask
        loss = loss - (one.fields["advantages"] * chosen).sum() - 0.1 * entropy.sum()
        logprobs.append(chosen.detach())
    loss = loss / batch.loss_mask.sum()
    model.zero_grad()
    loss.backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    return loss.item(), grad_norm.item(), torch.cat(logprobs)


def per_token(batch: Any, shard: Any) -> Tensor:
    """A shard's values at their places in the batch, NaN elsewhere."""
    out = torch.full((batch.num_tokens,), torch.nan)
    out[batch.token_index(shard.sequences)] = shard.values.cpu()
    return out


def logprobs_of(engine: Any) -> Tensor:
    """[T] of random_batch() at temperature 0.8; NaN, on ranks that have none, or have others."""
    batch = random_batch()
    shard = engine.logprobs(batch, max_tokens_per_mb=MAX_TOKENS, temperature=0.8)
    return torch.full((batch.num_tokens,), torch.nan) if shard is None else per_token(batch, shard)


def steps_of(engine: Any) -> list[dict[str, float]]:
    """Steps on one random batch after the other."""
    return [
        engine.train_step(
            random_batch(seed=i), policy_loss, max_tokens_per_mb=MAX_TOKENS, temperature=0.8, with_entropy=True
        )
        for i in range(STEPS)
    ]


def actor_run(rank: Rank, layout: ParallelLayout, model: str, *, steps: int = STEPS, **settings: Any) -> dict[str, Any]:
    with rank.joined(layout) as (parallel, device):
        engine = make_engine(parallel, device, model, **settings)
        batch = random_batch()
        shard = engine.logprobs(batch, max_tokens_per_mb=MAX_TOKENS, temperature=0.8)
        taken = [
            engine.train_step(batch, policy_loss, max_tokens_per_mb=MAX_TOKENS, temperature=0.8, with_entropy=True)
            for _ in range(steps)
        ]
        owner = parallel.tp_rank == 0 and parallel.cp_rank == 0 and parallel.is_last_stage
        return {"steps": taken, "shard": shard, "owner": owner}


def whole(results: list[dict[str, Any]]) -> torch.Tensor:
    """The per-token result of all shards together; every token must come from exactly one."""
    batch = random_batch()
    return together([per_token(batch, r["shard"]) for r in results if r["shard"] is not None])


def together(parts: list[Tensor]) -> Tensor:
    """[T] of parts [T] that are NaN where they have no value; every token must come from exactly one."""
    stacked = torch.stack(parts)
    assert torch.equal((~stacked.isnan()).sum(0), torch.ones(stacked.shape[1], dtype=torch.int64))
    return stacked.nan_to_num().sum(0)


def assert_same_steps(results: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["steps"] == results[0]["steps"], "every rank reports the same numbers"
    for step, reference in zip(results[0]["steps"], expected[0]["steps"], strict=True):
        assert step.keys() == reference.keys()
        for key in step.keys() - {"num_microbatches"}:
            assert step[key] == pytest.approx(reference[key], rel=1e-5, abs=1e-5), key
