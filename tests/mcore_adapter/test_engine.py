"""The engine on real gloo ranks: every layout computes what one process does, and that is what transformers does."""

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from allocation import ParallelLayout
from helpers.engine_cases import (
    MAX_TOKENS,
    STEPS,
    actor_run,
    assert_same_steps,
    make_engine,
    per_token,
    policy_loss,
    random_batch,
    transformers_step,
    value_loss,
    whole,
)
from helpers.mcore_ranks import LAYOUTS as MEGATRON_LAYOUTS
from helpers.mcore_ranks import Rank, RankPool, build, cases
from helpers.saved_models import save
from helpers.tiny_models import MODELS, write_model
from mcore_adapter.data.batch import shape_of
from mcore_adapter.data.planner import BatchShard

LAYOUTS = {"dp2": ParallelLayout(dp=2), **MEGATRON_LAYOUTS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine")
    write_model("qwen2_tied", path / "qwen2_tied")
    write_model("qwen3", path / "qwen3")
    return path


def critic_run(rank: Rank, layout: ParallelLayout, model: str) -> dict[str, Any]:
    with rank.joined(layout) as (parallel, device):
        engine = make_engine(parallel, device, model, is_critic=True, init_critic_from_actor=True)
        batch = random_batch()
        steps = [engine.train_step(batch, value_loss, max_tokens_per_mb=MAX_TOKENS) for _ in range(STEPS)]
        return {"steps": steps, "shard": engine.values(batch, max_tokens_per_mb=MAX_TOKENS)}


@pytest.fixture(scope="module")
def one_process(ranks: RankPool, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What one rank computes, by kind of run."""
    return {
        "qwen2_tied": ranks.run(actor_run, 1, ParallelLayout(), str(folder / "qwen2_tied")),
        "qwen3": ranks.run(actor_run, 1, ParallelLayout(), str(folder / "qwen3")),
        "critic": ranks.run(critic_run, 1, ParallelLayout(), str(folder / "qwen3")),
    }


@cases(
    MODELS, LAYOUTS, others=("tp2", "dp2 pp2 ep2"),
    also={("qwen2_tied", "tp2 pp2"), ("glm4", "cp2"), ("deepseek_v3", "cp2 ep2")},
)  # fmt: skip
def test_a_first_step_is_that_of_transformers(ranks, model_folders, name, layout):
    """Each sequence on its own through the Hugging Face model: loss, gradient norm and log-probabilities."""
    folder, model = model_folders[name]
    loss, grad_norm, logprobs = transformers_step(model)
    results = ranks.run(partial(actor_run, steps=1), layout.world_size, layout, str(folder))
    (first,) = results[0]["steps"]
    assert first["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert first["grad_norm"] == pytest.approx(grad_norm, rel=1e-5)
    torch.testing.assert_close(whole(results), logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["dp2", "cp2", "tp2 pp2"])  # at night: test_layout_products
def test_a_layout_trains_as_one_process_does(ranks, folder, one_process, layout):
    """Tied embeddings: the first and the last stage share a weight and its gradient."""
    results = ranks.run(actor_run, LAYOUTS[layout].world_size, LAYOUTS[layout], str(folder / "qwen2_tied"))
    assert_same_steps(results, one_process["qwen2_tied"])
    assert [r["shard"] is not None for r in results] == [r["owner"] for r in results]


def test_the_first_step_in_bfloat16_is_that_of_float32_to_its_rounding(ranks, folder, one_process):
    """bfloat16 keeps 8 bits of a number: one rounding is 0.4 % at most."""
    results = ranks.run(partial(actor_run, dtype="bfloat16"), 2, LAYOUTS["cp2"], str(folder / "qwen3"))
    first, reference = results[0]["steps"][0], one_process["qwen3"][0]["steps"][0]  # later ones amplify the rounding
    assert first["grad_norm"] == pytest.approx(reference["grad_norm"], rel=0.02)
    assert first["loss"] == pytest.approx(reference["loss"], rel=0.02)
    torch.testing.assert_close(whole(results), whole(one_process["qwen3"]), rtol=0.01, atol=0.01)


def test_a_critic_learns_the_same_values_in_tensor_and_pipeline_parallel_ranks(ranks, folder, one_process):
    results = ranks.run(critic_run, 4, LAYOUTS["tp2 pp2"], str(folder / "qwen3"))
    assert_same_steps(results, one_process["critic"])
    torch.testing.assert_close(whole(results), whole(one_process["critic"]), rtol=1e-5, atol=1e-5)


def value_run(rank: Rank, layout: ParallelLayout, model: str) -> Any:
    with rank.joined(layout) as (parallel, device):
        return {
            "shard": make_engine(parallel, device, model, is_critic=True).values(random_batch(), max_tokens_per_mb=64)
        }


def test_a_critic_values_the_state_before_every_token_with_its_head(ranks, folder, tmp_path):
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder / "qwen3", num_labels=1)
    critic = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    torch.nn.init.normal_(critic.score.weight)
    critic.save_pretrained(tmp_path)
    values = whole(ranks.run(value_run, 4, LAYOUTS["tp2 pp2"], str(tmp_path)))
    batch = random_batch()
    with torch.no_grad():
        hidden = [critic.model(batch.select([i]).token_ids[None]) for i in range(batch.num_sequences)]
        theirs = torch.cat([critic.score(one.last_hidden_state[0])[:, 0].roll(1) for one in hidden])
    torch.testing.assert_close(values, theirs * batch.loss_mask, rtol=1e-5, atol=1e-5)


def build_error(rank: Rank, layout: ParallelLayout, folder: Path) -> str:
    from model_specs.untrusted import ModelConfigError

    with rank.joined(layout) as (parallel, device), pytest.raises(ModelConfigError) as error:
        build(folder, parallel, device)
    return str(error.value)


@pytest.mark.parametrize(
    ("settings", "layout", "words"),
    [
        ({"vocab_size": 97}, ParallelLayout(tp=2), ("vocab_size=97", "tensor parallel size, 2")),
        ({"num_key_value_heads": 1}, ParallelLayout(tp=2), ("num_key_value_heads=1", "tensor parallel size, 2")),
        ({"num_hidden_layers": 3}, ParallelLayout(pp=2, vpp=2), ("num_hidden_layers=3", "pipeline stages", "4")),
        ({}, ParallelLayout(dp=2, ep=2), ("ep=2", "mixture-of-experts")),
    ],
)
def test_a_model_that_the_layout_cannot_cut_is_an_error(ranks, folder, tmp_path, settings, layout, words):
    config = json.loads((folder / "qwen3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "layer_types": None, **settings}))
    for message in ranks.run(build_error, layout.world_size, layout, tmp_path):
        assert all(word in message for word in words), message


def packing_run(rank: Rank, model: str) -> dict[str, Any]:
    """One rank: the same minibatch cut in different ways, and with all of a layer's activations recomputed."""
    with rank.joined(ParallelLayout()) as (parallel, device):
        batch = random_batch()
        cuts = {"alone": int(batch.seq_lens.max()), "packed": 10_000}
        result: dict[str, Any] = {}
        for name, max_tokens in cuts.items():
            engine = make_engine(parallel, device, model)
            result[name] = (
                engine.logprobs(batch, max_tokens_per_mb=max_tokens),
                engine.train_step(batch, policy_loss, max_tokens_per_mb=max_tokens),
            )
        engine = make_engine(parallel, device, model, recompute="full")
        result["recomputed"] = (
            engine.logprobs(batch, max_tokens_per_mb=10_000),
            engine.train_step(batch, policy_loss, max_tokens_per_mb=10_000),
        )
        return result


def test_packed_sequences_and_recomputation_change_nothing(ranks, folder):
    (result,) = ranks.run(packing_run, 1, str(folder / "qwen2_tied"))
    batch = random_batch()
    logprobs, step = result["packed"]
    assert step["num_microbatches"] == 1
    assert result["alone"][1]["num_microbatches"] >= 6
    for name in ("alone", "recomputed"):
        other_logprobs, other_step = result[name]
        torch.testing.assert_close(per_token(batch, other_logprobs), per_token(batch, logprobs), rtol=1e-6, atol=1e-6)
        assert other_step["loss"] == pytest.approx(step["loss"], rel=1e-6)
        assert other_step["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-5)


def filler_run(rank: Rank, layout: ParallelLayout, model: str) -> Any:
    with rank.joined(layout) as (parallel, device):
        engine = make_engine(parallel, device, model)
        batch = random_batch(num_sequences=3)
        shard = engine.logprobs(batch, max_tokens_per_mb=40)
        of_last = BatchShard(shape=shape_of(batch), select=batch.select, owners=np.full(3, layout.dp - 1))
        owned = engine.logprobs(of_last, max_tokens_per_mb=40)
        assert owned is None or set(owned.sequences) == ({0, 1, 2} if parallel.dp_rank == layout.dp - 1 else set())
        one = random_batch(num_sequences=1)
        return [engine.train_step(b, policy_loss, max_tokens_per_mb=40) for b in (batch, one)], shard, owned


def test_fewer_sequences_than_ranks_train_the_same_with_fillers(ranks, folder):
    (expected, shard, _), *_ = ranks.run(filler_run, 1, ParallelLayout(), str(folder / "qwen2_tied"))
    results = ranks.run(filler_run, 4, ParallelLayout(dp=2, tp=2), str(folder / "qwen2_tied"))
    for steps, *_ in results:
        assert [step["num_microbatches"] for step in steps] == [s["num_microbatches"] for s in results[0][0]]
        for step, reference in zip(steps, expected, strict=True):
            assert step["loss"] == pytest.approx(reference["loss"], rel=1e-5)
            assert step["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5)
    for which in (1, 2):
        shards = [result[which] for result in results if result[which] is not None]
        assert sorted(i for s in shards for i in s.sequences) == [0, 1, 2]
        assert sum(s.values.sum() for s in shards) == pytest.approx(float(shard.values.sum()), rel=1e-5)


def one_rank_run(rank: Rank, model: str) -> dict[str, Any]:
    """Everything that needs no second rank, in one world."""
    with rank.joined(ParallelLayout()) as (parallel, device):
        return {
            "several": _several_engines(parallel, device, model),
            "masked": make_engine(parallel, device, model).train_step(
                _all_masked(), policy_loss, max_tokens_per_mb=MAX_TOKENS
            ),
            "bf16": _bf16(parallel, device, model),
            "lrs": _lrs(parallel, device, model),
            "errors": _errors(parallel, device, model),
        }


def _weights(engine: Any) -> dict[str, torch.Tensor]:
    return {k: v.clone() for bucket in engine.iter_hf_weights(1 << 20) for k, v in bucket.items()}


def _several_engines(parallel: Any, device: Any, model: str) -> dict[str, Any]:
    actor = make_engine(parallel, device, model)
    critic = make_engine(parallel, device, model, is_critic=True, init_critic_from_actor=True)
    reference = make_engine(parallel, device, model, train=False)
    batch = random_batch()
    first = reference.logprobs(batch, max_tokens_per_mb=MAX_TOKENS).values
    steps = []
    for _ in range(2):
        steps.append(actor.train_step(batch, policy_loss, max_tokens_per_mb=MAX_TOKENS))
        critic.train_step(batch, value_loss, max_tokens_per_mb=MAX_TOKENS)
    control = make_engine(parallel, device, model)
    expected = [control.train_step(batch, policy_loss, max_tokens_per_mb=MAX_TOKENS) for _ in range(2)]
    return dict(
        steps=steps,
        expected=expected,
        reference_unchanged=torch.equal(first, reference.logprobs(batch, max_tokens_per_mb=MAX_TOKENS).values),
        reference_buffers=[n for c in reference._model for n, p in c.named_parameters() if hasattr(p, "main_grad")],
    )


def _all_masked() -> Any:
    batch = random_batch()
    batch.loss_mask.zero_()
    return batch


def _bf16(parallel: Any, device: Any, model: str) -> list[float]:
    engine = make_engine(parallel, device, model, dtype="bfloat16", optimizer={"lr": 1e-2})
    batch = random_batch()
    batch.fields["advantages"].fill_(1.0)
    return [engine.train_step(batch, policy_loss, max_tokens_per_mb=MAX_TOKENS)["loss"] for _ in range(6)]


def _lrs(parallel: Any, device: Any, model: str) -> list[float]:
    schedule = {"lr_scheduler_type": "linear", "warmup_steps_proportion": 0.5, "total_steps": 4, "lr": 1.0}
    engine = make_engine(parallel, device, model, optimizer=schedule)
    return [engine.train_step(random_batch(), policy_loss, max_tokens_per_mb=MAX_TOKENS)["lr"] for _ in range(5)]


def _errors(parallel: Any, device: Any, model: str) -> dict[str, str]:
    reference = make_engine(parallel, device, model, train=False)
    batch = random_batch()
    first_token = copy.deepcopy(batch)
    first_token.loss_mask[0] = True
    calls = {
        "no optimizer": lambda: reference.train_step(batch, policy_loss, max_tokens_per_mb=MAX_TOKENS),
        "too long": lambda: reference.logprobs(batch, max_tokens_per_mb=8),
        "first token": lambda: reference.logprobs(first_token, max_tokens_per_mb=MAX_TOKENS),
        "no values": lambda: reference.values(batch, max_tokens_per_mb=MAX_TOKENS),
        "no critic": lambda: make_engine(parallel, device, model, is_critic=True),
    }
    messages = {}
    for name, call in calls.items():
        with pytest.raises(ValueError) as error:
            call()
        messages[name] = str(error.value)
    return messages


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool, folder: Path) -> dict[str, Any]:
    return ranks.run(one_rank_run, 1, str(folder / "qwen2_tied"))[0]


def test_actor_critic_and_reference_share_a_process_without_touching_each_other(one_rank):
    several = one_rank["several"]
    assert several["steps"] == several["expected"]
    assert several["reference_unchanged"]
    assert several["reference_buffers"] == [], "an inference engine holds no gradient buffers"


def warmed_run(rank: Rank, layout: ParallelLayout, model: str, *, warms_up: bool, **settings: Any) -> dict[str, Any]:
    with rank.joined(layout) as (parallel, device):
        engine, batch = make_engine(parallel, device, model, **settings), random_batch()
        if warms_up:
            engine.warm_up()
        loss = value_loss if settings.get("is_critic") else policy_loss
        steps = [engine.train_step(batch, loss, max_tokens_per_mb=MAX_TOKENS) for _ in range(STEPS)]
        weights = [(name, t.sum().item()) for bucket in engine.iter_hf_weights(1 << 20) for name, t in bucket.items()]
        random = torch.get_rng_state().tolist()
        return {"steps": steps, "updates": engine.num_updates, "weights": weights, "random": random}


CRITIC = {"is_critic": True, "init_critic_from_actor": True}
EXPERTS = {"moe_aux_loss_coeff": 0.05, "moe_bias_update_rate": 0.01, "recompute": "auto"}


@pytest.mark.parametrize(
    ("layout", "model", "settings"),
    [
        (ParallelLayout(tp=2, pp=2), "qwen2_tied", {}),
        (ParallelLayout(dp=2, ep=2), "qwen3_moe", EXPERTS),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                (ParallelLayout(), "qwen2_tied", {}),
                (ParallelLayout(cp=3), "qwen2_tied", {}),
                (ParallelLayout(dp=2), "qwen2_tied", CRITIC),
                (ParallelLayout(pp=2, vpp=2), "qwen2_tied", {}),
                (ParallelLayout(tp=2), "qwen2_tied", CRITIC),
                (ParallelLayout(cp=2), "qwen3_moe", EXPERTS),
                (ParallelLayout(pp=2), "qwen3_moe", EXPERTS),
                (ParallelLayout(tp=2), "deepseek_v2", {}),
            )
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "critic" if value == CRITIC else None,
)
def test_a_warm_up_changes_nothing(ranks, folder, layout, model, settings):
    if not (folder / model).exists():
        write_model(model, folder / model)
    cold, warm = (
        ranks.run(partial(warmed_run, warms_up=warms_up, **settings), layout.world_size, layout, str(folder / model))
        for warms_up in (False, True)
    )
    assert warm == cold and warm[0]["updates"] == STEPS


def test_a_batch_without_trained_tokens_is_a_step_of_zero_gradient(one_rank):
    assert one_rank["masked"]["loss"] == 0.0
    assert one_rank["masked"]["grad_norm"] == 0.0


def test_bfloat16_training_learns(one_rank):
    assert one_rank["bf16"][-1] < one_rank["bf16"][0] - 0.5


def test_the_learning_rate_follows_the_schedule_with_the_updates(one_rank):
    assert one_rank["lrs"] == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0])


def test_misuse_is_one_clear_error(one_rank):
    errors = one_rank["errors"]
    assert "inference" in errors["no optimizer"]
    assert "max_tokens_per_mb=8" in errors["too long"]
    assert "loss_mask" in errors["first token"]
    assert "language model" in errors["no values"]
    assert "init_critic_from_actor=true" in errors["no critic"]


def export_run(rank: Rank, layout: ParallelLayout, model: str, target: str) -> Any:
    with rank.joined(layout) as (parallel, device):
        engine = make_engine(parallel, device, model, optimizer={"lr": 1e-2})
        batch = random_batch()
        engine.train_step(batch, policy_loss, max_tokens_per_mb=MAX_TOKENS)
        engine.save_hf(target)
        return engine.logprobs(batch, max_tokens_per_mb=MAX_TOKENS)


def test_what_was_trained_is_what_is_exported(ranks, folder, tmp_path):
    import transformers

    results = ranks.run(export_run, 2, LAYOUTS["tp2"], str(folder / "qwen2_tied"), str(tmp_path / "hf"))
    batch = random_batch()
    logprobs = per_token(batch, results[0])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").float()
    one = batch.select([0])
    with torch.no_grad():
        logp = model(one.token_ids[None]).logits[0, :-1].log_softmax(-1).gather(1, one.token_ids[1:, None])[:, 0]
    expected = torch.cat((torch.zeros(1), logp)) * one.loss_mask
    torch.testing.assert_close(logprobs[: one.num_tokens], expected, rtol=1e-5, atol=1e-5)


def options_run(
    rank: Rank, layout: ParallelLayout, model: str, overlap: bool, dtype: str, settings: dict[str, Any]
) -> dict[str, Any]:
    """Minibatches of several microbatches, with log-probabilities and weights read between them."""
    with rank.joined(layout) as (parallel, device):
        device.overlaps_communication = overlap
        engine = make_engine(parallel, device, model, dtype=dtype, **settings)
        steps, read = [], []
        for seed in range(STEPS):
            batch = random_batch(seed=seed)
            for _ in range(2):  # the second one meets weights that nobody has gathered
                steps.append(engine.train_step(batch, policy_loss, max_tokens_per_mb=64))
            shard = engine.logprobs(batch, max_tokens_per_mb=64)
            read.append(float(shard.values.sum()) if shard is not None else 0.0)
        return {"steps": steps, "logprobs": read, "weights": _weights(engine)}


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(dp=2, pp=2, vpp=2),
        *(pytest.param(one, marks=pytest.mark.nightly) for one in (ParallelLayout(dp=2), ParallelLayout(dp=2, pp=2))),
    ],
)
def test_communication_beside_the_computation_changes_nothing(ranks, folder, layout):
    model = str(folder / "qwen2_tied")
    plain = ranks.run(options_run, layout.world_size, layout, model, False, "float32", {})
    overlapped = ranks.run(options_run, layout.world_size, layout, model, True, "float32", {})
    for ours, theirs in zip(overlapped, plain, strict=True):
        for step, reference in zip(ours["steps"], theirs["steps"], strict=True):
            for key in step:
                assert step[key] == pytest.approx(reference[key], rel=1e-5, abs=1e-6), key
        assert ours["logprobs"] == pytest.approx(theirs["logprobs"], rel=1e-5)
        assert ours["weights"].keys() == theirs["weights"].keys()
        for name, weight in ours["weights"].items():
            torch.testing.assert_close(weight, theirs["weights"][name], rtol=1e-5, atol=1e-5)


