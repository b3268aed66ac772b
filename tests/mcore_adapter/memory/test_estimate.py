"""The estimate of activation memory, against what was measured on a GPU, and the choice that is made by it."""

from dataclasses import replace
from typing import Any

import pytest

from allocation import ParallelLayout
from mcore_adapter.memory import estimate as estimates
from mcore_adapter.memory.estimate import UpdateShape, activation_bytes, choose, in_flight, moments
from mcore_adapter.settings import LEVELS, MLP_TOKENS, SEVERAL_LOGITS_BYTES
from model_specs.families import parse_config
from tools.bench import SHAPES, SLICE
from tools.bench import WIDTHS as LONG

DENSE = SHAPES["1.5B"]
LATENT: dict[str, Any] = dict(
    model_type="deepseek_v3", hidden_act="silu", vocab_size=512, hidden_size=64, intermediate_size=96,
    num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=16,
    qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12, n_routed_experts=8, num_experts_per_tok=2,
    moe_intermediate_size=24, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1,
    max_position_embeddings=512, norm_topk_prob=True, routed_scaling_factor=1.0,
)  # fmt: skip


def shape(raw: dict[str, Any], tokens: int, **changes: Any) -> UpdateShape:
    config = parse_config(raw)
    one = UpdateShape(
        config=config, layout=ParallelLayout(), itemsize=2, tokens=tokens, in_flight=1,
        layers=range(config.num_layers), has_head=True,
    )  # fmt: skip
    return replace(one, **changes)


def at(one: UpdateShape, levels: list[Any], name: str) -> float:
    """The bytes of one moment."""
    return next(moment.total for moment in moments(one, levels) if moment.name == name)


@pytest.mark.parametrize(
    ("raw", "tokens", "measured"),
    [
        # Peak less weights, gradients and optimizer state of `tools.bench gpu`, rows memory.*, in GB.
        (DENSE, 16384, 59.1 - 27.8), (SLICE, 16384, 91.5 - 78.6),
    ],
)  # fmt: skip
def test_the_estimate_is_near_what_was_measured(raw: dict[str, Any], tokens: int, measured: float) -> None:
    one = shape(raw, tokens)
    assert activation_bytes(one, ["selective"] * len(one.layers)) / 1e9 == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize(
    ("tokens", "levels", "chunk", "measured"),
    [
        # In GiB, as the log of `tools.bench gpu --only long` has it; those of whole MLPs from before there were chunks.
        # The first one was 2 GiB more, with two buffers of logits at once.
        (65536, ["linear"] * 34 + ["qkv"] * 2, MLP_TOKENS, 50.6),
        (131072, ["offload"] * 21 + ["linear"] * 15, MLP_TOKENS, 47.0),
        (131072, ["full"] * 26 + ["linear"] * 10, MLP_TOKENS, 51.6),
        (131072, ["full"] * 35 + ["linear"], 131072, 41.5), (131072, ["offload"] * 20 + ["linear"] * 16, 131072, 49.2),
    ],
)  # fmt: skip
def test_the_estimate_for_long_sequences_is_near_what_was_measured(
    tokens: int, levels: list[Any], chunk: int, measured: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimates, "MLP_TOKENS", chunk)
    estimate = activation_bytes(shape(LONG, tokens), levels) / 2**30
    assert estimate == pytest.approx(measured, rel=0.04)
    assert estimate > 0.99 * measured, "with less, memory would run out"


@pytest.mark.parametrize(
    ("tokens", "levels", "measured"),
    [
        # GB, rows memory.*_activations; the first one without the second buffer of logits that there was.
        (32768, ["linear"] * 6, 10.78 - SEVERAL_LOGITS_BYTES / 1e9), (16384, ["qkv"] * 4 + ["selective"] * 2, 11.11),
    ],
)  # fmt: skip
def test_the_estimate_for_experts_is_near_what_was_measured(tokens: int, levels: list[Any], measured: float) -> None:
    assert activation_bytes(shape(SLICE, tokens), levels) / 1e9 == pytest.approx(measured, rel=0.02)


