"""Kernels of an update: what `python -m tools.bench gpu --profile FOLDER` writes. Without a GPU there are none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools.bench import gpu, gpu_memory
from tools.bench.gpu import Scene
from tools.bench.profiles import kernels
from tools.bench.profiles.kernels import Kernel, kernels_of, kind_of, report, write_profile

GROUPED = "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::"
GROUPED += "GemmUniversal<cutlass::gemm::GroupProblemShape<cute::tuple<int, int, int>>, cutlass::gemm::collective::"


def tables(text: str) -> tuple[str, list[list[str]], list[list[str]]]:
    """The first line, and the cells of both tables without their heads."""
    first, *parts = text.split("\n\n")
    kinds, names = ([line.strip("| ").split(" | ") for line in part.splitlines()[2:]] for part in parts)
    return first, kinds, names


def test_times_of_kernels_beside_each_other_are_summed_but_the_gpu_is_busy_once() -> None:
    launches = [
        Kernel("nvjet_tst", 0.0, 4000.0),
        Kernel("ncclDevKernel_AllGather", 1000.0, 1000.0),  # within the first one
        Kernel("ncclDevKernel_AllGather", 3000.0, 2000.0),  # beyond its end
        Kernel("nvjet_tst", 7000.0, 3000.0),
    ]
    first, kinds, names = tables(report("some", launches[::-1], seconds=0.5, fastest_seconds=0.25))
    assert first == (
        "some: 0.500 s with the profiler, 0.250 s the fastest without; kernels 10.0 ms, at least one of them during "
        "8.0 ms; 4 launches"
    )
    assert kinds == [["other matrix products", "7.0", "2", "70.0%"], ["communication", "3.0", "2", "30.0%"]]
    assert names == [["7.0", "2", "`nvjet_tst`"], ["3.0", "2", "`ncclDevKernel_AllGather`"]]


def test_the_longest_kernels_are_listed_with_the_beginnings_of_their_names() -> None:
    launches = [Kernel(f"{n:03}" + "x" * 200, 0.0, 1000.0 * n) for n in range(1, 31)]
    _, kinds, names = tables(report("some", launches, seconds=1.0, fastest_seconds=1.0))
    assert [row[0] for row in names] == [f"{n}.0" for n in range(30, 5, -1)]
    assert names[0][2] == "`030" + "x" * 117 + "`"
    assert kinds == [["other", "465.0", "30", "100.0%"]], "of all"


def test_an_update_without_kernels_has_empty_tables() -> None:
    first, kinds, names = tables(report("some", [], seconds=1.0, fastest_seconds=1.0))
    assert "kernels 0.0 ms" in first and kinds == names == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        (GROUPED, "grouped products of experts"),
        ("void at::cuda::detail::prepare_grouped_gemm_data<c10::BFloat16>", "grouped products of experts"),
        ("void GroupedGemmKernel<cutlass::bfloat16_t>", "grouped products of experts"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "other matrix products"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_tn_align1>", "other matrix products"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("void transformer_engine::multi_tensor_adam::multi_tensor_apply_kernel<AdamFunctor>", "optimizer"),
        ("Memcpy DtoH (Device -> Pinned)", "memory copies"),
        ("Memset (Device)", "memory copies"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "elementwise, Triton"),
        ("triton_poi_fused_add_0", "elementwise, Triton"),
        ("_swiglu_grad_kernel", "elementwise, Triton"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "other"),
    ],
)
def test_a_kernel_belongs_to_the_first_kind_that_its_name_matches(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_launches_and_copies_of_a_gpu_are_read_from_a_trace() -> None:
    events = [
        {"cat": category, "name": category, "ts": 1.5, "dur": 2.0}
        for category in ("kernel", "gpu_memcpy", "gpu_memset", "cpu_op", "cuda_runtime", "gpu_user_annotation")
    ]
    found = kernels_of([*events, {"name": "process_name", "ph": "M"}])
    assert found == [Kernel(name, 1.5, 2.0) for name in ("kernel", "gpu_memcpy", "gpu_memset")]


def test_every_rank_takes_part_in_the_update_and_the_first_one_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updated: list[int] = []
    for rank in (1, 0):
        ranks = SimpleNamespace(is_initialized=lambda: True, get_rank=lambda rank=rank: rank)
        monkeypatch.setattr(kernels, "dist", ranks)
        write_profile(tmp_path / "new", f"rank {rank}", lambda: updated.append(1) or 0.5, fastest_seconds=0.5)
        assert (tmp_path / "new").exists() == (rank == 0)
    assert updated == [1, 1]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["rank-0.md"]


class Clock:
    """Stands in for an engine and its device: updates take the seconds that it is given, and all of them are run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
        self._seconds: Iterator[float] = iter(seconds)
        self.batch = SimpleNamespace(num_tokens=100)
        self.recompute_peak = None
        for module in (gpu, gpu_memory):
            monkeypatch.setattr(module, "seconds_of", lambda device, step: next(self._seconds))
        monkeypatch.setattr(gpu, "make_engine", lambda *args, **settings: self)

    @property
    def left(self) -> list[float]:
        return list(self._seconds)

    def held_bytes(self) -> dict[str, float]:
        return {}

    def forget_peak(self) -> None: ...

    def memory_stats(self) -> dict[str, float]:
        return {"allocated_gib": 1.0, "peak_gib": 2.0, "allocator_retries": 0}


