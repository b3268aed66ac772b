"""Layouts against models and batches: one test for each failure that users of other trainers meet at run time."""

import re
from pathlib import Path

import pytest

from allocation import AllocationError, Checks, ParallelLayout, batch_errors, model_errors, parse
from allocation.checks import nearest_layouts_of

ROOT = Path(__file__).parents[2]

# 12 heads, 2 KV heads: the shape of a common 1.5B model.
MODEL = {
    "num_heads": 12,
    "num_kv_heads": 2,
    "num_layers": 28,
    "vocab_size": 151_936,
    "intermediate_size": 8_960,
    "path": "/models/small",
}


def batch_error(layout: str, role: str = "actor_train", **numbers: int) -> AllocationError:
    return batch_errors(layout_of(layout), role, **numbers)[0]


def layout_of(text: str) -> ParallelLayout:
    slots = 1
    for part in text.replace("d", " ").replace("m", " ").replace("p", " ").split("e")[0].split("v")[0].split():
        slots *= int(part)
    return parse(text, n_nodes=1, n_gpus_per_node=slots).trainer.layout


@pytest.mark.parametrize(
    ("layout", "role", "changes"),
    [
        ("d4m2p4v7", "actor_train", {}),
        ("d1m1p3", "actor_train", {}),
        ("d1m4p1", "actor_gen", {}),  # a server may hold a key-value head on several ranks
        ("d1m2p1", "actor_gen", {"vocab_size": 50_257}),
    ],
)
def test_a_model_that_can_be_cut_has_no_errors(layout: str, role: str, changes: dict[str, int]) -> None:
    assert model_errors(layout_of(layout), role, **{**MODEL, **changes}) == []


@pytest.mark.parametrize(
    ("layout", "role", "changes", "rule", "nearest"),
    [
        ("d1m8p1", "actor_train", {"num_kv_heads": 12},
         "actor_train:d1m8p1 of /models/small: m8 must divide num_attention_heads=12", "m = 4"),
        ("d1m4p1", "actor_train", {}, "m4 must divide num_key_value_heads=2", "m = 2"),
        ("d1m6p1", "actor_gen", {"num_kv_heads": 4, "intermediate_size": 0},
         "m6 must divide num_key_value_heads=4, or be a multiple of it", "m = 4 or 12"),
        ("d1m1p29", "actor_train", {}, "p29: each needs a layer, and num_hidden_layers=28", "p = 28 without v"),
        ("d1m1p4v8", "actor_train", {},
         "p4 x v8 = 32 chunks: each needs a layer, and num_hidden_layers=28", "v = 7"),
        ("d1m2p1", "actor_train", {"vocab_size": 50_257}, "m2 must divide vocab_size=50257", "m = 1"),
        ("d1m2p1", "actor_train", {"intermediate_size": 8_961}, "m2 must divide intermediate_size=8961", "m = 1"),
        ("d4m1p1e2", "actor_train", {}, "no experts", None),
        ("d4m1p1e4", "actor_train", {"num_experts": 6}, "e4 must divide num_experts=6", "e = 3 or 6"),
    ],
)  # fmt: skip
def test_a_layout_that_cannot_cut_the_model_is_named_with_the_nearest_one_that_can(
    layout: str, role: str, changes: dict[str, int], rule: str, nearest: str | None
) -> None:
    error = model_errors(layout_of(layout), role, **{**MODEL, **changes})[0]
    assert rule in str(error)
    assert nearest in (None, error.nearest)


def test_a_single_expert_is_not_split() -> None:
    layout = parse("(attn:d1m2p1|ffn:d1m2p1)", n_nodes=1, n_gpus_per_node=2).trainer.layout
    (error,) = model_errors(layout, "actor_train", **{**MODEL, "num_experts": 8})
    assert "m2 of ffn" in str(error) and error.nearest == "m1 for ffn"


@pytest.mark.parametrize(
    ("text", "num_experts", "near"),
    [
        ("sglang.d2m2p1+(attn:d4m1p1|ffn:d1m4p1)", 128, "sglang.d2m2p1+d4m1p1e4"),
        ("sglang.d2m2p1+d4m1p1e4", 0, "sglang.d2m2p1+d4m1p1"),
        ("sglang.d2m2p1+d4m1p1e4", 6, "sglang.d2m2p1+d4m1p1e2"),
    ],
)
def test_the_suggested_layout_has_the_same_ranks_and_spreads_experts_over_about_as_many(
    text: str, num_experts: int, near: str
) -> None:
    model = {**MODEL, "num_experts": num_experts}
    checks = Checks(suits=lambda role, layout: not model_errors(layout, role, **model))
    assert str(nearest_layouts_of(parse(text, n_nodes=1, n_gpus_per_node=8), checks)) == near


