"""Memory of a run by rank and phase, from a configuration file and models that have nothing but config.json."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from allocation import ParallelLayout
from core.checks.rules import load_config
from core.planning.advice import verdict
from core.planning.memory import plan_memory, worst_imbalance
from core.planning.scene import GPUS, Gpu, PlanError, find_gpu, gpu_of_machine, scene_of
from core.planning.server_memory import GIB, cache_bytes_per_token, server_weights
from helpers.plan_recipe import make_scene, write_recipe
from mcore_adapter.memory.estimate import SPARE
from tools.bench import SHAPES, SLICE


def test_a_rank_holds_what_its_parts_say(tmp_path: Path) -> None:
    scene = make_scene(tmp_path)
    (rank,) = plan_memory(scene).ranks
    states, parts = scene.actor.states(0), rank.phases[0].parts
    assert len(rank.ranks) == 8 and rank.layers == 28
    parameters = sum(states.parameters.values())
    assert parts["weights"] == pytest.approx(2 * parameters, rel=1e-6)
    assert parts["gradients"] == pytest.approx(4 * parameters, rel=1e-6)
    assert parts["masters"] + parts["moments"] == pytest.approx(12 * parameters / 4, rel=1e-6)
    phase = rank.phases[0]
    assert phase.total == pytest.approx(phase.allocated / (1 - SPARE) + parts["context"] + parts["NCCL"])


def test_roles_share_the_memory_of_a_rank(tmp_path: Path) -> None:
    alone = plan_memory(make_scene(tmp_path))
    words = ("ppo.kl_ctl=0.1", "ppo.disable_value=false", "critic.init_critic_from_actor=true", "algorithm.name=ppo")
    scene = make_scene(tmp_path, *words)
    phases = {phase.name: phase for phase in plan_memory(scene).ranks[0].phases}
    assert set(phases) == {"actor update", "critic update", "ref log-probs", "weight update"}
    more = sum(engine.states(0).total for engine in scene.engines[1:])
    actor = alone.ranks[0].phases[0]
    beside = phases["actor update"].allocated - actor.allocated
    assert beside == pytest.approx(more, rel=0.03), "workspaces of their own"
    assert phases["actor update"].beside == actor.beside, "in one process"


def test_models_in_different_layouts_have_processes_of_their_own(tmp_path: Path) -> None:
    words = ("ppo.kl_ctl=0.1", "ppo.disable_value=false", "critic.init_critic_from_actor=true", "algorithm.name=ppo")
    mode = "allocation_mode=sglang.d8m1p1+actor_train:d8m1p1,critic_train:d4p2m1,ref_inf:d4p2m1"
    plan = plan_memory(make_scene(tmp_path, *words, mode))
    alone = plan_memory(make_scene(tmp_path, "allocation_mode=sglang.d8m1p1+d8m1p1"))
    assert [plan.name_of(rank) for rank in plan.ranks] == ["ranks 0 to 3", "ranks 4 to 7"]
    assert plan.ranks[0].models["critic"] != plan.ranks[1].models["critic"], "embedding, and value head"
    for rank in plan.ranks:
        phases = {phase.name: phase for phase in rank.phases}
        assert phases["actor update"].allocated == pytest.approx(alone.ranks[0].phases[0].allocated)
        critic = max(phases["critic update"].of_process, phases["ref log-probs"].of_process)
        assert phases["actor update"].parts["other roles"] == pytest.approx(critic)
        assert phases["critic update"].parts["other roles"] == pytest.approx(phases["actor update"].of_process)
        assert critic > phases["critic update"].allocated / (1 - SPARE)
    assert plan.host["trainer ranks"] == pytest.approx(2 * alone.host["trainer ranks"])


def test_log_probabilities_of_experts_take_their_copies_of_tokens(tmp_path: Path) -> None:
    words = ("ppo.kl_ctl=0.1", "allocation_mode=sglang.d4m2p1+(attn:d8m1p1|ffn:d1m1p1e8)")
    scene = make_scene(tmp_path, *words, raw=SLICE)
    phase = next(phase for phase in plan_memory(scene).ranks[0].phases if phase.name == "ref log-probs")
    copies = 16384 * 8 * (2 * 2048 + 3 * 768) * 2
    assert copies < phase.parts["activations"] < 1.5 * copies


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


@pytest.mark.parametrize("value", ["0", "-1", "1", "2", "abc", "[1]", "true", "nan"])
def test_a_share_of_a_gpu_is_a_number_between_0_and_1(tmp_path: Path, value: str) -> None:
    for key in ("actor.sglang.mem_fraction_static", "generator.flags.mem-fraction-static"):
        with pytest.raises(
            PlanError, match=rf"(?i){key}: must be a number above 0 and below 1, not .*{re.escape(value)}"
        ):
            make_scene(tmp_path, f"{key}={value}")


def test_a_share_of_null_is_not_given(tmp_path: Path) -> None:
    words = ("actor.sglang.mem_fraction_static=0.5", "generator.flags.mem_fraction_static=null")
    assert make_scene(tmp_path, *words).servers == make_scene(tmp_path).servers


def test_a_share_that_leaves_too_little_for_graphs_and_activations_is_lowered(tmp_path: Path) -> None:
    def plan(share: float, *words: str) -> tuple[bool, str]:
        scene = make_scene(tmp_path, f"generator.flags.mem_fraction_static={share:g}", *words, gpu="H200")
        found = plan_memory(scene)
        return found.fits, verdict(scene, found, [])

    fits, text = plan(0.999)
    share = re.search("graphs and activations; lower generator.flags.mem_fraction_static to ([0-9.]+)[.]$", text)
    assert not fits and share
    largest = float(share[1])
    assert plan(largest)[0] and not plan(largest + 0.01)[0], "the largest that leaves room"
    fits, text = plan(0.999, "generator.max_running=100000")
    assert not fits and "lower generator.max_running" in text, "no share leaves room"
    tiny = make_scene(tmp_path, "generator.flags.mem_fraction_static=0.9", gpu="X:0.7")  # all is CUDA's context
    assert "weights of a server leave no memory" in verdict(tiny, plan_memory(tiny), [])


def test_a_share_of_a_shared_gpu_that_is_too_large_is_missing_in_the_phase_of_sampling(tmp_path: Path) -> None:
    words = ("allocation_mode=sglang.d8m1p1|d4m2p1", "n_nodes=1", "staleness.max_staleness=0")
    scene = make_scene(tmp_path, *words, "generator.flags.mem_fraction_static=0.999", gpu="H200")
    plan = plan_memory(scene)
    assert "missing in the sampling." in verdict(scene, plan, []) and plan.servers is not None
    assert plan.servers.tokens > 0 and plan.servers.largest_share is None


def test_servers_of_the_auxiliary_model_are_planned_too(tmp_path: Path) -> None:
    judge = tmp_path / "judge"
    judge.mkdir()
    wide = {"hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672}
    (judge / "config.json").write_text(json.dumps(SHAPES["7B"] | wide))
    for servers, fits in (("d4m1p1", False), ("d2m2p1", True)):
        words = (
            f"allocation_mode=sglang.{servers}+d4m1p1",
            f"auxiliary.path={judge}",
            "n_nodes=1",
            "n_gpus_per_node=8",
        )
        scene = make_scene(tmp_path, *words, "actor.gradient_checkpointing=auto", raw=SHAPES["1.5B"], gpu="H100:40")
        plan = plan_memory(scene)
        assert plan.servers is not None and plan.servers.tokens > 0 and plan.auxiliary is not None
        assert plan.auxiliary.weights > 10 * plan.servers.weights and plan.fits == fits == (plan.auxiliary.tokens > 0)
        assert plan.host["servers"] == 4 * 4e9
        said = "The weights of a server of the auxiliary model leave no memory for its cache"
        assert (said in verdict(scene, plan, [])) != fits


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
    states = [engine.states(0) for engine in scene.engines]
    gone = sum(s.weights for s in states[1:]) + sum(s.masters + s.moments for s in states)
    assert together.host["trainer while servers sample"] == pytest.approx(gone)
    offloaded = plan_memory(scene.with_engines(offload=True)).host
    assert offloaded["trainer while servers sample"] == pytest.approx(sum(s.weights for s in states[1:]))


def test_auto_leaves_a_server_in_turns_what_it_keeps(tmp_path: Path) -> None:
    words = ("actor.gradient_checkpointing=auto", "actor_train.mb_spec.max_tokens_per_mb=65536")
    scene = make_scene(tmp_path, *IN_TURNS, *words, raw=SHAPES["1.5B"])
    peak = plan_memory(scene).ranks[0].phases[0]
    assert "recomputed: auto" in peak.detail and peak.beside > peak.parts["context"]
    assert peak.total <= scene.gpu.gib * GIB


def test_experts_lie_on_their_ranks_and_may_all_be_wanted_of_one(tmp_path: Path) -> None:
    layout = "allocation_mode=sglang.d4m2p1+(attn:d8m1p1|ffn:d1m1p1e8)"
    assert SLICE["num_experts"] == 128 and SLICE["num_experts_per_tok"] == 8
    actor = make_scene(tmp_path, layout, raw=SLICE, gpu="H200").actor
    assert worst_imbalance(actor) == 8, "a rank has 16 experts, enough for all eight of a token"
    ranks = replace(actor, layout=ParallelLayout(dp=32, ep=32))
    assert worst_imbalance(ranks) == 16, "four experts a rank: half of the copies"


def test_between_what_is_allocated_and_what_is_safe_a_plan_is_tight(tmp_path: Path) -> None:
    scene = make_scene(tmp_path)
    peak = plan_memory(scene).peak
    context = peak.beside

    def of(gib: float) -> tuple[bool, bool]:
        plan = plan_memory(replace(scene, gpu=replace(scene.gpu, gib=gib), servers=None))
        return plan.fits, plan.is_tight

    assert of(peak.total / GIB + 0.1) == (True, False)
    assert of(peak.total / GIB - 0.1) == (False, True)
    assert of((peak.allocated + context) / GIB - 0.1) == (False, False)


def test_a_rank_on_a_cpu_takes_host_memory(tmp_path: Path) -> None:
    one = ("allocation_mode=embedded.d1m1p1+d1m1p1", "n_nodes=1", "n_gpus_per_node=2")
    scene = make_scene(tmp_path, *one, raw=SHAPES["1.5B"])
    plan = plan_memory(scene)
    assert not scene.on_gpu and plan.host["trainer ranks"] > plan.peak.allocated
    assert plan.peak.beside == 0 and plan.peak.total == plan.peak.allocated, "no allocator that fragments"
    small = plan_memory(replace(scene, host_bytes=plan.host_total - 1))
    assert scene.host_bytes and plan.fits == (plan.host_total <= scene.host_bytes) and not small.fits


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
    for text in ("H100:0", "B200:nan", ":3", "H100:", "B200:178:3", "H100:2001"):
        with pytest.raises(PlanError, match=f"--gpu {text}: NAME:GIB needs a name without a colon, and a number above"):
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
