"""Hooks of sampling: float32 logits, drawing tokens, and top_k and top_p without sorting the vocabulary.

The smallest probability that stays is found by bisection over the bits of floats: for numbers that are not negative,
their order is that of their bits. 31 passes over a row are a few times less work on a GPU than a sort of it, and what
is left out never travels to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # on the CPU there may be none
    triton = None

_BITS_OF_ONE = 0x3F800000
_BLOCK = 4096
_LOG_KEPT = "slipstream_log_kept"
"""Attribute of sampled tokens: logarithm of what top_k and top_p left of their distributions."""


def fp32_logits(
    original: Callable[..., Tensor], processor: object, hidden: Tensor, lm_head: object, bias: Tensor | None = None
) -> Tensor:
    """Compute float32 logits around LogitsProcessor._compute_lm_head, for plain heads on GPUs. The server's own
    enable_fp32_lm_head converts the whole weight at every step."""
    weight = getattr(lm_head, "weight", None)
    if (
        isinstance(weight, Tensor)
        and weight.is_cuda
        and weight.dtype == hidden.dtype == torch.bfloat16
        and hidden.dim() == 2
        and bias is None
        and not hasattr(lm_head, "apply_lora")
    ):
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return original(processor, hidden, lm_head, bias)


class _SamplingInfo(Protocol):
    """SGLang's SamplingBatchInfo, as far as it is used."""

    top_ks: Tensor
    top_ps: Tensor
    sampling_seed: Tensor | None
    need_min_p_sampling: bool
    need_top_k_sampling: bool
    need_top_p_sampling: bool
    is_all_greedy: bool


class _Parameters(Protocol):
    top_k: int
    top_p: float


class _Request(Protocol):
    sampling_params: _Parameters


class _Batch(Protocol):
    reqs: Sequence[_Request]
    sampling_info: _SamplingInfo


class _Logprobs(Protocol):
    token_logprobs: Tensor


class Sampling:
    """Drawing in place of SGLang's, which checks the probabilities anew in every step; and top_k and top_p in place of
    its own, which sort the vocabulary, and twice where log-probabilities of what is left are requested."""

    def sample(
        self,
        original: Callable[..., Tensor],
        sampler: object,
        probs: Tensor,
        info: _SamplingInfo,
        positions: object,
        is_simple: bool,
    ) -> Tensor:
        """Sample around Sampler._sample_from_probs. The remaining probability of each row is kept with its token;
        greedy rows (top_k = 1) keep the log-probability under temperature 1."""
        if is_simple:
            return self._drawn(original, sampler, probs, info, positions)
        if info.need_min_p_sampling:
            return original(sampler, probs, info, positions, is_simple)
        kept = keep_most_likely(probs, info.top_ks, info.top_ps)
        greedy, whole = info.top_ks == 1, (info.top_ks >= probs.shape[1]) & (info.top_ps >= 1)
        tokens = self._drawn(original, sampler, probs, info, positions)
        tokens = torch.where(greedy, probs.argmax(-1).to(tokens.dtype), tokens)  # of equals, always the first
        setattr(tokens, _LOG_KEPT, torch.where(greedy | whole, 0.0, kept.log()))
        return tokens

    def _drawn(
        self, original: Callable[..., Tensor], sampler: object, probs: Tensor, info: _SamplingInfo, positions: object
    ) -> Tensor:
        if info.sampling_seed is not None:  # drawn by it, in the server's own way
            return original(sampler, probs, info, positions, True)
        return draw(probs)

    def renormalise(
        self,
        original: Callable[..., _Logprobs],
        processor: object,
        logprobs: Tensor,
        top: object,
        requested: object,
        tokens: Tensor,
    ) -> _Logprobs:
        """Renormalize log-probabilities around OutputLogprobProcessor.compute_logprobs."""
        result = original(processor, logprobs, top, requested, tokens)
        log_kept = getattr(tokens, _LOG_KEPT, None)
        if log_kept is not None:
            result.token_logprobs = result.token_logprobs - log_kept
        return result

    def forget(self, result: object, batch: _Batch, *args: object, **kwargs: object) -> None:
        """Recompute, after ScheduleBatch.filter_batch, whether a batch has a request with top_k or top_p. SGLang
        otherwise keeps the flag until the batch is empty, which does not happen in a run, so one evaluation would slow
        down all later steps."""
        info = batch.sampling_info
        if batch.reqs and (info.need_top_k_sampling or info.need_top_p_sampling):
            from sglang.srt.sampling.sampling_params import TOP_K_ALL

            info.need_top_k_sampling = any(req.sampling_params.top_k != TOP_K_ALL for req in batch.reqs)
            info.need_top_p_sampling = any(req.sampling_params.top_p != 1.0 for req in batch.reqs)
            info.is_all_greedy = all(req.sampling_params.top_k <= 1 for req in batch.reqs)


