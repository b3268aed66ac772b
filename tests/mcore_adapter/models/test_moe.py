"""Training models with experts and latent attention: every layout as one process, balance, and replayed routing."""

from dataclasses import replace
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
    per_token,
    policy_loss,
    random_batch,
    whole,
)
from helpers.mcore_ranks import EXPERT_LAYOUTS, Rank, RankPool
from helpers.tiny_models import EXPERT_MODELS, make_model
from mcore_adapter.data.batch import ROUTED_EXPERTS

BALANCED = dict(moe_aux_loss_coeff=0.05, moe_bias_update_rate=0.01)


@pytest.fixture(scope="module")
def one_process(ranks: RankPool, model_folders: Any) -> dict[str, Any]:
    run = partial(actor_run, **BALANCED)
    return {name: ranks.run(run, 1, ParallelLayout(), str(model_folders[name][0])) for name in EXPERT_MODELS}


@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_the_auxiliary_loss_is_the_mean_imbalance_of_the_sequences(model_folders, one_process, name) -> None:
    """Recomputed from the router logits of transformers, sequence by sequence."""
    model = make_model(name)
    config, batch = model.config, random_batch()
    k = config.num_experts_per_tok
    logits: list[torch.Tensor] = []
    gates = [module.gate for _, module in model.named_modules() if hasattr(module, "gate")]
    hooks = [gate.register_forward_hook(lambda *args: logits.append((args[2][0], args[2][2]))) for gate in gates]
    total = 0.0
    for i in range(batch.num_sequences):
        tokens = batch.select([i]).token_ids
        logits.clear()
        with torch.no_grad():
            model(tokens[None])
        for scores, experts in logits:
            shares = scores.softmax(-1) if name != "deepseek_v3" else scores.sigmoid()
            shares = (shares / shares.sum(-1, keepdim=True))[:-1]
            counts = torch.zeros_like(shares).scatter(1, experts[:-1], 1.0).sum(0)
            n = len(tokens) - 1
            total += float(shares.shape[1] * (counts / (k * n) * shares.mean(0)).sum()) * n / len(logits)
    for hook in hooks:
        hook.remove()
    expected = total / (batch.num_tokens - batch.num_sequences)
    assert one_process[name][0]["steps"][0]["moe_aux_loss"] == pytest.approx(expected, rel=1e-5)
    assert expected > 0.9


def balance_run(rank: Rank, layout: ParallelLayout, model: str, num_steps: int, **settings: Any) -> dict[str, Any]:
    """Correction biases and imbalance over some steps that teach nothing else."""
    with rank.joined(layout) as (parallel, device):
        engine = make_engine(parallel, device, model, **settings)
        batch = random_batch()
        batch.fields["advantages"].zero_()
        steps = [engine.train_step(batch, policy_loss, max_tokens_per_mb=MAX_TOKENS) for _ in range(num_steps)]
        biases = {
            name: tensor.clone()
            for bucket in engine.iter_hf_weights(1 << 20)
            for name, tensor in bucket.items()
            if name.endswith("e_score_correction_bias")
        }
        return {"steps": steps, "biases": biases}


def test_correction_biases_move_by_the_rate_towards_the_idle_experts(ranks: RankPool, model_folders: Any) -> None:
    run = partial(balance_run, moe_bias_update_rate=0.125, optimizer={"lr": 1e-9})
    folder, model = model_folders["deepseek_v3"]
    for layout in (ParallelLayout(), EXPERT_LAYOUTS["tp2 ep2"]):
        after = ranks.run(run, layout.world_size, layout, str(folder), 3)[0]["biases"]
        before = {name: b for name, b in model.named_buffers() if name in after}
        assert len(after) == 3
        for name, bias in after.items():
            moved = ((bias - before[name]) / 0.125).round(decimals=4)
            assert torch.equal(moved, moved.round()) and 1 <= moved.abs().max() <= 3, name


