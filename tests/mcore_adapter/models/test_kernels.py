"""What the log says about the library that computes each part."""

from pathlib import Path

from allocation import ParallelLayout
from helpers.engine_cases import make_engine
from helpers.mcore_ranks import Rank, RankPool
from helpers.tiny_models import write_model


def parts(rank: Rank, model: str, train: bool) -> dict[str, str]:
    with rank.joined(ParallelLayout()) as (parallel, device):
        return make_engine(parallel, device, model, train=train).computed_by()


def test_every_part_is_named_with_its_library(ranks: RankPool, tmp_path: Path) -> None:
    for name in ("qwen3", "qwen3_moe"):
        write_model(name, tmp_path / name)
    (dense,) = ranks.run(parts, 1, str(tmp_path / "qwen3"), True)
    assert list(dense) == [
        "attention", "query, key, value", "attention output", "norm", "MLP input", "MLP output", "head",
        "rotary embedding", "SwiGLU", "sums of gradients", "Adam", "gradient norm", "gradient scale",
    ]  # fmt: skip
    assert dense["attention"].startswith("Slipstream (") and dense["MLP input"] == "Megatron (ColumnParallelLinear)"
    assert dense["head"] == "Slipstream (LMHead)" and dense["Adam"].startswith("Slipstream (")
    assert dense["rotary embedding"] == "Slipstream (rotary_thd)" and dense["SwiGLU"] == "Slipstream (_bias_swiglu)"
    assert dense["sums of gradients"] == "torch (add_)", "on GPUs: add_to"
    (experts,) = ranks.run(parts, 1, str(tmp_path / "qwen3_moe"), False)
    assert not {"Adam", "sums of gradients"} & experts.keys()
    assert experts["routing"] == "Slipstream (routing)", "on GPUs: fused_routing"
    assert experts["dispatch"] == "Megatron (MoEAlltoAllTokenDispatcher)", "on GPUs: LocalDispatcher"
