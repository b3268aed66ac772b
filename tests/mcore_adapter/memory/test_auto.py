"""recompute="auto" in an engine: what it chooses, corrects and falls back to; the update is the same."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from allocation import ParallelLayout
from helpers.engine_cases import make_engine, policy_loss, random_batch
from helpers.mcore_ranks import LAYOUTS, Rank, RankPool
from mcore_adapter.memory.auto import SPARE
from mcore_adapter.memory.estimate import activation_bytes
from mcore_adapter.memory.out_of_memory import StepOutOfMemory
from mcore_adapter.settings import LEVELS, EngineConfig

HELD = 1.0  # GiB beside the activations, as every rank reports it


class Stats:
    """What a device reports, in GiB; `used()`: activations of the last update, `moments()`: once they are there."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        from mcore_adapter.cpu.device import CpuDevice

        self.used: Callable[[], float] = lambda: 0.0
        self.moments: Callable[[], float] = lambda: 0.0
        self.available = 100.0

        def memory_stats(_: Any) -> dict[str, float]:
            held = HELD + self.moments()
            return {"allocated_gib": held, "peak_gib": held + self.used(), "available_gib": self.available}

        patch.setattr(CpuDevice, "memory_stats", memory_stats)


def step(engine: Any, tokens: int = 200) -> dict[str, float]:
    return engine.train_step(random_batch(), policy_loss, max_tokens_per_mb=tokens)


def sizes_of(engine: Any) -> dict[str, float]:
    """The estimate in GiB of each level in all layers."""
    shape = engine._recompute._shape
    return {level: activation_bytes(shape, [level] * len(shape.layers)) / 2**30 for level in LEVELS}


def chosen_by_limit(rank: Rank, layout: ParallelLayout, model: str) -> dict[str, Any]:
    """Steps with plenty of memory, then with limits between the levels."""
    with pytest.MonkeyPatch.context() as patch, rank.joined(layout) as (parallel, device):
        stats = Stats(patch)
        plain = step(make_engine(parallel, device, model))
        roomy = make_engine(parallel, device, model, recompute="auto")
        steps = {"roomy": (step(roomy), roomy._recompute.choice.levels)}
        sizes = sizes_of(roomy)
        pending = make_engine(parallel, device, model)._optimizer.pending_bytes() / 2**30
        for level in ("linear", "full"):
            stats.used = partial(float, sizes[level] * 1.0001)
            limit = HELD + pending + sizes[level] * 1.001
            engine = make_engine(parallel, device, model, recompute="auto", gradient_checkpointing_limit_gib=limit)
            steps[level] = step(engine), engine._recompute.choice.levels
        return {"plain": plain, "steps": steps}


@pytest.mark.parametrize("layout", ["one process", "pp2"])
def test_the_least_that_fits_is_chosen_and_the_update_is_the_same(ranks: RankPool, model_folders, layout: str) -> None:
    model = str(model_folders["qwen3"][0])
    where = LAYOUTS[layout]
    results = ranks.run(chosen_by_limit, where.world_size, where, model)
    for result in results:
        for figures, _ in result["steps"].values():
            assert figures == result["plain"]
    if where.pp == 1:  # limits are those of every rank's own estimate
        for result in results:
            levels = {name: chosen for name, (_, chosen) in result["steps"].items()}
            assert levels["roomy"] == ("none",) * 4
            # The last layer, whose backward pass comes first, may keep more: its activations are gone at the peak.
            assert levels["linear"][:3] == ("linear",) * 3 and levels["linear"][3] in ("linear", "qkv")
            assert levels["full"][:3] == ("full",) * 3 and levels["full"][3] in ("full", "linear")


def corrected(rank: Rank, model: str) -> list[int]:
    """The choices for steps that use half of what is estimated, then for larger microbatches."""
    with pytest.MonkeyPatch.context() as patch, rank.joined(ParallelLayout()) as (parallel, device):
        stats = Stats(patch)
        probe = make_engine(parallel, device, model, recompute="auto")
        probe._recompute.prepare(100, 1)
        moments = probe._optimizer.pending_bytes() / 2**30
        limit = HELD + moments + sizes_of(probe)["linear"] * 1.01
        engine = make_engine(parallel, device, model, recompute="auto", gradient_checkpointing_limit_gib=limit)
        auto = engine._recompute
        stats.moments = lambda: moments - engine._optimizer.pending_bytes() / 2**30
        stats.used = lambda: auto.choice and activation_bytes(auto._shape, auto.choice.levels) / 2**31 or 0.0
        choices = []
        for tokens in (100, 100, 100, 150):
            auto.prepare(tokens, 1)
            choices.append(sum(map(LEVELS.index, auto.choice.levels)))
            step(engine, tokens)
        assert engine.recompute_peak.measured / engine.recompute_peak.estimated == pytest.approx(0.5)
        return choices


def test_a_measured_peak_below_the_estimate_allows_less_recomputation(ranks: RankPool, model_folders: Any) -> None:
    model = str(model_folders["qwen3"][0])
    ((first, second, third, larger),) = ranks.run(corrected, 1, model)
    assert first in (3 * 4, 3 * 3 + 2) and second < first, "after the first update it is corrected"
    assert third == second, "and settles"
    assert third < larger < 3 * 4, "what was measured holds for larger microbatches too"


def limited(parallel: Any, device: Any, model: str, *, share: float) -> tuple[Any, float]:
    """An engine's choice whose limit is a share of what "selective" in all layers is estimated to take, and that
    estimate in GiB, with microbatches of 200 tokens."""
    probe = make_engine(parallel, device, model, recompute="auto")
    probe._recompute.prepare(200, 1)
    size = sizes_of(probe)["selective"]
    limit = HELD + probe._optimizer.pending_bytes() / 2**30 + size * share
    return make_engine(
        parallel, device, model, recompute="auto", gradient_checkpointing_limit_gib=limit
    )._recompute, size


