"""Memory of a run by rank and phase, from a configuration file and models that have nothing but config.json."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allocation import ParallelLayout
from core.checks.rules import load_config
from core.planning.memory import (
    GIB,
    advice,
    cache_bytes_per_token,
    plan_memory,
    server_weights,
    smallest_trainer,
    states_of,
    verdict,
    worst_imbalance,
)
from core.planning.scene import GPUS, Gpu, PlanError, Scene, find_gpu, gpu_of_machine, scene_of
from helpers.plan_recipe import write_recipe
from mcore_adapter.memory.estimate import SPARE
from tools.bench import SHAPES, SLICE

FEW_LAYERS = SHAPES["7B"] | {"hidden_size": 14336, "intermediate_size": 75776, "num_hidden_layers": 1}


def make_scene(folder: Path, *words: str, raw: dict[str, Any] | None = None, gpu: str = "H100") -> Scene:
    path = write_recipe(folder, raw or SHAPES["7B"])
    return scene_of(load_config("ppo-math", path, words).config, find_gpu(gpu))


def test_a_rank_holds_what_its_parts_say(tmp_path: Path) -> None:
    scene = make_scene(tmp_path)
    (rank,) = plan_memory(scene).ranks
    states, parts = states_of(scene.actor, 0), rank.phases[0].parts
    assert rank.num_ranks == 8 and rank.layers == 28
    parameters = sum(states.parameters.values())
    assert parts["weights"] == pytest.approx(2 * parameters, rel=1e-6)
    assert parts["gradients"] == pytest.approx(4 * parameters, rel=1e-6)
    assert parts["masters"] + parts["moments"] == pytest.approx(12 * parameters / 4, rel=1e-6)
    phase = rank.phases[0]
    assert phase.total == pytest.approx(phase.allocated / (1 - SPARE) + parts["context"])


def test_roles_share_the_memory_of_a_rank(tmp_path: Path) -> None:
    alone = plan_memory(make_scene(tmp_path))
    words = ("ppo.kl_ctl=0.1", "ppo.disable_value=false", "critic.init_critic_from_actor=true", "algorithm.name=ppo")
    scene = make_scene(tmp_path, *words)
    phases = {phase.name: phase for phase in plan_memory(scene).ranks[0].phases}
    assert set(phases) == {"actor update", "critic update", "ref log-probs", "weight update"}
    more = sum(states_of(engine, 0).total for engine in scene.engines[1:])
    beside = phases["actor update"].allocated - alone.ranks[0].phases[0].allocated
    assert beside == pytest.approx(more, rel=0.03), "workspaces of their own"


@pytest.mark.parametrize(
    ("words", "less"),
    [
        ("actor.gradient_checkpointing=true", "kept"),
        ("actor.optimizer.offload=true", "optimizer"),
        ("actor.grad_reduce_in_fp32=false", "gradients"),
    ],
)
def test_each_key_lowers_its_part_alone(tmp_path: Path, words: str, less: str) -> None:
    def parts(*given: str) -> dict[str, float]:
        found = dict(plan_memory(make_scene(tmp_path, *given)).ranks[0].phases[0].parts)
        kept = sum(found.pop(name, 0.0) for name in ("residual stream", "attention", "MLP"))
        optimizer = found.pop("masters", 0.0) + found.pop("moments", 0.0)
        return {"kept": kept, "optimizer": optimizer, **{k: found[k] for k in ("weights", "gradients", "context")}}

    before, after = parts(), parts(words)
    assert {name for name in before if after[name] != before[name]} == {less} and after[less] < before[less]


def test_an_earlier_stage_holds_more_passes_and_the_last_one_the_logits(tmp_path: Path) -> None:
    plan = plan_memory(make_scene(tmp_path, "allocation_mode=sglang.d8m1p1+d4p2m1"))
    first, last = (rank.phases[0].parts for rank in plan.ranks)
    assert first["MLP"] == pytest.approx(2 * last["MLP"])
    assert "logits and loss" not in first and plan.ranks[1].peak.detail.startswith("at the output layer")


def test_a_server_caches_what_its_share_leaves_beside_the_weights(tmp_path: Path) -> None:
    scene = make_scene(tmp_path, "allocation_mode=sglang.d4m2p1+d4m2p1", "actor.sglang.mem_fraction_static=0.8")
    plan = plan_memory(scene).servers
    assert scene.servers is not None and plan is not None
    assert server_weights(scene.servers) == pytest.approx(15.231e9 / 2, rel=0.001)
    per_token = 28 * 2 * (4 // 2) * 128 * 2
    assert cache_bytes_per_token(scene.servers) == per_token
    assert plan.tokens == int((0.8 * (79.1 * GIB - plan.context) - plan.weights) / per_token)
    assert plan.longest == plan.tokens // 8192
    small = replace(scene, servers=replace(scene.servers, max_running=2))
    capped = plan_memory(small).servers
    assert capped is not None and capped.tokens == 2 * 2 * 32768, "as the server is started"


IN_TURNS = ("allocation_mode=sglang.d1m1p1|d1m1p1", "n_nodes=1", "n_gpus_per_node=1")


def test_a_gpu_in_turns_holds_what_was_measured(tmp_path: Path) -> None:
    plan = plan_memory(make_scene(tmp_path, *IN_TURNS, raw=SHAPES["1.5B"], gpu="H200"))
    update, push, sampling = plan.ranks[0].phases
    assert [p.name for p in (update, push, sampling)] == ["actor update", "weight update", "sampling"]
    assert plan.fits and plan.servers is not None
    # Of the whole GPU, benchmarks/weight-updates.md: while generating, and with both sides released.
    assert (sampling.allocated + sampling.beside) / GIB == pytest.approx(86.8, rel=0.03)
    released = sampling.allocated + sampling.parts["context"] + update.parts["server"]
    assert released / GIB == pytest.approx(5.7, rel=0.1)
    assert push.allocated - sampling.allocated == sampling.parts["weights"] < 3 * 2**30, "no more than the model"
    assert push.parts["server"] == pytest.approx(update.parts["server"] + plan.servers.weights)
    assert not {"gradients", "masters", "moments"} & {*push.parts, *sampling.parts}
    assert plan.servers.trainer == pytest.approx(sampling.allocated + sampling.parts["context"])
    assert plan.servers.rest == pytest.approx(0.4 * (139.8 * GIB - plan.servers.context) - plan.servers.trainer)


def test_critic_and_reference_leave_a_gpu_while_servers_sample(tmp_path: Path) -> None:
    words = (*IN_TURNS, "ppo.kl_ctl=0.1", "ppo.disable_value=false", "critic.init_critic_from_actor=true")
    scene = make_scene(tmp_path, *words, "algorithm.name=ppo", raw=SHAPES["1.5B"], gpu="H200")
    alone = plan_memory(make_scene(tmp_path, *IN_TURNS, raw=SHAPES["1.5B"], gpu="H200"))
    together, before = plan_memory(scene), alone.ranks[0].phases[-1]
    sampling = together.ranks[0].phases[-1]
    assert sampling.parts["weights"] == before.parts["weights"]
    away = (sampling.allocated - before.allocated) / 1e9
    assert away == pytest.approx(0.2 + 0.1, abs=0.05), "workspaces; 0.2 of the critic in benchmarks/recovery.md"
    states = [states_of(engine, 0) for engine in scene.engines]
    gone = sum(s.weights for s in states[1:]) + sum(s.masters + s.moments for s in states)
    assert together.host["trainer while servers sample"] == pytest.approx(gone)
    offloaded = plan_memory(scene.with_engines(offload=True)).host
    assert offloaded["trainer while servers sample"] == pytest.approx(sum(s.weights for s in states[1:]))


def test_a_server_too_large_beside_the_trainer_is_lowered_until_both_fit(tmp_path: Path) -> None:
    words = (*IN_TURNS, "actor.gradient_checkpointing=true")
    scene = make_scene(tmp_path, *words, "actor.sglang.mem_fraction_static=0.95", raw=SHAPES["1.5B"])
    plan = plan_memory(scene)
    change = advice(scene, plan)[0]
    assert not plan.fits and plan.peak.name == "sampling" and change.fits
    key, _, share = change.keys.partition("=")
    assert key == "generator.flags.mem_fraction_static"
    assert plan_memory(make_scene(tmp_path, *words, change.keys, raw=SHAPES["1.5B"])).fits
    more = f"{key}={float(share) + 0.01:.2f}"
    assert not plan_memory(make_scene(tmp_path, *words, more, raw=SHAPES["1.5B"])).fits, "the largest that fits"
    full = replace(scene, gpu=replace(scene.gpu, gib=8.0))
    assert not any(one.keys.startswith(key) for one in advice(full, plan_memory(full))), "no share is left for a cache"
    small = make_scene(tmp_path, *words, f"{key}=0.02", raw=SHAPES["1.5B"])
    assert verdict(small, plan_memory(small), []).endswith(
        "for the servers, or raise generator.flags.mem_fraction_static."
    )


def test_servers_whose_weights_alone_are_too_large_in_turns_need_more_ranks(tmp_path: Path) -> None:
    layout = ("allocation_mode=sglang.d4m1p1|d1m4p1", "n_nodes=1", "n_gpus_per_node=4")
    words = (*layout, "actor.optimizer.offload=true", "actor.gradient_checkpointing=true")
    words += ("actor.sglang.mem_fraction_static=0.9", "actor_train.mb_spec.max_tokens_per_mb=8192")
    scene = make_scene(tmp_path, *words, gpu="X:20")
    plan = plan_memory(scene)
    text = verdict(scene, plan, advice(scene, plan))
    assert plan.peak.name == "sampling"
    assert text.endswith("Use more tensor-parallel ranks (m) for the servers, or GPUs of their own (+).")


def test_auto_leaves_a_server_in_turns_what_it_keeps(tmp_path: Path) -> None:
    words = ("actor.gradient_checkpointing=auto", "actor_train.mb_spec.max_tokens_per_mb=65536")
    scene = make_scene(tmp_path, *IN_TURNS, *words, raw=SHAPES["1.5B"])
    peak = plan_memory(scene).ranks[0].phases[0]
    assert "recomputed: auto" in peak.detail and peak.beside > peak.parts["context"]
    assert peak.total <= scene.gpu.gib * GIB


def test_experts_lie_on_their_ranks_and_may_all_be_wanted_of_one(tmp_path: Path) -> None:
    layout = "allocation_mode=sglang.d4m2p1+(attn:d8m1p1|ffn:d1m1p1e8)"
    plan = plan_memory(make_scene(tmp_path, layout, raw=SLICE, gpu="H200"))
    assert "with all tokens for the experts of one rank" in plan.ranks[0].peak.detail
    assert SLICE["num_experts"] == 128 and SLICE["num_experts_per_tok"] == 8
    actor = make_scene(tmp_path, layout, raw=SLICE, gpu="H200").actor
    assert worst_imbalance(actor) == 8, "a rank has 16 experts, enough for all eight of a token"
    ranks = replace(actor, layout=ParallelLayout(dp=32, ep=32))
    assert worst_imbalance(ranks) == 16, "four experts a rank: half of the copies"


def test_a_plan_that_fits_has_no_advice_and_one_that_does_not_says_what_helps(tmp_path: Path) -> None:
    fitting = make_scene(tmp_path, gpu="H200")
    plan = plan_memory(fitting)
    assert plan.fits and advice(fitting, plan) == [] and verdict(fitting, plan, []).startswith("It fits")
    tight = make_scene(tmp_path, "allocation_mode=sglang.d8m1p1+d8m1p1", "actor_train.mb_spec.max_tokens_per_mb=32768")
    plan = plan_memory(tight)
    changes = advice(tight, plan)
    assert not plan.fits and changes and changes[0].plan.fits
    as_advised = make_scene(
        tmp_path, "allocation_mode=sglang.d8m1p1+d8m1p1", "actor_train.mb_spec.max_tokens_per_mb=32768",
        *changes[0].keys.split(),
    )  # fmt: skip
    assert plan_memory(as_advised).peak.total == pytest.approx(changes[0].plan.peak.total)


CRITIC = ("ppo.kl_ctl=0.1", "ppo.disable_value=false", "critic.init_critic_from_actor=true", "algorithm.name=ppo")


@pytest.mark.parametrize(
    "words",
    [
        ("ppo.gen.max_new_tokens=15360", "actor_train.mb_spec.max_tokens_per_mb=32768"),
        (*CRITIC, "ppo.gen.max_new_tokens=15360", "actor_train.mb_spec.max_tokens_per_mb=32768"),
        (*CRITIC, "critic_train.mb_spec.max_tokens_per_mb=65536", "critic.optimizer.offload=true"),
        (*CRITIC, "allocation_mode=sglang.d8m1p1+actor_train:d8m1p1,*:d4m2p1"),
    ],
)
def test_advice_promises_what_a_plan_with_its_keys_says(tmp_path: Path, words: tuple[str, ...]) -> None:
    scene = make_scene(tmp_path, *words)
    changes = advice(scene, plan_memory(scene))
    assert changes
    for change in changes:
        if not change.keys.startswith("the trainer as"):
            changed = plan_memory(make_scene(tmp_path, *words, *change.keys.split()))
            assert changed.peak.total == change.plan.peak.total, change.keys
            assert changed.trainer == change.plan.trainer and change.words.endswith(change.plan.trainer)


def test_graphs_of_too_many_requests_are_not_the_weights_of_a_server(tmp_path: Path) -> None:
    scene = make_scene(tmp_path, "generator.max_running=30000")
    text = verdict(scene, plan_memory(scene), [])
    assert text.endswith("The CUDA graphs of a server leave no memory for its cache; lower generator.max_running.")


def test_between_what_is_allocated_and_what_is_safe_a_plan_is_tight(tmp_path: Path) -> None:
    scene = make_scene(tmp_path)
    peak = plan_memory(scene).peak
    context = peak.parts["context"]

    def of(gib: float) -> tuple[bool, bool]:
        plan = plan_memory(replace(scene, gpu=replace(scene.gpu, gib=gib), servers=None))
        return plan.fits, plan.is_tight

    assert of(peak.total / GIB + 0.1) == (True, False)
    assert of(peak.total / GIB - 0.1) == (False, True)
    assert of((peak.allocated + context) / GIB - 0.1) == (False, False)


def test_advice_is_for_layouts_that_divide_the_model_and_its_experts(tmp_path: Path) -> None:
    eight, raw = ("n_nodes=1", "n_gpus_per_node=8"), SLICE | {"num_hidden_layers": 48}
    keys = ("actor.optimizer.offload=true", "actor.gradient_checkpointing=auto")
    scene = make_scene(tmp_path, "allocation_mode=sglang.d2m2p1+(attn:d4m1p1|ffn:d1m1p1e4)", *keys, *eight, raw=raw)
    modes = [change.keys for change in advice(scene, plan_memory(scene)) if "allocation_mode=" in change.keys]
    assert modes == ["allocation_mode=sglang.d2m2p1+d2m2p1e4"], "with two stages, e4 does not divide the ranks of one"
    assert make_scene(tmp_path, *modes, *eight, raw=raw).actor.layout.tp == 2
    one_layer = make_scene(tmp_path, *eight, "allocation_mode=sglang.d6m1p1+d2m1p1", raw=FEW_LAYERS)
    assert all(change.plan.ranks[-1].layers for change in advice(one_layer, plan_memory(one_layer)))


def test_a_rank_on_a_cpu_takes_host_memory(tmp_path: Path) -> None:
    one = ("allocation_mode=embedded.d1m1p1+d1m1p1", "n_nodes=1", "n_gpus_per_node=2")
    scene = make_scene(tmp_path, *one, raw=SHAPES["1.5B"])
    plan = plan_memory(scene)
    assert not scene.on_gpu and plan.host["trainer ranks"] > plan.peak.allocated
    assert plan.peak.beside == 0


def test_a_model_that_fits_nowhere_says_the_smallest_number_of_gpus(tmp_path: Path) -> None:
    one = ("allocation_mode=sglang.d1m1p1+d1m1p1", "n_nodes=1", "n_gpus_per_node=2")
    huge = {**SHAPES["7B"], "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64}
    huge |= {"num_key_value_heads": 8, "intermediate_size": 28672}
    scene = make_scene(tmp_path, *one, raw=huge)
    plan = plan_memory(scene)
    text = verdict(scene, plan, advice(scene, plan))
    where = "as d1m1p16 with all layers recomputed and the optimizer in host memory"
    assert "does not fit" in text and f"The trainer needs at least 16 GPUs of 79 GiB, {where}." in text
    smallest = smallest_trainer(scene)
    assert smallest is not None and plan_memory(smallest).fits
    scene = make_scene(tmp_path, *one, raw=huge | {"hidden_size": 1 << 17, "num_hidden_layers": 500})
    assert "The trainer needs more than 4096 GPUs of 79 GiB" in verdict(scene, plan_memory(scene), [])


@pytest.mark.parametrize(
    "name", ["NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "A100-40GB", "NVIDIA H100 NVL", "H100 94GB"]
)
def test_a_gpu_with_another_memory_than_that_of_the_table_is_not_taken_for_it(name: str) -> None:
    with pytest.raises(PlanError, match=r"(A|H)100 is the one with 79.1 GiB; write (A|H)100:GIB"):
        find_gpu(name)
    assert find_gpu(f"{name}:40") == Gpu(name="A100" if "A100" in name else "H100", gib=40)


@pytest.mark.parametrize(
    ("name", "mib", "gib"),
    [
        ("NVIDIA A100-SXM4-40GB", 40960, 39.4),
        ("NVIDIA A100-SXM4-80GB", 81920, 79.1),
        ("NVIDIA H100 NVL", 95830, 93.0),
        ("NVIDIA H100 80GB HBM3", 81559, 79.1),
        ("NVIDIA H200", 143771, 139.8),
        ("NVIDIA L4", 23034, 21.9),
    ],
)
def test_the_memory_of_this_machine_is_what_its_driver_reports(name: str, mib: int, gib: float, tmp_path, monkeypatch):
    # Not every host of tests has a GPU.
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ncase $1 in *gpu=*) echo 0, GPU-1, {name}, 0, {mib}, 0;; esac\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpu = gpu_of_machine()
    assert gpu is not None and gpu.gib == pytest.approx(gib, abs=0.05) and gpu.host_bytes


def test_bad_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"--gpu B300: unknown; known: H100, H200, A100.*NAME:GIB.*calibration"):
        find_gpu("B300")
    assert find_gpu("H100:40").gib == 40, "a part of a GPU that is in the table"
    for text in ("H100:0", "B200:nan", ":3", "H100:"):
        with pytest.raises(PlanError, match=f"--gpu {text}: NAME:GIB needs a name, and a number above 0"):
            find_gpu(text)
    with pytest.raises(PlanError, match="--gpu '': unknown"):
        find_gpu("")
    assert find_gpu("RTX 4090:24").name == "RTX 4090" and find_gpu("B200:1.78e2").gib == 178
    assert find_gpu("B200:178").gib == 178 and find_gpu("NVIDIA H100 80GB HBM3") == GPUS["H100"]
    with pytest.raises(PlanError, match=r"1024 \+ 40000 = 41024 tokens, max_position_embeddings=32768; lower"):
        make_scene(tmp_path, "ppo.gen.max_new_tokens=40000", "actor_train.mb_spec.max_tokens_per_mb=50000")
    path = write_recipe(tmp_path, SHAPES["7B"])
    (tmp_path / "model/config.json").write_text('{"model_type": ')
    with pytest.raises(PlanError, match=r"actor.path: .*config.json"):
        scene_of(load_config("ppo-math", path).config, GPUS["H100"])
