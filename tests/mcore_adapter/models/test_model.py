"""Megatron's model against transformers' own, in every layout: logits, values and gradients."""

import json
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from allocation import ParallelLayout
from helpers.mcore_ranks import LAYOUTS, Rank, RankPool, build, cases
from helpers.tiny_models import MODELS, checkpoint_tensors

LENS = ((8, 4, 36, 16, 80, 4), (4, 4, 4, 12, 8, 8))  # of two microbatches; multiples of 2 * cp and, in sum, of tp


def sequences() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [[torch.randint(0, 96, (n,), generator=generator) for n in lens] for lens in LENS]


# What runs on the ranks


def own_positions(lens: tuple[int, ...], cp: int, cp_rank: int) -> Tensor:
    """Of a packing: the tokens that a context-parallel rank holds, two chunks of every sequence."""
    pieces = []
    start = 0
    for n in lens:
        chunks = torch.arange(start, start + n).chunk(2 * cp)
        pieces += [chunks[cp_rank], chunks[2 * cp - 1 - cp_rank]] if cp > 1 else [torch.arange(start, start + n)]
        start += n
    return torch.cat(pieces)


def run_schedule(chunks: list[Any], parallel: Any, head: Any) -> list[Any]:
    """head(chunk, hidden or values, tokens, positions in the packing) -> (loss, kept) on the last stage."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func

    batches = []
    for sequence in sequences():
        lens = tuple(len(s) for s in sequence)
        cu = torch.tensor((0, *lens)).cumsum(0).to(torch.int32)
        own = own_positions(lens, parallel.layout.cp, parallel.cp_rank)
        params = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=max(lens), max_seqlen_kv=max(lens)
        )
        batches.append((torch.cat(sequence), own, params))

    def forward_step(iterator: Any, chunk: Any) -> Any:
        tokens, own, params = next(iterator)
        inner = getattr(chunk, "module", chunk)
        output = chunk(tokens[own][None], own[None], None, packed_seq_params=params)

        def loss_of(output: Tensor) -> Any:
            loss, kept = head(inner, output, tokens, own)
            return loss, torch.zeros((), dtype=torch.int32), kept

        return output, loss_of

    iterators = [iter(batches) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        seq_length=sum(LENS[0]),
        micro_batch_size=1,
        forward_only=False,
    )


def logits_shard(chunk: Any, output: Tensor) -> Tensor:
    """hidden states [1, t, h], perhaps sequence parallel -> logits [t, v / tp] of all the tokens"""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
    from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

    from mcore_adapter.models.gpt import lm_head_weight

    hidden = output[0]
    if chunk.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden)
    return hidden @ lm_head_weight(chunk).T


def compute(rank: Rank, layout: ParallelLayout, folder: Path, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    """Run one forward and backward pass. Return, on the ranks of the last stage, for each microbatch (positions, logits
    or values there), and on rank 0 the gradients of the loss, exported as if they were the weights."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region, vocab_parallel_cross_entropy

    from mcore_adapter.hf.weights import iter_hf_weights

    def head(chunk: Any, output: Tensor, tokens: Tensor, own: Tensor) -> Any:
        if options.get("is_critic"):
            assert output.dtype == torch.float32 and output.shape == (1, len(own), 1)
            return (output[0, :, 0] * (tokens[own] - 48)).sum(), (own, output[0].detach())
        logits = logits_shard(chunk, output)
        loss = vocab_parallel_cross_entropy(logits[:, None].clone(), tokens.roll(-1)[own][:, None]).sum()
        return loss, (own, gather_from_tensor_model_parallel_region(logits.detach()))

    with rank.joined(layout) as (parallel, device):
        chunks = build(folder, parallel, device, **options)
        config = chunks[0].config
        config.finalize_model_grads_func = lambda model, _, **kwargs: finalize_model_grads(model, None, **kwargs)
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        wrapped = [DistributedDataParallel(config, ddp_config, c, disable_bucketing=True) for c in chunks]
        answer = run_schedule(wrapped, parallel, head)
        for chunk in chunks:
            for param in chunk.parameters():
                param.data.copy_(param.main_grad)
        gradients: dict[str, Tensor] = {}
        for bucket in iter_hf_weights(wrapped, parallel=parallel, bucket_bytes=20_000):
            gradients.update(bucket)
        return answer, gradients


# What transformers says


def merged(answers: list[Any]) -> list[Tensor]:
    """Per microbatch: results in token order, from all context-parallel ranks of the last stage."""
    whole: list[dict[int, Tensor]] = [{} for _ in LENS]
    for answer in answers:
        for i, (own, result) in enumerate(answer or ()):
            whole[i].update(zip(own.tolist(), result, strict=True))
    return [torch.stack([tokens[p] for p in range(sum(lens))]) for tokens, lens in zip(whole, LENS, strict=True)]


