"""The FP8 quantizer against a loop over blocks."""

import math

import pytest
import torch

from core.weight_sync.buckets import FP8, quantize, quantize_bucket


def by_loop(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize one block after another."""
    rows, columns = weight.shape
    values = torch.empty(rows, columns, dtype=FP8)
    scales = torch.empty(math.ceil(rows / 128), math.ceil(columns / 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            here = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
            block = weight[here].float()
            largest = max(abs(float(x)) for x in (block.min(), block.max()))
            scales[i, j] = torch.tensor(largest) / 448
            values[here] = (block / scales[i, j]).to(FP8) if largest else torch.zeros_like(block).to(FP8)
    return values, scales


@pytest.mark.parametrize("shape", [(256, 384), (300, 200), (128, 128), (7, 1000)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_block_is_divided_by_its_own_factor(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight[:128, :128] *= 1000
    weight[0, 0] = -50_000.0
    values, scales = quantize(weight)
    expected_values, expected_scales = by_loop(weight)
    assert values.dtype == FP8 and values.is_contiguous() and scales.dtype == torch.float32
    assert torch.equal(values.view(torch.uint8), expected_values.view(torch.uint8))
    assert torch.equal(scales, expected_scales)


def test_rounding_is_at_most_a_sixteenth_of_a_value() -> None:
    """e4m3 has three bits of mantissa; values below the smallest normal one are off by at most 2^-10 * scale."""
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(2))
    values, scales = quantize(weight)
    factors = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    bound = torch.maximum(weight.abs() / 16, factors / 1024) * (1 + 1e-6)
    error = (values.float() * factors - weight).abs()
    assert (error <= bound).all() and error.max() > 0


def test_zeros_stay_zeros_and_the_tiniest_values_stay_finite() -> None:
    weight = torch.zeros(256, 128)
    weight[128:] = 1e-42
    values, scales = quantize(weight)
    assert (scales > 0).all() and values.float().isfinite().all()
    assert (values[:128].float() == 0).all()


def test_a_bucket_gets_scales_beside_its_weights_and_keeps_the_rest() -> None:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    experts = {f"model.layers.1.mlp.experts.{i}.up_proj.weight": random(128, 256) for i in range(3)}
    bucket = {"model.embed_tokens.weight": random(512, 256), **experts}
    bucket |= {
        "model.layers.1.self_attn.o_proj.weight": random(256, 256),
        "model.layers.1.mlp.gate.weight": random(3, 256),
    }
    quantized = quantize_bucket(bucket)
    assert len(quantized) == 6 + 4
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.gate.weight"):
        assert quantized[name] is bucket[name]
    for name in (*experts, "model.layers.1.self_attn.o_proj.weight"):
        values, scales = quantize(bucket[name])
        assert torch.equal(quantized[name].view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(quantized[f"{name}_scale_inv"], scales)
        assert quantized[name].is_contiguous()
    assert quantize_bucket({}) == {}
