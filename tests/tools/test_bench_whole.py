"""The pieces of `python -m tools.bench gpu --only whole`; the runs themselves need eight GPUs, or minutes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from allocation import ParallelLayout
from core.config.allocation import resolve_allocation
from core.config.checks import run_checks
from core.config.load import load_config
from mcore_adapter.activations.auto import SPARE
from mcore_adapter.activations.estimate import UpdateShape, choose
from model_specs.hf_config import parse_config, read_config
from rollout.inference.gpus import Gpu
from tools.bench.gpu import Scene
from tools.bench.gpu_experts import SLICE
from tools.bench.gpu_memory import WidthsScene
from tools.bench.whole import size as sizes
from tools.bench.whole.measure import _logprobs_rate
from tools.bench.whole.running import differences, pushes, recovered_steps, sampled_per_second, server_below
from tools.bench.whole.size import Size, configuration, held_bytes, scene_of, shared_size_for, size_for

WHOLE_MODEL = parse_config({**SLICE, "num_hidden_layers": 48})
GPU_BYTES = 141e9
SMALL_HOST, LARGE_HOST = 440e9, 512 * 2**30
"""Bytes of memory with which the optimizer's state stays on the GPUs, and with which it is offloaded."""


def test_the_estimate_counts_the_parameters_of_the_model_and_the_bytes_that_were_measured() -> None:
    assert held_bytes(WHOLE_MODEL, ParallelLayout(), offload=True)["weights"] == 2 * 30_532_122_624
    # Of `tools.bench gpu --only experts`, six layers on one GPU.
    held = held_bytes(parse_config(SLICE), ParallelLayout(), offload=False)
    assert sum(held.values()) / 1e9 == pytest.approx(78.6, abs=0.15)


def test_measurements_of_one_call_have_their_own_models(tmp_path: Path) -> None:
    scenes = [WidthsScene(folder=tmp_path, raw={**SLICE, "num_hidden_layers": n}) for n in (6, 12)]
    assert [read_config(scene.model).num_layers for scene in [*scenes, scenes[0]]] == [6, 12, 6]


def test_a_rank_of_the_recipe_fits_into_a_gpu_because_the_optimizer_does_not_stay_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLIPSTREAM_DATA", "/data")
    monkeypatch.setenv("SLIPSTREAM_MODEL", "/model")
    config = load_config("ppo-math", sizes.RECIPE).config
    layout = resolve_allocation(config).trainer.layout
    assert (str(layout), layout.ep, layout.expert_dp) == ("d4m1p1e4", 4, 1)
    held = held_bytes(WHOLE_MODEL, layout, offload=config.actor.optimizer.offload)
    tokens = config.actor_train.mb_spec.max_tokens_per_mb
    shape = UpdateShape(
        config=WHOLE_MODEL, layout=layout, itemsize=2, tokens=tokens, in_flight=1, layers=range(48), has_head=True
    )
    chosen = choose(shape, (1 - SPARE) * GPU_BYTES - sum(held.values()))
    # The offload of activations would take host memory that the optimizer needs.
    assert chosen.fits and not {"offload", "full"} & set(chosen.levels)
    masters = held_bytes(WHOLE_MODEL, layout, offload=False)["optimizer"] / 3
    assert sum(held.values()) + masters < (1 - SPARE) * GPU_BYTES, "the optimizer step"
    assert sum(held_bytes(WHOLE_MODEL, layout, offload=False).values()) > GPU_BYTES


