"""The text of allocation_mode: every dialect, its canonical form, and what a wrong one is answered."""

import pytest

from allocation import ROLES, Allocation, AllocationError, ParallelLayout, parse


def layouts(allocation: Allocation) -> dict[str, str]:
    return {role: str(placed.layout) for role, placed in allocation.roles.items()}


def error_of(text: str, n_nodes: int = 1, n_gpus_per_node: int = 8) -> AllocationError:
    with pytest.raises(AllocationError) as caught:
        parse(text, n_nodes=n_nodes, n_gpus_per_node=n_gpus_per_node)
    return caught.value


@pytest.mark.parametrize(
    ("text", "n_nodes", "canonical"),
    [
        ("sglang.d4m2p1+d2m4p1", 2, "sglang.d4m2p1+d2m4p1"),
        ("d2m4p1+sglang.d4m2p1", 2, "sglang.d4m2p1+d2m4p1"),
        ("sglang.d4p1m1+d2p2m1", 1, "sglang.d4m1p1+d2m1p2"),
        ("mock.m2p1d2+p1m4", 1, "mock.d2m2p1+d1m4p1"),
        ("  sglang : d4  +  megatron : d4 ", 1, "sglang.d4m1p1+d4m1p1"),
        ("sglang:d4t2p1+megatron:d2t2p2c1e4", 2, "sglang.d4m2p1+d2m2p2e4"),
        ("sglang:d4t2+megatron:d1t2p2c2v3", 2, "sglang.d4m2p1+d1m2p2c2v3"),
        ("sglang.d32+(attn:d4p2t2c2|ffn:d2p2t4e2)", 8, "sglang.d32m1p1+(attn:d4m2p2c2|ffn:d2m4p2e2)"),
        ("sglang.d8+megatron:(attn:d4t2|ffn:t1e4)", 2, "sglang.d8m1p1+d4m2p1e4"),
        ("sglang.d1m8p1e8+d8", 2, "sglang.d1m8p1e8+d8m1p1"),
        ("d32p1m4", 16, "embedded.d32m4p1"),
        ("sglang.d4m2p1", 1, "sglang.d4m2p1"),
        ("sglang.d8m1p1|d4m2p1", 1, "sglang.d8m1p1|d4m2p1"),
        ("d4m2p1|sglang.d8m1p1", 1, "sglang.d8m1p1|d4m2p1"),
        ("sglang.d8m1p1|d8m1p1", 1, "sglang.d8m1p1"),
        ("actor_train:d4m2p1,ref_inf:d8m1p1", 1, "embedded.d8m1p1|actor_train:d4m2p1,ref_inf:d8m1p1"),
        ("*:d4m2p1,ref_inf:d8m1p1", 1, "embedded.d8m1p1|actor_train:d4m2p1,ref_inf:d8m1p1"),
        ("actor_gen:sglang.d8,*:d4m2", 1, "sglang.d8m1p1|d4m2p1"),
        ("sglang.d8+actor_train:d4m2p1,ref_inf:d8m1p1", 2, "sglang.d8m1p1+actor_train:d4m2p1,ref_inf:d8m1p1"),
        ("actor_train:d4m2p1,*:d8m1p1+sglang.d8", 2, None),
    ],
)
def test_every_dialect_has_one_canonical_form(text: str, n_nodes: int, canonical: str | None) -> None:
    allocation = parse(text, n_nodes=n_nodes, n_gpus_per_node=8)
    again = parse(str(allocation), n_nodes=n_nodes, n_gpus_per_node=8, default_backend="mock")
    assert again == allocation
    assert str(again) == str(allocation)
    if canonical is not None:
        assert str(allocation) == canonical


def test_without_a_plus_every_role_uses_all_slots() -> None:
    allocation = parse("d4m2p1", n_nodes=1, n_gpus_per_node=8, default_backend="sglang")
    assert allocation.colocated
    assert layouts(allocation) == dict.fromkeys(ROLES, "d4m2p1")
    assert all(sorted(placed.slots) == [(0, gpu) for gpu in range(8)] for placed in allocation.roles.values())


def test_a_shared_layout_leaves_the_generator_what_it_can_use() -> None:
    text = "d2m2p1c2e2"
    assert str(parse(text, n_nodes=1, n_gpus_per_node=8, default_backend="sglang").generator.layout) == "d4m2p1"
    assert str(parse(text, n_nodes=1, n_gpus_per_node=8, default_backend="embedded").generator.layout) == "d8m1p1"


