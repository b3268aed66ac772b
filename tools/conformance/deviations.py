"""Formulas of peers that differ, written down here; a row of the matrix is right only where they give the peer's
numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tools.conformance.batches import GROUP_SIZE, LONGEST, Batch
from tools.conformance.checks import Result, of


def group_std_eps(eps: float) -> Callable[[Batch], Result]:
    """Compute (R - mean of the group) / (std of the group + eps)."""

    def formula(batch: Batch) -> Result:
        scores = of(batch, "rewards").view(-1, GROUP_SIZE)
        normalized = (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + eps)
        return {"advantages": normalized.view(-1, 1) * of(batch, "mask")}

    return formula


def batch_std_eps(batch: Batch) -> Result:
    """Compute (R - mean of the group) / (std of the batch + 1e-4)."""
    scores = of(batch, "rewards").view(-1, GROUP_SIZE)
    normalized = (scores - scores.mean(1, keepdim=True)) / (scores.std() + 1e-4)
    return {"advantages": normalized.view(-1, 1) * of(batch, "mask")}


def whiten_population(advantages: Tensor, mask: Tensor) -> Tensor:
    """Compute (A - mean) / sqrt(max(population variance, 1e-8))."""
    mean = (advantages * mask).sum() / mask.sum()
    variance = ((advantages - mean).square() * mask).sum() / mask.sum()
    return (advantages - mean) * variance.clamp(min=1e-8).rsqrt() * mask


def discounted(batch: Batch, discount: float) -> Tensor:
    """Compute returns whose discount acts over tokens that are not trained as well: [B, T]."""
    mask = of(batch, "mask")
    last = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(1, keepdim=True)
    distance = (last - torch.arange(mask.shape[1])).clamp(min=0)
    return of(batch, "rewards")[:, None] * discount**distance * mask


def whitened_returns(discount: float, *, population: bool) -> Callable[[Batch], Result]:
    """Whiten `discounted` returns, by the variance of the population or of a sample."""

    def formula(batch: Batch) -> Result:
        returns, mask = discounted(batch, discount), of(batch, "mask")
        whitened = whiten_population(returns, mask)
        count = mask.sum()
        return {"advantages": whitened if population else whitened * ((count - 1) / count).sqrt()}

    return formula


def whitened_baseline(batch: Batch) -> Result:
    """Compute R - mean of the group, whitened by the population."""
    scores, mask = of(batch, "rewards").view(-1, GROUP_SIZE), of(batch, "mask")
    centred = (scores - scores.mean(1, keepdim=True)).view(-1, 1) * mask
    return {"advantages": whiten_population(centred, mask)}


def whitened_gae(batch: Batch) -> Result:
    """Compute GAE with discount 0.9 and lambda 0.8 over all tokens, whitened by the population."""
    mask, values = of(batch, "mask"), of(batch, "values") * of(batch, "mask")
    last = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(1, keepdim=True)
    rewards = torch.zeros_like(mask).scatter(1, last, of(batch, "rewards")[:, None])
    advantage, following, columns = torch.zeros(len(mask)), torch.zeros(len(mask)), []
    for t in reversed(range(mask.shape[1])):
        advantage = rewards[:, t] + 0.9 * following - values[:, t] + 0.9 * 0.8 * advantage
        following = values[:, t]
        columns.append(advantage)
    return {"advantages": whiten_population(torch.stack(columns[::-1], 1), mask)}


def with_gradient(formula: Callable[[Tensor, Batch], Tensor]) -> Callable[[Batch], Result]:
    """Add the gradient by the log-probabilities to a loss."""

    def both(batch: Batch) -> Result:
        logprobs = of(batch, "logprobs").requires_grad_()
        loss = formula(logprobs, batch)
        return {"loss": loss.detach(), "grads": torch.autograd.grad(loss, logprobs)[0]}

    return both


def clipped(logprobs: Tensor, batch: Batch) -> Tensor:
    """Compute PPO's loss of each token, [B, T], clip 0.2 / 0.2."""
    ratio, advantages = (logprobs - of(batch, "old_logprobs")).exp(), of(batch, "advantages")
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))


@with_gradient
def constant_without_count(logprobs: Tensor, batch: Batch) -> Tensor:
    """Compute the sum of all tokens / constant: not divided by the number of sequences."""
    return (clipped(logprobs, batch) * of(batch, "mask")).sum() / LONGEST