def test_gradients_reduced_in_bfloat16_train_nearly_the_same(ranks, folder):
    layout, model = ParallelLayout(dp=2), str(folder / "qwen2_tied")
    fp32, *_ = ranks.run(options_run, 2, layout, model, False, "bfloat16", {})
    bf16, *_ = ranks.run(options_run, 2, layout, model, True, "bfloat16", {"grad_reduce_in_fp32": False})
    pairs = [(a["grad_norm"], b["grad_norm"]) for a, b in zip(bf16["steps"], fp32["steps"], strict=True)]
    assert all(a == pytest.approx(b, rel=0.03) for a, b in pairs)
    assert any(a != b for a, b in pairs), "another format gives other sums"


def test_an_optimizer_whose_state_visits_the_device_in_pieces_takes_the_same_steps(ranks, folder, tmp_path):
    model = str(folder / "qwen2_tied")
    (plain,) = ranks.run(pieces_run, 1, model, False, str(tmp_path / "plain"))
    (moved,) = ranks.run(pieces_run, 1, model, True, str(tmp_path / "moved"))
    assert moved["num_pieces"] > 3 and plain["num_pieces"] == 0
    assert moved["steps"] == plain["steps"]
    assert moved["again"] == plain["again"]
    files = [sorted((tmp_path / name).iterdir()) for name in ("plain", "moved")]
    sizes = [{path.name: path.stat().st_size for path in found} for found in files]
    assert sizes[0] == sizes[1], "what is a part of a larger allocation is saved without the rest"