def test_roles_that_are_not_named_take_the_star_and_then_the_role_they_belong_to() -> None:
    starred = parse("ref_inf:d8,actor_train:d2m4,*:d4m2", n_nodes=1, n_gpus_per_node=8)
    assert layouts(starred)["critic_inf"] == layouts(starred)["critic_train"] == "d4m2p1"
    assert layouts(starred)["actor_inf"] == "d2m4p1", "it uses the weights of a role that is named"
    named = parse("actor_train:d2m4,critic_train:d4m2", n_nodes=1, n_gpus_per_node=8)
    assert layouts(named)["critic_inf"] == "d4m2p1"
    assert layouts(named)["ref_inf"] == layouts(named)["actor_inf"] == "d2m4p1"


def test_a_reward_model_is_accepted_and_has_no_place(caplog: pytest.LogCaptureFixture) -> None:
    allocation = parse("*:d4m2p1,rew_inf:d8m1p1", n_nodes=1, n_gpus_per_node=8)
    assert "rew_inf" in caplog.text
    assert allocation == parse("d4m2p1", n_nodes=1, n_gpus_per_node=8)


def test_a_run_that_samples_nothing_trains_on_every_slot_and_has_no_generators_side() -> None:
    options = {"n_nodes": 1, "n_gpus_per_node": 8, "trainer_only": True}
    assert str(parse("heuristic", **options).trainer.layout) == "d8m1p1"
    assert str(parse("d4m2p1", **options)) == str(parse("d4m2p1", n_nodes=1, n_gpus_per_node=8))
    assert parse("sglang.d4m2p1", **options).generator.backend == "sglang", "how it says that there are GPUs"
    for text in ("sglang.d4m1p1+d2m2p1", "sglang.d8m1p1|d4m2p1", "actor_gen:d8,*:d4m2"):
        with pytest.raises(AllocationError, match="this experiment has no generators") as caught:
            parse(text, **options)
        assert caught.value.nearest == "d4m2p1"
    with pytest.raises(AllocationError) as caught:
        parse("manual", **options)
    assert caught.value.nearest == "heuristic, or d8m1p1"


def test_the_heuristic_halves_the_cluster_and_shares_a_single_slot() -> None:
    assert str(parse("heuristic", n_nodes=1, n_gpus_per_node=8)) == "embedded.d4m1p1+d4m1p1"
    assert str(parse("heuristic", n_nodes=1, n_gpus_per_node=3)) == "embedded.d1m1p1+d2m1p1"
    assert str(parse("heuristic", n_nodes=3, n_gpus_per_node=8)) == "embedded.d8m1p1+d16m1p1"
    assert str(parse("heuristic", n_nodes=1, n_gpus_per_node=1)) == "embedded.d1m1p1"
    assert parse("heuristic", n_nodes=2, n_gpus_per_node=8, default_backend="sglang").generator.backend == "sglang"


def test_a_moe_layout_says_how_attention_and_experts_share_the_ranks() -> None:
    layout = parse("sglang.d32+(attn:d4p2t2c2|ffn:d2p2t4e2)", n_nodes=8, n_gpus_per_node=8).trainer.layout
    assert layout == ParallelLayout(dp=4, tp=2, pp=2, cp=2, ep=2, etp=4)
    assert layout.world_size == 32
    assert layout.expert_dp == 2


def test_the_table_has_a_row_for_each_role() -> None:
    rows = parse("sglang.d4m2p1+d2m4p1", n_nodes=2, n_gpus_per_node=8).table()
    assert [row.role for row in rows] == list(ROLES)
    assert tuple(rows[0]) == ("actor_gen", "sglang", "d4m2p1", "cpu", 8, "node 0: 0-7", 0, "")
    assert tuple(rows[1]) == ("actor_train", "megatron", "d2m4p1", "cpu", 8, "node 1: 0-7", 0, "")


def test_too_few_gpus_names_both_numbers_and_what_fits() -> None:
    error = error_of("sglang.d4m2p1+d2m4p1")
    assert error.key == "allocation_mode"
    for part in ("'sglang.d4m2p1+d2m4p1'", "8 + 8 = 16", "n_nodes=1 x n_gpus_per_node=8 = 8", "too few"):
        assert part in str(error)
    assert error.nearest == "sglang.d2m2p1+d1m4p1, or n_nodes=2"


def test_too_many_gpus_are_an_error_because_all_must_be_used() -> None:
    error = error_of("embedded.d1m1p1+d1m2p1")
    assert "1 + 2 = 3" in str(error)
    assert "too many" in str(error)
    assert error.nearest is not None
    assert error.nearest.endswith("n_gpus_per_node=3")
    assert error_of("d2m2p1").nearest == "embedded.d4m2p1, or n_gpus_per_node=4"


