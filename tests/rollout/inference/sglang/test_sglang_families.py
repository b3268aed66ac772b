"""Families whose tensors a SGLang server holds otherwise than Qwen2's, on CPU servers."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.weight_sync.disk import DiskSender
from core.weight_sync.ipc import IpcSender
from core.weight_sync.nccl import NcclSender
from core.weight_sync.push import SenderSettings
from helpers import embedded_models, tiny_models
from helpers.embedded_models import FAMILIES
from helpers.sglang_environment import PYTHON, TWO_RANKS, VOCAB, WHY_NOT, environment, running_server, settings_for

if PYTHON is None:
    pytest.skip(WHY_NOT, allow_module_level=True)
pytest.importorskip("aiohttp", reason="aiohttp is not installed (extra gpu)")

from helpers.sglang_live import TOLERANCE, prompt_of, request, with_generator  # noqa: E402
from model_specs.families import read_config  # noqa: E402
from rollout.bucket import FlatBucket
from rollout.inference.sglang.checksums import ExpectedChecksums, ModelShape  # noqa: E402
from rollout.inference.sglang.generator import SGLangGenerator  # noqa: E402
from rollout.types import Completion  # noqa: E402


def test_a_server_of_glm4_holds_and_samples_what_was_pushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, settings = FAMILIES["glm4"]
    # Widths that SGLang does not pad on the CPU.
    size = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 256, "head_dim": 32}
    size |= {"eos_token_id": VOCAB - 1, "bos_token_id": None}
    monkeypatch.setitem(FAMILIES, "glm4", (family, {**settings, **size}))
    embedded_models.write_model("glm4", tmp_path / "model")
    pushed = embedded_models.make_model("glm4", seed=1)
    tensors = {name: p.detach() for name, p in pushed.named_parameters()}
    expected = ExpectedChecksums(ModelShape.from_config(read_config(tmp_path / "model")), tp=2)
    expected.add(tensors)

    async def push_and_sample(generator: SGLangGenerator) -> tuple[list[str], list[str], Completion]:
        before = expected.mismatches(generator.endpoint.checksums(timeout_seconds=60))
        await generator.pause()
        await generator.update_weights(FlatBucket.of(tensors))
        await generator.resume(1)
        after = expected.mismatches(generator.endpoint.checksums(timeout_seconds=60))
        return before, after, await generator.generate(request("a", prompt_of(1, 20), max_new_tokens=30))

    log_file = tmp_path / "generator-0.log"
    settings_ = settings_for(
        tmp_path / "model", log_file, tp=2, env=environment() | TWO_RANKS, startup_timeout_seconds=900.0
    )
    with running_server(settings_) as server:
        before, after, completion = with_generator(server, "abort", push_and_sample)
    assert before
    assert after == []
    ids = torch.tensor([[*prompt_of(1, 20), *completion.token_ids.tolist()]])
    with torch.no_grad():
        logprobs = pushed(ids).logits[0, 19:-1].log_softmax(-1).gather(1, ids[0, 20:, None])[:, 0]
    np.testing.assert_allclose(completion.logprobs, logprobs.numpy(), atol=TOLERANCE)


def perturbed(model: Any, seed: int) -> Any:
    """Change all values, and the correction biases so much that other experts are chosen."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.03)
        for _, bias in correction_biases(model):
            bias.copy_(torch.randn_like(bias) * 0.3)
    return model


def correction_biases(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]


def buckets_of(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Two tensors each, so that q_a_proj and kv_a_proj_with_mqa, one parameter of the server, come apart."""
    named = {name: p.detach() for name, p in model.named_parameters()} | dict(correction_biases(model))
    items = list(tiny_models.checkpoint_tensors(named).items())
    for i in range(0, len(items), 2):
        yield {name: tensor.clone() for name, tensor in items[i : i + 2]}


@pytest.mark.parametrize(
    ("name", "tp"), [pytest.param("deepseek_v2", 1, marks=pytest.mark.nightly), ("deepseek_v3", 2)]
)
def test_a_server_of_latent_attention_holds_and_samples_what_was_pushed(tmp_path, monkeypatch, name, tp) -> None:
    """The second push of everything may be loaded by recorded copies. The last one has changes of one half of a fused
    parameter, and of what the server derives others from."""
    family, settings = tiny_models.MODELS[name]
    # Widths that SGLang does not pad on the CPU.
    size = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64}
    size |= {"eos_token_id": VOCAB - 1, "bos_token_id": None}
    monkeypatch.setitem(tiny_models.MODELS, name, (family, {**settings, **size}))
    pushed = perturbed(tiny_models.write_model(name, tmp_path / "model"), seed=1)
    sending = SenderSettings(
        type="disk", dtype="float32", timeout_seconds=100.0, bucket_bytes=1 << 20, staged_bytes=0,
        folder=tmp_path / "pushed", model_path=str(tmp_path / "model"), changes="always",
    )  # fmt: skip
    senders: list[Any] = [IpcSender(sending) if tp == 2 else NcclSender(sending) for _ in range(2)]
    senders += 2 * [DiskSender(sending)]

    async def push_and_sample(generator: SGLangGenerator) -> tuple[list[str], Completion]:
        compared = []
        endpoint = replace(server.endpoint, trainer_ranks=(0,) * tp)
        for number, sender in enumerate(senders):
            if number == 1:
                perturbed(pushed, seed=2)
            if number == 3:
                with torch.no_grad():
                    attention = pushed.model.layers[1].self_attn
                    attention.kv_b_proj.weight[:, 3] += 0.2
                    attention.kv_a_proj_with_mqa.weight[2] += 0.2
            await asyncio.to_thread(sender.connect, [endpoint])
            sender.prepare(buckets_of(pushed), verify=True)
            await generator.pause()
            compared.append((await asyncio.to_thread(sender.send)).compared)
            await generator.resume(number + 1)
            await asyncio.to_thread(sender.close)
        return compared, await generator.generate(request("a", prompt_of(1, 20), max_new_tokens=30))

    log_file = tmp_path / "generator-0.log"
    env = environment() | (TWO_RANKS if tp == 2 else {})
    with running_server(
        settings_for(tmp_path / "model", log_file, tp=tp, env=env, startup_timeout_seconds=900.0, reports_experts=True)
    ) as server:
        compared, completion = with_generator(server, "abort", push_and_sample)
    assert compared == ["all checksums equal"] * 4
    chosen: dict[int, torch.Tensor] = {}
    for number, layer in enumerate(pushed.model.layers):
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.register_forward_pre_hook(
                lambda _, given, number=number: chosen.update({number: given[1]})
            )
    ids = torch.tensor([[*prompt_of(1, 20), *completion.token_ids.tolist()]])
    with torch.no_grad():
        logprobs = pushed(ids).logits[0, 19:-1].log_softmax(-1).gather(1, ids[0, 20:, None])[:, 0]
    np.testing.assert_allclose(completion.logprobs, logprobs.numpy(), atol=TOLERANCE)
    assert completion.routed_experts is not None and chosen.keys() == {1, 2, 3}  # the first layer is dense
    for number, experts in chosen.items():
        np.testing.assert_array_equal(np.sort(completion.routed_experts[:, number]), experts[:-1].sort().values)
