"""What a measurement of two trainer ranks makes of the results of both; the updates need GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.launch.trainer_group import PAGE_LOCKING
from mcore_adapter.data.batch import ROUTED_EXPERTS
from mcore_adapter.data.routing_inputs import check_routed_experts
from model_specs.hf_config import parse_config
from tools.bench import gpu_experts, gpu_ranks
from tools.bench.gpu import Scene, become_rank, random_batch
from tools.bench.gpu_experts import TRIED
from tools.bench.gpu_memory import Measured, WidthsScene, with_balanced_experts
from tools.bench.gpu_push import Pushed, gap_around
from tools.bench.gpu_ranks import Updates, measure_routings, measure_updates


def measured(rate: float, peak: float, held: float) -> Measured:
    return Measured(tokens_per_second=rate, peak=peak, held=held, parts={}, activations=None)


def test_the_slower_rank_has_the_rate_and_the_fuller_one_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ranks:
        killed = False

        def __init__(self, *args: object, num_ranks: int) -> None:
            assert num_ranks == 2

        def results(self, patience_seconds: float) -> dict[int, dict[int, Measured]]:
            return {0: {64: measured(100.0, 9.0, 5.0)}, 1: {64: measured(90.0, 8.0, 6.0)}}

        def kill(self) -> None:
            Ranks.killed = True

    monkeypatch.setattr(gpu_ranks, "TrainerRanks", Ranks)
    updates = Updates(layout={"dp": 2}, batches={64: [64]}, count=1, label="")
    assert measure_updates(Scene(folder=tmp_path), updates) == {64: measured(90.0, 9.0, 5.0)}
    assert Ranks.killed


def test_the_updates_of_one_routing_are_there_before_those_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ranks:
        made, waited, killed = 0, 0, False

        def __init__(self, *args: object, num_ranks: int) -> None:
            Ranks.made += 1

        def results(self, patience_seconds: float) -> dict[int, dict[int, Measured]]:
            Ranks.waited += 1
            if Ranks.waited == 3:
                raise RuntimeError("rank 0 ended")
            return {0: {64: measured(Ranks.waited, 9.0, 5.0)}}

        def kill(self) -> None:
            Ranks.killed = True

    monkeypatch.setattr(gpu_ranks, "TrainerRanks", Ranks)
    updates = Updates(layout={"dp": 1}, batches={64: [64]}, count=1, label="", balanced=(True, False, False))
    found = measure_routings(Scene(folder=tmp_path), updates)
    assert [next(found)[64].tokens_per_second, next(found)[64].tokens_per_second] == [1, 2]
    assert not Ranks.killed, "they go on meanwhile"
    with pytest.raises(RuntimeError, match="rank 0 ended"):
        next(found)
    assert Ranks.made == 1 and Ranks.killed


def test_a_rank_of_a_measurement_has_the_threads_of_a_rank_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)  # the process has more tests to run
    monkeypatch.setattr("tools.bench.gpu.query_gpus", lambda: ["a GPU"])
    environment: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(12), raising=False)
    for ranks in (1, 2, 4):
        become_rank(num_ranks=ranks)
    assert chosen == [8, 6, 3]
    assert environment == {"NCCL_CUMEM_ENABLE": "0", "PYTORCH_CUDA_ALLOC_CONF": PAGE_LOCKING}


def test_a_process_that_joins_a_measurement_becomes_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[int] = []
    monkeypatch.setattr(gpu_ranks, "become_rank", lambda *, num_ranks: became.append(num_ranks))
    monkeypatch.setattr("mcore_adapter.parallel.initialize_parallel", lambda *_, **__: None)
    monkeypatch.setenv("LOCAL_RANK", "0")
    with gpu_ranks._joined(0, 1, Scene(folder=tmp_path), dp=2, tp=2):
        assert became == [4]


def test_balanced_experts_have_as_many_tokens_each_in_every_layer(tmp_path: Path) -> None:
    scene = WidthsScene(folder=tmp_path, raw=TRIED)
    config = parse_config(TRIED)
    batch = with_balanced_experts(random_batch(scene, [5, 11]), config)
    check_routed_experts(batch, config)
    assert config.moe is not None
    for layer in range(config.num_layers):
        counts = batch.fields[ROUTED_EXPERTS][:, layer].flatten().bincount(minlength=config.moe.num_experts)
        assert counts.tolist() == [16 * config.moe.top_k // config.moe.num_experts] * config.moe.num_experts
    first, second = batch.fields[ROUTED_EXPERTS][0, :2].tolist()
    assert first != second, "not the same experts in every layer"


def test_all_layers_are_measured_with_balanced_experts_and_with_those_that_the_router_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(scene: Scene, updates: Updates) -> Iterator[dict[int, Measured]]:
        assert updates.layout == {"dp": 4, "ep": 4} and updates.patience_seconds > 240
        for balanced in updates.balanced:
            yield {64: measured(2.0 if balanced else 1.0, 9.0, 5.0)}

    monkeypatch.setattr(gpu_experts, "measure_routings", measure)
    found = {figure.name: (figure.value, figure.target) for figure in gpu_experts.experts_whole(Scene(folder=tmp_path))}
    assert found["update.experts_whole_balanced_tokens_per_second"] == (2.0, "")
    assert found["update.experts_whole_tokens_per_second"] == (1.0, ">= 20,000")


def test_a_rank_of_balanced_updates_prescribes_the_experts_and_measures_all_routings_with_one_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[bool, object]] = []
    made: list[object] = []
    results: list[tuple[int, dict[int, Measured]]] = []
    engine = SimpleNamespace(model_config=parse_config(TRIED), logprobs=lambda *args, **kwargs: None)

    @contextmanager
    def joined(*args: object, **kwargs: object) -> Iterator[tuple[object, object]]:
        yield None, SimpleNamespace()

    def measure(
        engine: object, device: object, batch: Any, *args: object, label: str, profile: object, **kwargs: object
    ) -> Measured:
        assert profile == tmp_path / "profiles"
        given.append((ROUTED_EXPERTS in batch.fields, label))
        return measured(len(given), 1.0, 1.0)

    monkeypatch.setattr(gpu_ranks, "_joined", joined)
    monkeypatch.setattr(gpu_ranks, "make_engine", lambda *args, **kwargs: made.append(engine) or engine)
    monkeypatch.setattr(gpu_ranks, "measure", measure)
    updates = Updates(layout={"dp": 1}, batches={16: [16]}, count=1, label="x", balanced=(True, False))
    scene = WidthsScene(folder=tmp_path, profile=tmp_path / "profiles", raw=TRIED)
    gpu_ranks._updating_rank(0, 0, scene, None, SimpleNamespace(put=results.append), updates)
    assert given == [(True, "x, 16, balanced"), (False, "x, 16")]
    assert len(made) == 1
    assert results == [(0, {16: measured(rate, 1.0, 1.0)}) for rate in (1.0, 2.0)]


@pytest.mark.parametrize(
    ("arrivals", "gap"),
    [
        ([[0.0, 0.01, 0.16, 0.17]], 0.15),
        ([[0.0, 0.05, 0.1, 0.15, 0.2]], 0.12),
    ],
    ids=["a stream waits", "a client that is behind"],
)
def test_no_gap_around_a_push_is_shorter_than_its_pause(arrivals: list[list[float]], gap: float) -> None:
    push = Pushed(gather=1.0, pause=0.01, send=0.1, resume=0.01, gigabytes=1.0)
    assert gap_around(push, arrivals, 0.0, 0.2) == pytest.approx(gap)
