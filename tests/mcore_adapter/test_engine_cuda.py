"""The engine on a GPU: its layers and fused head against transformers, and against the engine on the CPU."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.engine_cases import (
    BF16_NATS,
    MAX_TOKENS,
    ON_A_GPU,
    STEPS,
    VOCAB,
    logprobs_of,
    make_engine,
    policy_loss,
    random_batch,
    steps_of,
    transformers_logprobs,
    write_bfloat16,
)
from helpers.mcore_ranks import RankPool
from helpers.saved_models import save as save_engine

pytestmark = ON_A_GPU


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads are as wide as GPU kernels want them."""
    from transformers import Qwen2Config

    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.05, tie_word_embeddings=True,
    )  # fmt: skip
    return write_bfloat16(config, tmp_path_factory.mktemp("gpu") / "model")


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """(parallel, device) of a world of one."""
    from allocation import ParallelLayout
    from mcore_adapter.device import get_device
    from mcore_adapter.parallel import destroy_parallel, initialize_parallel

    device = get_device("cuda")
    with device.activate():
        init = f"file://{tmp_path_factory.mktemp('world')}/rendezvous"
        yield (
            initialize_parallel(
                ParallelLayout(), rank=0, world_size=1, init_method=init, device=device, seed=1, timeout_seconds=120.0
            ),
            device,
        )
        destroy_parallel()


def cpu_run(rank: Any, folder: str, dtype: str, load: str | None, save: str | None) -> dict[str, Any]:
    """Some steps on the CPU, from a checkpoint or into one."""
    from allocation import ParallelLayout

    with rank.joined(ParallelLayout()) as (parallel, device):
        engine = make_engine(parallel, device, folder, dtype=dtype)
        if load:
            engine.load(load)
        before, updates = logprobs_of(engine), engine.num_updates
        steps = steps_of(engine)
        if save:
            save_engine(engine, save)
        return {"logprobs": before, "steps": steps, "after": logprobs_of(engine), "updates": updates}


def test_logprobs_are_those_of_transformers(folder: Path, gpu: Any) -> None:
    import transformers

    engine = make_engine(*gpu, str(folder), train=False, dtype="bfloat16")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").cuda()
    assert (logprobs_of(engine) - transformers_logprobs(model)).abs().mean() < BF16_NATS


def test_it_trains_as_the_cpu_does_and_checkpoints_cross_over(folder: Path, gpu, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # for the processes of the pool, as for a run's own on the CPU
    pool = RankPool()
    try:
        (reference,) = pool.run(cpu_run, 1, str(folder), "float32", None, None)
        engine = make_engine(*gpu, str(folder), dtype="bfloat16")
        steps = steps_of(engine)
        for step, expected in zip(steps, reference["steps"], strict=True):
            assert step["nll"] == pytest.approx(expected["nll"], rel=0.02)
            assert step["entropy"] == pytest.approx(expected["entropy"], rel=0.02)
            assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.1)
        before = logprobs_of(engine)
        engine.offload()
        save_engine(engine, tmp_path / "from-gpu")
        engine.reload()
        assert torch.equal(before, logprobs_of(engine))
        (there,) = pool.run(cpu_run, 1, str(folder), "bfloat16", str(tmp_path / "from-gpu"), str(tmp_path / "from-cpu"))
        assert there["updates"] == STEPS
        assert (there["logprobs"] - before).abs().mean() < BF16_NATS
        engine.load(tmp_path / "from-cpu")
        assert engine.num_updates == 2 * STEPS
        assert (logprobs_of(engine) - there["after"]).abs().mean() < BF16_NATS
    finally:
        pool.close()


def test_what_is_recomputed_does_not_change_the_update(folder: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mcore_adapter.memory import host
    from mcore_adapter.settings import LEVELS

    monkeypatch.setattr(host, "SMALLEST_BYTES", 0)
    plain, *others = (
        steps_of(make_engine(*gpu, str(folder), dtype="bfloat16", recompute=level)) for level in (*LEVELS, "auto")
    )
    for other in others:
        for ours, theirs in zip(other, plain, strict=True):
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-2)