def draw(probs: Tensor) -> Tensor:
    """Draw one column of each row, with probabilities proportional to `probs` [n, v] float32, none of them negative,
    some of each row positive: [n] int32. The smallest of exponential variables with these rates wins, as in
    torch.multinomial(), which first checks the probabilities in ten more passes over the matrix."""
    clocks = torch.empty_like(probs).exponential_()
    return torch.div(probs, clocks, out=clocks).argmax(-1).to(torch.int32)


def keep_most_likely(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set everything outside of the top_k most likely columns to zero, in place, and among these everything outside of
    the smallest set that holds top_p of their probability; columns as likely as the last one that stays, stay.

    probs [n, v] float32, top_k [n] int32 (>= v: no limit), top_p [n] float32. Returns what is left of each row, [n]."""
    if probs.is_cuda and triton is not None:
        assert probs.stride(1) == 1, "columns next to each other"
        kept = torch.empty(len(probs), dtype=torch.float32, device=probs.device)
        _keep_most_likely[(len(probs),)](
            probs, top_k, top_p, kept, probs.shape[1], probs.stride(0), ONE=_BITS_OF_ONE, BLOCK=_BLOCK, num_warps=8
        )
        return kept
    ordered = probs.sort(dim=-1, descending=True).values
    last = top_k.long().clamp(max=probs.shape[1])[:, None] - 1
    mass = torch.where(ordered >= ordered.gather(1, last), ordered, 0.0)
    before = mass.cumsum(-1) - mass
    stays = (before < top_p[:, None] * mass.sum(-1, keepdim=True)) & (mass > 0)
    stays[:, 0] = True
    least = torch.where(stays, ordered, torch.inf).amin(-1, keepdim=True)
    probs.masked_fill_(probs < least, 0.0)
    return probs.sum(-1)


if triton is not None:

    @triton.jit
    def _count(row, least, width, BLOCK: tl.constexpr):
        total = tl.zeros([BLOCK], tl.int32)
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(row + at, mask=at < width, other=0.0)
            total += ((x.to(tl.int32, bitcast=True) >= least) & (at < width)).to(tl.int32)
        return tl.sum(total)

    @triton.jit
    def _mass(row, least, width, BLOCK: tl.constexpr):
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(row + at, mask=at < width, other=0.0)
            total += tl.where(x.to(tl.int32, bitcast=True) >= least, x, 0.0)
        return tl.sum(total)

    @triton.jit
    def _keep_most_likely(probs, top_k, top_p, kept, width, stride, ONE: tl.constexpr, BLOCK: tl.constexpr):
        index = tl.program_id(0)
        row = probs + index.to(tl.int64) * stride
        k = tl.load(top_k + index)
        p = tl.load(top_p + index)
        least = tl.full([], 0, tl.int32)  # the largest bits that enough columns reach; too few reach `over`
        if k < width:
            over = tl.full([], ONE + 2, tl.int32)
            while over - least > 1:
                middle = (least + over) // 2
                if _count(row, middle, width, BLOCK) >= k:
                    least = middle
                else:
                    over = middle
        mass = _mass(row, least, width, BLOCK)
        if p < 1.0:
            over = tl.full([], ONE + 2, tl.int32)
            while over - least > 1:
                middle = (least + over) // 2
                if _mass(row, middle, width, BLOCK) >= p * mass:
                    least = middle
                else:
                    over = middle
            mass = _mass(row, least, width, BLOCK)
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(row + at, mask=at < width, other=0.0)
            stays = x.to(tl.int32, bitcast=True) >= least
            tl.store(row + at, tl.where(stays, x, 0.0), mask=at < width)
        tl.store(kept + index, mass)
