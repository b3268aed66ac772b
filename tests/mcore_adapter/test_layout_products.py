"""At night: every family in a selection of products of layouts, up to eight ranks, trains as one process does, and what
it saves becomes the Hugging Face folder that it was loaded from."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_cases import actor_run, assert_same_steps
from mcore_ranks import RankPool
from test_convert import convert, write_checkpoint
from test_weights import assert_same_bytes, tensors_of
from tiny_models import EXPERT_MODELS, MODELS

from allocation import ParallelLayout

pytestmark = pytest.mark.nightly

DENSE = [
    ParallelLayout(tp=2),
    ParallelLayout(pp=2),
    ParallelLayout(cp=2),
    ParallelLayout(dp=2),
    ParallelLayout(pp=2, vpp=2),
    ParallelLayout(tp=2, pp=2),
    ParallelLayout(tp=2, cp=2),
    ParallelLayout(pp=3),
    ParallelLayout(dp=2, pp=2, vpp=2),
    ParallelLayout(dp=2, tp=2, pp=2),
    ParallelLayout(dp=2, tp=2, cp=2),
    ParallelLayout(tp=2, pp=2, cp=2),
    ParallelLayout(dp=2, pp=2, cp=2),
    ParallelLayout(dp=2, pp=4),
    ParallelLayout(dp=8),
]
EXPERTS = [
    ParallelLayout(dp=2, ep=2),
    ParallelLayout(tp=2, ep=2),
    ParallelLayout(cp=2, ep=2),
    ParallelLayout(dp=4, ep=2),
    ParallelLayout(dp=2, tp=2, ep=4),
    ParallelLayout(dp=2, tp=2, pp=2, ep=2),
    ParallelLayout(dp=2, tp=2, pp=2, ep=4),
    ParallelLayout(tp=2, pp=2, cp=2, ep=2),
    ParallelLayout(dp=2, pp=2, cp=2, ep=4),
    ParallelLayout(dp=4, pp=2, vpp=2, ep=4),
]
CASES = [
    *((name, layout) for name in MODELS for layout in DENSE),
    *((name, layout) for name in EXPERT_MODELS for layout in EXPERTS),
]


@pytest.fixture(scope="module")
def one_process(ranks: RankPool, model_folders: Any) -> dict[str, Any]:
    return {
        name: ranks.run(run_of(name), 1, ParallelLayout(), str(folder)) for name, (folder, _) in model_folders.items()
    }


def run_of(name: str) -> Any:
    balanced = dict(moe_aux_loss_coeff=0.05, moe_bias_update_rate=0.01)
    return partial(actor_run, **balanced) if name in EXPERT_MODELS else actor_run


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_every_family_trains_in_the_selected_layouts_as_one_process_does(
    ranks: RankPool, model_folders: Any, one_process: dict[str, Any], name: str, layout: ParallelLayout
) -> None:
    results = ranks.run(run_of(name), layout.world_size, layout, str(model_folders[name][0]))
    assert_same_steps(results, one_process[name])


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_every_family_s_checkpoint_of_the_selected_layouts_is_converted_byte_by_byte(
    ranks: RankPool, model_folders: Any, tmp_path: Path, name: str, layout: ParallelLayout
) -> None:
    source = model_folders[name][0]
    ranks.run(write_checkpoint, layout.world_size, layout, source, tmp_path / "checkpoint", {})
    status, _, error = convert(ranks, tmp_path / "checkpoint", tmp_path / "hf", "--check")
    assert (status, error) == (0, "")
    assert_same_bytes(tensors_of(source), tensors_of(tmp_path / "hf"))
