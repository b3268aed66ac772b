"""The uniform numbers, the draw by inversion, and the restriction to top_k and top_p."""

import numpy as np
import pytest
import torch

from helpers.embedded_models import follows
from rollout.inference.embedded.model import draw, num_blocks, padded_size, restrict, sample, uniforms


def padded(logits: torch.Tensor) -> torch.Tensor:
    """As the model hands logits out: -inf up to whole blocks."""
    n, vocab = logits.shape
    out = torch.full((n, padded_size(vocab)), -torch.inf)
    out[:, :vocab] = logits
    return out


def test_uniforms_are_uniform_over_places_and_over_neighbouring_seeds() -> None:
    from scipy import stats  # here: it takes a second or two, in every test process

    one_stream = uniforms(np.array([7], dtype=np.uint64), np.array([0]), 20_000)[0]
    many_seeds = uniforms(np.arange(20_000, dtype=np.uint64), np.zeros(20_000, dtype=np.int64), 2)
    for numbers in (one_stream, many_seeds[:, 0], many_seeds[:, 1]):
        assert stats.kstest(numbers, "uniform").pvalue > 0.01
    assert abs(np.corrcoef(one_stream[:-1], one_stream[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(many_seeds[:, 0], many_seeds[:, 1])[0, 1]) < 0.02
    assert abs(np.corrcoef(many_seeds[:-1, 0], many_seeds[1:, 0])[0, 1]) < 0.02


@pytest.mark.parametrize(("vocab", "num_draws"), [(5, 40_000), (64, 40_000), (1000, 20_000), (50_257, 640)])
def test_draws_follow_the_distribution(vocab: int, num_draws: int) -> None:
    torch.manual_seed(vocab)
    probs = padded(torch.randn(1, vocab) * 3).softmax(-1)
    u = torch.from_numpy(np.random.default_rng(vocab).random(num_draws))
    rows = min(num_draws, 2_000_000 // vocab)
    drawn = [draw(probs.expand(len(part), -1).contiguous(), part, num_blocks(vocab)) for part in u.split(rows)]
    assert follows(torch.cat(drawn).numpy(), probs[0, :vocab].double().numpy())


def test_a_token_of_probability_zero_is_never_drawn_whatever_the_number() -> None:
    vocab = 1000
    probs = torch.zeros(1, padded_size(vocab))
    probs[0, [3, 500, 999]] = torch.tensor([1e-30, 0.7, 0.3])
    u = torch.tensor([0.0, 1e-300, 0.3, 0.7 - 2**-53, 0.7, 0.99, 1 - 2**-52], dtype=torch.float64)
    tokens = draw(probs.expand(len(u), -1).contiguous(), u, num_blocks(vocab))
    assert set(tokens.tolist()) <= {3, 500, 999}
    assert draw(probs.flip(1)[:, :].contiguous(), u[-1:], num_blocks(vocab)).item() in {24, 523, 1020}


def test_a_row_draws_the_same_token_alone_and_among_others() -> None:
    torch.manual_seed(0)
    probs = padded(torch.randn(200, 301) * 2).softmax(-1)
    u = torch.from_numpy(np.random.default_rng(0).random(200))
    together = draw(probs, u, num_blocks(301))
    assert together.tolist() == [draw(probs[i : i + 1], u[i : i + 1], num_blocks(301)).item() for i in range(200)]


def kept_naively(logits: np.ndarray, top_k: int, top_p: float) -> set[int]:
    """The definition, one token at a time."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:top_k]
    weights = np.exp(logits[order].astype(np.float64) - logits.max())
    kept, mass = set(), 0.0
    for token, weight in zip(order, weights, strict=True):
        if kept and mass >= top_p * weights.sum():
            break
        kept.add(token)
        mass += weight
    return kept


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (50, 0.9), (7, 0.5), (50, 0.05), (1, 1.0), (10, 0.999)])
def test_top_k_and_top_p_keep_what_their_definition_keeps(top_k: int, top_p: float) -> None:
    logits = torch.from_numpy(np.random.default_rng(top_k).normal(0, 2, (20, 50)).astype(np.float32))
    limited = restrict(logits, torch.full((20,), top_k), torch.full((20,), top_p))
    for row, before in zip(limited, logits, strict=True):
        kept = set(torch.isfinite(row).nonzero()[:, 0].tolist())
        assert kept == kept_naively(before.numpy(), top_k, top_p)
        assert torch.equal(row[sorted(kept)], before[sorted(kept)])


def test_rows_with_different_settings_share_a_batch_and_report_what_they_were_drawn_from() -> None:
    rng = np.random.default_rng(0)
    raw = torch.from_numpy(rng.normal(0, 2, (6, 90)).astype(np.float32))
    temperature = np.array([1, 0.5, 0, 1, 2, 0.7], dtype=np.float32)
    top_p = np.array([1, 1, 1, 0.8, 1, 0.6], dtype=np.float32)
    top_k = np.array([90, 90, 90, 90, 5, 20])
    u = rng.random(6)
    tokens, logprobs = sample(padded(raw), temperature, top_p, top_k, u, vocab_size=90)
    for i in range(6):
        logits = raw[i : i + 1] / (temperature[i] or 1)
        if temperature[i]:
            logits = restrict(logits, torch.tensor(top_k[i : i + 1]), torch.tensor(top_p[i : i + 1]))
        assert logprobs[i] == pytest.approx(logits.log_softmax(-1)[0, tokens[i]].item(), abs=2e-6)
        alone, _ = sample(
            padded(raw[i : i + 1]), *(a[i : i + 1] for a in (temperature, top_p, top_k, u)), vocab_size=90
        )
        assert alone[0] == tokens[i]
    assert tokens[2] == raw[2].argmax()


def test_logits_that_are_not_finite_are_an_error_and_not_a_token() -> None:
    logits = padded(torch.zeros(2, 20))
    logits[1, 3] = torch.nan
    ones = np.ones(2, dtype=np.float32)
    with pytest.raises(FloatingPointError, match="not finite"):
        sample(logits, ones, ones, np.array([20, 20]), np.array([0.5, 0.5]), vocab_size=20)