def test_the_layouts_with_experts_that_are_shown_can_be_trained() -> None:
    shown = re.findall(r"\(attn:\S+ffn:\S+\)", (ROOT / "docs" / "allocation.md").read_text().replace("\\|", "|"))
    with pytest.raises(AllocationError) as caught:
        parse("(attn:d1)", n_nodes=1, n_gpus_per_node=1)
    model = {**MODEL, "num_heads": 16, "num_experts": 8}
    assert shown and caught.value.nearest
    for text in [*shown, caught.value.nearest]:
        assert model_errors(parse(text, n_nodes=4, n_gpus_per_node=8).trainer.layout, "actor_train", **model) == []


def test_all_errors_of_a_layout_are_found_at_once() -> None:
    errors = model_errors(layout_of("d1m8p29"), "actor_train", **{**MODEL, "vocab_size": 50_257})
    rules = [error.rule for error in errors]
    for number in ("num_attention_heads=12", "num_key_value_heads=2", "vocab_size=50257", "num_hidden_layers=28"):
        assert any(number in rule for rule in rules), number


def test_a_batch_smaller_than_the_ranks_of_the_reference_is_named() -> None:
    # Elsewhere: AssertionError: batch_size 32 < chunks 64.
    error = batch_error("d64m1p1", "ref_inf", train_bs_n_seqs=32)
    assert error.key == "dataset.train_bs_n_seqs"
    assert "32 sequences are fewer than the 64 data-parallel ranks of ref_inf:d64m1p1" in str(error)
    assert error.nearest == "64"


def test_an_update_with_less_than_a_sequence_for_each_rank_is_named() -> None:
    # Elsewhere: assert self.lr_decay_steps > 0, after a division that rounds down to 0.
    error = batch_error("d32m4p1", train_bs_n_seqs=64, ppo_n_minibatches=4)
    assert error.key == "ppo.ppo_n_minibatches"
    assert "an update has 16 of the" in str(error)
    assert error.nearest == "2"


def test_the_batch_must_be_a_multiple_of_updates_times_data_parallel_ranks() -> None:
    error = batch_error("d32m4p1", train_bs_n_seqs=30, group_size=16, ppo_n_minibatches=4)
    assert "30 prompts x group_size=16 = 480 sequences" in str(error)
    assert "multiple of ppo_n_minibatches=4 x 32 = 128" in str(error)
    assert "world size 128 / m4 / p1 / c1" in str(error)
    assert error.nearest == "24 or 32"
    for prompts in (24, 32):
        assert not batch_errors(
            layout_of("d32m4p1"), "actor_train", train_bs_n_seqs=prompts, group_size=16, ppo_n_minibatches=4
        )


@pytest.mark.parametrize(("text", "ranks"), [("d2m2p2c2", 2), ("d8m1p1e4", 8)])
def test_other_parallelism_divides_the_ranks_and_experts_do_not(text: str, ranks: int) -> None:
    layout = parse(text, n_nodes=2 if ranks == 2 else 1, n_gpus_per_node=8).trainer.layout
    for prompts in range(1, 20):
        fits = batch_errors(layout, "actor_train", train_bs_n_seqs=prompts) == []
        assert fits == (prompts % ranks == 0)


def test_minibatches_must_divide_the_batch() -> None:
    error = batch_error("d4m1p1", train_bs_n_seqs=512, ppo_n_minibatches=3)
    assert str(error) == (
        "ppo.ppo_n_minibatches=3: must divide 512 prompts x group_size=1 = 512 sequences; nearest: 2 or 4"
    )


def test_inference_needs_a_sequence_for_each_rank_and_no_multiple() -> None:
    assert batch_errors(layout_of("d3m1p1"), "ref_inf", train_bs_n_seqs=32, ppo_n_minibatches=5) == []
    assert batch_errors(layout_of("d3m1p1"), "actor_gen", train_bs_n_seqs=1) == []
