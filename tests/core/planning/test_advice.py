"""What the planner says of a run that does not fit: the verdict, and changes that help."""

from dataclasses import replace
from pathlib import Path

import pytest

from core.planning.advice import advice, smallest_trainer, verdict, with_worst_routing
from core.planning.memory import plan_memory
from core.planning.scene import Scene
from core.planning.server_memory import GIB
from helpers.plan_recipe import make_scene
from tools.bench import SHAPES, SLICE

FEW_LAYERS = SHAPES["7B"] | {"hidden_size": 14336, "intermediate_size": 75776, "num_hidden_layers": 1}
IN_TURNS = ("allocation_mode=sglang.d1m1p1|d1m1p1", "n_nodes=1", "n_gpus_per_node=1")
CRITIC = ("ppo.kl_ctl=0.1", "ppo.disable_value=false", "critic.init_critic_from_actor=true", "algorithm.name=ppo")


def test_a_server_too_large_beside_the_trainer_is_lowered_until_both_fit(tmp_path: Path) -> None:
    words = (*IN_TURNS, "actor.gradient_checkpointing=true")
    scene = make_scene(tmp_path, *words, "actor.sglang.mem_fraction_static=0.95", raw=SHAPES["1.5B"])
    plan = plan_memory(scene)
    change = advice(scene, plan)[0]
    assert not plan.fits and plan.peak.name == "sampling" and change.helps
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
        changed = plan_memory(make_scene(tmp_path, *words, *change.keys.split()))
        assert changed.peak.total == change.plan.peak.total, change.keys
        assert changed.trainer == change.plan.trainer and change.words.endswith(change.plan.trainer)


def test_a_change_is_named_once(tmp_path: Path) -> None:
    words = ("actor.gradient_checkpointing=auto", "actor_train.mb_spec.max_tokens_per_mb=65536")
    scene = make_scene(tmp_path, "allocation_mode=sglang.d8m1p1+d8m1p1", *words)
    keys = [change.keys for change in advice(scene, plan_memory(scene))]
    assert "actor.optimizer.offload=true" in keys and len(keys) == len(set(keys)) == 3


def test_advice_combines_a_layout_with_keys_where_neither_suffices(tmp_path: Path) -> None:
    scene = make_scene(tmp_path, *CRITIC, "allocation_mode=sglang.d8m1p1+d8m1p1", gpu="X:50")
    changes = advice(scene, plan_memory(scene))
    assert changes and all(change.helps for change in changes)
    assert all(change.keys.startswith("allocation_mode=sglang.d8m1p1+d") for change in changes)
    assert any("gradient_checkpointing=auto" in change.keys for change in changes)
    assert "The trainer needs" not in verdict(scene, plan_memory(scene), changes)


def test_a_run_on_the_cpu_takes_less_host_memory_with_recomputation(tmp_path: Path) -> None:
    words = ("allocation_mode=embedded.d1m1p1+d1m1p1", "n_nodes=1", "n_gpus_per_node=2")
    scene = make_scene(tmp_path, *words, raw=SHAPES["1.5B"])
    small = replace(scene, host_bytes=plan_memory(scene).host_total - 50 * GIB)
    (change,) = advice(small, plan_memory(small))
    assert change.keys == "actor.gradient_checkpointing=true" and change.helps
    as_advised = plan_memory(make_scene(tmp_path, *words, change.keys, raw=SHAPES["1.5B"]))
    assert as_advised.host_total == change.plan.host_total


def test_graphs_of_too_many_requests_are_not_the_weights_of_a_server(tmp_path: Path) -> None:
    scene = make_scene(tmp_path, "generator.max_running=30000")
    text = verdict(scene, plan_memory(scene), [])
    assert text.endswith("The CUDA graphs of a server leave no memory for its cache; lower generator.max_running.")