def assert_close(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert gradients.keys() == expected.keys()
    for key, gradient in expected.items():
        atol = 1e-4 * float(gradient.abs().max())
        torch.testing.assert_close(gradients[key], gradient, rtol=1e-4, atol=atol, msg=key)


@cases(MODELS, {**LAYOUTS, "dp2": ParallelLayout(dp=2)}, also={("glm4", "cp2"), ("deepseek_v3", "cp2 ep2")})
def test_logits_and_gradients_are_those_of_transformers(ranks, model_folders, name, layout) -> None:
    folder, model = model_folders[name]
    results = ranks.run(compute, layout.world_size, layout, folder)
    model.zero_grad()
    for ours, microbatch in zip(merged([answer for answer, _ in results]), sequences(), strict=True):
        theirs = torch.cat([model(s[None]).logits[0] for s in microbatch])
        torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-5)
        loss = F.cross_entropy(theirs, torch.cat(microbatch).roll(-1), reduction="sum")
        (loss * layout.dp).backward()  # here every data-parallel rank is given the same batch, and gradients add up
    gradients = {n: g for n, g in results[0][1].items() if not n.endswith("e_score_correction_bias")}
    assert_close(gradients, checkpoint_tensors({n: p.grad for n, p in model.named_parameters()}))


def test_bfloat16_weights_compute_in_bfloat16_as_transformers_does(ranks: RankPool, model_folders: Any) -> None:
    folder, model = model_folders["qwen2"]
    ((answer, _),) = ranks.run(partial(compute, dtype=torch.bfloat16), 1, ParallelLayout(), folder)
    rounded = deepcopy(model).bfloat16()
    for ours, microbatch in zip(merged([answer]), sequences(), strict=True):
        with torch.no_grad():
            theirs = torch.cat([rounded(s[None]).logits[0] for s in microbatch])
        assert ours.dtype == torch.bfloat16
        assert (ours - theirs).abs().mean() < 0.02 * theirs.abs().mean()


@pytest.mark.parametrize("layout", ["tp2 pp2", "cp2", "pp2 vpp2"])
def test_a_critic_values_every_token_with_its_head(ranks: RankPool, model_folders, tmp_path, layout: str) -> None:
    import transformers

    folder, _ = model_folders["qwen2"]
    config = transformers.AutoConfig.from_pretrained(folder, num_labels=1)
    critic = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    torch.nn.init.normal_(critic.score.weight)
    critic.save_pretrained(tmp_path)
    where = LAYOUTS[layout]
    results = ranks.run(partial(compute, is_critic=True), where.world_size, where, tmp_path)
    for ours, microbatch in zip(merged([answer for answer, _ in results]), sequences(), strict=True):
        theirs = torch.cat([critic.score(critic.model(s[None]).last_hidden_state[0]) for s in microbatch])
        torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-5)
        (theirs[:, 0] * (torch.cat(microbatch) - 48)).sum().backward()
    assert_close(results[0][1], {key: param.grad for key, param in critic.named_parameters()})


def build_error(rank: Rank, layout: ParallelLayout, folder: Path) -> str:
    from model_specs.untrusted import ModelConfigError

    with rank.joined(layout) as (parallel, device):
        try:
            build(folder, parallel, device)
        except ModelConfigError as error:
            return str(error)
    return "built"


@pytest.mark.parametrize(
    ("settings", "layout", "words"),
    [
        ({"vocab_size": 97}, ParallelLayout(tp=2), ("vocab_size=97", "tensor parallel size, 2")),
        ({"num_key_value_heads": 1}, ParallelLayout(tp=2), ("num_key_value_heads=1", "tensor parallel size, 2")),
        ({"num_hidden_layers": 3}, ParallelLayout(pp=2, vpp=2), ("num_hidden_layers=3", "pipeline stages", "4")),
        ({}, ParallelLayout(dp=2, ep=2), ("ep=2", "mixture-of-experts")),
    ],
)
def test_a_model_that_the_layout_cannot_cut_is_an_error(
    ranks: RankPool,
    model_folders: Any,
    tmp_path: Path,
    settings: dict[str, int],
    layout: ParallelLayout,
    words: tuple[str, ...],
) -> None:
    config = json.loads((model_folders["qwen2"][0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "layer_types": None, **settings}))
    for message in ranks.run(build_error, layout.world_size, layout, tmp_path):
        assert all(word in message for word in words), message
