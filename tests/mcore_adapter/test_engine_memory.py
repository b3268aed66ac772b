"""Memory that runs out on one of two data-parallel ranks: both stay where they were; a smaller cut gives the same."""

from functools import partial
from typing import Any

import pytest
import torch

from allocation import ParallelLayout
from helpers.engine_cases import make_engine, per_token, policy_loss, random_batch
from helpers.mcore_ranks import Rank, RankPool
from helpers.memory_faults import injected
from mcore_adapter.memory.out_of_memory import StepOutOfMemory

DP2 = ParallelLayout(dp=2)


def run_out(rank: Rank, model: str, failing_rank: int | None) -> dict[str, Any]:
    """Two updates and a pass without gradients, each tried with 100 tokens a microbatch, then with half as many."""
    asked = [] if failing_rank is None else [f"{p}:rank={failing_rank}:over=50" for p in ("train", "logprobs")]
    ran_out: list[tuple[str, int, int, bool]] = []

    def fitting(call: Any) -> Any:
        for limit in (100, 50):
            try:
                return call(limit)
            except StepOutOfMemory as e:
                ran_out.append((str(e), e.largest, e.longest, e.repeatable))
        raise AssertionError("half fits")

    with rank.joined(DP2) as (parallel, device), injected(",".join(asked)):
        engine, batch = make_engine(parallel, device, model), random_batch()
        steps = [
            fitting(lambda limit: engine.train_step(batch, policy_loss, max_tokens_per_mb=limit)) for _ in range(2)
        ]
        # Each rank has its own results or none; the driver repeats the pass on all.
        shard = fitting(lambda limit: engine.logprobs(batch, max_tokens_per_mb=limit))
        again = engine.logprobs(batch, max_tokens_per_mb=50)
        return {"steps": steps, "ran_out": ran_out, "shard": shard, "again": again}


def test_ranks_agree_that_memory_ran_out_and_do_the_same_step_again(ranks: RankPool, model_folders: Any) -> None:
    failing_rank = 1
    model = str(model_folders["qwen2_tied"][0])
    quiet = ranks.run(run_out, 2, model, None)
    disturbed = ranks.run(run_out, 2, model, failing_rank)
    longest = int(random_batch().seq_lens.max())
    for number, (got, expected) in enumerate(zip(disturbed, quiet, strict=True)):
        assert expected["ran_out"] == []
        passes = 3 if number == failing_rank else 2  # a pass without gradients concerns a rank alone
        assert len(got["ran_out"]) == passes
        for said, largest, sequence, repeatable in got["ran_out"]:
            assert said.startswith("out of memory in ") and f"on rank {number}" in said
            assert 50 < largest <= 100 and sequence == longest and repeatable
        for step, reference in zip(got["steps"], expected["steps"], strict=True):
            for key in step.keys() - {"num_microbatches"}:
                assert step[key] == pytest.approx(reference[key], rel=1e-5, abs=1e-5), key
            assert step["num_microbatches"] > reference["num_microbatches"]
    batch = random_batch()
    both = [
        torch.stack([per_token(batch, r["again"]) for r in runs]).nan_to_num().sum(0) for runs in (disturbed, quiet)
    ]
    torch.testing.assert_close(*both, rtol=1e-5, atol=1e-5)


def lowered_limit_run(rank: Rank, model: str, longest: int) -> dict[str, Any]:
    """A step and log-probabilities under a limit that shorter sequences have taught, and what is too long."""
    with rank.joined(ParallelLayout()) as (parallel, device):
        engine, batch = make_engine(parallel, device, model), random_batch()
        low: dict[str, int] = {"max_tokens_per_mb": longest - 1, "max_sequence_tokens": 100}
        with pytest.raises(ValueError, match=f"max_tokens_per_mb={longest - 1}: sequence .* has {longest} tokens"):
            engine.logprobs(batch, max_tokens_per_mb=longest - 5, max_sequence_tokens=longest - 1)
        shards = [engine.logprobs(batch, max_tokens_per_mb=100), engine.logprobs(batch, **low)]
        return {
            "step": engine.train_step(batch, policy_loss, **low),
            "per_token": [per_token(batch, shard) for shard in shards],
        }


def test_a_limit_that_was_lowered_makes_way_for_a_longer_sequence_up_to_the_configured_one(
    ranks: RankPool, model_folders: Any
) -> None:
    model = str(model_folders["qwen2_tied"][0])
    lens = random_batch().seq_lens
    (result,) = ranks.run(lowered_limit_run, 1, model, int(lens.max()))
    assert result["step"]["num_microbatches"] >= int(lens.sum()) / int(lens.max())
    torch.testing.assert_close(*result["per_token"], rtol=1e-5, atol=1e-5)


def moe_run(rank: Rank, model: str, *, runs_out: bool) -> dict[str, float]:
    with rank.joined(ParallelLayout()) as (parallel, device), injected("train:over=50" if runs_out else ""):
        balanced = {"moe_aux_loss_coeff": 0.05, "moe_bias_update_rate": 0.01}
        engine = make_engine(parallel, device, model, **balanced)
        batch = random_batch()
        if runs_out:
            with pytest.raises(StepOutOfMemory):
                engine.train_step(batch, policy_loss, max_tokens_per_mb=100)
        return engine.train_step(batch, policy_loss, max_tokens_per_mb=50)


def test_what_routers_counted_in_a_pass_that_ran_out_of_memory_does_not_count(ranks: RankPool, model_folders) -> None:
    model = str(model_folders["qwen3_moe"][0])
    (quiet,), (again,) = (ranks.run(partial(moe_run, runs_out=out), 1, model) for out in (False, True))
    assert again == pytest.approx(quiet, rel=1e-5) and quiet["moe_aux_loss"] > 0
