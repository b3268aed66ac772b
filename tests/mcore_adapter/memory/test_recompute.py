"""What layers recompute in the backward pass: it changes no gradient, and is not kept meanwhile."""

from typing import Any

import pytest
import torch

from allocation import ParallelLayout
from helpers.engine_cases import MAX_TOKENS, logprobs_of, make_engine, policy_loss, random_batch
from helpers.mcore_ranks import EXPERT_LAYOUTS, LAYOUTS, Rank, RankPool
from mcore_adapter.memory import host, recompute
from mcore_adapter.memory.recompute import recompute_layers
from mcore_adapter.settings import LEVELS, Level

MIXED: list[Level] = ["full", "offload", "offload", "selective"]  # of the 4 layers of a tiny model
CASES = [
    ("qwen3", "cp2"),
    ("deepseek_v2", "one process"),
    ("qwen3_moe", "tp2 ep2"),
    *(
        pytest.param(*case, marks=pytest.mark.nightly)
        for case in (
            *(("qwen3", layout) for layout in ("one process", "tp2", "pp2 vpp2")),
            ("qwen2_tied", "one process"),
            ("glm4", "one process"),
        )
    ),
]


def step_of(engine: Any) -> tuple[dict[str, float], list[torch.Tensor]]:
    """Run one step, and return its figures and the gradients of this rank."""
    step = engine.train_step(random_batch(), policy_loss, max_tokens_per_mb=MAX_TOKENS, with_entropy=True)
    return step, [p.main_grad.clone() for chunk in engine._model for p in chunk.parameters()]


def compare_levels(rank: Rank, layout: ParallelLayout, model: str) -> dict[str, bool]:
    """Return for each choice whether a step with it is the step without recomputation, to the last bit."""
    from mcore_adapter.cpu.device import CpuDevice

    with pytest.MonkeyPatch.context() as patch, rank.joined(layout) as (parallel, device):
        patch.setattr(CpuDevice, "has_grouped_products", True)
        patch.setattr(host, "SMALLEST_BYTES", 0)
        choices: dict[str, list[Level]] = {level: [level] * 4 for level in LEVELS} | {"mixed": MIXED}
        steps = {}
        for name, levels in choices.items():
            engine = make_engine(parallel, device, model)
            recompute_layers(engine._model, levels)
            steps[name] = step_of(engine)
        figures, gradients = steps.pop("none")
        return {
            name: other[0] == figures and all(map(torch.equal, other[1], gradients)) for name, other in steps.items()
        }


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_what_is_recomputed_changes_no_bit_of_the_gradients(ranks, model_folders, name, layout) -> None:
    where = (LAYOUTS | EXPERT_LAYOUTS)[layout]
    for same in ranks.run(compare_levels, where.world_size, where, str(model_folders[name][0])):
        assert all(same.values()), same


def kept_bytes(rank: Rank, layout: ParallelLayout, model: str, chunk: int = 4096) -> dict[str, int]:
    """Return for each level the bytes that the layers keep between forward and backward pass."""
    from mcore_adapter.cpu.device import CpuDevice

    with pytest.MonkeyPatch.context() as patch, rank.joined(layout) as (parallel, device):
        patch.setattr(CpuDevice, "has_grouped_products", True)
        patch.setattr(host, "SMALLEST_BYTES", 0)
        patch.setattr(recompute, "MLP_TOKENS", chunk)
        engine = make_engine(parallel, device, model)
        weights = {p.untyped_storage().data_ptr() for p in engine._model[0].parameters()}
        kept: dict[str, int] = {}

        def loss(level: str, output: Any, fields: Any, sequences: Any) -> Any:
            alive = {s.data_ptr(): s.nbytes() for s in storages if s.nbytes() and s.data_ptr() not in weights}
            kept[level] = sum(alive.values())
            return policy_loss(output, fields, sequences)

        for level in LEVELS:
            storages: list[torch.UntypedStorage] = []
            recompute_layers(engine._model, [level] * 4)

            def pack(tensor: torch.Tensor, storages: Any = storages) -> torch.Tensor:
                storages.append(tensor.untyped_storage())
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                engine.train_step(
                    random_batch(), lambda *given, level=level: loss(level, *given), max_tokens_per_mb=4096
                )
        return kept