@with_gradient
def mean_of_all_sequences(logprobs: Tensor, batch: Batch) -> Tensor:
    """Compute the mean over all sequences, those without trained tokens included."""
    mask = of(batch, "mask")
    return ((clipped(logprobs, batch) * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


@with_gradient
def sapo_detached(logprobs: Tensor, batch: Batch) -> Tensor:
    """Compute -A sg(4 / tau sigmoid(tau (r - 1))) log pi: the gate is a constant weight."""
    mask, advantages = of(batch, "mask"), of(batch, "advantages")
    ratio = (logprobs - of(batch, "old_logprobs")).exp().detach()
    tau = torch.where(advantages > 0, 1.0, 1.05)
    loss = -advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau * logprobs
    return ((loss * mask).sum(1) / mask.sum(1)).mean()


@with_gradient
def cispo_cap_4(logprobs: Tensor, batch: Batch) -> Tensor:
    """Compute -sg(min(r, 4)) A log pi."""
    mask, ratio = of(batch, "mask"), (logprobs - of(batch, "old_logprobs")).exp().detach()
    return -(ratio.clamp(max=4.0) * of(batch, "advantages") * logprobs * mask).sum() / mask.sum()


@with_gradient
def rloo_of_sequences(logprobs: Tensor, batch: Batch) -> Tensor:
    """Compute PPO's clip on the product of the ratios of a sequence, mean over sequences."""
    ratio = ((logprobs - of(batch, "old_logprobs")) * of(batch, "mask")).sum(1).exp()
    advantages = of(batch, "advantages")[:, 0]
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).mean()


@with_gradient
def k3_with_gradient_of_k2(logprobs: Tensor, batch: Batch) -> Tensor:
    """Compute the value of k3 with the gradient sg(min(r, 10)) x."""
    mask, x = of(batch, "mask"), logprobs - of(batch, "ref_logprobs")
    weight = (logprobs - of(batch, "old_logprobs")).exp().clamp(max=10.0).detach()
    square = weight * x.square() / 2
    value = ((-x).exp() - 1 + x).detach() + square - square.detach()
    return (value * mask).sum() / mask.sum()


@with_gradient
def k3_ratio_to_2(logprobs: Tensor, batch: Batch) -> Tensor:
    """Compute k3 times the ratio, at most 2."""
    mask, x = of(batch, "mask"), logprobs - of(batch, "ref_logprobs")
    ratio = (logprobs - of(batch, "old_logprobs")).exp().clamp(0.0, 2.0)
    return (((-x).exp() - 1 + x) * ratio * mask).sum() / mask.sum()


@with_gradient
def one_pair_of_all(logprobs: Tensor, batch: Batch) -> Tensor:
    """Compute -(1 - s) log sigmoid(beta D) - s log sigmoid(-beta D) of the sum D over all pairs, s = 0.1, beta =
    0.1."""
    changes = ((logprobs - of(batch, "ref_logprobs")) * of(batch, "mask")).sum(1)
    margin = 0.1 * (changes[0::2] - changes[1::2]).sum()
    return -0.9 * logsigmoid(margin) - 0.1 * logsigmoid(-margin)


@with_gradient
def ipo_of_sums(logprobs: Tensor, batch: Batch) -> Tensor:
    """Compute (D - 1 / (2 beta))^2 from sums over tokens, beta = 0.1."""
    changes = ((logprobs - of(batch, "ref_logprobs")) * of(batch, "mask")).sum(1)
    return (changes[0::2] - changes[1::2] - 5.0).square().mean()


def inverted_band(low: float, high: float, *, of_sequence: bool = False) -> Callable[[Batch], Result]:
    """Keep where 1 / w, or its geometric mean over the sequence, is within the bounds."""

    def formula(batch: Batch) -> Result:
        mask = of(batch, "mask")
        log_weight = (of(batch, "old_logprobs") - of(batch, "rollout_logprobs")) * mask
        measured = log_weight.sum(1, keepdim=True) / mask.sum(1, keepdim=True) if of_sequence else log_weight
        kept = (-measured >= math.log(low)) & (-measured <= math.log(high))
        return {"weights": log_weight.exp() * kept * mask}

    return formula
