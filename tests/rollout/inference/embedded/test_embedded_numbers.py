"""What the embedded generator computes, against plain forward passes of transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from helpers.embedded_models import (
    FAMILIES,
    VOCAB,
    config_of,
    engine_of,
    follows,
    make_model,
    oracle_logprobs,
    prompt,
    request,
    run,
    write_model,
)
from model_specs.families import parse_config, read_config
from rollout.inference.embedded.engine import Engine
from rollout.inference.embedded.generator import EmbeddedGenerator
from rollout.inference.embedded.weights import ModelWeights


@pytest.fixture(scope="module")
def qwen2() -> Any:
    return make_model("qwen2")


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_transformers_for_every_family(family: str, tmp_path: Path) -> None:
    model = write_model(family, tmp_path)
    config = read_config(tmp_path)
    weights = ModelWeights(config, dtype=torch.float32)
    weights.load_folder(tmp_path)
    requests = [request(i, prompt(1 + 23 * i, seed=i), max_new_tokens=(90, 5)[i % 2]) for i in range(8)]
    requests.append(request(8, prompt(40), max_new_tokens=60, temperature=0.6))
    for r, completion in zip(requests, run(Engine(config, weights, max_running=5), requests), strict=True):
        expected = oracle_logprobs(model, r.prompt_ids, completion.token_ids, r.sampling.temperature)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
        assert len(completion.token_ids) == r.sampling.max_new_tokens
        assert completion.finish_reason == "length"
        arrays = (completion.token_ids, completion.logprobs, completion.versions)
        assert [a.dtype for a in arrays] == [np.int32, np.float32, np.int32]


def test_greedy_decoding_is_that_of_transformers(qwen2: Any) -> None:
    requests = [request(i, prompt(5 + i, seed=i), max_new_tokens=40, temperature=0.0) for i in range(4)]
    for r, completion in zip(requests, run(engine_of(qwen2), requests), strict=True):
        ids = torch.tensor(r.prompt_ids)[None]
        expected = qwen2.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
        assert completion.token_ids.tolist() == expected[0, ids.shape[1] :].tolist()
        np.testing.assert_allclose(
            completion.logprobs, oracle_logprobs(qwen2, r.prompt_ids, completion.token_ids), atol=1e-4
        )


def test_bfloat16_stays_near_float32(qwen2: Any) -> None:
    requests = [request(i, prompt(30, seed=i), max_new_tokens=40) for i in range(6)]
    completions = run(engine_of(qwen2, dtype="bfloat16"), requests)
    errors = [
        np.abs(c.logprobs - oracle_logprobs(qwen2, r.prompt_ids, c.token_ids))
        for r, c in zip(requests, completions, strict=True)
    ]
    assert np.mean(errors) < 0.1


def test_sampled_tokens_follow_the_model_at_the_first_and_the_second_place(qwen2: Any) -> None:
    ids, n = prompt(9), 3000
    completions = run(
        engine_of(qwen2, max_running=512), [request(i, ids, max_new_tokens=2, temperature=1.5) for i in range(n)]
    )
    tokens = np.array([c.token_ids for c in completions])
    favourite = int(np.bincount(tokens[:, 0]).argmax())
    after_favourite = tokens[tokens[:, 0] == favourite, 1]
    for drawn, context in ((tokens[:, 0], [*ids]), (after_favourite, [*ids, favourite])):
        with torch.no_grad():
            probs = (qwen2(torch.tensor([context])).logits[0, -1].double() / 1.5).softmax(-1).numpy()
        assert follows(drawn, probs)


@pytest.mark.parametrize("limits", [{"top_k": 4}, {"top_p": 0.6}, {"top_k": 20, "top_p": 0.8, "temperature": 1.3}])
def test_logprobs_under_top_k_and_top_p_are_those_of_the_restricted_distribution(qwen2: Any, limits: Any) -> None:
    requests = [request(i, prompt(12, seed=i), max_new_tokens=20, **limits) for i in range(6)]
    temperature, top_k, top_p = (limits.get(k, d) for k, d in (("temperature", 1.0), ("top_k", VOCAB), ("top_p", 1.0)))
    for r, c in zip(requests, run(engine_of(qwen2), requests), strict=True):
        with torch.no_grad():
            logits = qwen2(torch.tensor([[*r.prompt_ids, *c.token_ids]])).logits[0, len(r.prompt_ids) - 1 : -1]
        for row, token, logprob in zip(logits.double() / temperature, c.token_ids, c.logprobs, strict=True):
            probs, order = row.softmax(-1).sort(descending=True)
            probs, order = probs[:top_k] / probs[:top_k].sum(), order[:top_k]
            kept = int((probs.cumsum(0) - probs < top_p).sum())
            assert token in order[:kept]
            rank = (order == token).nonzero().item()
            assert logprob == pytest.approx((probs[rank] / probs[:kept].sum()).log().item(), abs=1e-4)


def test_stop_tokens_end_a_completion_but_not_before_min_new_tokens(qwen2: Any) -> None:
    stops = tuple(range(0, VOCAB, 4))
    requests = [
        request(i, prompt(6, seed=i), max_new_tokens=12, min_new_tokens=(0, 5, 12)[i % 3], stop_token_ids=stops)
        for i in range(60)
    ]
    completions = run(engine_of(qwen2), requests)
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for r, c in zip(requests, completions, strict=True):
        n, shortest, is_stop = len(c.token_ids), r.sampling.min_new_tokens, np.isin(c.token_ids, stops)
        assert not is_stop[:-1].any()
        assert c.finish_reason == ("stop" if is_stop[-1] else "length")
        assert n == 12 if shortest == 12 or not is_stop[-1] else n > shortest
        with torch.no_grad():
            logits = qwen2(torch.tensor([[*r.prompt_ids, *c.token_ids]])).logits[0, len(r.prompt_ids) - 1 : -1].clone()
        logits[:shortest, list(stops)] = -torch.inf
        expected = logits.log_softmax(-1)[torch.arange(n), torch.from_numpy(c.token_ids).long()]
        np.testing.assert_allclose(c.logprobs, expected.numpy(), atol=1e-4)


# Loading: what is not this model is an error, never a different model.


def test_a_model_with_experts_is_refused(tmp_path: Path) -> None:
    write_model("qwen2", tmp_path)
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    with pytest.raises(ValueError, match="model_type='qwen3_moe' has experts or latent attention.*use sglang"):
        EmbeddedGenerator(config_of(tmp_path) | experts)


def test_a_missing_folder_a_truncated_file_and_absent_parameters_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere/config.json: no such file"):
        EmbeddedGenerator(tmp_path / "nowhere")
    write_model("qwen2", tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="model.safetensors: truncated"):
        EmbeddedGenerator(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match="neither model.safetensors nor model.safetensors.index.json"):
        EmbeddedGenerator(tmp_path)


def test_tensors_of_another_model_are_refused_before_anything_changes(qwen2: Any) -> None:
    config = parse_config(qwen2.config.to_dict())
    weights = ModelWeights(config, dtype=torch.float32)
    with pytest.raises(ValueError, match="did you mean 'model.layers.0.mlp.down_proj.weight'"):
        weights.update({"model.norm.weight": torch.ones(48), "model.layers.0.mlp.downproj.weight": torch.ones(48, 80)})
    with pytest.raises(ValueError, match=r"model.norm.weight: shape \(3,\), expected \(48,\)"):
        weights.update({"model.norm.weight": torch.ones(3)})
    assert "model.norm.weight" in weights.missing
    assert not weights.norm.any()


def test_weights_in_another_form_beside_the_model_are_not_read(tmp_path: Path) -> None:
    write_model("qwen2", tmp_path)
    save_file({"layers.0.attention.wq.weight": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    weights = ModelWeights(read_config(tmp_path), dtype=torch.float32)
    weights.load_folder(tmp_path)
    assert not weights.missing


def test_stop_tokens_outside_of_the_vocabulary_do_nothing(qwen2: Any) -> None:
    (completion,) = run(engine_of(qwen2), [request(0, prompt(4), min_new_tokens=3, stop_token_ids=(VOCAB, 10**6))])
    assert completion.finish_reason == "length"
