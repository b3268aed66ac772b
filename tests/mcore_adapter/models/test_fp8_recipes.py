"""Recipes of FP8 training: what a device and the sizes of a model allow."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from allocation import ParallelLayout
from mcore_adapter.models.gpt import FP8_ROWS, _check_fp8, transformer_config
from mcore_adapter.settings import Fp8Recipe
from model_specs.families import parse_config
from model_specs.untrusted import ModelConfigError

SIZES = {
    "model_type": "qwen2", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
MOE = {
    "model_type": "qwen3_moe", "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192,
}  # fmt: skip
HOPPER, ADA = ("tensorwise", "blockwise"), ("tensorwise",)


def check(recipe: Fp8Recipe, recipes: tuple[str, ...], tp: int = 1, **changes: Any) -> None:
    parallel: Any = SimpleNamespace(layout=ParallelLayout(tp=tp))
    device: Any = SimpleNamespace(fp8_recipes=recipes)
    _check_fp8(recipe, parse_config(SIZES | changes), parallel, device)


def test_a_model_of_whole_blocks_trains_with_either_recipe() -> None:
    check("tensorwise", HOPPER)
    check("blockwise", HOPPER)
    assert FP8_ROWS["blockwise"] == 128 and FP8_ROWS["tensorwise"] == 16


@pytest.mark.parametrize(
    ("recipe", "recipes", "message"),
    [
        ("blockwise", ADA, "fp8=blockwise needs a GPU of compute capability 9.0 .*; write fp8=tensorwise or false"),
        ("blockwise", (), "fp8=blockwise needs .*; write fp8=false"),
        ("tensorwise", (), "fp8=tensorwise needs a GPU of compute capability 8.9 .*; write fp8=false"),
    ],
)
def test_a_recipe_that_the_device_lacks_is_refused_with_those_that_it_has(recipe, recipes, message) -> None:
    with pytest.raises(ModelConfigError, match=message):
        check(recipe, recipes)


@pytest.mark.parametrize(
    ("changes", "tp", "size"),
    [
        ({"hidden_size": 320}, 1, "hidden_size is 320"),
        ({}, 2, r"num_key_value_heads x head_dim / tp is 64 \(tp=2\)"),
        ({"intermediate_size": 576}, 1, "intermediate_size / tp is 576"),
        (MOE, 1, "moe_intermediate_size is 192"),
    ],
)
def test_a_size_that_blocks_do_not_divide_is_named(changes: dict[str, Any], tp: int, size: str) -> None:
    check("tensorwise", HOPPER, tp, **changes)
    with pytest.raises(ModelConfigError, match=f"fp8=blockwise needs multiples of 128, {size}"):
        check("blockwise", HOPPER, tp, **changes)


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [(None, (None, "tensorwise")), ("tensorwise", ("hybrid", "tensorwise")), ("blockwise", ("e4m3", "blockwise"))],
)
def test_gradients_have_the_range_of_e5m2_where_a_whole_tensor_has_one_factor(recipe: Any, expected: Any) -> None:
    config = transformer_config(
        parse_config(SIZES), parallel=cast(Any, SimpleNamespace(layout=ParallelLayout())),
        device=cast(Any, SimpleNamespace(config_overrides=dict)), dtype=torch.bfloat16, sequence_parallel=False,
        fp8=recipe,
    )  # fmt: skip
    assert (config.fp8, config.fp8_recipe) == expected