@pytest.mark.parametrize("text", ["vllm.d4m2p1+d2m4p1", "d2m4p1+vllm:d4m2p1", "actor_gen:vllm.d4m2p1,*:d2m4p1"])
def test_vllm_is_answered_with_sglang(text: str) -> None:
    error = error_of(text, n_nodes=2)
    assert error.nearest == text.replace("vllm", "sglang")


@pytest.mark.parametrize(
    ("text", "rule", "nearest"),
    [
        ("", "letters with numbers", "d4m2p1"),
        ("+", "letters with numbers", None),
        ("d4m2x3", "'x'", None),
        ("D4M2P1", "letters with numbers", None),
        ("d4m2p1 d2", "letters with numbers", None),
        ("d4m2m3", "given twice", None),
        ("d4m2t3", "given twice", None),
        ("d0m1p1", "from 1 to 999999", "d1"),
        ("d4m99999999999", "from 1 to 999999", "m1"),
        ("d999999m999999p999999c999999", "needs 999996000005999996000001 GPUs", None),
        ("d4m2p1v2", "one stage", "v1, or p2"),
        ("d4m2p1e3", "must divide the 8 ranks of a pipeline stage", "e = 2 or 4"),
        ("d4m2p1+d2m4p1", "neither side", "sglang.d4m2p1+d2m4p1 (or embedded., without GPUs)"),
        ("sglang.d4+mock.d4", "both sides", "sglang.d4+d4m1p1"),
        ("sglang.d2+d2+d4", "3 sides", None),
        ("sglang.d2+d2|d4", "cannot be combined", None),
        ("sglan.d4+d4", "did you mean 'sglang'?", None),
        ("acter_train:d8", "did you mean 'actor_train'?", None),
        ("actor_train:d8,d4", "role:layout", "actor_train:d4"),
        ("sglang,d4+d4", "a dot stands between a backend and its layout: sglang.d4", None),
        ("actor_train:d8,actor_train:d8", "given twice", None),
        ("ref_inf:d8", "actor_train has no layout", None),
        ("actor_train:sglang.d8", "runs on megatron", "actor_train:d8m1p1"),
        ("actor_gen:megatron.d8,*:d8", "not on megatron", "sglang.d8m1p1"),
        ("sglang.d4+actor_gen:d4,actor_train:d4", "given twice", None),
        ("sglang.actor_train:d8,ref_inf:d8", "ambiguous", None),
        ("embedded.d1m2p1+d6", "one process a replica", "embedded.d2m1p1"),
        ("sglang.d1m2c2+d4", "for training", "sglang.d2m2p1"),
        ("sglang.d2m2e4+d4", "e4 must divide m2", "e = 2"),
        ("sglang.d4|d4m2p1", "has 4 ranks and shares", "sglang.d8m1p1"),
        ("actor_train:d4m2p1,ref_inf:d4m1p1", "has 4 ranks and shares", "ref_inf:d8m1p1"),
        ("(attn:d4m2|ffn:d4m2", "without", None),
        ("d4)", "without", None),
        ("(attn:d8)", "(attn:layout|ffn:layout)", None),
        ("(attn:d4e2|ffn:d8)", "belongs to the experts", None),
        ("(attn:d8|ffn:d4c2)", "write them in attn", None),
        ("(attn:d4p2|ffn:d8p1)", "share their pipeline stages", "p2 in both"),
        ("(attn:d8|ffn:d4m1e1)", "the same 8 ranks", "d8 in ffn"),
        ("manual", "device_mapping", "heuristic, or embedded.d4m1p1+d4m1p1"),
        ("search", "no search", "heuristic, or embedded.d4m1p1+d4m1p1"),
        ("heurstic", "did you mean 'heuristic'?", "heuristic"),
    ],
)
def test_a_wrong_text_is_answered_with_the_rule_and_a_way_out(text: str, rule: str, nearest: str | None) -> None:
    error = error_of(text)
    assert rule in str(error)
    assert str(error).startswith("allocation_mode=")
    if nearest is not None:
        assert error.nearest == nearest


def test_a_cluster_must_have_slots_and_not_more_than_can_be_meant() -> None:
    assert error_of("heuristic", n_nodes=10**9).nearest == "12500"
    assert error_of("heuristic", n_gpus_per_node=10**9).key == "n_gpus_per_node"
