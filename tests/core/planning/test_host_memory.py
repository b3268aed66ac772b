"""Memory of a rank: against what processes of measured updates took, and host memory against bytes that a real engine
keeps."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from allocation import ParallelLayout
from core.planning.host_memory import host_of_rank
from core.planning.memory import engine_peak, plan_memory
from core.planning.scene import GPUS, Scene
from core.planning.server_memory import GIB
from helpers.plan_recipe import make_scene
from mcore_adapter.memory.estimate import checkpoint_pieces, page_locked
from tools.bench import MODELS, SLICE
from tools.bench.gpu.plan import CASES, Case

MEASURED = Path(__file__).parents[3] / "benchmarks/predictions/memory-measured.json"


def scene_of_case(case: Case) -> Scene:
    return Scene(
        gpu=GPUS["H200"], on_gpu=True, engines=(replace(case.engine, is_drawn=True),), servers=None, shares_gpus=False,
        n_nodes=1, n_gpus_per_node=8, bucket_bytes=0, sequences=1, prompts=1, group_size=1, minibatches=1,
        prompt_tokens=case.length, answer_tokens=0, max_staleness=0, writes_checkpoints=False,
    )  # fmt: skip


def test_a_rank_takes_the_memory_of_a_gpu_that_was_measured() -> None:
    """Print each row, then the median and the largest error."""
    measured, errors = json.loads(MEASURED.read_text()), []
    for case in CASES:
        for stage, row in enumerate(measured[str(case)]["stages"]):
            found = engine_peak(case.engine, stage, longest=max(case.lengths))
            errors.append(abs(found / row["peak"] - 1))
            print(f"{case}, stage {stage}: {found / 1e9:.2f} GB, {row['peak'] / 1e9:.2f} measured")
    print(f"median {median(errors):.1%}, worst {max(errors):.1%}")
    assert len(errors) == 30 and median(errors) < 0.002 and max(errors) < 0.01


def test_a_rank_takes_the_host_memory_that_was_measured() -> None:
    """Print each row, then the median and the largest error."""
    measured, errors = json.loads(MEASURED.read_text()), {}
    for case in CASES:
        scene = scene_of_case(case)
        for plan, row in zip(plan_memory(scene).ranks, measured[str(case)]["stages"], strict=True):
            found = host_of_rank(scene, plan.use)
            errors[case, plan.stage] = found / row["host"] - 1
            print(f"{case}, stage {plan.stage}: {found / 1e9:.2f} GB, {row['host'] / 1e9:.2f} measured")
    sizes = sorted(map(abs, errors.values()))
    print(f"median {median(sizes):.1%}, worst {sizes[-1]:.1%}")
    assert len(sizes) == 30 and sizes[-1] < 0.05 and median(sizes) < 0.01


def test_the_first_data_parallel_rank_copies_a_checkpoint(tmp_path: Path) -> None:
    scene = make_scene(tmp_path)
    with_moments = plan_memory(scene.in_layout(ParallelLayout(tp=8))).host
    wide = scene.in_layout(ParallelLayout(tp=8)).actor.states(0)
    sizes = (4 * wide.weights // 2, 2 * sum(wide.parameters.values()))
    assert with_moments["recover checkpoint"] == 8 * (3 * page_locked(sizes[0]) + page_locked(sizes[1]))
    without = plan_memory(replace(scene, writes_checkpoints=False)).host
    assert "recover checkpoint" not in without


def test_a_node_has_no_more_of_a_checkpoint_than_its_own_ranks(tmp_path: Path) -> None:
    words = ("allocation_mode=sglang.d8m1p1+(attn:d16m1p1|ffn:d1m1p1e16)", "n_nodes=3")
    scene = make_scene(tmp_path, *words, raw=SLICE)
    whole = plan_memory(replace(scene, n_gpus_per_node=16)).host["recover checkpoint"]
    half = plan_memory(scene).host["recover checkpoint"]
    pieces = checkpoint_pieces(scene.actor.config, scene.actor.layout, pp_rank=0)
    assert {piece.num_ranks for piece in pieces} == {1, 16}
    assert whole - half == 8 * sum(page_locked(piece.num_bytes) for piece in pieces if piece.num_ranks == 16)


def test_activations_go_to_the_host_memory_that_the_engine_will_find(tmp_path: Path) -> None:
    words = ("actor.gradient_checkpointing=auto", "actor_train.mb_spec.max_tokens_per_mb=131072")
    scene = make_scene(tmp_path, *words, "recover_mode=disabled", "actor.optimizer.offload=true", gpu="X:50")
    elsewhere = plan_memory(scene)
    hint = "--host-gib"
    assert "activations" not in elsewhere.host and hint in elsewhere.ranks[0].phases[0].detail
    taken = sum(elsewhere.host.values())
    here = plan_memory(replace(scene, host_bytes=taken + 800 * GIB))
    assert 0 < here.host["activations"] <= 0.6 * 800 * GIB and hint not in here.ranks[0].phases[0].detail
    given = plan_memory(scene.with_engines(host_gib=0.6 * 800 / 8))
    assert given.host["activations"] == pytest.approx(here.host["activations"], rel=0.2)
    none = plan_memory(scene.with_engines(host_gib=0.0))
    assert "activations" not in none.host and hint not in none.ranks[0].phases[0].detail


def test_earlier_stages_move_the_activations_of_more_passes(tmp_path: Path) -> None:
    scene = make_scene(tmp_path, "recover_mode=disabled").with_engines(recompute="offload")
    layout = ParallelLayout(dp=4, pp=2)
    plan = plan_memory(scene.in_layout(layout))
    first, last = (rank.phases[0].on_host for rank in plan.ranks)
    assert first == 2 * last and plan.host["activations"] == 4 * (first + last)


def test_random_weights_take_host_memory_before_updates_do(tmp_path: Path) -> None:
    words = ("recover_mode=disabled", "allocation_mode=sglang.d8m1p1+d8m1p1")
    loaded, drawn = (make_scene(tmp_path, *words, *more) for more in ((), ("actor.init_from_scratch=true",)))
    host = plan_memory(drawn).host
    assert "random weights" not in plan_memory(loaded).host
    assert host["random weights"] > 8 * 6 * 152064 * 3584, "of the embedding in float32, and in bfloat16"


def test_a_run_on_a_cpu_takes_no_more_than_its_batch_and_its_model_need(tmp_path: Path) -> None:
    one = ("allocation_mode=embedded.d1m1p1+d2m1p1", "n_nodes=1", "n_gpus_per_node=3", "recover_mode=disabled")
    small = ("dataset.max_prompt_len=16", "ppo.gen.max_new_tokens=48", "dataset.train_bs_n_seqs=4")
    scene = make_scene(tmp_path, *one, *small)
    assert scene.actor.microbatch_tokens == 4 * 8 * 64 // 2 < scene.actor.tokens
    parts = {phase.name: phase.parts for phase in plan_memory(scene).ranks[0].phases}
    states, whole = scene.actor.states(0), 4 * sum(scene.actor.states(0).parameters.values())
    assert parts["actor optimizer"]["buckets"] == states.gradients, "gloo reduces them in a copy"
    assert parts["weight update"]["buckets"] == min(3 * scene.bucket_bytes, whole)
    assert plan_memory(scene).host["copy of the weights"] == whole, "in the object store"


def test_episodes_wait_in_the_store_and_their_experts_with_them(tmp_path: Path) -> None:
    scene = make_scene(tmp_path, "staleness.max_staleness=2")
    batch = 16 * 8 * 8192 * 13
    assert plan_memory(scene).host["episodes"] == (2 + 3) * batch
    stored = make_scene(tmp_path, "staleness.max_staleness=2", "experience.store=sqlite", "experience.path=e.sqlite")
    assert plan_memory(stored).host["episodes"] == 2 * batch


@pytest.mark.parametrize(("mode", "servers"), [("d8m1p1+d8m1p1", 0), ("d12m1p1+d4m1p1", 4), ("d16m1p1|d16m1p1", 8)])
def test_servers_count_where_the_trainer_leaves_them_gpus(tmp_path: Path, mode: str, servers: int) -> None:
    host = plan_memory(make_scene(tmp_path, f"allocation_mode=sglang.{mode}")).host
    assert host.get("servers", 0) == servers * 4e9


@pytest.mark.parametrize(
    ("model", "mode", "measured"), [("0.6B", "d1m1p1+d1m1p1", 23.4), ("1.5B", "d2m1p1|d2m1p1", 62.5)]
)
def test_a_run_takes_the_host_memory_that_was_measured(tmp_path: Path, model: str, mode: str, measured: float) -> None:
    """benchmarks/planner.md, Host memory: without the copies that torch's writer made then, in GB."""
    words = (f"allocation_mode=sglang.{mode}", "n_nodes=1", "n_gpus_per_node=2", "actor.init_from_scratch=true")
    sizes = ("dataset.train_bs_n_seqs=60", "dataset.max_prompt_len=32", "ppo.gen.max_new_tokens=256")
    scene = make_scene(tmp_path, *words, *sizes, raw=MODELS[model], gpu="H200")
    assert plan_memory(scene).host_total / 1e9 == pytest.approx(measured, rel=0.05)
