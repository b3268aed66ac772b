"""Families whose tensors a SGLang server holds otherwise than Qwen2's, on a CPU server of two tensor-parallel ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from helpers import embedded_models
from helpers.embedded_models import FAMILIES
from helpers.sglang_environment import PYTHON, TWO_RANKS, VOCAB, WHY_NOT, environment, running_server, settings_for

if PYTHON is None:
    pytest.skip(WHY_NOT, allow_module_level=True)
pytest.importorskip("aiohttp", reason="aiohttp is not installed (extra gpu)")

from helpers.sglang_live import TOLERANCE, prompt_of, request, with_generator  # noqa: E402
from rollout.inference.sglang.checksums import ExpectedChecksums, ModelShape  # noqa: E402
from rollout.inference.sglang.generator import SGLangGenerator  # noqa: E402
from rollout.inference.sglang.server import read_model_config  # noqa: E402
from rollout.types import Completion, WeightBucket  # noqa: E402


def test_a_server_of_glm4_holds_and_samples_what_was_pushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, settings = FAMILIES["glm4"]
    # Widths that SGLang does not pad on the CPU.
    size = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 256, "head_dim": 32}
    size |= {"eos_token_id": VOCAB - 1, "bos_token_id": None}
    monkeypatch.setitem(FAMILIES, "glm4", (family, {**settings, **size}))
    embedded_models.write_model("glm4", tmp_path / "model")
    pushed = embedded_models.make_model("glm4", seed=1)
    tensors = {name: p.detach() for name, p in pushed.named_parameters()}
    expected = ExpectedChecksums(ModelShape.from_config(read_model_config(str(tmp_path / "model"))), tp=2)
    for name, tensor in tensors.items():
        expected.add(name, tensor)

    async def push_and_sample(generator: SGLangGenerator) -> tuple[list[str], list[str], Completion]:
        before = expected.mismatches(await generator.checksums())
        await generator.pause()
        await generator.update_weights(WeightBucket(tensors=tensors))
        await generator.resume(1)
        after = expected.mismatches(await generator.checksums())
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