def test_advice_is_for_layouts_that_divide_the_model_and_its_experts(tmp_path: Path) -> None:
    eight, raw = ("n_nodes=1", "n_gpus_per_node=8"), SLICE | {"num_hidden_layers": 48}
    keys = ("actor.optimizer.offload=true", "actor.gradient_checkpointing=auto")
    scene = make_scene(tmp_path, "allocation_mode=sglang.d2m2p1+(attn:d4m1p1|ffn:d1m1p1e4)", *keys, *eight, raw=raw)
    modes = [change.keys for change in advice(scene, plan_memory(scene)) if "allocation_mode=" in change.keys]
    layouts = ["d2m2p1e4", "d1m4p1e4", "d1m2p1c2e4"]
    assert modes == [f"allocation_mode=sglang.d2m2p1+{one}" for one in layouts], "with two stages, e4 does not divide"
    assert make_scene(tmp_path, modes[0], *eight, raw=raw).actor.layout.tp == 2
    one_layer = make_scene(tmp_path, *eight, "allocation_mode=sglang.d6m1p1+d2m1p1", raw=FEW_LAYERS)
    assert all(change.plan.ranks[-1].layers for change in advice(one_layer, plan_memory(one_layer)))


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
    single = smallest_trainer(replace(scene, sequences=1, prompts=1, group_size=1, minibatches=1, answer_tokens=64))
    assert single is not None and single.actor.layout.dp == 1, "one sequence has one data-parallel rank"
    scene = make_scene(tmp_path, *one, raw=huge | {"hidden_size": 1 << 17, "num_hidden_layers": 500})
    assert "The trainer needs more than 4096 GPUs of 79 GiB" in verdict(scene, plan_memory(scene), [])


def test_host_memory_that_a_node_lacks_is_part_of_the_verdict(tmp_path: Path) -> None:
    words = ("actor.optimizer.offload=true",)
    scene = make_scene(tmp_path, *words, gpu="H200")
    plan = plan_memory(scene)
    needs = f"node needs about {plan.host_total / GIB:.0f}"
    assert plan.fits and verdict(scene, plan, []).endswith(f" A {needs} GiB of host memory.")
    enough = replace(scene, host_bytes=plan.host_total)
    assert plan_memory(enough).fits and "host memory" not in verdict(enough, plan_memory(enough), [])
    small = replace(scene, host_bytes=plan.host_total - 10 * GIB)
    lacking = plan_memory(small)
    changes = advice(small, lacking)
    assert not lacking.fits and not lacking.is_tight
    assert verdict(small, lacking, changes) == f"It does not fit: 10 GiB of host memory are missing: a {needs}."
    assert [change.keys for change in changes] == ["actor.optimizer.offload=false", "recover_mode=disabled"]
    for change in changes:
        changed = plan_memory(make_scene(tmp_path, *words, *change.keys.split(), gpu="H200"))
        gives = plan.host_total - changed.host_total
        assert gives > 10 * GIB and change.words == f"{gives / GIB:.0f} GiB less host memory, fits"


def test_changes_that_do_not_give_enough_host_memory_alone_are_proposed_together(tmp_path: Path) -> None:
    scene = make_scene(tmp_path, "actor.optimizer.offload=true", gpu="H200")
    least = plan_memory(make_scene(tmp_path, "recover_mode=disabled", gpu="H200")).host_total
    for limit, fits in ((least, True), (least - GIB, False)):
        small = replace(scene, host_bytes=limit)
        changes = advice(small, plan_memory(small))
        assert changes[-1].keys == "actor.optimizer.offload=false recover_mode=disabled"
        assert [change.helps for change in changes] == [False, False, fits]
        text = verdict(small, plan_memory(small), changes)
        assert text.endswith(" Use nodes with more memory.") != fits


def test_what_a_host_lacks_is_not_moved_to_a_gpu_that_lacks_it_too(tmp_path: Path) -> None:
    scene = make_scene(tmp_path, "actor.optimizer.offload=true", "actor.gradient_checkpointing=true")
    gib = plan_memory(scene).peak.total / GIB + 1
    scene = replace(scene, gpu=replace(scene.gpu, gib=gib))
    plan = plan_memory(scene)
    small = replace(scene, host_bytes=plan.host_total - GIB)
    assert plan.fits and plan_memory(scene.with_engines(offload=False)).trainer == "does not fit"
    assert [change.keys for change in advice(small, plan_memory(small))] == ["recover_mode=disabled"]
    tight = replace(scene, gpu=replace(scene.gpu, gib=(plan.peak.allocated + plan.peak.beside) / GIB + 0.5))
    assert plan_memory(tight).is_tight and not plan_memory(replace(tight, host_bytes=GIB)).is_tight


def test_what_a_gpu_lacks_is_not_moved_to_a_host_that_lacks_it_too(tmp_path: Path) -> None:
    scene = make_scene(tmp_path, "allocation_mode=sglang.d8m1p1+d8m1p1", "ppo.gen.max_new_tokens=15360")
    plan = plan_memory(scene)
    assert any("offload=true" in change.keys for change in advice(scene, plan))
    full = replace(scene, host_bytes=plan.host_total)
    assert plan.trainer == "does not fit"
    assert not any("offload=true" in change.keys for change in advice(full, plan_memory(full)))


