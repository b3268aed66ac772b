"""Engines whose weights visit the host between two turns compute, save and continue as others do."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from allocation import ParallelLayout
from helpers.engine_cases import MAX_TOKENS, make_engine, random_batch, value_loss
from helpers.mcore_ranks import Rank, RankPool
from helpers.saved_models import assert_same_bytes, save, tensors_of
from helpers.tiny_models import write_model
from mcore_adapter.checkpoint.outcome import wait_for_outcome

LAYOUTS = [ParallelLayout(dp=2), pytest.param(ParallelLayout(tp=2), marks=pytest.mark.nightly)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    write_model("qwen3", path)
    return str(path)


def device_bytes(engine: Any) -> int:
    """What the storages of the weights hold that the device's memory is in, those that were moved away included."""
    storages = engine._host_weights._storages
    assert storages, "nothing was ever moved"
    return sum(storage.whole.untyped_storage().nbytes() for storage in storages)


def turns(rank: Rank, layout: ParallelLayout, model: str, folder: str, visits: bool) -> dict[str, Any]:
    """Three steps of a critic, with two saves after the second, where its weights are on the host if `visits`."""
    with rank.joined(layout) as (parallel, device):
        engine = make_engine(parallel, device, model, is_critic=True, init_critic_from_actor=True)
        batch, steps, sizes = random_batch(), [], []
        for number in range(3):
            engine.offload(weights=visits)
            if visits:
                engine.offload(weights=True)  # once is enough
                sizes.append(device_bytes(engine))
            else:
                assert not engine._host_weights._storages, "nothing was moved"
            if number == 2:
                engine.begin_save(f"{folder}/checkpoint")
                engine.save_hf(f"{folder}/model", tokenizer_from=model)
                if rank.rank == 0:
                    wait_for_outcome(Path(folder, "checkpoint"), threading.Event())
            engine.reload()
            engine.reload()
            if visits:
                sizes.append(device_bytes(engine))
            steps.append(engine.train_step(batch, value_loss, max_tokens_per_mb=MAX_TOKENS))
        save(engine, f"{folder}/last")
        return {"steps": steps, "sizes": sizes, "values": engine.values(batch, max_tokens_per_mb=MAX_TOKENS)}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_critic_that_leaves_the_device_between_turns_trains_and_saves_as_one_that_stays(
    ranks: RankPool, model: str, layout: ParallelLayout, tmp_path: Path
) -> None:
    stays, visits = (
        ranks.run(turns, layout.world_size, layout, model, str(tmp_path / name), name == "visits")
        for name in ("stays", "visits")
    )
    for here, there in zip(stays, visits, strict=True):
        assert there["steps"] == here["steps"]
        assert (there["values"] is None) == (here["values"] is None)
        assert here["values"] is None or torch.equal(there["values"].values, here["values"].values)
        away, back, *rest = there["sizes"]
        assert away == 0 and back > 0 and rest == [0, back, 0, back]
    assert_same_bytes(tensors_of(tmp_path / "stays/model"), tensors_of(tmp_path / "visits/model"))
    for saved in ("checkpoint", "last"):
        (first,), (second,) = (
            ranks.run(continued, 1, model, str(tmp_path / name / saved)) for name in ("stays", "visits")
        )
        assert first == second


def continued(rank: Rank, model: str, folder: str) -> Any:
    """A step from a checkpoint."""
    with rank.joined(ParallelLayout()) as (parallel, device):
        engine = make_engine(parallel, device, model, is_critic=True, init_critic_from_actor=True)
        engine.load(folder)
        return engine.train_step(random_batch(), value_loss, max_tokens_per_mb=MAX_TOKENS)
