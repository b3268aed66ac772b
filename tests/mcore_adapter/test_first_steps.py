"""The first steps of every dense family on many ranks are those of one process; test_moe.py has the others."""

from __future__ import annotations

from typing import Any

import pytest

from allocation import ParallelLayout
from helpers.engine_cases import actor_run, assert_same_steps
from helpers.mcore_ranks import RankPool
from helpers.tiny_models import EXPERT_MODELS, MODELS

LAYOUTS = [ParallelLayout(tp=2, pp=2, vpp=2), ParallelLayout(cp=2, dp=2)]
FAMILIES = [name for name in MODELS if name not in EXPERT_MODELS]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_dense_family_trains_on_many_ranks_as_in_one_process(ranks: RankPool, model_folders: Any, name: str) -> None:
    folder = str(model_folders[name][0])
    expected = ranks.run(actor_run, 1, ParallelLayout(), folder)
    for layout in LAYOUTS:
        assert_same_steps(ranks.run(actor_run, layout.world_size, layout, folder), expected)
