"""Stacked experts in a whole engine, on the CPU: as transformers, as Megatron's own experts, in every layout and
checkpoint."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from allocation import ParallelLayout
from helpers.engine_cases import (
    MAX_TOKENS,
    actor_run,
    assert_same_steps,
    make_engine,
    policy_loss,
    random_batch,
    steps_of,
    transformers_step,
    whole,
)
from helpers.mcore_ranks import EXPERT_LAYOUTS, LAYOUTS, Rank, RankPool, cases
from helpers.saved_models import save
from helpers.tiny_models import EXPERT_MODELS
from mcore_adapter.data.batch import ROUTED_EXPERTS

BALANCED = dict(moe_aux_loss_coeff=0.05, moe_bias_update_rate=0.01)


def stacked(function: Any, rank: Rank, *args: Any, **kwargs: Any) -> Any:
    """Run `function` on a rank whose device has grouped products, as a GPU has."""
    from mcore_adapter.cpu.device import CpuDevice
    from mcore_adapter.models.experts import StackedExperts

    built: list[StackedExperts] = []
    make = StackedExperts.__init__

    def count(self: StackedExperts, *args: Any, **kwargs: Any) -> None:
        built.append(self)
        make(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuDevice, "has_grouped_products", True)
        patch.setattr(StackedExperts, "__init__", count)
        result = function(rank, *args, **kwargs)
    assert built
    return result


@pytest.fixture(scope="module")
def one_by_one(ranks: RankPool, model_folders: Any) -> dict[str, Any]:
    """What Megatron's experts compute, one after the other."""
    run = partial(actor_run, **BALANCED)
    return {name: ranks.run(run, 1, ParallelLayout(), str(model_folders[name][0])) for name in EXPERT_MODELS}


@cases(EXPERT_MODELS, {name: LAYOUTS[name] for name in ("one process", "tp2", "pp2 vpp2")})
def test_stacked_experts_train_as_experts_one_by_one_do(ranks, model_folders, one_by_one, name, layout) -> None:
    run = partial(stacked, actor_run)
    results = ranks.run(partial(run, **BALANCED), layout.world_size, layout, str(model_folders[name][0]))
    assert_same_steps(results, one_by_one[name])
    torch.testing.assert_close(whole(results), whole(one_by_one[name]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_stacked_experts_compute_what_transformers_computes(ranks: RankPool, model_folders: Any, name: str) -> None:
    folder, model = model_folders[name]
    result = ranks.run(partial(stacked, actor_run), 1, ParallelLayout(), str(folder))
    loss, grad_norm, logprobs = transformers_step(model)
    assert result[0]["steps"][0]["loss"] == pytest.approx(loss, rel=1e-5)
    assert result[0]["steps"][0]["grad_norm"] == pytest.approx(grad_norm, rel=1e-5)
    torch.testing.assert_close(whole(result), logprobs, rtol=1e-5, atol=1e-5)


def replayed(rank: Rank, model: str, experts: torch.Tensor, **settings: Any) -> Any:
    """(log-probabilities, one step) with these experts."""
    with rank.joined(ParallelLayout()) as (parallel, device):
        engine = make_engine(parallel, device, model, **settings)
        batch = random_batch().with_fields(**{ROUTED_EXPERTS: experts})
        logprobs = engine.logprobs(batch, max_tokens_per_mb=MAX_TOKENS).values
        return logprobs, engine.train_step(batch, policy_loss, max_tokens_per_mb=MAX_TOKENS)


def test_replayed_experts_compute_the_tokens_that_they_were_chosen_for(ranks: RankPool, model_folders: Any) -> None:
    folder, model = model_folders["qwen3_moe"]
    shape = (random_batch().num_tokens, model.config.num_hidden_layers, model.config.num_experts)
    experts = torch.rand(shape, generator=torch.Generator().manual_seed(5)).topk(2).indices.to(torch.int16)
    run = partial(replayed, recompute="full")
    (logprobs, step), (expected, reference) = (
        ranks.run(how, 1, str(folder), experts)[0] for how in (partial(partial(stacked, run)), run)
    )
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    assert step == pytest.approx(reference, rel=1e-5, abs=1e-5)


def saved(rank: Rank, layout: ParallelLayout, model: str, path: str) -> Any:
    """Steps, a checkpoint, and the steps after it."""
    with rank.joined(layout) as (parallel, device):
        engine = make_engine(parallel, device, model)
        steps_of(engine)
        save(engine, path)
        return steps_of(engine)


def continued(rank: Rank, layout: ParallelLayout, model: str, path: str) -> Any:
    with rank.joined(layout) as (parallel, device):
        engine = make_engine(parallel, device, model)
        engine.load(path)
        return steps_of(engine)


@pytest.mark.parametrize("saving", ["stacked", pytest.param("one by one", marks=pytest.mark.nightly)])
def test_a_checkpoint_does_not_depend_on_how_experts_are_stored(ranks, model_folders, tmp_path, saving) -> None:
    """Weights, masters and moments of every expert, into the same form and the other one, in another layout."""
    model, path = str(model_folders["qwen3_moe"][0]), str(tmp_path / "checkpoint")
    Path(model, "tokenizer_config.json").write_text("{}")
    forms = {"stacked": partial(stacked, saved), "one by one": saved}
    expected = ranks.run(forms[saving], 2, EXPERT_LAYOUTS["dp2 ep2"], model, path)[0]
    for load, layout in ((partial(stacked, continued), EXPERT_LAYOUTS["tp2 ep2"]), (continued, ParallelLayout())):
        for steps in ranks.run(load, layout.world_size, layout, model, path):
            for step, reference in zip(steps, expected, strict=True):
                assert step["loss"] == pytest.approx(reference["loss"], rel=1e-5)
                assert step["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5)


def exported(rank: Rank, layout: ParallelLayout, model: str) -> Any:
    """(weights as loaded, after a step) under their Hugging Face names."""
    with rank.joined(layout) as (parallel, device):
        engine = make_engine(parallel, device, model)

        def weights() -> dict[str, torch.Tensor]:
            return {name: t.clone() for bucket in engine.iter_hf_weights(1 << 14) for name, t in bucket.items()}

        before = weights()
        engine.train_step(random_batch(), policy_loss, max_tokens_per_mb=MAX_TOKENS)
        return before, weights()


def test_stacked_weights_are_exported_one_expert_at_a_time_and_as_they_are_now(ranks: RankPool, model_folders) -> None:
    from safetensors.torch import load_file

    folder, where = model_folders["qwen3_moe"][0], EXPERT_LAYOUTS["dp2 ep2"]
    before, after = ranks.run(partial(stacked, exported), 2, where, str(folder))[0]
    _, expected = ranks.run(exported, 2, where, str(folder))[0]
    stored = load_file(folder / "model.safetensors")
    assert before.keys() == stored.keys() and all(torch.equal(before[name], stored[name]) for name in stored)
    assert not torch.equal(
        after["model.layers.0.mlp.experts.1.up_proj.weight"], stored["model.layers.0.mlp.experts.1.up_proj.weight"]
    )
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-5)
