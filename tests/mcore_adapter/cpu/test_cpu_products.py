"""torch.mm by oneDNN: its numbers, which products it takes, and what torch computes with it."""

import warnings

import pytest
import torch

import mcore_adapter.cpu.device as products
from helpers.forks.calls import call

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")

SIZES = ((300, 192, 128), (300, 64, 512), (64, 128, 1024))
"""Left and right factor: the smaller one is the one that is copied where neither lies as oneDNN needs it."""


def factor(rows: int, columns: int, *, transposed: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * columns)
    x = torch.randn((columns, rows) if transposed else (rows, columns), generator=generator)
    return x.t() if transposed else x


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("right", [False, True])
def test_a_product_is_that_of_float64(monkeypatch, size: tuple[int, int, int], left: bool, right: bool) -> None:
    m, k, n = size
    a, b = factor(m, k, transposed=left), factor(k, n, transposed=right)
    taken = []
    compute = products._linear
    monkeypatch.setattr(products, "_linear", lambda x, w: taken.append(1) or compute(x, w))
    product = products.mm(a, b)
    assert taken and product.shape == (m, n) and product.is_contiguous()
    torch.testing.assert_close(product.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.ones(8, 8), torch.ones(8, 8)),
        (torch.ones(300, 192, dtype=torch.float64), torch.ones(192, 128, dtype=torch.float64)),
        (torch.ones(300, 384)[:, ::2], torch.ones(192, 128)),
        (torch.ones(300, 192), torch.ones(192, 1).expand(192, 128)),
        (torch.ones(0, 192), torch.ones(192, 128)),
    ],
    ids=["small", "float64", "every second column", "repeated column", "no rows"],
)
def test_other_products_stay_with_torch(monkeypatch: pytest.MonkeyPatch, a: torch.Tensor, b: torch.Tensor) -> None:
    monkeypatch.setattr(products, "_linear", lambda *_: pytest.fail("computed by oneDNN"))
    product = products.mm(a, b)
    assert product.dtype == a.dtype and torch.equal(product, torch.full((len(a), b.shape[1]), float(a.shape[1])))


def compute_by_torch() -> None:
    warnings.simplefilter("error")
    products.use_onednn()
    products.use_onednn()
    torch.manual_seed(0)
    calls, compute = [], products._linear
    products._linear = lambda x, w: calls.append(1) or compute(x, w)
    x, weight = torch.randn(3, 100, 192, requires_grad=True), torch.randn(128, 192, requires_grad=True)
    (torch.matmul(x, weight.t()) ** 2).sum().backward()
    wide, w = x.detach().double().flatten(0, 1), weight.detach().double()
    product = wide @ w.t()
    torch.testing.assert_close(x.grad.double().flatten(0, 1), 2 * product @ w, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(weight.grad.double(), 2 * product.t() @ wide, rtol=1e-4, atol=1e-2)
    assert len(calls) == 3


def test_torch_computes_with_it_forward_and_backward() -> None:
    """In a process of its own: what is replaced stays replaced. No warning is shown."""
    assert call(compute_by_torch).wait() == 0
