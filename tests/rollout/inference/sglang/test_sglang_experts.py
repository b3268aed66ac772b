"""The experts of tokens: reading what a server tells, and a real one on the CPU through updates."""

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.sglang_environment import PYTHON, VOCAB, WHY_NOT, running_server, set_interrupt, settings_for
from model_specs.families import parse_config
from rollout.bucket import FlatBucket
from rollout.errors import GeneratorCallError
from rollout.inference.sglang.client import ExpertsOfTokens
from rollout.inference.sglang.server import SGLangServer
from rollout.types import Completion, FinishReason, GenerateRequest, SamplingParams

SHAPE = dict(
    vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
MODEL = parse_config(
    {**SHAPE, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
)
EXPERTS = np.arange(10 * 3 * 2, dtype=np.int32).reshape(10, 3, 2)


def meta(experts: np.ndarray | None, reason: FinishReason = "stop") -> dict[str, Any]:
    told = {} if experts is None else {"routed_experts": base64.b64encode(experts.tobytes()).decode()}
    return {"finish_reason": {"type": reason}, **told}


def test_answers_that_continue_each_other_tell_of_every_token_but_the_last_once() -> None:
    reader = ExpertsOfTokens(MODEL)
    assert reader.question(None) == {"return_routed_experts": True, "routed_experts_start_len": 0}
    first = reader.read(meta(EXPERTS[:6], "abort"), None, 7, server="s")
    assert reader.question(first)["routed_experts_start_len"] == 6
    whole = reader.read(meta(EXPERTS[6:]), first, 11, server="s")
    assert whole.dtype == np.int16 and np.array_equal(whole, EXPERTS)


def test_tokens_that_an_aborted_answer_lost_have_no_experts_either() -> None:
    kept = ExpertsOfTokens(MODEL).read(meta(EXPERTS, "abort"), None, 5, server="s")
    assert np.array_equal(kept, EXPERTS[:4])


def test_experts_that_are_not_told_are_unknown_after_an_abort_and_else_an_error() -> None:
    reader, known = ExpertsOfTokens(MODEL), EXPERTS[:4].astype(np.int16)
    after = reader.read(meta(None, "abort"), known, 7, server="s")
    assert np.array_equal(after[:4], known) and after.shape == (6, 3, 2) and (after[4:] == -1).all()
    with pytest.raises(GeneratorCallError, match="generator-0: a response lacks the experts"):
        reader.read(meta(None), None, 5, server="generator-0")
    with pytest.raises(GeneratorCallError, match="has 12 experts for 3 tokens of 3 layers x 2"):
        reader.read(meta(EXPERTS[:2]), None, 4, server="s")


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"actor.moe_routing_replay=true, but .* 'qwen2' has no experts; write false"):
        ExpertsOfTokens(parse_config({**SHAPE, "model_type": "qwen2"}))


class ExpertModels:
    """A version of random weights for every number; version 0 is in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._models: dict[int, Any] = {}
        self[0].save_pretrained(folder)

    def __getitem__(self, version: int) -> Any:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        if version not in self._models:
            torch.manual_seed(version)
            config = Qwen3MoeConfig(
                vocab_size=VOCAB, hidden_size=128, intermediate_size=256, moe_intermediate_size=64,
                num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
                max_position_embeddings=2048, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
                tie_word_embeddings=False, eos_token_id=VOCAB - 1, bos_token_id=None,
            )  # fmt: skip
            model = Qwen3MoeForCausalLM(config).float().eval()
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.15)
            self._models[version] = model
        return self._models[version]

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        """Hugging Face names of files to tensors."""
        return {name: tensor.detach() for name, tensor in saved_tensors(self[version], self.folder).items()}

    @torch.no_grad()
    def experts(self, version: int, tokens: list[int]) -> np.ndarray:
        """[len(tokens), 3, 2], the two of each layer sorted."""
        logits = self[version](torch.tensor([tokens]), output_router_logits=True).router_logits
        return np.sort(torch.stack([layer.topk(2, -1).indices for layer in logits], 1).numpy(), -1)


def saved_tensors(model: Any, near: Path) -> dict[str, torch.Tensor]:
    """As files hold them: transformers keeps a layer's experts in one tensor."""
    from safetensors.torch import load_file

    folder = near / "as-saved"
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> ExpertModels:
    return ExpertModels(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def server(models: ExpertModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    if PYTHON is None:
        pytest.skip(WHY_NOT)
    log = tmp_path_factory.mktemp("log") / "generator-0.log"
    with running_server(settings_for(models.folder, log, reports_experts=True)) as server:
        yield server


@pytest.mark.parametrize("interrupt", ["abort", "retract", "in_place"])
def test_a_server_tells_the_experts_of_each_token_s_forward_pass_through_an_update(server, models, interrupt) -> None:
    """Two requests of each prompt: the second takes the prompt from the cache."""
    from rollout.inference.router import Router
    from rollout.inference.sglang.generator import SGLangGenerator

    prompts = [np.random.default_rng(i // 2).integers(0, VOCAB - 1, 30).tolist() for i in range(6)]

    async def sample() -> list[Completion]:
        set_interrupt(server, interrupt)
        generator = SGLangGenerator(server)
        router = Router([generator])
        try:
            await generator.pause()
            await generator.update_weights(FlatBucket.of(models.weights(1)))
            await generator.resume(1)
            running = [
                asyncio.create_task(
                    router.generate(
                        GenerateRequest(
                            request_id=f"r{i}", prompt_ids=prompt,
                            sampling=SamplingParams(max_new_tokens=40 + 60 * i, min_new_tokens=40 + 60 * i),
                        )
                    )
                )
                for i, prompt in enumerate(prompts)
            ]  # fmt: skip
            await asyncio.sleep(1.0)
            await generator.pause()
            await generator.update_weights(FlatBucket.of(models.weights(2)))
            await generator.resume(2)
            return await asyncio.gather(*running)
        finally:
            await generator.close()

    across = 0
    for prompt, completion in zip(prompts, asyncio.run(sample()), strict=True):
        assert completion.routed_experts is not None
        tokens = [*prompt, *completion.token_ids.tolist()]
        told = np.sort(completion.routed_experts, -1)
        assert told.shape == (len(tokens) - 1, 3, 2)
        old = int((completion.versions == 1).sum())
        if 0 < old < len(completion.token_ids):
            across += 1
        # The pass that sampled a token took in the one before it.
        boundary = len(prompt) + old - 1 if old else 0
        if interrupt == "retract" and old < len(completion.token_ids):
            boundary = 0  # everything was computed anew
        expected = models.experts(2, tokens)[:-1]
        expected[:boundary] = models.experts(1, tokens)[:boundary]
        if interrupt == "in_place" and old:  # on keys and values of old weights nobody else computes the rest
            told, expected = told[:boundary], expected[:boundary]
        np.testing.assert_array_equal(told, expected)
    assert across >= 2, "the update came too late to say anything"
