"""What top_k and top_p leave of a distribution, inside a server; the kernel where there is a GPU."""

import pytest
import torch

from rollout.inference.embedded.model import restrict
from rollout.inference.sglang.hooks.sampling import draw, keep_most_likely

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NO_LIMIT = 1 << 30  # how SGLang writes that there is no top_k


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return request.param


def limits(device: str, *rows: tuple[int, float]) -> tuple[torch.Tensor, torch.Tensor]:
    top_k, top_p = zip(*rows, strict=True)
    return torch.tensor(top_k, dtype=torch.int32, device=device), torch.tensor(top_p, device=device)


@pytest.mark.parametrize("width", [7, 4096, 10007])
@pytest.mark.parametrize("temperature", [0.05, 1.0, 20.0])
def test_the_embedded_generator_keeps_the_same_columns(device: str, width: int, temperature: float) -> None:
    rows = [(1, 1.0), (3, 1.0), (NO_LIMIT, 0.5), (NO_LIMIT, 0.95), (NO_LIMIT, 1.0), (50, 0.9), (width, 0.999)]
    torch.manual_seed(width)
    logits = torch.randn(len(rows), width) / temperature
    probs = torch.softmax(logits, -1)
    top_k, top_p = limits("cpu", *rows)
    expected = restrict(logits, top_k.long(), top_p) > -torch.inf
    left = probs.clone().to(device)
    kept = keep_most_likely(left, top_k.to(device), top_p.to(device)).cpu()
    found = left.cpu() > 0
    # Columns on the border of top_p: sums in another order may decide otherwise where they differ by rounding.
    differs = (found != expected) & (probs > 1e-7)
    assert (differs.sum(-1) <= 1).all() and probs[differs].sum() < 1e-3
    torch.testing.assert_close(left.cpu()[found], probs[found], rtol=0, atol=0)
    torch.testing.assert_close(kept, left.cpu().sum(-1), rtol=1e-5, atol=0)


def test_tokens_are_drawn_in_proportion_to_their_probability(device: str) -> None:
    torch.manual_seed(5)
    weights = torch.tensor([0.5, 0.0, 3.0, 1e-3, 0.0, 12.0, 1.5])  # no sum of 1: what top_k and top_p have left
    counts = torch.bincount(draw(weights.repeat(200_000, 1).to(device)).cpu(), minlength=len(weights))
    expected = 200_000 * weights / weights.sum()
    assert counts[weights == 0].sum() == 0
    possible = weights > 0
    chi_squared = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_squared < 18.5, "the 99.9th percentile with four degrees of freedom"


def test_columns_as_likely_as_the_last_one_stay(device: str) -> None:
    probs = torch.tensor([[0.1, 0.3, 0.3, 0.3], [0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]], device=device)
    kept = keep_most_likely(probs, *limits(device, (1, 1.0), (NO_LIMIT, 0.1), (2, 0.5)))
    assert (probs > 0).tolist() == [[False, True, True, True], [True] * 4, [True, False, False, False]]
    torch.testing.assert_close(kept.cpu(), torch.tensor([0.9, 1.0, 1.0]))