def test_the_update_that_is_profiled_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 9.0, 2.0, 4.0, 1.0)
    measured = gpu_memory.measure(clock, clock, clock.batch, 64, updates=3, label="a, 64", profile=tmp_path)
    assert measured.tokens_per_second == 50.0
    assert (tmp_path / "a-64.md").read_text().startswith("a, 64: 1.000 s with the profiler, 2.000 s the fastest")


def test_without_a_folder_no_more_updates_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 9.0, 2.0, 4.0, 1.0)
    gpu_memory.measure(clock, clock, clock.batch, 64, updates=3, label="a", profile=None)
    assert clock.left == [1.0]
    clock = Clock(monkeypatch, *[4.0] * 7, 1.0)
    gpu.update_rate(Scene(folder=tmp_path), None, clock, clock.batch, 64, label="b")
    assert clock.left == [1.0] and not list(tmp_path.iterdir())


def test_updates_against_megatrons_loop_are_profiled_and_those_with_options_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(folder=tmp_path, profile=tmp_path)
    given: dict[str, Any] = {"scene": scene, "parallel": None, "tokens_per_mb": 64}
    for label in ({}, {"label": "update.1.5B_2048"}):
        clock = Clock(monkeypatch, 9.0, 9.0, 4.0, 3.0, 4.0, 4.0, 5.0, 1.0)
        assert gpu.update_rate(device=clock, batch=clock.batch, **given, **label) == (25.0, 2.0 * 2**30 / 1e9)
    (path,) = tmp_path.iterdir()
    assert path.name == "update.1.5B_2048.md" and "1.000 s with the profiler, 3.000 s the" in path.read_text()


@pytest.mark.slow
def test_each_update_of_a_measurement_has_its_file_in_the_folder_that_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.bench", "gpu", "--trial", "--only", "long"]
    command += ["--shape", "tiny", "--profile", str(tmp_path / "profiles"), "--output", str(tmp_path / "rows")]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    host_gib = "long-recompute-auto-recompute_host_gib-0.0-128-tokens.md"
    names = {*(f"long-recompute-{way}-tokens.md" for way in ("auto-64", "auto-128", "full-64")), host_gib}
    assert {path.name for path in (tmp_path / "profiles").iterdir()} == names
    text = (tmp_path / "profiles" / host_gib).read_text()
    assert text.startswith("long, {'recompute': 'auto', 'recompute_host_gib': 0.0}, 128 tokens: ")
    (path,) = (tmp_path / "rows").iterdir()
    how = {row["command"] for row in json.loads(path.read_text())}
    assert how == {"python -m tools.bench gpu --only long --shape tiny --profile FOLDER"}, "how to measure it again"