def exceeded(rank: Rank, model: str) -> tuple[list[int], list[int]]:
    """Ranks of choices, and the first one, as a choice takes more than estimated and the one after it less."""
    with pytest.MonkeyPatch.context() as patch, rank.joined(ParallelLayout()) as (parallel, device):
        stats = Stats(patch)
        auto, _ = limited(parallel, device, model, share=1.0001)
        chosen = []
        for ratio in (1.06, 0.85, 0.85):
            auto.prepare(200, 1)
            stats.used = partial(float, ratio * activation_bytes(auto._shape, auto.choice.levels) / 2**30)
            chosen.append(auto.choice.levels)
            auto.observe()
        auto.prepare(200, 1)
        same = [sum(map(LEVELS.index, levels)) for levels in (*chosen, auto.choice.levels)]
        stats.used = float
        auto.prepare(50, 1)
        auto.prepare(200, 1)
        return same, [sum(map(LEVELS.index, auto.choice.levels))]


def test_a_choice_that_exceeded_the_limit_is_not_made_again(ranks: RankPool, model_folders: Any) -> None:
    model = str(model_folders["qwen3"][0])
    (((first, *later), (afresh,)),) = ranks.run(exceeded, 1, model)
    assert min(later) > first, "another choice took less, and the estimate of the first one sank with it"
    assert afresh <= first, "after microbatches of another size, all is chosen anew"


def test_the_documents_name_the_share_that_is_left_free() -> None:
    left = f"{100 * SPARE:.0f} %"
    assert f"less {left}" in str(EngineConfig.model_fields["gradient_checkpointing_limit_gib"].description)
    assert f"all but {left} of the device" in (Path(__file__).parents[3] / "docs" / "models.md").read_text()


def squeezed(rank: Rank, layout: ParallelLayout, model: str) -> list[int]:
    """The choices before and after the first rank alone has less memory."""
    with pytest.MonkeyPatch.context() as patch, rank.joined(layout) as (parallel, device):
        stats = Stats(patch)
        engine = make_engine(parallel, device, model, recompute="auto")
        choices = []
        for available in (100.0, 100.0, 0.0 if rank.rank == 0 else 100.0):
            stats.available = available
            step(engine)
            choices.append(sum(map(LEVELS.index, engine._recompute.choice.levels)))
        return choices


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_rank_with_less_memory_than_before_lets_its_stage_recompute(ranks, model_folders, layout) -> None:
    model = str(model_folders["qwen3"][0])
    where = LAYOUTS[layout]
    first, second = ranks.run(squeezed, 2, where, model)
    layers = 4 // where.pp
    assert first == [0, 0, layers * LEVELS.index("full")]
    assert second == (first if where.pp == 1 else [0, 0, 0])


def ran_out(rank: Rank, model: str, least: int) -> Any:
    """A step on a device on which everything below a sum of levels runs out of memory."""
    import mcore_adapter.engine as module

    with pytest.MonkeyPatch.context() as patch, rank.joined(ParallelLayout()) as (parallel, device):
        Stats(patch)
        plain = step(make_engine(parallel, device, model))
        engine = make_engine(parallel, device, model, recompute="auto")
        run = module.run_schedule

        def fails(*args: Any, **kwargs: Any) -> Any:
            result = run(*args, **kwargs)  # the gradients are there: they must not count
            if sum(map(LEVELS.index, engine._recompute.choice.levels)) < least:
                raise MemoryError("no memory")
            return result

        patch.setattr(module, "run_schedule", fails)
        try:
            return step(engine) == plain, engine._recompute.choice.levels
        except StepOutOfMemory as e:
            return e.repeatable, engine._recompute.choice.levels


def test_an_update_that_ran_out_of_memory_is_repeated_with_more_recomputation(ranks: RankPool, model_folders) -> None:
    model = str(model_folders["qwen3_moe"][0])
    ((same, levels),) = ranks.run(ran_out, 1, model, 6)
    assert same and 6 <= sum(map(LEVELS.index, levels)) < 20


def on_host(rank: Rank, model: str) -> list[float]:
    """The bytes of the host that activations may take: on the CPU, then on a device, as given and by default."""
    from mcore_adapter.memory import auto

    with pytest.MonkeyPatch.context() as patch, rank.joined(ParallelLayout(dp=2)) as (parallel, device):
        given = [
            make_engine(parallel, device, model, recompute="auto", gradient_checkpointing_host_gib=size)._recompute
            for size in (7.0, 0.0, None)
        ]
        found = [given[0]._host_limit()]
        patch.setattr(auto, "available_on_host", lambda: 10.0)
        for one in given:
            one._device = SimpleNamespace(torch_device=torch.device("cuda"))
        return found + [one._host_limit() for one in given]


def test_activations_take_as_much_host_memory_as_is_given(ranks: RankPool, model_folders: Any) -> None:
    model = str(model_folders["qwen3"][0])
    assert ranks.run(on_host, 2, model) == 2 * [[0.0, 7.0 * 2**30, 0.0, 3.0]], "by default half of the share for each"


def test_the_memory_of_the_host_is_that_of_its_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mcore_adapter.memory import available

    limit, used = tmp_path / "max", tmp_path / "current"
    monkeypatch.setattr(available, "_CONTROL_GROUPS", (("/no/max", "/no/current"), (str(limit), str(used))))
    whole = available.available_on_host()
    limit.write_text("3000000\n")
    used.write_text("1000000\n")
    assert available.available_on_host() == 2_000_000 < whole
    limit.write_text("max\n")
    assert available.available_on_host() > 2_000_000
