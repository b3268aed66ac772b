"""linear_logprobs against plain torch, and the memory it needs."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import Tensor

from allocation import ParallelLayout
from helpers.mcore_ranks import Rank
from mcore_adapter.models.forward import linear_logprobs

VOCAB, HIDDEN, TOKENS = 97, 24, 53


def reference(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logp = ((hidden @ weight.t()) / temperature).log_softmax(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def problem(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator) * 0.5
    return hidden, weight, torch.randint(VOCAB, (TOKENS,), generator=generator)


@pytest.mark.parametrize("chunk_tokens", [1, 7, TOKENS, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy_weight", [None, 0.3])
def test_values_and_gradients_equal_those_of_torch(chunk_tokens, temperature, entropy_weight):
    """As exactly as torch's own float32: against float64, with at most four times its error or four roundings."""
    hidden, weight, targets = problem()
    coefficients = torch.linspace(-1, 1, TOKENS)

    def run(function, dtype=torch.float32):
        h, w = (t.to(dtype, copy=True).requires_grad_() for t in (hidden, weight))
        logprobs, entropy = function(h, w, targets, temperature=temperature)
        assert (entropy is None) == (function is fused and entropy_weight is None)
        loss = (coefficients * logprobs).sum()
        if entropy_weight is not None:
            loss = loss + entropy_weight * (coefficients * entropy).sum()
        loss.backward()
        return [t.detach() for t in (logprobs, h.grad, w.grad, *((entropy,) if entropy_weight is not None else ()))]

    fused = partial(linear_logprobs, chunk_tokens=chunk_tokens, with_entropy=entropy_weight is not None)
    for found, plain, exact in zip(run(fused), run(reference), run(reference, torch.float64), strict=True):
        rounding = torch.finfo(torch.float32).eps * exact.abs().max()
        assert (found - exact).abs().max() <= 4 * max((plain - exact).abs().max(), rounding)


def test_an_entropy_alone_has_its_gradient():
    hidden, weight, targets = problem(1)
    grads = []
    for fused in (True, False):
        h = hidden.clone().requires_grad_()
        entropy = (
            linear_logprobs(h, weight, targets, with_entropy=True)[1]
            if fused
            else reference(h, weight, targets, 1.0)[1]
        )
        entropy.sum().backward()
        grads.append(h.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-6, atol=1e-6)


def vocabulary_shard_run(rank: Rank, chunk_tokens: int) -> tuple[Tensor, ...]:
    """Log-probabilities, entropies and gradients of this rank's half of the vocabulary, hidden's summed over ranks."""
    with rank.joined(ParallelLayout(tp=2)) as (parallel, _):
        hidden, weight, targets = problem(4)
        hidden, shard = hidden.requires_grad_(), weight[:96].chunk(2)[rank.rank].clone().requires_grad_()
        logprobs, entropy = linear_logprobs(
            hidden,
            shard,
            targets % 96,
            temperature=0.7,
            chunk_tokens=chunk_tokens,
            tp_group=parallel.tp_group,
            with_entropy=True,
        )
        (torch.linspace(-1, 1, TOKENS) * (logprobs + 0.3 * entropy)).sum().backward()
        torch.distributed.all_reduce(hidden.grad)
        return logprobs.detach(), entropy.detach(), hidden.grad, shard.grad


@pytest.mark.parametrize("chunk_tokens", [8, 1000])
def test_a_vocabulary_on_two_ranks_gives_what_one_rank_gives(ranks, chunk_tokens):
    first, second = ranks.run(vocabulary_shard_run, 2, chunk_tokens)
    hidden, weight, targets = problem(4)
    hidden, weight = hidden.requires_grad_(), weight[:96].clone().requires_grad_()
    logprobs, entropy = reference(hidden, weight, targets % 96, 0.7)
    (torch.linspace(-1, 1, TOKENS) * (logprobs + 0.3 * entropy)).sum().backward()
    for mine, other in zip(first[:2], second[:2], strict=True):
        assert torch.equal(mine, other), "bit-equal on all ranks: their losses must not drift apart"
    torch.testing.assert_close(first[0], logprobs.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(first[1], entropy.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(first[2], hidden.grad, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.cat((first[3], second[3])), weight.grad, rtol=1e-6, atol=1e-6)


def test_extreme_logits_stay_finite():
    weight = torch.eye(8) * 200
    logprobs, entropy = linear_logprobs(torch.eye(8)[:2], weight, torch.tensor([0, 1]), with_entropy=True)
    assert logprobs.tolist() == [0.0, 0.0]
    assert entropy.tolist() == [0.0, 0.0]
    logprobs, _ = linear_logprobs(torch.eye(8)[:2], weight, torch.tensor([1, 0]))
    assert logprobs.tolist() == [-200.0, -200.0]


def test_bfloat16_weights_give_float32_results_close_to_the_exact_ones():
    hidden, weight, targets = problem(3)
    h, w = hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()
    logprobs, _ = linear_logprobs(h, w, targets, chunk_tokens=16)
    logprobs.sum().backward()
    expected, _ = reference(h.detach().float(), w.detach().float(), targets, 1.0)
    assert logprobs.dtype == torch.float32
    assert w.grad.dtype == torch.bfloat16
    torch.testing.assert_close(logprobs.detach(), expected, rtol=0.02, atol=0.05)


def test_the_gradient_of_a_bfloat16_head_is_summed_in_float32_over_all_chunks():
    """Added up in bfloat16, chunks of 2.25 would stop at 512."""
    weight = torch.zeros(4, 8, dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.ones(1023, 8, dtype=torch.bfloat16)
    logprobs, _ = linear_logprobs(hidden, weight, torch.zeros(1023, dtype=torch.long), chunk_tokens=3)
    logprobs.sum().backward()
    assert weight.grad[0].tolist() == [768.0] * 8 and weight.grad[1].tolist() == [-256.0] * 8


MEMORY_PROGRAM = """
import resource, sys, torch
from mcore_adapter.models.forward import linear_logprobs
torch.set_num_threads(1)
tokens, vocab, h = int(sys.argv[1]), 16384, 16
hidden = torch.randn(tokens, h).requires_grad_()
weight = torch.randn(vocab, h).requires_grad_()
targets = torch.randint(vocab, (tokens,))
def step(n):
    logprobs, entropy = linear_logprobs(hidden[:n], weight, targets[:n], chunk_tokens=64, with_entropy=True)
    (logprobs + entropy).sum().backward()
step(64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
step(tokens)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_peak_memory_is_that_of_a_chunk_not_of_all_logits():
    """2,048 tokens x 16,384 words are 128 MiB of fp32 logits; a chunk of 64 tokens is 4 MiB."""
    process = subprocess.run(
        [sys.executable, "-c", MEMORY_PROGRAM, "2048"], capture_output=True, text=True, check=True, timeout=120
    )
    assert float(process.stdout) < 32


def test_temperature_zero_is_refused():
    hidden, weight, targets = problem()
    with pytest.raises(ValueError, match="temperature=0"):
        linear_logprobs(hidden, weight, targets, temperature=0.0)
