"""The device seam and the process groups of a rank."""

from typing import Any

import pytest
import torch

from allocation import ParallelLayout
from helpers.mcore_ranks import Rank, RankPool


def where_am_i(rank: Rank, layout: ParallelLayout) -> dict[str, Any]:
    import torch.distributed as dist

    with rank.joined(layout) as (parallel, _):
        groups = ("tp_group", "pp_group", "cp_group", "dp_group", "dp_cp_group")
        answer = {name: dist.get_process_group_ranks(getattr(parallel, name)) for name in groups}
        assert parallel.rank == dist.get_rank() == rank.rank and parallel.world_size == dist.get_world_size()
        at = (parallel.tp_rank, parallel.cp_rank, parallel.dp_rank, parallel.pp_rank)
        first = parallel.rank_at(tp=parallel.tp_rank, pp=parallel.pp_rank)
        return {**answer, "at": at, "first": first, "ends": (parallel.is_first_stage, parallel.is_last_stage)}


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(tp=2, pp=2),
        ParallelLayout(dp=2, cp=2),
        ParallelLayout(dp=2, pp=2, vpp=2),
        ParallelLayout(tp=2, dp=2),
    ],
    ids=str,
)
def test_ranks_are_ordered_tp_cp_dp_pp(ranks: RankPool, layout: ParallelLayout) -> None:
    places = [
        (tp, cp, dp, pp)
        for pp in range(layout.pp)
        for dp in range(layout.dp)
        for cp in range(layout.cp)
        for tp in range(layout.tp)
    ]

    def like(place: tuple[int, ...], free: str) -> list[int]:
        fixed = [i for i, axis in enumerate(("tp", "cp", "dp", "pp")) if axis not in free.split()]
        return [r for r, other in enumerate(places) if all(other[i] == place[i] for i in fixed)]

    for place, answer in zip(places, ranks.run(where_am_i, layout.world_size, layout), strict=True):
        assert answer["at"] == place
        assert answer["tp_group"] == like(place, "tp") and answer["pp_group"] == like(place, "pp")
        assert answer["cp_group"] == like(place, "cp") and answer["dp_group"] == like(place, "dp")
        assert answer["dp_cp_group"] == like(place, "dp cp")
        assert answer["first"] == like(place, "dp cp")[0]
        assert answer["ends"] == (place[3] == 0, place[3] == layout.pp - 1)


def join_error(rank: Rank, layout: ParallelLayout) -> str:
    try:
        with rank.joined(layout):
            return "joined"
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (ParallelLayout(tp=2), ("d1m2p1", "needs 2 ranks", "world_size=1")),
        (ParallelLayout(dp=2, etp=2), ("m2 of ffn", "not supported")),
    ],
    ids=str,
)
def test_a_layout_that_does_not_fit_is_an_error(ranks, layout, words) -> None:
    world_size = 1 if layout.tp > 1 else layout.world_size
    for message in ranks.run(join_error, world_size, layout):
        assert all(word in message for word in words), message


def random_states(rank: Rank, seed: int) -> list[float]:
    from megatron.core import tensor_parallel

    with rank.joined(ParallelLayout(tp=2), seed=seed):
        shared = torch.rand(1).item()
        with tensor_parallel.get_cuda_rng_tracker().fork():
            own = torch.rand(1).item()
        return [shared, own, torch.rand(1).item()]


def test_random_numbers_are_shared_outside_and_own_inside_tensor_parallel_regions(ranks: RankPool) -> None:
    first, second = ranks.run(random_states, 2, 7)
    assert first[0] == second[0] and first[2] == second[2] and first[1] != second[1]
    assert ranks.run(random_states, 2, 7) == [first, second]
    assert ranks.run(random_states, 2, 8)[0] != first


def device_answers(rank: Rank) -> dict[str, Any]:
    from mcore_adapter.device import get_device

    answers: dict[str, Any] = {}
    device = get_device("cpu")
    with device.activate(), device.activate():
        answers["literal"] = torch.zeros(2, device="cuda").device.type
        answers["inside"] = torch.ones(2).cuda().device.type
        answers["type"] = torch.ones(2).type()
    answers["type outside"] = torch.ones(2).type()
    device.synchronize()
    device.empty_cache()
    answers["memory"] = device.memory_stats()
    answers["auto"] = get_device("auto").backend
    for kind in ("cuda", "tpu"):
        try:
            get_device(kind)  # type: ignore[arg-type]
        except ValueError as error:
            answers[kind] = str(error)
    return answers


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_a_machine_without_a_gpu_runs_what_asks_for_one(ranks: RankPool) -> None:
    answers = ranks.run(device_answers, 1)[0]
    assert answers["literal"] == answers["inside"] == "cpu"
    assert (answers["type"], answers["type outside"]) == ("torch.cuda.FloatTensor", "torch.FloatTensor")
    assert 0 < answers["memory"]["allocated_gib"] <= answers["memory"]["peak_gib"]
    assert answers["auto"] == "gloo"
    assert "no GPU is visible" in answers["cuda"] and "device=cpu" in answers["cuda"]
    assert "tpu" in answers["tpu"] and "auto, cpu, cuda" in answers["tpu"]


def wait_alone(rank: Rank) -> str:
    """Rank 1 never comes."""
    from mcore_adapter.device import get_device
    from mcore_adapter.parallel import destroy_parallel, initialize_parallel

    try:
        initialize_parallel(
            ParallelLayout(dp=2),
            rank=0,
            world_size=2,
            init_method=rank.init_method,
            device=get_device("cpu"),
            seed=1,
            timeout_seconds=2,
        )
    except RuntimeError as error:
        return str(error)
    finally:
        destroy_parallel()
    return "joined"


def test_waiting_for_a_rank_that_never_comes_ends(ranks: RankPool) -> None:
    try:
        assert "timeout" in ranks.run(wait_alone, 1)[0].lower()
    finally:
        ranks.close()  # torch counts the groups that it tried to make: this process no longer agrees with the others
