"""Small models of every family for the generator's tests, their Hugging Face oracles, and requests against them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from helpers import tiny_models
from model_specs.families import parse_config
from rollout.bucket import FlatBucket
from rollout.inference.embedded.engine import Engine
from rollout.inference.embedded.weights import DTYPES, ModelWeights
from rollout.types import Completion, GenerateRequest, SamplingParams

# The suite shares few cores; with more threads than idle cores, small products wait for each other.
torch.set_num_threads(1)

VOCAB = 67

_SHAPE = dict(vocab_size=VOCAB, hidden_size=48, num_hidden_layers=2, initializer_range=0.15)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("qwen2", "qwen3", "llama", "mistral", "glm4", "llama3_tied")},
    "qwen2_tied": ("qwen2_tied", {"num_key_value_heads": 4}),
    "qwen3_tied": ("qwen3", {"tie_word_embeddings": True, "head_dim": 8, "num_key_value_heads": 1}),
    "glm4_tied": ("glm4", {"tie_word_embeddings": True, "head_dim": 8, "attention_bias": False}),
}
"""Name -> a model of tiny_models and its other settings."""


def make_model(family: str, *, seed: int = 0) -> Any:
    """A transformers model with weights, biases and norms that matter."""
    name, settings = FAMILIES[family]
    return tiny_models.make_model(name, seed=seed, **{**_SHAPE, **settings})


def write_model(family: str, folder: Path, *, seed: int = 0) -> Any:
    """The same, saved to `folder`."""
    model = make_model(family, seed=seed)
    model.save_pretrained(folder)
    return model


def bucket_of(model: Any) -> FlatBucket:
    """All parameters of a transformers model under their names; tied ones once."""
    return FlatBucket.of({name: p.detach() for name, p in model.named_parameters()})


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def prompt(length: int, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, length)


def request(i: int, prompt_ids: Sequence[int] | np.ndarray, *, output: Completion | None = None, group_id: str = "",
            **sampling: Any) -> GenerateRequest:  # fmt: skip
    """Request number i (its seed too)."""
    return GenerateRequest(
        request_id=f"r{i}",
        prompt_ids=prompt_ids,
        seed=i,
        group_id=group_id,
        output=output,
        sampling=SamplingParams(**{"max_new_tokens": 16, **sampling}),
    )


def oracle_logprobs(model: Any, prompt_ids: Sequence[int] | np.ndarray, token_ids: np.ndarray,
                    temperature: float = 1.0) -> np.ndarray:  # fmt: skip
    """log p(token | everything before it) of the completion, by a plain forward pass: [n] float32."""
    ids = torch.tensor([[*prompt_ids, *token_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt_ids) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt_ids) :, None])[:, 0].numpy()


def follows(drawn: np.ndarray, probs: np.ndarray) -> bool:
    """Whether a chi-square test accepts that tokens `drawn` come from `probs`; rare ones are counted together."""
    from scipy import stats  # here: it takes a second or two, in every test process

    counts, expected = np.bincount(drawn, minlength=len(probs)), probs * len(drawn)
    common = expected >= 5
    if expected[~common].sum() >= 1:
        counts = np.append(counts[common], counts[~common].sum())
        expected = np.append(expected[common], expected[~common].sum())
    else:
        assert counts[~common].sum() <= 8, "tokens that should never come"
        counts, expected = counts[common], expected[common]
    return bool(stats.chisquare(counts, expected * (counts.sum() / expected.sum())).pvalue > 0.01)


def engine_of(model: Any, *, max_running: int = 16, dtype: str = "float32") -> Engine:
    """An engine with the weights of a transformers model."""
    config = parse_config(model.config.to_dict())
    weights = ModelWeights(config, dtype=DTYPES[dtype])
    weights.update(bucket_of(model).tensors())
    return Engine(config, weights, max_running=max_running)


def steps(engine: Engine, n: int | None = None) -> dict[str, Completion]:
    """What finishes within n steps (all steps that there are)."""
    done: dict[str, Completion] = {}
    with torch.inference_mode():
        while (n is None or n > 0) and (engine.num_running or engine.num_waiting):
            done.update((r.request_id, c) for r, c in engine.step())
            n = None if n is None else n - 1
    return done


def run(engine: Engine, requests: Sequence[GenerateRequest]) -> list[Completion]:
    """All completions, in the order of the requests."""
    engine.add(requests)
    done = steps(engine)
    return [done[r.request_id] for r in requests]


def assert_same(a: Completion, b: Completion, *, versions: bool = True) -> None:
    """Equal tokens, and log-probabilities equal to rounding."""
    assert a.token_ids.tolist() == b.token_ids.tolist()
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)
    assert a.finish_reason == b.finish_reason
    if versions:
        assert a.versions.tolist() == b.versions.tolist()
