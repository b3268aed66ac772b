"""At night: every family in every product of layouts up to eight ranks trains as one process does, and what it saves
becomes the Hugging Face folder that it was loaded from."""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from allocation import AllocationError, ParallelLayout
from helpers.engine_cases import actor_run, assert_same_steps
from helpers.mcore_ranks import RankPool
from helpers.saved_models import assert_same_bytes, convert, tensors_of, write_checkpoint
from helpers.tiny_models import EXPERT_MODELS, MODELS, SHAPE

pytestmark = pytest.mark.nightly

NUM_RANKS = 8


def layouts_of(name: str) -> Iterator[ParallelLayout]:
    """Every product of degrees with more than one rank that the small model can be cut by."""
    shape = {**SHAPE, **MODELS[name][1]}
    num_experts = shape.get("num_experts") or shape.get("n_routed_experts", 1)
    degrees = [1, 2, 4, 8]
    for tp, pp, vpp, cp, dp, ep in product(degrees, degrees, (1, 2), degrees, degrees, degrees):
        if not 1 < tp * pp * cp * dp <= NUM_RANKS or shape["num_key_value_heads"] % tp or num_experts % ep:
            continue
        if pp * vpp > shape["num_hidden_layers"] or (vpp > 1 and pp == 1):
            continue
        with suppress(AllocationError):  # expert groups that the ranks of a stage do not fill
            yield ParallelLayout(tp=tp, pp=pp, vpp=vpp, cp=cp, dp=dp, ep=ep)


UNEVEN = ParallelLayout(pp=3)
CASES = [(name, layout) for name in MODELS for layout in (*layouts_of(name), UNEVEN)]


@pytest.fixture(scope="module")
def one_process(ranks: RankPool, model_folders: Any) -> dict[str, Any]:
    return {name: ranks.run(run_of(name), 1, ParallelLayout(), str(model_folders[name][0])) for name in MODELS}


def run_of(name: str) -> Any:
    balanced = dict(moe_aux_loss_coeff=0.05, moe_bias_update_rate=0.01)
    return partial(actor_run, **balanced) if name in EXPERT_MODELS else actor_run


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_every_family_trains_in_every_layout_as_one_process_does(
    ranks: RankPool, model_folders: Any, one_process: dict[str, Any], name: str, layout: ParallelLayout
) -> None:
    results = ranks.run(run_of(name), layout.world_size, layout, str(model_folders[name][0]))
    assert_same_steps(results, one_process[name])


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_every_family_s_checkpoint_of_every_layout_is_converted_byte_by_byte(
    ranks: RankPool, model_folders: Any, tmp_path: Path, name: str, layout: ParallelLayout
) -> None:
    source = model_folders[name][0]
    ranks.run(write_checkpoint, layout.world_size, layout, source, tmp_path / "checkpoint", {})
    status, _, error = convert(ranks, tmp_path / "checkpoint", tmp_path / "hf", "--check")
    assert (status, error) == (0, "")
    assert_same_bytes(tensors_of(source), tensors_of(tmp_path / "hf"))