@pytest.mark.parametrize("level", ["linear", "offload", "full"])
def test_chunks_of_the_mlp_do_not_change_the_update(folder: Path, gpu, monkeypatch, level: str) -> None:
    from mcore_adapter.memory import host, recompute

    monkeypatch.setattr(host, "SMALLEST_BYTES", 0)

    def run() -> tuple[list[torch.Tensor], list[dict[str, float]]]:
        engine = make_engine(*gpu, str(folder), dtype="bfloat16", recompute=level)
        first = engine.train_step(random_batch(), policy_loss, max_tokens_per_mb=MAX_TOKENS)
        gradients = [p.main_grad.clone() for chunk in engine._model for p in chunk.parameters()]
        return gradients, [first, *steps_of(engine)]

    whole, expected = run()
    monkeypatch.setattr(recompute, "MLP_TOKENS", 48)
    parts, steps = run()
    for found, gradient in zip(parts, whole, strict=True):
        assert (found - gradient).norm() <= 0.05 * gradient.norm()
    for ours, theirs in zip(steps, expected, strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.05)


@pytest.mark.parametrize("level", ["linear", "full"])
def test_chunks_of_the_mlp_free_what_is_computed_of_them(gpu, tmp_path, monkeypatch, level: str) -> None:
    from transformers import Qwen2Config

    from mcore_adapter.memory import recompute

    tokens, chunk, width = 16384, 1024, 8192
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=width, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=tokens, initializer_range=0.05, tie_word_embeddings=True,
    )  # fmt: skip
    engine = make_engine(*gpu, str(write_bfloat16(config, tmp_path / "wide")), dtype="bfloat16", recompute=level)
    batch = random_batch(1, shortest=tokens, longest=tokens)
    monkeypatch.setattr(recompute, "CHUNK_ROWS", chunk)  # beside the products, otherwise another 400 MB

    def peak(mlp_tokens: int) -> int:
        monkeypatch.setattr(recompute, "MLP_TOKENS", mlp_tokens)
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        engine.train_step(batch, policy_loss, max_tokens_per_mb=tokens)
        return torch.cuda.max_memory_allocated() - held

    peak(tokens)  # the optimizer makes its state
    freed = peak(tokens) - peak(chunk)
    computed = 2 * (tokens - chunk) * 4 * width  # both products and the gradient of the second's input, 2 bytes each
    assert freed >= 0.85 * computed
    if level == "linear":  # a layer that Megatron recomputes has the gradient of the first product beside it
        assert freed <= 1.25 * computed