def test_gradients_of_the_weights_of_experts_come_after_what_is_computed_again() -> None:
    def passing(tokens: int) -> float:
        last = next(m for m in moments(shape(SLICE, tokens, layers=range(2)), ["linear"] * 2) if "MLP" in m.name)
        return last.parts["backward pass"] - 2 * tokens * 2048  # the gradient of the layer's output

    copies, weights = 2 * 8, 2 * 128 * 768 * 2048
    inputs, inner = copies * 2048, copies * 768
    assert passing(65536) == 65536 * (2 * inputs + 5 * inner), "long: halves and their gradient, and no weights"
    assert passing(1024) == 1024 * (inputs + 2 * inner + 2 * 2048) + 3 * weights, "short: gradients of both weights"


@pytest.mark.parametrize(
    ("raw", "layout"),
    [
        (DENSE, ParallelLayout()),
        (DENSE, ParallelLayout(cp=2)),
        (SLICE, ParallelLayout(dp=2, ep=2)),
        (LATENT, ParallelLayout(tp=2)),
    ],
    ids=["dense", "cp2", "experts", "latent"],
)
def test_a_smaller_limit_means_more_recomputation_that_fits(raw: dict[str, Any], layout: ParallelLayout) -> None:
    one = shape(raw, 8192, layout=layout)
    sizes = [activation_bytes(one, [level] * len(one.layers)) for level in LEVELS]
    least, most = choose(one, sizes[0]), choose(one, sizes[-1])
    assert set(least.levels) == {"none"} and least.fits and most.fits
    assert activation_bytes(one, most.levels) <= sizes[-1]
    before = 0
    for part in range(21):
        limit = sizes[0] + (sizes[-1] - sizes[0]) * part / 20
        choice = choose(one, limit)
        ranks = [LEVELS.index(level) for level in choice.levels]
        assert choice.fits and activation_bytes(one, choice.levels) == choice.activation_bytes <= limit
        assert ranks == sorted(ranks, reverse=True) and sum(ranks) >= before
        before = sum(ranks)
    hopeless = choose(one, sizes[-1] / 2)
    assert set(hopeless.levels) == {"full"} and not hopeless.fits


def test_layers_move_to_the_host_before_any_is_recomputed_as_a_whole() -> None:
    one = shape(DENSE, 32768)
    kept = activation_bytes(one, ["linear"] * 28)
    layer = 32768 * 2 * 3 * 1536
    several = choose(one, kept - 5 * layer, host_limit_bytes=1e15)
    assert several.levels == ("offload",) * several.levels.count("offload") + ("linear",) * (
        28 - several.levels.count("offload")
    )
    assert 5 <= several.levels.count("offload") < 10, "perhaps more: some are on their way"
    none = choose(one, 0, host_limit_bytes=1e15)
    assert none.levels == ("full",) * 28
    few = choose(one, kept - 12 * layer, host_limit_bytes=2.5 * layer)
    assert few.levels.count("offload") <= 2 and few.levels[0] == "full" and few.fits


def test_ranks_that_share_the_tokens_or_the_widths_keep_half() -> None:
    one = shape(DENSE, 8192, has_head=False)
    for layout in (ParallelLayout(tp=2), ParallelLayout(cp=2)):
        halved = replace(one, layout=layout)
        for level in ("none", "selective", "full"):
            halves, wholes = (next(moments(each, [level] * 28)).parts for each in (halved, one))
            for name in ("residual stream", "attention", "MLP"):
                assert halves[name] == pytest.approx(wholes[name] / 2)


@pytest.mark.parametrize(
    ("layout", "rank", "microbatches", "expected"),
    [
        (ParallelLayout(), 0, 8, 1), (ParallelLayout(pp=4), 0, 8, 4), (ParallelLayout(pp=4), 3, 8, 1),
        (ParallelLayout(pp=4), 0, 2, 2), (ParallelLayout(pp=2, vpp=2), 0, 8, 5), (ParallelLayout(pp=2, vpp=2), 1, 8, 3),
    ],
    ids=str,
)  # fmt: skip
def test_earlier_stages_hold_more_passes(layout: ParallelLayout, rank: int, microbatches: int, expected: int) -> None:
    assert in_flight(layout, rank, microbatches) == expected