@pytest.mark.parametrize("num_gpus", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("host_bytes", [SMALL_HOST, LARGE_HOST])
def test_each_host_gets_a_size_that_fits_its_gpus(num_gpus: int, host_bytes: float) -> None:
    size = size_for(num_gpus, host_bytes)
    assert size.num_gpus <= num_gpus and size.num_generator_gpus < size.num_gpus
    assert size.offload == (size.layers == 48) == (num_gpus == 8 and host_bytes == LARGE_HOST)
    config = parse_config({**SLICE, "num_hidden_layers": size.layers})
    assert sum(held_bytes(config, size.placed.trainer.layout, offload=size.offload).values()) < 0.8 * GPU_BYTES


@pytest.mark.parametrize(
    ("num_gpus", "host_bytes", "layers", "gpus"),
    [
        (0, SMALL_HOST, 2, 2),
        (2, LARGE_HOST, 6, 2),
        (4, SMALL_HOST, 36, 4),
        (4, LARGE_HOST, 48, 4),
        (8, LARGE_HOST, 48, 4),
    ],
)
def test_servers_and_trainer_in_turns_get_what_fits_too(
    num_gpus: int, host_bytes: float, layers: int, gpus: int
) -> None:
    size = shared_size_for(num_gpus, host_bytes)
    assert (size.layers, size.num_gpus, size.offload) == (layers, gpus, layers == 48)
    config = parse_config({**SLICE, "num_hidden_layers": size.layers})
    assert sum(held_bytes(config, size.placed.trainer.layout, offload=size.offload).values()) < 0.8 * GPU_BYTES


def problems(scene: Scene, size: Size) -> list[str]:
    """What the checks of a start find wrong with the recipe, not with this host."""
    own = scene_of(scene, size, "trial")
    words = [f"{key}={value}" for key, value in {**configuration(own, size), "trial_name": "trial"}.items()]
    loaded = load_config("ppo-math", sizes.RECIPE, words)
    return [str(p) for p in run_checks(loaded.config, loaded.where, connections=True) if not p.of_host]


@pytest.mark.parametrize(
    "size", [sizes.WHOLE, sizes.WITHOUT_OFFLOAD, sizes.FOUR, sizes.TWO, sizes.SHARED, sizes.SHARED_FOUR], ids=str
)
def test_a_run_on_gpus_passes_every_check_of_its_recipe(
    size: Size, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Gpu(index=0, name="NVIDIA H200", used_mib=0, total_mib=143771, users=())
    for module in ("tools.bench.whole.size", "tools.bench.gpu_runs"):
        monkeypatch.setattr(f"{module}.query_gpus", lambda: [card] * 8)
    monkeypatch.setenv("SLIPSTREAM_DATA", "/data")
    monkeypatch.setenv("SLIPSTREAM_MODEL", "/model")
    assert problems(Scene(folder=tmp_path), size) == []


def test_a_trial_passes_every_check_with_and_without_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_DATA", "/data")
    monkeypatch.setenv("SLIPSTREAM_MODEL", "/model")
    python = tmp_path / "python"
    for scene in (Scene(folder=tmp_path), Scene(folder=tmp_path, sglang_python=python)):
        assert problems(scene, sizes.TRIAL) == []


def test_log_probabilities_per_second_are_of_all_tokens_of_their_steps() -> None:
    steps = [
        {"avg_seq_len": 100.0, "n_seqs": 8.0, "time/old_log-probs": 0.5},
        {"avg_seq_len": 50.0, "n_seqs": 4.0, "time/old_log-probs": 1.5},
    ]
    figure = _logprobs_rate("rate", steps)
    assert (figure.name, figure.value, figure.unit) == ("whole.rate", 500.0, "tokens/s")


DECODE = "[2026-11-23 10:00:00 TP0] Decode batch, #running-req: {}, #token: 9, token usage: 0.01, cuda graph: True, gen throughput (token/s): {}, #queue-req: 0\n"  # noqa: E501


def test_the_rate_of_a_server_is_its_tokens_by_its_time() -> None:
    # 40 steps of 100 requests in 2 s, then 40 of 50 in 4 s: 6,000 tokens in 6 s.
    uneven = DECODE.format(100, 2000.0) + "Prefill batch, #new-seq: 3\n" + DECODE.format(50, 500.0)
    assert sampled_per_second([uneven, DECODE.format(7, 10.0)]) == pytest.approx(1010.0)
    assert sampled_per_second(["", DECODE.format(1, 0.0)]) == 0.0


def test_the_mismatch_is_of_sampled_tokens_of_the_present_weights_alone() -> None:
    one = {"mask": [0, 1, 1], "versions": [-1, 4, 5], "logprobs": [0, -1.0, -2.0], "rollout_logprobs": [0, -9.0, -2.5]}
    other = {"mask": [0, 1], "versions": [-1, 5], "logprobs": [0, -3.0], "rollout_logprobs": [0, -2.75]}
    assert differences({"version": 5, "sequences": [one, other]}).tolist() == [0.5, 0.25]


def test_a_weight_update_without_a_comparison_does_not_count_as_equal() -> None:
    sent = "Pushed version {}: 1.00 GB in 1 buckets, sent in 0.1 s; generators paused for at most 0.1 s{}\n"
    output = sent.format(0, "; all checksums equal") + sent.format(1, "")
    assert pushes(output + "Pushed version 1 to the restarted generators in 2.00 s\n") == (2, 1)


WRITTEN = "Recover checkpoint of step {}: 5.0 MiB written in 0.1 s in the background.\n"
FINISHED = "Epoch 1/9 step 2/9 (global step {}) finishes.\n"


def test_a_recovery_is_compared_with_the_last_checkpoint_before_the_failure() -> None:
    first = WRITTEN.format(12) + FINISHED.format(20) + WRITTEN.format(24) + FINISHED.format(27)
    failed = "Attempt 1 failed after step 27: trainer-rank0 exited. Restarting\n"
    found = "Recovered from /runs/globalstep24: 24 steps are done.\n"
    assert recovered_steps(first + failed + found + FINISHED.format(25) + WRITTEN.format(36)) == (25, 25)
    assert recovered_steps(first + failed + found + FINISHED.format(26)) == (26, 25)
    for end in ("", FINISHED.format(1), found):
        with pytest.raises(RuntimeError, match="did not recover"):
            recovered_steps(first + failed + end)


def test_the_server_is_found_beside_processes_that_have_ended(tmp_path: Path) -> None:
    (tmp_path / "hooks.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    parent = """
import os, subprocess, sys
ended = subprocess.Popen([sys.executable, "-c", ""])
os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
subprocess.run([sys.executable, sys.argv[1]])
"""
    command = [sys.executable, "-c", parent, str(tmp_path / "hooks.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as generator:
        assert generator.stdout is not None
        server = psutil.Process(int(generator.stdout.readline()))
        try:
            assert server_below(psutil.Process(generator.pid)).pid == server.pid
        finally:
            server.kill()