def test_an_offloaded_engine_trains_on_as_if_nothing_had_happened(folder: Path, gpu: Any) -> None:
    plain = make_engine(*gpu, str(folder), dtype="bfloat16")
    moved = make_engine(*gpu, str(folder), dtype="bfloat16")
    steps_of(plain), steps_of(moved)
    held = torch.cuda.memory_allocated()
    moved.offload()
    assert torch.cuda.memory_allocated() < held - 12 * 10**6
    moved.reload()
    for ours, theirs in zip(steps_of(moved), steps_of(plain), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("train", [True, False], ids=["critic", "reference"])
def test_an_engine_whose_weights_left_the_gpu_comes_back_as_it_was(
    folder: Path, gpu: Any, tmp_path: Path, *, train: bool
) -> None:
    """As critic and reference do while servers sample on their GPU."""
    engine = make_engine(*gpu, str(folder), train=train, dtype="bfloat16")
    if train:
        steps_of(engine)
    before = logprobs_of(engine)
    weights = sum(param.nbytes for param in engine._model[0].parameters())
    for turn in range(2):
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        engine.offload(weights=True)
        assert torch.cuda.memory_allocated() <= held - weights
        if train:
            save_engine(engine, tmp_path / f"from-the-host-{turn}")
        engine.reload()
        assert torch.cuda.memory_allocated() <= held + 2**20
        assert torch.equal(before, logprobs_of(engine))
    if train:
        other = make_engine(*gpu, str(folder), dtype="bfloat16")
        other.load(tmp_path / "from-the-host-1")
        assert torch.equal(before, logprobs_of(other))


@pytest.mark.parametrize(
    "settings", [{}, {"fp8": "tensorwise"}, {"fp8": "blockwise"}, {"optimizer": {"offload": True}}]
)
def test_a_warm_up_changes_nothing_on_a_gpu(folder: Path, gpu: Any, settings: dict[str, Any]) -> None:
    """Atomic additions of the attention's and the embedding's gradients round differently from step to step."""

    def losses(*, warms_up: bool) -> list[dict[str, float]]:
        engine = make_engine(*gpu, str(folder), dtype="bfloat16", **settings)
        if warms_up:
            engine.warm_up()
        assert engine.num_updates == 0
        return steps_of(engine)

    for warm, cold in zip(losses(warms_up=True), losses(warms_up=False), strict=True):
        assert warm["nll"] == pytest.approx(cold["nll"], rel=1e-3)
        assert warm["grad_norm"] == pytest.approx(cold["grad_norm"], rel=1e-2)


def test_an_optimizer_whose_state_lives_on_the_host_takes_the_same_steps(folder: Path, gpu: Any) -> None:
    def stepped(**settings: Any) -> tuple[Any, list[dict[str, float]], int]:
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        engine = make_engine(*gpu, str(folder), dtype="bfloat16", **settings)
        steps = steps_of(engine)
        torch.cuda.synchronize()
        return engine, steps, torch.cuda.memory_allocated() - before

    # The first one allocates what libraries keep for themselves.
    engines = [stepped(), stepped(optimizer={"offload": True}), stepped()]
    _, (hosted, hosted_steps, hosted_bytes), (plain, plain_steps, plain_bytes) = engines
    for ours, theirs in zip(hosted_steps, plain_steps, strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-2)
    num_params = sum(param.numel() for param in plain._model[0].parameters())
    assert plain_bytes - hosted_bytes >= 0.95 * 12 * num_params, "masters and two moments, 4 bytes each"
    for _ in range(2):  # leaves the device as a colocated trainer does
        hosted.offload()
        hosted.reload()
    for ours, theirs in zip(steps_of(hosted), steps_of(plain), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_8_bit_products_train_nearly_as_bfloat16_does(folder: Path, gpu: Any, recipe: str) -> None:
    plain = make_engine(*gpu, str(folder), dtype="bfloat16")
    fp8 = make_engine(*gpu, str(folder), dtype="bfloat16", fp8=recipe)
    assert (logprobs_of(fp8) - logprobs_of(plain)).abs().mean() < 0.1
    for ours, theirs in zip(steps_of(fp8), steps_of(plain), strict=True):
        assert ours["nll"] == pytest.approx(theirs["nll"], rel=0.02)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.2)


@pytest.mark.parametrize(
    "options",
    [{}, {"recompute": "selective"}, {"recompute": "selective", "fp8": "tensorwise"}, {"grad_reduce_in_fp32": False}],
    ids=["plain", "selective", "fp8", "bf16"],
)
@pytest.mark.parametrize("layout", ["tp2", "pp2", "cp2", "dp2"])
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_compute_what_one_does(folder, gpu_ranks, one_gpu, layout, options) -> None:
    if options and layout != "dp2":
        pytest.skip("reduction and padding are those of dp2")
    ours, *_ = gpu_ranks.run(gpu_run, 2, str(folder), layout, options)
    for step, expected in zip(ours, one_gpu, strict=True):
        assert step["nll"] == pytest.approx(expected["nll"], rel=0.02)
        assert step["entropy"] == pytest.approx(expected["entropy"], rel=0.02)
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.2 if "fp8" in options else 0.05)


@pytest.mark.parametrize("layout", ["tp2", "dp2"])
@pytest.mark.parametrize("level", ["linear", "full"])
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_compute_the_mlp_in_chunks_as_one_does_at_once(folder, gpu_ranks, one_gpu, layout, level) -> None:
    ours, *_ = gpu_ranks.run(chunked_run, 2, str(folder), layout, level)
    for step, expected in zip(ours, one_gpu, strict=True):
        assert step["nll"] == pytest.approx(expected["nll"], rel=0.02)
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)


def chunked_run(rank: Any, folder: str, layout: str, level: str) -> list[dict[str, float]]:
    from mcore_adapter.memory import recompute

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recompute, "MLP_TOKENS", 24)
        return gpu_run(rank, folder, layout, {"recompute": level})


