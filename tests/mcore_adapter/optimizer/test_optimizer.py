"""One update on real ranks: clipped as torch clips, skipped where the norm is not finite, never repeated."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from allocation import ParallelLayout
from helpers.engine_cases import MAX_TOKENS, make_engine, policy_loss, random_batch, transformers_step
from helpers.mcore_ranks import Rank, RankPool
from helpers.tiny_models import checkpoint_tensors, make_model, write_model
from mcore_adapter.memory.out_of_memory import StepOutOfMemory
from mcore_adapter.optimizer.training import TrainOptimizer

EPS = 1e6
PLAIN_STEPS = {"lr": EPS, "eps": EPS, "weight_decay": 0.0}
"""Adam without momentum and scale: where eps is much larger than a gradient, the first update subtracts it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("optimizer") / "model"
    write_model("qwen2_tied", path)
    return path


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {k: v.clone() for bucket in engine.iter_hf_weights(1 << 20) for k, v in bucket.items()}


def clipped_run(rank: Rank, layout: ParallelLayout, model: str, *, limits: list[float]) -> list[Any]:
    """(the step, the weights after it) for each limit."""
    done = []
    with rank.joined(layout) as (parallel, device):
        for limit in limits:
            engine = make_engine(parallel, device, model, optimizer={**PLAIN_STEPS, "gradient_clipping": limit})
            step = engine.train_step(
                random_batch(), policy_loss, max_tokens_per_mb=MAX_TOKENS, temperature=0.8, with_entropy=True
            )
            done.append((step, weights(engine)))
    return done


@pytest.mark.parametrize("layout", [ParallelLayout(dp=2), ParallelLayout(tp=2)], ids=str)
def test_an_update_applies_the_gradient_that_torch_clips(ranks: RankPool, model: Path, layout: ParallelLayout) -> None:
    reference = make_model("qwen2_tied")
    _, grad_norm, _ = transformers_step(reference)
    gradients = {name: p.grad.clone() for name, p in reference.named_parameters()}
    limits = [grad_norm / 4, grad_norm * 4, 0.0]  # a limit of 0 clips nothing
    run = partial(clipped_run, limits=limits)
    first, *_ = ranks.run(run, layout.world_size, layout, str(model))
    for limit, (step, updated) in zip(limits, first, strict=True):
        for name, p in reference.named_parameters():
            p.grad = gradients[name].clone()
        if limit:
            torch.nn.utils.clip_grad_norm_(reference.parameters(), limit)
        expected = {name: (p - p.grad).detach() for name, p in reference.named_parameters()}
        assert step["grad_norm"] == pytest.approx(grad_norm, rel=1e-5)
        for name, weight in checkpoint_tensors(expected).items():
            torch.testing.assert_close(updated[name], weight, rtol=1e-5, atol=1e-5)


def scaled_loss(output: Any, fields: Any, sequences: Any, *, factor: float) -> Any:
    return output.logprobs.sum() * factor, {}


def skipped_run(rank: Rank, model: str, *, factor: float) -> dict[str, Any]:
    """An update, a loss multiplied by `factor`, the first update again; and both without the step between."""
    with rank.joined(ParallelLayout()) as (parallel, device):
        engine, control = (make_engine(parallel, device, model) for _ in range(2))
        step = lambda e: e.train_step(random_batch(), policy_loss, max_tokens_per_mb=MAX_TOKENS)  # noqa: E731
        step(engine)
        before = weights(engine)
        loss = partial(scaled_loss, factor=factor)
        skipped = engine.train_step(random_batch(), loss, max_tokens_per_mb=MAX_TOKENS)
        unchanged = all(torch.equal(before[k], v) for k, v in weights(engine).items())
        num_updates = engine.num_updates
        after, expected = step(engine), [step(control) for _ in range(2)][1]
        return dict(skipped=skipped, unchanged=unchanged, num_updates=num_updates, after=after, expected=expected)


@pytest.mark.parametrize(("factor", "norm"), [(1e30, "inf"), (float("nan"), "nan")])
def test_a_gradient_norm_that_is_not_finite_changes_nothing(ranks, model, factor, norm) -> None:
    """1e30: every gradient is finite, the sum of their squares is not."""
    (result,) = ranks.run(partial(skipped_run, factor=factor), 1, str(model))
    assert str(result["skipped"]["grad_norm"]) == norm
    assert result["skipped"]["update_skipped"] == 1.0
    assert result["unchanged"] and result["num_updates"] == 1
    assert result["after"] == result["expected"]


def exhausted_run(rank: Rank, layout: ParallelLayout, model: str) -> tuple[str, bool]:
    """Memory runs out in the update, on every rank."""
    with rank.joined(layout) as (parallel, device):
        engine = make_engine(parallel, device, model)
        with mock.patch.object(TrainOptimizer, "step", side_effect=MemoryError), pytest.raises(StepOutOfMemory) as e:
            engine.train_step(random_batch(), policy_loss, max_tokens_per_mb=MAX_TOKENS)
        return str(e.value), e.value.repeatable


def test_an_update_that_runs_out_of_memory_is_not_repeatable(ranks: RankPool, model: Path) -> None:
    for rank, (message, repeatable) in enumerate(ranks.run(exhausted_run, 2, ParallelLayout(dp=2), str(model))):
        assert message.startswith(f"out of memory in the update on rank {rank}") and not repeatable
