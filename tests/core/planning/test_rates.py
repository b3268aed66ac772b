"""Times of updates and servers against measurements, and the allocations that are proposed by them."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from allocation import ParallelLayout
from core.checks.rules import load_config
from core.config.load import LoadedConfig
from core.planning.advice import keys_of_engines, with_microbatches
from core.planning.memory import plan_memory, usual_level
from core.planning.rates import (
    Lengths,
    calibration_of,
    decoding,
    read_calibration,
    step_time,
    update_seconds,
    wave_seconds,
)
from core.planning.scene import GPUS, Engine, Gpu, PlanError, Scene, Servers, scene_of
from core.planning.search import parse_fixed, proposals, search
from core.planning.server_memory import plan_servers
from core.planning.simulation import forecast, simulate, world_of
from helpers.hf_configs import DEEPSEEK_V2, QWEN2
from helpers.plan_recipe import write_recipe
from mcore_adapter.settings import Level
from model_specs.families import parse_config
from tools.bench import PLANNED, SHAPES, SLICE, WIDTHS
from tools.bench.gpu.plan import RATES
from tools.bench.gpu.servers import planned_server, predicted_waves

ONE, CP2, EP2 = ParallelLayout(), ParallelLayout(cp=2), ParallelLayout(dp=2, ep=2)
TWELVE = {**SLICE, "num_hidden_layers": 12}
ROOT = Path(__file__).parents[3]
CALIBRATION = calibration_of("H200")
assert CALIBRATION is not None


def make_scene(raw: dict[str, Any], layout: ParallelLayout = ONE, *, tokens: int = 16384) -> Scene:
    engine = Engine(
        name="actor", config=parse_config(raw), layout=layout, trains=True, is_critic=False, itemsize=2,
        gradient_itemsize=4, recompute="selective", fp8=False, offload=False, tokens=tokens, limit_gib=None,
        host_gib=None,
    )  # fmt: skip
    servers = Servers(
        backend="sglang", config=parse_config(raw), layout=ONE, itemsize=2, fp8=False, max_running=256, share=None,
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
def test_an_update_takes_about_as_long_as_was_measured(raw, layout, tokens, total, length, level, measured) -> None:
    scene = make_scene(raw, layout, tokens=tokens)
    seconds = update_seconds(scene, scene.actor, CALIBRATION, tokens=total, length=length, level=level)
    assert total / seconds == pytest.approx(measured, rel=0.05)


def test_updates_and_requests_of_a_core_take_about_as_long_as_was_measured() -> None:
    measured = json.loads((ROOT / "benchmarks/predictions/cpu-measured.json").read_text())
    calibration = calibration_of("CPU")
    assert calibration is not None
    errors: dict[str, list[float]] = {"updates": [], "waves": []}
    for kind, row in [("updates", row) for row in measured["updates"]] + [("waves", row) for row in measured["waves"]]:
        scene = make_scene(measured["models"][row["model"]], tokens=row.get("microbatch", 1))
        engine = replace(scene.actor, itemsize=4, recompute="none")
        assert scene.servers is not None
        servers = replace(scene.servers, itemsize=4, on_gpu=False)
        scene = replace(scene, on_gpu=False, engines=(engine,), servers=servers)
        if kind == "updates":
            of = {"tokens": row["tokens"], "length": row["length"]}
            planned = update_seconds(scene, engine, calibration, level="none", **of)
        else:
            of = {name: row[name] for name in ("running", "prompt", "answer")}
            planned = wave_seconds(servers, calibration, **of)
        errors[kind].append(abs(planned / row["seconds"] - 1))
    assert median(errors["updates"]) == pytest.approx(0.105, abs=0.005)
    assert median(errors["waves"]) == pytest.approx(0.14, abs=0.005)
    assert max(errors["updates"] + errors["waves"]) == pytest.approx(0.33, abs=0.01)


@pytest.mark.parametrize(
    "measured",
    [
        # What was measured with the same model, GPUs and lengths: (layout, tokens of a microbatch, level) -> tokens/s.
        (
            SHAPES["1.5B"], 2048, 6,
            {(ParallelLayout(dp=2), 16384, "selective"): 98970, (ParallelLayout(tp=2), 16384, "selective"): 70499,
             (ParallelLayout(pp=2), 8192, "selective"): 69563},
        ),
        (SHAPES["1.5B"], 16384, 1, {(ONE, 32768, "selective"): 36011, (ONE, 32768, "linear"): 30785}),
        (WIDTHS, 65536, 1, {(ONE, 65536, "linear"): 5440, (ONE, 65536, "full"): 4527}),
        (SHAPES["7B"], 65536, 1, {(CP2, 65536, "linear"): 10825, (CP2, 65536, "full"): 9079}),
        (SHAPES["7B"], 131072, 1, {(CP2, 131072, "offload"): 7211, (CP2, 131072, "full"): 6001}),
        (
            SLICE, 4096, 4,
            {(ONE, 16384, "selective"): 93750, (ONE, 32768, "selective"): 90735, (ONE, 32768, "linear"): 84356},
        ),
        (TWELVE, 4096, 4, {(EP2, 32768, "selective"): 107570, (EP2, 16384, "selective"): 106213}),
    ],
)  # fmt: skip
def test_what_is_planned_as_the_fastest_is_nearly_the_fastest_of_what_was_measured(measured) -> None:
    raw, length, microbatches, rates = measured

    def planned(layout: ParallelLayout, tokens: int, level: Level) -> float:
        scene, total = make_scene(raw, layout, tokens=tokens), microbatches * layout.dp * 32768
        return total / update_seconds(scene, scene.actor, CALIBRATION, tokens=total, length=length, level=level)

    chosen = max(rates, key=lambda one: planned(*one))
    assert rates[chosen] > 0.97 * max(rates.values())


FITTED = {("1.5B", "H200"), ("7B", "H200"), ("3B", "H100")}
"""Servers whose waves three of the rates are fitted to; 12 ns a head were chosen with all."""


def test_a_server_answers_each_wave_in_about_the_time_that_was_measured() -> None:
    measured = json.loads((ROOT / "benchmarks/predictions/servers-measured.json").read_text())
    errors: dict[bool, list[float]] = {True: [], False: []}
    for shape, hosts in measured.items():
        for host, rates in hosts.items():
            gpu = host.split(",")[0]
            planned = predicted_waves(shape, GPUS[gpu], RATES[gpu])
            assert planned.keys() == rates.keys()
            cache, *waves = (abs(planned[load] / rate - 1) for load, rate in rates.items())
            errors[(shape, host) in FITTED] += waves
            assert cache < 0.0025
    assert len(errors[True]) == 18 and max(errors[True]) < 0.095 and median(errors[True]) < 0.05
    assert len(errors[False]) == 48 and max(errors[False]) < 0.095 and median(errors[False]) < 0.045


@pytest.mark.parametrize(("running", "measured"), [(256, 46960), (192, 40340), (128, 32840)])
def test_a_loaded_server_is_about_as_fast_as_was_measured(running: int, measured: int) -> None:
    """Rows of benchmarks/rollout.md, on H200."""
    seconds = wave_seconds(planned_server("1.5B"), CALIBRATION, running=running, prompt=128, answer=1024)
    assert running * 1024 / seconds == pytest.approx(measured, rel=0.07)


@pytest.mark.parametrize(
    ("shape", "gpu", "running", "context", "milliseconds"),
    [
        # benchmarks/planner.md, Whole runs and Search; contexts follow from the steps that were computed there.
        # Left out are 540 and 750 requests: 14 and 18 % too fast.
        ("0.6B", "H100", 1, 4354, 1.7), ("0.6B", "H100", 5, 3730, 2.5), ("0.6B", "H100", 20, 2680, 3.8),
        ("0.6B", "H100", 50, 1624, 5.4), ("0.6B", "H100", 107, 1044, 6.8), ("0.6B", "H100", 210, 626, 8.4),
        ("0.6B", "H100", 295, 419, 8.8), ("0.6B", "H100", 320, 47, 5.4), ("1.5B", "H200", 100, 2140, 4.7),
        ("1.5B", "H200", 300, 1054, 7.6), ("1.5B", "H200", 950, 297, 16.4),
    ],
)  # fmt: skip
def test_a_decode_step_takes_about_as_long_as_logs_of_servers_show(shape, gpu, running, context, milliseconds) -> None:
    calibration = calibration_of(gpu)
    assert calibration is not None
    seconds = decoding(planned_server(shape), calibration)(running, context)
    assert seconds == pytest.approx(milliseconds / 1000, rel=0.14)


@pytest.mark.parametrize(("raw", "tp", "heads"), [(QWEN2, 1, 2), (QWEN2, 4, 1), (QWEN2 | DEEPSEEK_V2, 1, 1)])
def test_a_request_costs_a_decode_step_the_heads_that_are_cached(raw: dict[str, Any], tp: int, heads: int) -> None:
    """Of tensor-parallel ranks at least one each, and of latent attention one: 12 ns each."""
    server = replace(planned_server("1.5B"), config=parse_config(raw), layout=ParallelLayout(tp=tp))
    free = replace(CALIBRATION, memory=math.inf, products=math.inf, decode_token_seconds=0.0)
    step = decoding(server, free)
    assert step(101, 9) - step(1, 9) == pytest.approx(100 * 12e-9 * 2 * heads)


@pytest.mark.parametrize(("shape", "measured"), [("1.5B", 4591119), ("7B", 2084507)])
def test_the_cache_of_a_server_has_as_many_tokens_as_was_measured(shape: str, measured: int) -> None:
    scene = make_scene(SHAPES[shape])
    assert scene.servers is not None
    plan = plan_servers(scene, replace(scene.servers, max_running=520))
    assert plan.tokens == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize(
    ("replicas", "running", "staleness", "shares", "measured"),
    [
        # Trained tokens/s of benchmarks/asynchronous.md and, the last two, of benchmarks/planner.md: servers and ranks
        # of the trainer, each on a GPU of its own, or in turns.
        (1, 448, 4, False, 44610), (1, 384, 4, False, 45520), (1, 256, 4, False, 40560), (2, 192, 4, False, 75486),
        (1, 192, 0, False, 15354), (2, 192, 0, False, 22173), (2, 240, 0, True, 20520), (1, 1024, 4, False, 41200),
        (1, 256, 0, True, 15277),
    ],
)  # fmt: skip
def test_a_run_trains_about_as_fast_as_was_measured(replicas, running, staleness, shares, measured) -> None:
    layout, scene = ParallelLayout(dp=replicas), make_scene(SHAPES["1.5B"])
    assert scene.servers is not None
    run = replace(
        scene.in_layout(layout).with_engines(has_pass=False), shares_gpus=shares, sequences=480, prompts=60,
        servers=replace(scene.servers, layout=layout, max_running=running), max_staleness=staleness, prompt_tokens=12,
        answer_tokens=4096,
    )  # fmt: skip
    answers = Lengths(mean=686, longest=4096, spread=0.95)
    planned = forecast(run, CALIBRATION, answers)
    assert planned is not None and 480 * answers.mean / planned.step == pytest.approx(
        measured, rel=0.11 if (replicas, shares) == (2, True) else 0.1
    )


@pytest.mark.parametrize(("raw", "tokens", "level"), [(SHAPES["1.5B"], 4096, "none"), (WIDTHS, 65536, "linear")])
def test_an_update_with_auto_takes_the_time_of_what_most_layers_recompute(raw, tokens, level) -> None:
    scene = make_scene(raw, tokens=tokens)
    automatic, given = (scene.with_engines(recompute=recompute) for recompute in ("auto", level))
    assert usual_level(automatic, automatic.actor) == level
    times = [step_time(one, CALIBRATION, Lengths(mean=3000, longest=7168)) for one in (automatic, given)]
    assert times[0] is not None and times[0] == times[1]


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("mean", [900, 4000])
def test_a_step_takes_about_as_long_as_a_simulated_one(staleness: int, mean: int, shares: bool) -> None:
    """By the formula that chooses what is simulated: waits for the longest answers, sides that overlap and sides in
    turns."""
    scene = replace(make_scene(SHAPES["7B"]), max_staleness=staleness, answer_tokens=15360, shares_gpus=shares)
    answers = Lengths(mean=mean, longest=15360)
    time, planned = step_time(scene, CALIBRATION, answers), forecast(scene, CALIBRATION, answers)
    assert time is not None and planned is not None
    assert time.step == pytest.approx(planned.step, rel=0.15)
    assert sum(planned.staleness.values()) == pytest.approx(1) and max(planned.staleness) <= staleness
    assert 0 < planned.trainer_share < 1 and 0 < planned.slots_share < 1


def test_a_part_of_a_large_run_takes_as_long_as_the_whole_run() -> None:
    scene, layout = make_scene(SHAPES["7B"], ParallelLayout(dp=2)), ParallelLayout(dp=8)
    assert scene.servers is not None
    scene = replace(scene, servers=replace(scene.servers, layout=layout), sequences=2048, prompts=256)
    answers = Lengths(mean=1500, longest=7168)
    planned, world = forecast(scene, CALIBRATION, answers), world_of(scene, CALIBRATION, answers)
    assert planned is not None and world is not None
    assert planned.step == pytest.approx(simulate(world, 16).seconds, rel=0.03)


@pytest.mark.parametrize("mean", [3000, 7168])
def test_where_the_cache_limits_formula_and_simulation_let_as_many_requests_run(mean: int) -> None:
    scene = make_scene(SHAPES["7B"], ParallelLayout(dp=4))
    scene = replace(scene, gpu=Gpu(name="H200", gib=40.0), max_staleness=4)
    answers = Lengths(mean=mean, longest=7168)
    world, planned = world_of(scene, CALIBRATION, answers), forecast(scene, CALIBRATION, answers)
    assert world is not None and planned is not None and world.slots < 0.7 * world.max_running == 0.7 * 256
    assert 0.85 * world.slots < planned.slots_share * 256 <= world.slots
    assert planned.rollout <= 1.01 * planned.step, "the servers' part is not longer than the whole"


def test_a_larger_staleness_bound_is_forecast_with_no_more_answers() -> None:
    answers, scene = Lengths(mean=300, longest=7168), make_scene(SHAPES["7B"])
    assert scene.servers is not None
    scene, servers = replace(scene, sequences=128, prompts=16), replace(scene.servers, layout=ParallelLayout(dp=8))
    large = replace(scene, servers=servers, sequences=704, prompts=88)
    steps = {}
    for run, staleness, oldest in ((scene, 8, 8), (scene, 1000, 24), (large, 8, 8), (large, 64, 24)):
        planned = forecast(replace(run, max_staleness=staleness), CALIBRATION, answers)
        assert planned is not None and max(planned.staleness) == oldest
        steps[run.prompts, staleness] = planned.step
    assert steps[16, 1000] == pytest.approx(steps[16, 8], rel=0.02)
    assert steps[88, 64] == pytest.approx(steps[88, 8], rel=0.02)


def test_servers_on_cores_decode_as_many_requests_as_they_may() -> None:
    scene, calibration = make_scene(SHAPES["1.5B"]), calibration_of("CPU")
    assert scene.servers is not None and calibration is not None
    servers = replace(scene.servers, on_gpu=False, max_running=64)
    scene = replace(scene, gpu=Gpu(name="none", gib=0.0), on_gpu=False, servers=servers)
    answers = Lengths(mean=100, longest=400)
    world, planned = world_of(scene, calibration, answers), forecast(scene, calibration, answers)
    assert world is not None and world.max_running == 64
    assert planned is not None and planned.limited_by == "trainer" and planned.checkpoint == 0


@pytest.mark.parametrize(
    ("num_gpus", "staleness", "metric", "fixed"),
    [(16, 1, "tokens", None), (8, 0, "cost", None), (256, 4, "latency", None), (16, 2, "tokens", "sglang.d4m2p1")],
)
def test_every_proposal_passes_the_checks_and_fits(tmp_path, num_gpus, staleness, metric, fixed) -> None:
    path = write_recipe(tmp_path, SHAPES["7B"])
    words = [f"staleness.max_staleness={staleness}", "dataset.train_bs_n_seqs=16", "ppo.gen.max_new_tokens=15360"]

    def load(more: Sequence[str]) -> LoadedConfig:
        return load_config("ppo-math", path, [*words, *more])

    scene = scene_of(load([]).config, GPUS["H100"])
    calibration = calibration_of("H100")
    assert calibration is not None
    answers = Lengths(mean=4000, longest=15360)
    spec = None if fixed is None else parse_fixed(fixed)
    found = proposals(load, scene, calibration, answers, num_gpus=num_gpus, metric=metric, fixed=spec)
    every = [*found.best, *found.others]
    assert found.best and len({(one.mode, one.num_gpus) for one in every}) == len(every)
    for proposal in every:
        as_run = scene_of(load(proposal.overrides).config, GPUS["H100"])
        assert as_run.actor == proposal.scene.actor and as_run.servers == proposal.scene.servers
        assert (as_run.max_staleness, as_run.shares_gpus) == (proposal.scene.max_staleness, proposal.scene.shares_gpus)
        assert plan_memory(as_run).fits and proposal.num_gpus <= num_gpus
        assert fixed is None or proposal.mode.startswith(fixed)
    values = {
        "tokens": [-one.time.tokens_per_second for one in every],
        "cost": [-one.time.tokens_per_second / one.num_gpus for one in every],
        "latency": [one.latency for one in every],
    }[metric]
    assert values == sorted(values)


def test_proposals_set_what_they_were_computed_with_for_every_engine(tmp_path: Path) -> None:
    """The offload of a critic, and one that a proposal leaves out."""
    path = write_recipe(tmp_path, PLANNED["3B"])
    words = ["ppo.kl_ctl=0.1", "ppo.disable_value=false", "critic.init_critic_from_actor=true", "algorithm.name=ppo"]
    words += ["dataset.train_bs_n_seqs=32", "critic_train.mb_spec.max_tokens_per_mb=65536"]
    words += ["actor_train.mb_spec.max_tokens_per_mb=65536", "actor.optimizer.offload=true"]

    def load(more: Sequence[str]) -> LoadedConfig:
        return load_config("ppo-math", path, [*words, *more])

    scene = scene_of(load([]).config, GPUS["H100"])
    found = proposals(load, scene, CALIBRATION, Lengths(mean=2000, longest=7168), num_gpus=4)
    assert found.best
    for one in (*found.best, *found.others):
        as_run = scene_of(load(one.overrides).config, GPUS["H100"])
        assert as_run.engines == one.scene.engines and plan_memory(as_run).peak.total == one.memory.peak.total
    assert any(not one.scene.actor.offload for one in found.best)
    assert any("critic.optimizer.offload=true" in one.overrides for one in (*found.best, *found.others))
    half = with_microbatches(scene, 0.5)
    keys = keys_of_engines(half, scene)
    assert keys == [f"{role}.mb_spec.max_tokens_per_mb=32768" for role in ("actor_train", "critic_train", "ref_inf")]
    assert scene_of(load(keys).config, GPUS["H100"]).engines == half.engines


def test_a_search_leaves_servers_to_the_auxiliary_model(tmp_path: Path) -> None:
    path, judge = write_recipe(tmp_path, SHAPES["7B"]), tmp_path / "judge"
    judge.mkdir()
    (judge / "config.json").write_text(json.dumps(SHAPES["7B"]))
    words = [f"auxiliary.path={judge}", "dataset.train_bs_n_seqs=16", "ppo.gen.max_new_tokens=4096"]

    def load(more: Sequence[str]) -> LoadedConfig:
        return load_config("ppo-math", path, [*words, *more])

    scene, calibration = scene_of(load(["allocation_mode=sglang.d12m1p1+d4m1p1"]).config, GPUS["H100"]), CALIBRATION
    found = proposals(load, scene, calibration, Lengths(mean=2000, longest=4096), num_gpus=16, num_others=0)
    assert found.best and not any(one.scene.shares_gpus for one in found.best)
    for proposal in found.best:
        assert scene_of(load(proposal.overrides).config, GPUS["H100"]).servers == proposal.scene.servers


def test_more_staleness_is_never_proposed_than_was_asked_for(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, SHAPES["1.5B"])
    scene = scene_of(load_config("ppo-math", path, ["staleness.max_staleness=1"]).config, GPUS["H200"])
    found = search(
        scene, CALIBRATION, Lengths(mean=900, longest=7168), num_gpus=8, accepts=lambda one, keys: True, num_others=50
    )
    ages = {one.scene.max_staleness for one in (*found.best, *found.others)}
    assert ages == {1}, "also those that take turns"


def test_the_layout_in_turns_that_was_measured_is_proposed(tmp_path: Path) -> None:
    scene = scene_of(load_config("ppo-math", write_recipe(tmp_path, SHAPES["1.5B"])).config, GPUS["H200"])
    fixed = parse_fixed("sglang.d2m1p1|d2m1p1")
    answers = Lengths(mean=900, longest=7168)
    found = search(scene, CALIBRATION, answers, num_gpus=2, accepts=lambda one, keys: True, fixed=fixed)
    assert found.best[0].mode == "sglang.d2m1p1|d2m1p1"
    assert found.best[0].scene.actor.recompute == "none"


def test_a_search_uses_the_memory_of_a_gpu_for_speed(tmp_path: Path) -> None:
    """No recomputation where that fits, and microbatches of another size only where these are faster by far."""
    answers = Lengths(mean=900, longest=3072)
    cases = {"small": (PLANNED["0.6B"], 4096), "even": (PLANNED["1.2B"], 8192), "7B": (SHAPES["7B"], 32768)}
    chosen = {}
    for name, (raw, tokens) in cases.items():
        path = write_recipe(tmp_path, raw)
        words = [f"actor_train.mb_spec.max_tokens_per_mb={tokens}", "ppo.gen.max_new_tokens=3072"]

        def load(more: Sequence[str], path: Path = path, words: Sequence[str] = words) -> LoadedConfig:
            return load_config("ppo-math", path, [*words, *more])

        scene, fixed = scene_of(load([]).config, GPUS["H200"]), parse_fixed("sglang.d1m1p1+d1m1p1")
        found = proposals(load, scene, CALIBRATION, answers, num_gpus=2, fixed=fixed, most=1)
        actor = found.best[0].scene.actor
        chosen[name] = actor.recompute, actor.offload, actor.tokens
    assert chosen == {"small": ("none", False, 16384), "even": ("none", False, 8192), "7B": ("none", True, 16384)}


def test_a_trainer_that_is_refused_makes_way_for_the_next_one(tmp_path: Path) -> None:
    scene = scene_of(load_config("ppo-math", write_recipe(tmp_path, SHAPES["1.5B"])).config, GPUS["H200"])
    found = search(
        scene, CALIBRATION, Lengths(mean=900, longest=7168), num_gpus=2, fixed=parse_fixed("sglang.d1m1p1+d1m1p1"),
        accepts=lambda one, keys: one.actor.recompute == "linear" and one.actor.tokens == scene.actor.tokens,
    )  # fmt: skip
    assert [one.scene.actor.recompute for one in found.best] == ["linear"]


def test_servers_get_more_requests_than_the_formula_gives_them_where_these_wait(tmp_path: Path) -> None:
    path, words = write_recipe(tmp_path, SHAPES["7B"]), ["dataset.train_bs_n_seqs=128", "ppo.gen.max_new_tokens=15360"]
    scene = scene_of(load_config("ppo-math", path, [*words, "staleness.max_staleness=4"]).config, GPUS["H100"])
    rates, answers, fixed = calibration_of("H100"), Lengths(mean=4000, longest=15360), "sglang.d4m2p1+d4m2p1"
    assert rates is not None
    found = search(
        scene, rates, answers, num_gpus=16, fixed=parse_fixed(fixed), most=1, num_others=0,
        accepts=lambda one, keys: True,
    )  # fmt: skip
    servers = found.best[0].scene.servers
    assert servers is not None and servers.max_running == 384, "256 have nine tenths of the speed, and some wait"


def test_no_more_requests_are_proposed_than_bring_speed(tmp_path: Path) -> None:
    """Measured on two H200: 45,520 tokens/s with 384 requests at once, 41,200 with 1,024 (benchmarks/planner.md)."""
    path = write_recipe(tmp_path, SHAPES["1.5B"])
    words = ["dataset.train_bs_n_seqs=60", "group_size=8", "dataset.max_prompt_len=32", "ppo.gen.max_new_tokens=4096",
             "ppo.kl_ctl=0.0", "ppo.ppo_n_minibatches=1", "staleness.max_staleness=4"]  # fmt: skip
    scene = scene_of(load_config("ppo-math", path, words).config, GPUS["H200"])
    found = search(
        scene, CALIBRATION, Lengths(mean=679, longest=4096, spread=0.95), num_gpus=2, most=1, num_others=0,
        accepts=lambda one, keys: True,
    )  # fmt: skip
    servers = found.best[0].scene.servers
    assert found.best[0].mode == "sglang.d1m1p1+d1m1p1" and servers is not None and servers.max_running == 384


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"products": 713.0}, "products: must be a number from 1e+08 to 1e+18 (operations per second), not 713.0"),
        (
            {"products": 10**400},
            f"products: must be a number from 1e+08 to 1e+18 (operations per second), not 1{'0' * 59}",
        ),
        ({"memory": 4800}, "memory: must be a number from 1e+08 to 1e+15 (bytes per second), not 4800"),
        ({"memory": None}, "memory: must be a number from 1e+08 to 1e+15 (bytes per second), not None"),
        ({"link": math.inf}, "link: must be a number from 1e+08 to 1e+15 (bytes per second), not inf"),
        ({"link": 1e-300}, "link: must be a number from 1e+08 to 1e+15 (bytes per second), not 1e-300"),
        ({"request_seconds": 1e300}, "request_seconds: must be a number from 0 to 10 (seconds), not 1e+300"),
        ({"decode_layer_seconds": -0.1}, "decode_layer_seconds: must be a number from 0 to 10 (seconds), not -0.1"),
        ({"gib": "80"}, "gib: must be a number from 0 to 2000 (GiB), not '80'"),
        ({"gib": 1e300}, "gib: must be a number from 0 to 2000 (GiB), not 1e+300"),
        ({"gib": math.nan}, "gib: must be a number from 0 to 2000 (GiB), not nan"),
        ({"attention_half_length": -1}, "attention_half_length: must be a number from 0 to 1e+06 (tokens), not -1"),
        ({"attention_narrow": 0}, "attention_narrow: must be a number from 0.01 to 100 (a share), not 0"),
        ({"gpu": 3}, "gpu: must be a text, not 3"),
        ({"speed": 3}, "speed: unknown key"),
    ],
)
def test_a_calibration_with_what_is_no_rate_is_refused(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(vars(CALIBRATION) | change))
    with pytest.raises(PlanError) as error:
        read_calibration(path)
    way_out = "write a new one with slipstream plan --calibrate FILE"
    assert str(error.value) == f"--calibration {path}: {why}; {way_out}"


@pytest.mark.parametrize(
    ("text", "why"),
    [("[]", "must be an object with the keys of a calibration, not []"), ("x", "no JSON: "),
     ("[" * 100_000, "no JSON: maximum recursion depth exceeded"),
     ('{"gpu": "a", "source": "b", "gib": 8}', "products, expert_products, attention_forward, ")],
)  # fmt: skip
def test_what_is_no_calibration_is_refused(tmp_path: Path, text: str, why: str) -> None:
    (path := tmp_path / "rates.json").write_text(text)
    with pytest.raises(PlanError, match=re.escape(f"--calibration {path}: {why}")):
        read_calibration(path)


def test_a_gpu_without_calibration_has_no_times() -> None:
    assert calibration_of("B200") is None
