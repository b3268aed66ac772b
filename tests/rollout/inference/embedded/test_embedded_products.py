"""Products with weights in the embedded generator: a row does not depend on the others."""

import pytest
import torch

from rollout.inference.embedded.model import ROWS, _padded
from rollout.inference.embedded.products import add_linear, linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("columns", "outputs"), [(192, 640), (640, 192), (2048, 16)])
def test_a_row_is_the_same_beside_any_others(dtype: torch.dtype, columns: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(600, columns, generator=generator), torch.randn(outputs, columns, generator=generator)
    total = torch.randn(600, outputs, generator=generator)
    x, weight, total = x.to(dtype), weight.to(dtype), total.to(dtype)
    whole, added = linear(x, weight), add_linear(total.clone(), x, weight)
    exact = x.double() @ weight.double().t()
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(whole.double(), exact, rtol=bound, atol=bound * columns**0.5)
    torch.testing.assert_close(added.double(), exact + total.double(), rtol=bound, atol=bound * columns**0.5)
    for rows in [*range(1, 2 * ROWS), *range(2 * ROWS, 600, ROWS)]:
        some, beside = _padded(x[:rows]), _padded(total[:rows]).clone()
        assert len(some) % ROWS == 0
        assert torch.equal(linear(some, weight)[:rows], whole[:rows])
        assert torch.equal(add_linear(beside, some, weight)[:rows], added[:rows])


def test_a_bias_is_added() -> None:
    x, weight, bias = torch.ones(ROWS, 4), torch.ones(3, 4), torch.tensor([1.0, 2.0, 3.0])
    assert linear(x, weight, bias).tolist() == [[5.0, 6.0, 7.0]] * ROWS