@pytest.mark.parametrize(("name", "chunk"), [("qwen3", 4096), ("qwen3", 40), ("qwen3_moe", 4096)])
def test_each_level_keeps_less_than_the_one_before(ranks: RankPool, model_folders: Any, name: str, chunk: int) -> None:
    (kept,) = ranks.run(kept_bytes, 1, ParallelLayout(), str(model_folders[name][0]), chunk)
    # Input, output of the core attention, input of the MLP and its norm; of experts, also its output. Some sequences
    # share rows.
    width = 32 + 4 * 16 + 32 + (32 if name == "qwen3_moe" else 0)
    assert kept["linear"] - kept.pop("offload") >= 0.9 * 4 * 4 * width * random_batch().num_tokens
    halves = 4 * 4 * 3 * 48 * random_batch().num_tokens  # also one that is activated, in all layers
    assert name == "qwen3_moe" or kept["qkv"] - kept["linear"] >= 0.9 * halves
    sizes = list(kept.values())
    if name == "qwen3_moe":  # its layers have no dense MLP whose product could be dropped
        assert sizes[0] == sizes.pop(1)
    assert all(more > less for more, less in zip(sizes, sizes[1:], strict=False)), kept


CHUNK = 21  # tokens: several chunks of a rank's rows, and a last one with fewer
LONG: list[Level] = ["full", "full", "offload", "linear"]


def chunked_step(
    rank: Rank, layout: ParallelLayout, model: str, chunk: int
) -> tuple[dict[str, float], list[torch.Tensor], torch.Tensor]:
    """Return figures and gradients of the second step of LONG, and log-probabilities, with at most so many tokens in a
    chunk."""
    with pytest.MonkeyPatch.context() as patch, rank.joined(layout) as (parallel, device):
        patch.setattr(recompute, "MLP_TOKENS", chunk)
        patch.setattr(host, "SMALLEST_BYTES", 0)
        engine = make_engine(parallel, device, model)
        recompute_layers(engine._model, LONG)
        step_of(engine)
        return *step_of(engine), logprobs_of(engine)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3", "tp2"), ("glm4", "cp2"), ("deepseek_v2", "one process"),
        *(pytest.param("qwen3", layout, marks=pytest.mark.nightly) for layout in ("cp2", "pp2 vpp2", "dp2")),
    ],
)  # fmt: skip
def test_chunks_of_tokens_change_neither_losses_nor_gradients(ranks, model_folders, name, layout) -> None:
    where = (LAYOUTS | {"dp2": ParallelLayout(dp=2)})[layout]
    whole, parts = (
        ranks.run(chunked_step, where.world_size, where, str(model_folders[name][0]), chunk) for chunk in (4096, CHUNK)
    )
    for (figures, gradients, logprobs), (expected, exact, reference) in zip(parts, whole, strict=True):
        assert figures == pytest.approx(expected, rel=1e-5, abs=1e-5)
        torch.testing.assert_close(logprobs, reference, rtol=1e-5, atol=1e-5, equal_nan=True)
        for found, gradient in zip(gradients, exact, strict=True):
            torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))


def test_gradients_of_chunks_are_summed_in_float32() -> None:
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    total: torch.Tensor | None = None
    for value in (256.0, 0.5, 0.5):  # bfloat16 has no number between 256 and 258
        total = recompute._add_gradient(total, torch.tensor([value], dtype=torch.bfloat16), weight)
    assert total is not None
    assert total.item() == 257


def warnings_at_start(rank: Rank, model: str, stacks: bool) -> list[str]:
    from mcore_adapter.cpu.device import CpuDevice

    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch, rank.joined(ParallelLayout()) as (parallel, device):
        patch.setattr(recompute.logger, "warning", lambda text, *values: said.append(text % values))
        patch.setattr(CpuDevice, "has_grouped_products", stacks)
        make_engine(parallel, device, model, recompute="linear")
    return said


@pytest.mark.parametrize(("name", "stacks"), [("qwen3_moe", False), ("qwen3_moe", True), ("qwen3", False)])
def test_experts_that_linear_cannot_reach_are_reported(ranks: RankPool, model_folders, name: str, stacks: bool) -> None:
    (said,) = ranks.run(warnings_at_start, 1, str(model_folders[name][0]), stacks)
    assert ["first products are kept" in text for text in said] == [True] * ((name, stacks) == ("qwen3_moe", False))
