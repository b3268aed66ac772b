"""Models with experts on GPUs: against transformers, alone and spread over two, and as Hugging Face tensors again."""

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.engine_cases import (
    BF16_NATS,
    ON_A_GPU,
    VOCAB,
    logprobs_of,
    make_engine,
    steps_of,
    together,
    transformers_logprobs,
    write_bfloat16,
)
from helpers.expert_layers import make_dispatcher, plain_output, shared_output
from helpers.mcore_ranks import RankPool
from mcore_adapter.models.experts import experts_output, sorted_rows

pytestmark = ON_A_GPU


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=4, num_experts_per_tok=2,
        norm_topk_prob=True, max_position_embeddings=512, initializer_range=0.05,
    )  # fmt: skip
    return write_bfloat16(config, tmp_path_factory.mktemp("experts") / "model")


def run(
    rank: Any, folder: str, sizes: dict[str, int]
) -> tuple[dict[str, torch.Tensor], torch.Tensor, list[dict[str, float]]]:
    """(weights under their Hugging Face names, on rank 0; log-probabilities; three steps)"""
    from allocation import ParallelLayout

    with rank.joined(ParallelLayout(**sizes), kind="cuda") as (parallel, device):
        engine = make_engine(parallel, device, folder, dtype="bfloat16")
        weights = {name: t.cpu() for bucket in engine.iter_hf_weights(1 << 20) for name, t in bucket.items()}
        return weights, logprobs_of(engine), steps_of(engine)


@pytest.fixture(scope="module")
def one_gpu(folder: Path, gpu_ranks: RankPool) -> Any:
    return gpu_ranks.run(run, 1, str(folder), {})[0]


def test_experts_on_one_gpu_compute_what_transformers_does_and_come_back_exactly(folder: Path, one_gpu: Any) -> None:
    import transformers
    from safetensors.torch import load_file

    weights, logprobs, _ = one_gpu
    stored = load_file(folder / "model.safetensors")
    assert weights.keys() == stored.keys() and all(torch.equal(weights[name], stored[name]) for name in stored)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    assert (logprobs - transformers_logprobs(model)).abs().mean() < BF16_NATS


@pytest.mark.parametrize("sizes", [{"dp": 2, "ep": 2}, {"tp": 2}, {"pp": 2}], ids=["ep2", "tp2", "pp2"])
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_experts_on_two_gpus_compute_what_one_does(folder, gpu_ranks, one_gpu, sizes) -> None:
    alone, logprobs, expected = one_gpu
    ranks = gpu_ranks.run(run, 2, str(folder), sizes)
    weights, _, steps = ranks[0]
    assert weights.keys() == alone.keys() and all(torch.equal(weights[name], alone[name]) for name in alone)
    spread = together([part for _, part, _ in ranks])
    assert (spread - logprobs).abs().mean() < 0.03  # wrong experts: 0.3
    for step, one in zip(steps, expected, strict=True):
        assert step["nll"] == pytest.approx(one["nll"], rel=0.02)
        assert step["grad_norm"] == pytest.approx(one["grad_norm"], rel=0.1)


def parts_of_a_layer(device: str, parts: list[range]) -> list[torch.Tensor]:
    """Return the sum over the parts of the experts, and the gradients of tokens, weights and experts."""
    generator = torch.Generator().manual_seed(4)
    shapes = [(301, 256), (301, 4), (16, 256, 256), (16, 256, 128)]  # tokens, weights, gate and up, down
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    scales = (1.0, 1.0, 256**-0.5, 128**-0.5)
    dtypes = (torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16)
    leaves = [(t * s).to(device, d).requires_grad_() for t, s, d in zip(drawn, scales, dtypes, strict=True)]
    experts = torch.rand(301, 15, generator=generator).topk(4).indices  # nobody chooses the last one
    experts[-5:] = 16  # none
    tokens, weights, gate_up, down = leaves
    summed = torch.zeros(301, 256, device=device)
    for part in parts:
        rows = sorted_rows(experts.to(device), 16, part=part)
        rows = rows.first(int(rows.ends[-1]))
        held = slice(part.start, part.stop)
        summed = summed + experts_output(tokens, weights, gate_up[held], down[held], rows).float()
    assert not summed[-5:].any()
    grads = torch.autograd.grad(summed, leaves, torch.randn(301, 256, generator=generator).to(device))
    assert not grads[0][-5:].any() and not grads[1][-5:].any()
    return [t.detach().float().cpu() for t in (summed, *grads)]


@pytest.mark.parametrize(
    "parts", [[range(16)], [range(8), range(8, 16)], [range(i, i + 1) for i in range(16)]], ids=len
)
def test_parts_of_the_experts_sum_on_a_gpu_to_what_the_cpu_computes(parts: list[range]) -> None:
    for on_gpu, expected in zip(parts_of_a_layer("cuda", parts), parts_of_a_layer("cpu", [range(16)]), strict=True):
        assert float((on_gpu - expected).norm() / expected.norm()) < 0.02


def shared_layers(rank: Any, keep_halves: bool) -> list[float]:
    """Return the largest difference, by the largest value, of the output and each gradient of four layers that two
    ranks share, with their exchanges beside the computation, from what plain operators compute."""
    from megatron.core import parallel_state

    from allocation import ParallelLayout

    num_experts, top_k, hidden, width, sizes = 16, 4, 1024, 512, (6007, 9001)
    own = sizes[rank.rank]
    with rank.joined(ParallelLayout(dp=2, ep=2), kind="cuda"):
        group = parallel_state.get_expert_model_parallel_group()
        generator = torch.Generator("cuda").manual_seed(rank.rank)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cuda")

        def leaf(value: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return value.to(dtype).requires_grad_()

        tokens = leaf(random(own, hidden))
        layers = [
            [
                leaf(random(own, top_k).softmax(-1), torch.float32),
                leaf(random(num_experts // 2, 2 * width, hidden) * hidden**-0.5),
                leaf(random(num_experts // 2, hidden, width) * width**-0.5),
            ]
            for _ in range(4)
        ]
        experts = [random(own, num_experts).topk(top_k).indices for _ in layers]
        dispatchers = [make_dispatcher(group, num_experts, top_k) for _ in layers]
        grad = random(own, hidden).to(torch.bfloat16)
        leaves = [tokens, *(weight for layer in layers for weight in layer)]
        settings: dict[str, Any] = dict(num_experts=num_experts, most=max(sizes), keep_halves=keep_halves)

        def results(*, beside: bool) -> list[torch.Tensor]:
            x = tokens
            for dispatcher, layer, chosen in zip(dispatchers, layers, experts, strict=True):
                if beside:
                    x = x + shared_output(dispatcher, [x, *layer], chosen, keep_halves=keep_halves)
                else:
                    x = x + plain_output(group, [x, *layer], chosen, **settings)
            return [x.detach(), *torch.autograd.grad(x, leaves, grad)]

        expected = results(beside=False)
        worst = [0.0] * len(expected)
        for _ in range(8):  # memory that was freed too early is used again
            for i, (one, other) in enumerate(zip(results(beside=True), expected, strict=True)):
                difference = (one.float() - other.float()).abs().max() / other.float().abs().max()
                worst[i] = max(worst[i], float(difference))
        return worst


@pytest.mark.parametrize("keep_halves", [True, False], ids=["kept", "computed again"])
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_exchanges_beside_the_computation_change_nothing_on_two_gpus(gpu_ranks: RankPool, keep_halves: bool) -> None:
    """The same operations on the same values: what differs is when they run."""
    for differences in gpu_ranks.run(shared_layers, 2, keep_halves):
        assert max(differences) < 0.02, differences