def replay_run(
    rank: Rank, layout: ParallelLayout, model: str, experts: torch.Tensor | None, levels: tuple[str, ...]
) -> dict[str, Any]:
    """With these experts: log-probabilities, and a step at each level of recomputation."""
    with rank.joined(layout) as (parallel, device):
        batch = random_batch()
        if experts is not None:
            batch = batch.with_fields(**{ROUTED_EXPERTS: experts})
        results = {}
        for recompute in levels:
            engine = make_engine(parallel, device, model, recompute=recompute)
            results[recompute] = (
                engine.logprobs(batch, max_tokens_per_mb=MAX_TOKENS),
                engine.train_step(batch, policy_loss, max_tokens_per_mb=MAX_TOKENS),
            )
        return {"shard": results[levels[0]][0], **results}


def chosen_experts(model: Any, batch: Any) -> torch.Tensor:
    """[T, layers, k] what transformers routes to; -1 in dense layers."""
    layers = [hasattr(layer.mlp, "gate") for layer in model.model.layers]
    out = torch.full((batch.num_tokens, len(layers), model.config.num_experts_per_tok), -1)
    found: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda *args: found.append(args[2][2]))
        for layer, sparse in zip(model.model.layers, layers, strict=True)
        if sparse
    ]
    for i in range(batch.num_sequences):
        found.clear()
        with torch.no_grad():
            model(batch.select([i]).token_ids[None])
        out[batch.token_index([i])[:, None], torch.tensor(layers).nonzero()[:, 0]] = torch.stack(found, 1)
    for hook in hooks:
        hook.remove()
    return out


def test_experts_that_are_given_are_the_experts_that_are_used(ranks: RankPool, model_folders: Any) -> None:
    folder, model = model_folders["deepseek_v3"]
    batch = random_batch()
    experts = chosen_experts(model, batch)
    free, replayed = (
        ranks.run(replay_run, 1, ParallelLayout(), str(folder), forced, ("none",)) for forced in (None, experts)
    )  # fmt: skip
    torch.testing.assert_close(whole(replayed), whole(free), rtol=1e-6, atol=1e-6)
    assert replayed[0]["none"][1]["grad_norm"] == pytest.approx(free[0]["none"][1]["grad_norm"], rel=1e-5)

    shifted = torch.where(experts >= 0, (experts + 1) % 8, experts)
    other = ranks.run(replay_run, 1, ParallelLayout(), str(folder), shifted, ("none", "full"))
    assert (whole(other) - whole(free)).abs().mean() > 0.01
    assert other[0]["full"][1]["grad_norm"] == pytest.approx(other[0]["none"][1]["grad_norm"], rel=1e-5)
    for key in ("dp2 pp2 ep2", "cp2 ep2", "tp2 ep2"):
        layout = EXPERT_LAYOUTS[key]
        results = ranks.run(replay_run, layout.world_size, layout, str(folder), shifted, ("full",))
        torch.testing.assert_close(whole(results), whole(other), rtol=1e-5, atol=1e-5)
        assert results[0]["full"][1]["grad_norm"] == pytest.approx(other[0]["none"][1]["grad_norm"], rel=1e-5)


def test_tokens_without_given_experts_choose_by_themselves(ranks: RankPool, model_folders: Any) -> None:
    """What a generator cannot report (the last token of a completion) is left to the router."""
    folder, model = model_folders["qwen3_moe"]
    batch = random_batch()
    experts = chosen_experts(model, batch)
    experts[::2] = -1
    free, partly = (ranks.run(replay_run, 1, ParallelLayout(), str(folder), e, ("none",)) for e in (None, experts))
    torch.testing.assert_close(whole(partly), whole(free), rtol=1e-6, atol=1e-6)


def replay_errors(rank: Rank, model: str, dense: str) -> list[str]:
    messages = []
    batch = random_batch()
    right = torch.tensor([[0, 1]]).expand(batch.num_tokens, 4, 2)
    cases = [(model, right[:, :3]), (model, right + 3), (model, right * 0), (dense, right)]
    with rank.joined(ParallelLayout()) as (parallel, device):
        for folder, experts in cases:
            engine = make_engine(parallel, device, folder, train=False)
            with pytest.raises(ValueError) as error:
                engine.logprobs(batch.with_fields(**{ROUTED_EXPERTS: experts}), max_tokens_per_mb=MAX_TOKENS)
            messages.append(str(error.value))
    return messages