def test_the_verdict_says_what_the_worst_routing_of_experts_takes(tmp_path: Path) -> None:
    layout = "allocation_mode=sglang.d4m2p1+(attn:d8m1p1|ffn:d1m1p1e8)"
    scene = make_scene(tmp_path, layout, raw=SLICE)
    worst = with_worst_routing(scene)
    assert worst is not None and with_worst_routing(make_scene(tmp_path)) is None
    balanced, needed = plan_memory(scene).peak.total, plan_memory(worst).peak.total

    def said(of: float) -> str:
        sized = replace(scene, gpu=replace(scene.gpu, gib=of / GIB))
        return verdict(sized, plan_memory(sized), [])

    routing = "With the worst routing, if all tokens choose the experts of one rank, "
    assert f"2.0 GiB of a GPU remain. {routing}" in said(balanced + 2 * GIB) and needed > balanced + 3 * GIB
    fewer = "actor_train.mb_spec.max_tokens_per_mb=8192: needs "
    assert f"{routing}1.0 GiB are missing in the actor update. {fewer}" in said(needed - GIB)
    assert f"{routing}1.5 remain." in said(needed + 1.5 * GIB)


def test_auto_does_not_know_the_worst_routing_before_memory_runs_out(tmp_path: Path) -> None:
    layout = "allocation_mode=sglang.d4m2p1+(attn:d8m1p1|ffn:d1m1p1e8)"
    plain, auto = (
        make_scene(tmp_path, layout, f"actor.gradient_checkpointing={level}", raw=SLICE) for level in ("false", "auto")
    )
    gib = plan_memory(plain).peak.total / GIB + 1

    def worst_of(scene: Scene, gib: float) -> tuple[float, str]:
        sized = replace(scene, gpu=replace(scene.gpu, gib=gib))
        worst, plan = with_worst_routing(sized), plan_memory(sized)
        assert worst is not None and plan.fits
        return plan_memory(worst).peak.total, verdict(sized, plan, [])

    needed, said = worst_of(auto, gib)
    assert needed == worst_of(plain, gib)[0] > gib * GIB, "layers recompute as with balanced experts"
    missing = f"{needed / GIB - gib:.1f} GiB are missing in the actor update. "
    assert f"{missing}gradient_checkpointing=auto recomputes more after memory has run out, and then it fits." in said
    least = plan_memory(auto.with_engines(recompute="full")).peak.total / GIB + 0.1
    assert "memory has run out" not in worst_of(auto, least)[1], "with all layers recomputed it does not fit either"


def test_a_change_fits_only_where_the_whole_run_does(tmp_path: Path) -> None:
    words = ("allocation_mode=sglang.d8m1p1+d8m1p1", "ppo.gen.max_new_tokens=15360")
    words += ("actor_train.mb_spec.max_tokens_per_mb=32768",)
    scene = make_scene(tmp_path, *words)
    plan = plan_memory(scene)
    small = replace(scene, host_bytes=plan.host_total - GIB)
    lacking = plan_memory(small)
    assert lacking.host_missing and lacking.trainer == "does not fit"
    *single, both = advice(small, lacking)
    assert single and all(change.words.endswith(("the trainer fits", "the host fits")) for change in single)
    assert {change.of_host for change in single} == {False, True}
    assert both.words.endswith(" GiB less host memory, fits") and both.words.startswith("needs ")
    assert [change.plan.fits for change in (*single, both)] == [False] * len(single) + [True]
    loaded = make_scene(tmp_path, *words, *both.keys.split())
    assert plan_memory(replace(loaded, host_bytes=small.host_bytes)) == both.plan
    offloaded = next(change for change in advice(scene, plan) if "offload=true" in change.keys)
    assert f", {-offloaded.host_gain / GIB:.0f} GiB more host memory, fits" in offloaded.words


def test_small_sizes_of_host_memory_have_a_decimal(tmp_path: Path) -> None:
    tiny = SHAPES["1.5B"] | {"num_hidden_layers": 1, "vocab_size": 1024}
    words = ("allocation_mode=embedded.d1m1p1+d1m1p1", "n_nodes=1", "n_gpus_per_node=2")
    scene = make_scene(tmp_path, *words, raw=tiny)
    needs = plan_memory(scene).host_total
    small = replace(scene, host_bytes=needs - 0.2 * GIB)
    said = f"0.2 GiB of host memory are missing: a node needs about {needs / GIB:.1f}."
    assert needs < 10 * GIB and said in verdict(small, plan_memory(small), [])