@pytest.fixture(scope="module")
def one_gpu(folder: Path, gpu_ranks: RankPool) -> Any:
    return gpu_ranks.run(gpu_run, 1, str(folder), None, {})[0]


def gpu_run(rank: Any, folder: str, layout: str | None, options: dict[str, Any]) -> list[dict[str, float]]:
    from allocation import ParallelLayout

    sizes = {} if layout is None else {layout[:2]: 2}
    with rank.joined(ParallelLayout(**sizes), kind="cuda") as (parallel, device):
        engine = make_engine(parallel, device, folder, dtype="bfloat16", **options)
        if layout is not None:
            engine.warm_up()  # as in a run, with communication beside the computation
        return steps_of(engine)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("chunk", [None, 100])
def test_the_fused_head_computes_what_fp32_logits_give(with_entropy: bool, chunk: int | None) -> None:
    from mcore_adapter.models.forward import linear_logprobs

    torch.manual_seed(0)
    hidden = torch.randn(300, 128, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(50_001, 128, device="cuda") * 0.1).bfloat16().requires_grad_()
    targets = torch.randint(50_001, (300,), device="cuda")
    grads = torch.randn(2, 300, device="cuda")

    def gradients(logprobs: torch.Tensor, entropy: torch.Tensor | None) -> list[torch.Tensor]:
        loss = (logprobs * grads[0]).sum()
        if with_entropy:
            loss = loss + (entropy * grads[1]).sum()
        return list(torch.autograd.grad(loss, (hidden, weight)))

    logprobs, entropy = linear_logprobs(
        hidden, weight, targets, temperature=0.7, chunk_tokens=chunk, with_entropy=with_entropy
    )
    exact = ((hidden.double() @ weight.double().t()) / 0.7).log_softmax(-1)
    expected = exact.gather(1, targets[:, None])[:, 0]
    expected_entropy = -(exact.exp() * exact).sum(-1)
    assert (logprobs - expected).abs().max() < 1e-3, "logits are not rounded on the way"
    if with_entropy:
        assert (entropy - expected_entropy).abs().max() < 0.01
    for ours, theirs in zip(gradients(logprobs, entropy), gradients(expected, expected_entropy), strict=True):
        assert (ours - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.parametrize("shape", [(3,), (8192,), (129, 1000), (16, 256, 513)])
def test_a_gradient_is_added_to_the_last_bit_as_torch_adds_it(shape: tuple[int, ...]) -> None:
    from mcore_adapter.cuda.elementwise import add_to

    behind = 100  # the next parameter's
    total = torch.randn(torch.Size(shape).numel() + behind, device="cuda")
    summand = torch.randn(*reversed(shape), device="cuda", dtype=torch.bfloat16).permute(*reversed(range(len(shape))))
    expected = total.clone()
    expected[:-behind].view(shape).add_(summand)
    add_to(total[:-behind].view(shape), summand)
    assert torch.equal(total, expected)


def test_swiglu_is_rounded_once_and_has_the_gradient_of_the_formula(gpu: Any) -> None:
    from mcore_adapter.cuda.elementwise import bias_swiglu

    generator = torch.Generator("cuda").manual_seed(0)
    halves = torch.randn(33, 1, 2 * 48, dtype=torch.bfloat16, device="cuda", generator=generator, requires_grad=True)
    grad = torch.randn(33, 1, 48, dtype=torch.bfloat16, device="cuda", generator=generator)
    product = bias_swiglu(halves, None)
    product.backward(grad)
    wide = halves.detach().float().requires_grad_()
    gate, up = wide.chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    expected.backward(grad.float())
    assert halves.grad is not None and wide.grad is not None and product.shape == (33, 1, 48)
    for found, exact in ((product, expected), (halves.grad, wide.grad)):
        torch.testing.assert_close(found.float(), exact, rtol=2**-8, atol=1e-6)


def test_a_dense_model_trains_without_torchs_compiler(folder: Path, gpu: Any) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()  # what earlier tests compiled would be used again
    counters.clear()
    steps_of(make_engine(*gpu, str(folder), dtype="bfloat16"))
    assert counters["stats"]["unique_graphs"] == 0