def test_experts_that_cannot_be_used_are_one_clear_error(ranks: RankPool, model_folders: Any) -> None:
    paths = [str(model_folders[name][0]) for name in ("qwen3_moe", "qwen3")]
    shape, range_, twice, dense = ranks.run(replay_errors, 1, *paths)[0]
    assert "[T, layers, k]" in shape and "expert 4" in range_ and "twice" in twice and "no experts" in dense


def uneven_folder(model_folders: Any, name: str, target: Path, num_layers: int) -> Path:
    """A model like `name` of so many layers."""
    _, model = model_folders[name]
    settings = {key: value for key, value in model.config.to_dict().items() if key != "layer_types"}
    config = type(model.config).from_dict({**settings, "num_hidden_layers": num_layers})
    torch.manual_seed(0)
    type(model)(config).save_pretrained(target)
    return target


@pytest.mark.parametrize(
    ("name", "num_layers", "layout"),
    [("qwen2_tied", 3, ParallelLayout(pp=2)), ("deepseek_v3", 5, ParallelLayout(pp=2, vpp=2))],
)
def test_stages_may_have_unequal_numbers_of_layers(ranks, model_folders, tmp_path, name, num_layers, layout) -> None:
    folder = str(uneven_folder(model_folders, name, tmp_path, num_layers))
    expected = ranks.run(actor_run, 1, ParallelLayout(), folder)
    results = ranks.run(actor_run, 2, layout, folder)
    assert_same_steps(results, expected)
    torch.testing.assert_close(whole(results), whole(expected), rtol=1e-5, atol=1e-5)


def shared_run(rank: Rank, model: str, max_tokens: int) -> Any:
    """A group of completions of one prompt, cut into few microbatches or many."""
    with rank.joined(ParallelLayout()) as (parallel, device):
        batch = random_batch(6, shortest=20, longest=20)
        tokens = batch.token_ids.clone().view(6, 20)
        tokens[:, :10] = tokens[0, :10]
        mask = batch.loss_mask.view(6, 20).clone()
        mask[:, :10], mask[:, 10:] = False, True
        batch = replace(batch, token_ids=tokens.flatten(), loss_mask=mask.flatten())
        engine = make_engine(parallel, device, model, **BALANCED)
        shard = engine.logprobs(batch, max_tokens_per_mb=max_tokens)
        return per_token(batch, shard), engine.train_step(batch, policy_loss, max_tokens_per_mb=max_tokens)


def test_a_shared_prompt_counts_for_each_of_its_completions(ranks: RankPool, model_folders: Any) -> None:
    folder = str(model_folders["qwen3_moe"][0])
    (together, one), (apart, many) = (ranks.run(shared_run, 1, folder, n)[0] for n in (1000, 20))
    assert (one["num_microbatches"], many["num_microbatches"]) == (1, 6)
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)
    for key in ("loss", "grad_norm", "moe_aux_loss"):
        assert one[key] == pytest.approx(many[key], rel=1e-5), key


def skipped_run(rank: Rank, model: str) -> tuple[dict[str, float], bool, bool]:
    """(a step whose gradient is not finite, whether it left the weights and biases, whether the next one did)"""
    with rank.joined(ParallelLayout()) as (parallel, device):
        engine = make_engine(parallel, device, model, **BALANCED)

        def exported() -> dict[str, torch.Tensor]:
            return {k: v.clone() for bucket in engine.iter_hf_weights(1 << 20) for k, v in bucket.items()}

        def unchanged(before: dict[str, torch.Tensor]) -> bool:
            return all(torch.equal(before[name], tensor) for name, tensor in exported().items())

        before = exported()
        assert any(name.endswith("e_score_correction_bias") for name in before)
        skipped = engine.train_step(
            random_batch(),
            lambda output, fields, sequences: (output.logprobs.sum() * torch.nan, {}),
            max_tokens_per_mb=MAX_TOKENS,
        )
        kept = unchanged(before)
        engine.train_step(random_batch(), policy_loss, max_tokens_per_mb=MAX_TOKENS)
        return skipped, kept, unchanged(before)


def test_a_skipped_update_leaves_the_correction_biases_where_they_are(ranks: RankPool, model_folders: Any) -> None:
    ((skipped, kept, kept_by_the_next),) = ranks.run(skipped_run, 1, str(model_folders["deepseek_v3"][0]))
    assert skipped["update_skipped"] == 1.0
    assert kept and not kept_by_the_next
