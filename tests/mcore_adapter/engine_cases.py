"""Batches, losses and engines that the tests of engine and checkpoint share; importable by spawned ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

VOCAB = 96  # of tiny_models


def random_batch(num_sequences: int = 12, seed: int = 0, *, shortest: int = 5, longest: int = 40) -> Any:
    from mcore_adapter.batch import PackedBatch

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


def policy_loss(output: Any, fields: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    mask = fields["loss_mask"]
    nll = -(output.logprobs * mask).sum()
    loss = -(fields["advantages"] * output.logprobs * mask).sum()
    if output.entropy is None:
        return loss, {"nll": nll.detach()}
    entropy = (output.entropy * mask).sum()
    return loss - 0.1 * entropy, {"nll": nll.detach(), "entropy": entropy.detach(), "tokens": mask.sum()}


def value_loss(output: Any, fields: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    error = ((output.values - fields["returns"]).square() * fields["loss_mask"]).sum()
    return error, {"mean_value": (output.values * fields["loss_mask"]).sum().detach()}


def make_engine(parallel: Any, device: Any, folder: str, *, train: bool = True, **settings: Any) -> Any:
    """`settings` of EngineSettings; those of OptimizerSettings under "optimizer"."""
    from mcore_adapter.engine import MegatronEngine
    from mcore_adapter.settings import EngineSettings, OptimizerSettings

    optimizer = {"lr": 1e-3, "total_steps": 100, "weight_decay": 0.01, **settings.pop("optimizer", {})}
    return MegatronEngine(
        parallel=parallel,
        device=device,
        settings=EngineSettings(hf_path=folder, **settings),
        optimizer=OptimizerSettings(**optimizer) if train else None,
    )


def per_token(batch: Any, shard: Any) -> Tensor:
    """A shard's values at their places in the batch, NaN elsewhere."""
    out = torch.full((batch.num_tokens,), torch.nan)
    out[batch.token_index(shard.sequences)] = shard.values
    return out