def pieces_run(rank: Rank, model: str, offload: bool, target: str) -> dict[str, Any]:
    """Steps, a checkpoint, and the same steps again from it."""
    from mcore_adapter.optimizer import training as optimizer_state

    optimizer_state.PIECE_BYTES = 40_000
    cut, pieces = optimizer_state._pieces, []
    optimizer_state._pieces = lambda params: (pieces.append(p) or p for p in cut(params))
    reserve, reserved = optimizer_state.OptimizerState.reserve, []
    optimizer_state.OptimizerState.reserve = reserved.append
    try:
        with rank.joined(ParallelLayout()) as (parallel, device):
            engine = make_engine(parallel, device, model, optimizer={"offload": offload})
            step = lambda: engine.train_step(random_batch(), policy_loss, max_tokens_per_mb=MAX_TOKENS)  # noqa: E731
            steps = [step() for _ in range(2)]
            save(engine, target)
            steps += [step() for _ in range(2)]
            num_pieces = len(pieces)
            engine = make_engine(parallel, device, model, optimizer={"offload": offload})
            engine.load(target)
            assert not reserved, "nothing is page-locked for the CPU"
            return {"steps": steps, "again": [step() for _ in range(2)], "num_pieces": num_pieces}
    finally:
        optimizer_state.OptimizerState.reserve = reserve
        optimizer_state._pieces, optimizer_state.PIECE_BYTES = cut, 1 << 30


def fp8_run(rank: Rank, model: str) -> str:
    with rank.joined(ParallelLayout()) as (parallel, device), pytest.raises(ValueError) as error:
        make_engine(parallel, device, model, fp8="blockwise")
    return str(error.value)


def test_8_bit_products_are_refused_where_there_are_none(ranks, folder):
    (message,) = ranks.run(fp8_run, 1, str(folder / "qwen2_tied"))
    assert "fp8=blockwise needs a GPU of compute capability 9.0" in message and "write fp8=false" in message
