"""Entropy of the policy: its value, which tokens carry it, and how a bonus for it is steered.

Contract. Pure functions; what stands at masked positions (padding sentinels, NaN) is never read.
Statistics over "all tokens" (a quantile, a mean) are of the tensors that are given: give the whole global
batch where the result must not depend on the split into micro-batches.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def categorical(logits: Tensor) -> Tensor:
    """H = -sum p log p of each distribution. [..., V] -> [...]; dH / dz_j = -p_j (log p_j + H)."""
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the masked entries, a scalar; 0 without any."""
    mask = mask.bool()
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def sampled(logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Mean of -logprob over the sampled tokens, a scalar: the one-sample estimate of the mean entropy."""
    return masked_mean(-logprobs, response_mask)


def top_fraction_mask(entropy: Tensor, response_mask: Tensor, *, fraction: float = 0.2) -> Tensor:
    """bool [B, T]: sampled tokens whose entropy is at or above `top_fraction_threshold`.

    The 80/20 rule, arXiv:2506.01939.
    """
    return (entropy >= top_fraction_threshold(entropy, response_mask, fraction=fraction)) & response_mask.bool()


def top_fraction_threshold(entropy: Tensor, response_mask: Tensor, *, fraction: float = 0.2) -> Tensor:
    """The (1 - fraction) quantile of the masked entries, linearly interpolated; infinity without any."""
    # Not torch.quantile, which refuses more than 16 million values.
    ordered = entropy.detach()[response_mask.bool()].sort().values
    if len(ordered) == 0:
        return entropy.new_tensor(torch.inf)
    position = (1 - fraction) * (len(ordered) - 1)
    below, above = ordered[math.floor(position)], ordered[math.ceil(position)]
    return below + (position - math.floor(position)) * (above - below)


def covariance(logprobs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    """(A - mean A)(logprob - mean logprob) per token, means over the mask, 0 outside. [B, T], no gradient.

    Clip-Cov drops gradients of some tokens with a high value, KL-Cov penalises the highest. arXiv:2505.22617.
    """
    mask = response_mask.bool()
    logprobs, advantages = logprobs.detach(), advantages.detach()
    product = (advantages - masked_mean(advantages, mask)) * (logprobs - masked_mean(logprobs, mask))
    return torch.where(mask, product, 0.0)


def adaptive_coefficient(coefficient: float, entropy: float, *, target: float, step: float) -> float:
    """The coefficient of the next step: up by `step` at or below the target entropy, else down.

    The bonus is active only at or below the target. Skywork-OR1, arXiv:2505.22312.
    """
    return coefficient + step if entropy <= target else coefficient - step
