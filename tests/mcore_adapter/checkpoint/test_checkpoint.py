"""Checkpoints on real ranks: what one layout saves, another continues; a failed save leaves no checkpoint behind."""

import random
import resource
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from allocation import ParallelLayout
from helpers.engine_cases import make_engine, per_token, random_batch
from helpers.mcore_ranks import Rank, RankPool
from helpers.saved_models import MAX_TOKENS, OPTIMIZER, draws, load_run, save, save_run, train
from helpers.tiny_models import write_model
from mcore_adapter.checkpoint import writing
from mcore_adapter.checkpoint.checkpoint import copied_sizes
from mcore_adapter.checkpoint.outcome import wait_for_outcome
from mcore_adapter.checkpoint.writing import CopiedCheckpoint

TP2 = ParallelLayout(tp=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    write_model("qwen2_tied", path / "model")
    (path / "model" / "tokenizer_config.json").write_text("{}")
    return path


@pytest.fixture(scope="module")
def saved(ranks: RankPool, folder: Path) -> dict[str, Any]:
    """A checkpoint made at TP2, and what its run did afterwards."""
    path = folder / "tp2"
    return {"path": path, "ranks": ranks.run(save_run, 2, TP2, str(folder / "model"), str(path), "float32")}


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(),
        ParallelLayout(dp=2),
        ParallelLayout(pp=2, vpp=2),
        *(pytest.param(one, marks=pytest.mark.nightly) for one in (ParallelLayout(pp=2), ParallelLayout(tp=2, pp=2))),
    ],
    ids=str,
)
def test_a_run_saved_at_tp2_continues_under_another_layout(ranks, folder, saved, layout):
    results = ranks.run(load_run, layout.world_size, layout, str(folder / "model"), str(saved["path"]), "float32")
    for result in results:
        assert result["num_updates"] == 3
        for step, expected in zip(result["steps"], saved["ranks"][0]["steps"], strict=True):
            assert step["lr"] == expected["lr"]
            assert step["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("name", [pytest.param("qwen3_moe", marks=pytest.mark.nightly), "deepseek_v3"])
def test_a_run_with_experts_continues_under_another_layout(ranks, folder, name):
    """Weights, correction biases and the optimizer's state of every expert, wherever it lies."""
    saving = ParallelLayout(dp=2, ep=2)
    write_model(name, folder / name)
    model, path = str(folder / name), str(folder / f"{name}-checkpoint")
    expected = ranks.run(save_run, 2, saving, model, path, "float32")[0]["steps"]
    for layout in (ParallelLayout(tp=2, ep=2), ParallelLayout(pp=2)):
        for result in ranks.run(load_run, layout.world_size, layout, model, path, "float32"):
            assert result["num_updates"] == 3
            for step, reference in zip(result["steps"], expected, strict=True):
                assert step["loss"] == pytest.approx(reference["loss"], rel=1e-5)
                assert step["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5)


def background_run(rank: Rank, layout: ParallelLayout, model: str, path: str, dtype: str) -> dict[str, Any]:
    """As save_run, but nothing is written before the run has gone on; a second checkpoint follows in the same memory.
    State is gathered in several chunks, the last of them smaller."""
    trained, write = threading.Event(), CopiedCheckpoint.write
    with (
        rank.joined(layout) as (parallel, device),
        mock.patch.object(CopiedCheckpoint, "write", lambda copied: trained.wait(60) and write(copied)),
        mock.patch.object(writing, "_CHUNK_ELEMENTS", 10_000),
    ):
        engine = make_engine(parallel, device, model, dtype=dtype, optimizer=OPTIMIZER)
        train(engine, 3)
        random.seed(rank.rank)
        engine.begin_save(path)
        result = {"draws": draws(), "steps": train(engine, 2)}
        dist.barrier()
        trained.set()
        if rank.rank == 0:
            wait_for_outcome(Path(path), threading.Event())
        dist.barrier()
        engine.begin_save(path + "-later")
        if rank.rank == 0:
            wait_for_outcome(Path(path + "-later"), threading.Event())
        dist.barrier()
        return result


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        (TP2, "bfloat16"),
        *(
            pytest.param(layout, dtype, marks=pytest.mark.nightly)
            for layout, dtype in (
                (ParallelLayout(), "float32"),
                (ParallelLayout(dp=2), "float32"),
                (ParallelLayout(dp=2), "bfloat16"),
                (ParallelLayout(pp=2), "float32"),
                (ParallelLayout(dp=2, pp=2), "bfloat16"),
                (ParallelLayout(pp=2, vpp=2), "float32"),
            )
        ),
    ],
    ids=str,
)
def test_a_checkpoint_written_beside_the_training_continues_bit_for_bit_from_the_moment_it_was_begun(
    ranks, folder, layout, dtype
):
    """Random states included, where the layout is the same."""
    path = folder / f"background-{layout}-{dtype}".replace("/", "")
    expected = ranks.run(background_run, layout.world_size, layout, str(folder / "model"), str(path), dtype)
    results = ranks.run(load_run, layout.world_size, layout, str(folder / "model"), str(path), dtype)
    assert len({tuple(result["draws"]) for result in expected}) == layout.world_size, "each rank has its own"
    for result, reference in zip(results, expected, strict=True):
        assert result["draws"] == reference["draws"]
        assert result["steps"] == reference["steps"]
    assert not list(folder.glob("*.outcome")) and not list(folder.glob("*.rank*"))


