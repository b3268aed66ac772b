"""Times of updates and servers against measurements, and the allocations that are proposed by them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allocation import ParallelLayout
from core.checks.rules import load_config
from core.planning.gpus import GPUS
from core.planning.rates import calibration_of, decode_seconds, server_rate, step_time, update_seconds
from core.planning.scene import Engine, Scene, Servers, scene_of
from core.planning.search import Proposal, search
from mcore_adapter.settings import Level
from model_specs.hf_config import parse_config
from tools.bench.gpu.shapes import SHAPES, SLICE, WIDTHS

ONE, CP2, EP2 = ParallelLayout(), ParallelLayout(cp=2), ParallelLayout(dp=2, ep=2)
TWELVE = {**SLICE, "num_hidden_layers": 12}
CALIBRATION = calibration_of("H200")
assert CALIBRATION is not None


def make_scene(raw: dict[str, Any], layout: ParallelLayout = ONE, *, tokens: int = 16384) -> Scene:
    engine = Engine(
        name="actor", config=parse_config(raw), layout=layout, trains=True, is_critic=False, itemsize=2,
        gradient_itemsize=4, recompute="selective", fp8=False, offload=False, tokens=tokens, limit_gib=None,
        host_gib=None,
    )  # fmt: skip
    servers = Servers(
        backend="sglang", config=parse_config(raw), layout=ONE, itemsize=2, fp8=False, max_running=256, share=0.85,
        colocated_share=0.6, on_gpu=True,
    )  # fmt: skip
    return Scene(
        gpu=GPUS["H200"], on_gpu=True, engines=(engine,), servers=servers, shares_gpus=False, n_nodes=1,
        n_gpus_per_node=8, bucket_bytes=1 << 30, sequences=512, prompts=64, group_size=8, minibatches=1,
        prompt_tokens=1024, answer_tokens=7168, max_staleness=2, writes_checkpoints=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "layout", "tokens", "total", "length", "level", "measured"),
    [
        # Rows of benchmarks/*.json of 2026-11-26 on H200; of two GPUs, both together.
        (SHAPES["1.5B"], ONE, 16384, 65536, 2048, "selective", 51700),
        (SHAPES["1.5B"], ONE, 32768, 131072, 16384, "selective", 36011),
        (WIDTHS, ONE, 65536, 65536, 65536, "linear", 5440), (WIDTHS, ONE, 65536, 65536, 65536, "full", 4527),
        (WIDTHS, ONE, 131072, 131072, 131072, "offload", 3133),
        (SHAPES["7B"], CP2, 65536, 65536, 65536, "linear", 10825),
        (SHAPES["7B"], CP2, 131072, 131072, 131072, "full", 6001),
        (SLICE, ONE, 16384, 131072, 4096, "selective", 93750), (SLICE, ONE, 32768, 131072, 4096, "linear", 84356),
        (TWELVE, EP2, 32768, 262144, 4096, "selective", 107570),
    ],
)  # fmt: skip
def test_an_update_takes_about_as_long_as_was_measured(
    raw: dict[str, Any], layout: ParallelLayout, tokens: int, total: int, length: int, level: Level, measured: float
) -> None:
    scene = make_scene(raw, layout, tokens=tokens)
    seconds = update_seconds(scene, scene.actor, CALIBRATION, tokens=total, length=length, level=level)
    assert total / seconds == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(("running", "measured"), [(128, 32840), (192, 40335), (256, 46961)])
def test_a_full_server_samples_about_as_fast_as_was_measured(running: int, measured: float) -> None:
    scene = make_scene(SHAPES["1.5B"])
    assert scene.servers is not None
    rate = server_rate(scene, scene.servers, CALIBRATION, running=running, context=700)
    assert rate == pytest.approx(measured, rel=0.05)


def test_a_longer_context_and_a_stage_more_cost_time() -> None:
    scene = make_scene(SHAPES["7B"])
    assert scene.servers is not None
    short, long = (
        decode_seconds(scene, scene.servers, CALIBRATION, running=64, context=context) for context in (500, 8000)
    )
    read = 64 * 7500 * 28 * 2 * 4 * 128 * 2
    assert long - short == pytest.approx(read / (4.8e12 * CALIBRATION.memory))
    one, two = (make_scene(SHAPES["7B"], layout) for layout in (ParallelLayout(dp=2), ParallelLayout(pp=2)))
    took = [update_seconds(s, s.actor, CALIBRATION, tokens=65536, length=4096, level="none") for s in (one, two)]
    assert took[1] > 1.15 * took[0], "the bubble of four microbatches"


def test_sides_that_overlap_take_the_longer_and_sides_in_turns_the_sum() -> None:
    scene = make_scene(SHAPES["1.5B"])
    apart = step_time(scene, CALIBRATION, mean_answer=3000)
    turns = step_time(replace(scene, max_staleness=0), CALIBRATION, mean_answer=3000)
    assert apart is not None and turns is not None
    assert max(apart.rollout, apart.update + apart.passes) < apart.step < apart.rollout + apart.update + apart.passes
    assert turns.step > apart.rollout + apart.update + apart.passes


RECIPE = """\
experiment_name: planned
trial_name: one
allocation_mode: sglang.d8m1p1+d8m1p1
n_nodes: 2
n_gpus_per_node: 8
actor: {path: MODEL}
dataset: {path: prompts.jsonl, max_prompt_len: 1024, train_bs_n_seqs: 128}
group_size: 8
ppo:
  gen: {max_new_tokens: 15360}
  kl_ctl: 0.0
  disable_value: true
"""


@pytest.mark.parametrize(("num_gpus", "staleness"), [(16, 1), (8, 0), (1024, 4)])
def test_every_proposal_passes_the_checks_and_fits(tmp_path: Path, num_gpus: int, staleness: int) -> None:
    import json

    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(SHAPES["7B"]))
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("MODEL", str(tmp_path / "model")))
    words = [f"staleness.max_staleness={staleness}"]
    scene = scene_of(load_config("ppo-math", path, words).config, GPUS["H100"])
    calibration = calibration_of("H100")
    assert calibration is not None
    asked: list[Proposal] = []
    found = search(scene, calibration, num_gpus=num_gpus, mean_answer=4000, accepts=lambda one: not asked.append(one))
    assert len(found) == 3 and len({one.mode for one in found}) == 3
    rates = [one.time.tokens_per_second for one in found]
    assert rates == sorted(rates, reverse=True)
    for proposal in found:
        config = load_config("ppo-math", path, [*words, *proposal.overrides]).config
        as_run = scene_of(config, GPUS["H100"])
        assert as_run.actor.layout == proposal.scene.actor.layout and as_run.servers == proposal.scene.servers
        assert proposal.memory.fits and as_run.n_nodes * as_run.n_gpus_per_node == num_gpus


def test_a_gpu_without_calibration_has_no_times() -> None:
    assert calibration_of("B200") is None