def sizes_run(rank: Rank, layout: ParallelLayout, model: str, path: str) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of host memory by name, as announced and as a save took them."""
    with rank.joined(layout) as (parallel, device):
        engine = make_engine(parallel, device, model, dtype="bfloat16", optimizer=OPTIMIZER)
        train(engine, 1)
        said = copied_sizes(engine._model, engine._optimizer, parallel=parallel)
        engine.begin_save(path)
        if rank.rank == 0:
            wait_for_outcome(Path(path), threading.Event())
        dist.barrier()
        return said, {name: buffer.numel() for name, buffer in engine._host_copy._buffers.items()}


def test_what_a_save_needs_of_host_memory_is_known_before(ranks, folder, tmp_path) -> None:
    for said, used in ranks.run(sizes_run, 2, ParallelLayout(dp=2), str(folder / "model"), str(tmp_path / "saved")):
        assert said.keys() == used.keys()
        assert all(used[name] <= said[name] <= 1.1 * used[name] + 65536 for name in used)


def written_run(rank: Rank, model: str, path: str) -> list[bool]:
    """Of each tensor that torch writes, whether it is the copy itself, in a storage of exactly its size."""
    tensors: list[torch.Tensor] = []
    torch_save = torch.save

    def seen(data: Any, *args: Any, **options: Any) -> None:
        if isinstance(data, torch.Tensor):
            tensors.append(data)
        torch_save(data, *args, **options)

    with rank.joined(TP2) as (parallel, device), mock.patch.object(torch, "save", seen):
        engine = make_engine(parallel, device, model, dtype="bfloat16", optimizer=OPTIMIZER)
        train(engine, 1)
        save(engine, path)
        places = [(b.data_ptr(), b.data_ptr() + b.nbytes) for b in engine._host_copy._buffers.values()]
        return [
            t.untyped_storage().nbytes() == t.nbytes
            and any(first <= t.data_ptr() and t.data_ptr() + t.nbytes <= end for first, end in places)
            for t in tensors
        ]


def test_a_checkpoint_is_written_from_the_copy_without_another_one(ranks, folder, tmp_path) -> None:
    for written in ranks.run(written_run, 2, str(folder / "model"), str(tmp_path / "saved")):
        assert written and all(written)


def test_parts_of_a_copy_are_written_bit_for_bit_whatever_their_type_and_strides(tmp_path) -> None:
    whole = torch.arange(240, dtype=torch.uint8)
    state = {str(dtype): whole.view(dtype)[5:11].view(2, 3) for dtype in (torch.bfloat16, torch.float32, torch.int8)}
    state |= {"fp8": whole.view(torch.float8_e4m3fn)[7:], "0-dim": whole.view(torch.int64)[3], "empty": whole[9:9]}
    state |= {
        "transposed": whole[6:18].view(3, 4).T,
        "strided": whole[1::2],
        "param": torch.nn.Parameter(torch.ones(9)[2:]),
    }
    writer = dcp.FileSystemWriter(tmp_path, per_thread_copy_ahead=0)
    dcp.save(state, storage_writer=writer, planner=writing._SavePlanner(flatten_state_dict=False), no_dist=True)
    loaded = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in state.items()}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    for name, tensor in state.items():
        assert torch.equal(loaded[name].flatten().view(torch.uint8), tensor.detach().flatten().view(torch.uint8)), name


def background_failure_run(rank: Rank, model: str, path: str, failing_rank: int) -> str:
    """The failing rank may not write files beyond 20 kB, less than its shards; whoever waits hears of it."""
    with rank.joined(TP2) as (parallel, device):
        engine = make_engine(parallel, device, model, optimizer=OPTIMIZER)
        train(engine, 1)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank.rank == failing_rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        try:
            engine.begin_save(path)
            dist.barrier()
            with pytest.raises(OSError) as error:
                if rank.rank == 1:
                    raise OSError
                wait_for_outcome(Path(path), threading.Event())
            dist.barrier()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        return str(error.value)


@pytest.mark.parametrize("failing_rank", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_full_disk_on_one_rank_is_told_to_who_waits_and_leaves_no_checkpoint(ranks, folder, failing_rank):
    path = folder / f"full{failing_rank}"
    message, _ = ranks.run(background_failure_run, 2, str(folder / "model"), str(path), failing_rank)
    assert f"rank {failing_rank} could not write its part of the checkpoint" in message
    assert "File too large" in message and not (path / "metadata.json").exists()


def reference_run(rank: Rank, model: str, path: str) -> Any:
    """An inference engine takes the model of a training checkpoint; its own checkpoint cannot resume a training."""
    with rank.joined(ParallelLayout()) as (parallel, device):
        trained = make_engine(parallel, device, model, optimizer=OPTIMIZER)
        trained.load(path)
        reference = make_engine(parallel, device, model, train=False)
        reference.load(path)
        batch = random_batch()
        both = [per_token(batch, e.logprobs(batch, max_tokens_per_mb=MAX_TOKENS)) for e in (trained, reference)]
        save(reference, path + "-inference")
        with pytest.raises(ValueError, match="no optimizer state"):
            trained.load(path + "-inference")
        with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
            trained.load(path + "-missing")
        with pytest.raises(FileExistsError, match="not empty"):
            trained.begin_save(path)
        return both


def test_an_inference_engine_loads_the_model_alone_and_misuse_is_told(ranks, folder, saved):
    ((trained, reference),) = ranks.run(reference_run, 1, str(folder / "model"), str(saved["path"]))
    assert torch.equal(trained, reference)


def unwritable_run(rank: Rank, model: str, path: str) -> list[str]:
    with rank.joined(TP2) as (parallel, device):
        engine = make_engine(parallel, device, model, train=False)
        with pytest.raises(OSError) as error:
            engine.begin_save(path)
        return [type(error.value).__name__, str(error.value)]


def test_a_path_that_cannot_be_a_folder_is_told_on_all_ranks(ranks, folder):
    (folder / "file").write_text("")
    results = ranks.run(unwritable_run, 2, str(folder / "model"), str(folder / "file" / "checkpoint"))
    assert results[0] == results[1]
    assert str(folder / "file") in results[0][1]
