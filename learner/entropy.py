"""Entropy of the policy: its value, which tokens carry it, and how a bonus for it is steered.

Contract. Pure functions; what stands at masked positions (padding sentinels, NaN) is never read.
Statistics over "all tokens" (a quantile, a mean) are of the tensors that are given: give the whole global
batch where the result must not depend on the split into micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from learner.guards import require, require_same_shape, wide

FUZZ = 1e-9  # (1 - 0.7) * 10 is a little more than 3, and means the third place


def categorical(logits: Tensor) -> Tensor:
    """H = -sum p log p of each distribution. [..., V] -> [...]; dH / dz_j = -p_j (log p_j + H).

    A logit of -inf, of an outcome that can't be, adds nothing to value and gradient.
    """
    logprobs = wide(logits).log_softmax(-1)
    impossible = logprobs == -torch.inf
    return -(logprobs.exp() * logprobs.masked_fill(impossible, 0.0)).sum(-1)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the masked entries, a scalar; 0 without any."""
    require_same_shape(values=values, mask=mask)
    mask = mask.bool()
    return torch.where(mask, wide(values), 0.0).sum() / mask.sum().clamp(min=1)


def sampled(logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Mean of -logprob over the sampled tokens, a scalar: the one-sample estimate of the mean entropy."""
    return masked_mean(-logprobs, response_mask)


def top_fraction_mask(entropy: Tensor, response_mask: Tensor, *, fraction: float = 0.2) -> Tensor:
    """bool [B, T]: sampled tokens whose entropy is at or above `top_fraction_threshold`.

    The 80/20 rule, arXiv:2506.01939.
    """
    return (entropy >= top_fraction_threshold(entropy, response_mask, fraction=fraction)) & response_mask.bool()


def top_fraction_threshold(entropy: Tensor, response_mask: Tensor, *, fraction: float = 0.2) -> Tensor:
    """The (1 - fraction) quantile of the masked entries that are no NaN, linearly interpolated; infinity without any.

    ValueError unless 0 < fraction <= 1.
    """
    require("fraction", fraction, above=0, at_most=1)
    require_same_shape(entropy=entropy, response_mask=response_mask)
    entropy = wide(entropy.detach())
    # Not torch.quantile, which refuses more than 16 million values.
    ordered = entropy[response_mask.bool() & ~entropy.isnan()].sort().values
    if len(ordered) == 0:
        return entropy.new_tensor(torch.inf)
    position = (1 - fraction) * (len(ordered) - 1)
    place = math.floor(position + FUZZ)
    share = max(position - place, 0.0)
    if share <= FUZZ:
        return ordered[place]
    return ordered[place] + share * (ordered[place + 1] - ordered[place])


def covariance(
    logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    total: Callable[[Tensor], Tensor] = lambda of_rank: of_rank,
) -> Tensor:
    """(A - mean A)(logprob - mean logprob) per token, means over the mask, 0 outside. One shape for all, no gradient.

    `total` adds a tensor up over the ranks that hold the other tokens. Clip-Cov drops gradients of some tokens with a high
    value, KL-Cov penalises the highest. arXiv:2505.22617.
    """
    require_same_shape(logprobs=logprobs, advantages=advantages, response_mask=response_mask)
    mask = response_mask.bool()
    lp, a = (values.detach().double().masked_fill(~mask, 0.0) for values in (logprobs, advantages))
    count, sum_lp, sum_a = total(torch.stack([mask.double().sum(), lp.sum(), a.sum()])).tolist()
    product = (a - sum_a / max(count, 1)) * (lp - sum_lp / max(count, 1))
    return torch.where(mask, product, 0.0).to(torch.promote_types(logprobs.dtype, torch.float32))


def adaptive_coefficient(coefficient: float, entropy: float, *, target: float, step: float, maximum: float) -> float:
    """The coefficient of the next step: up by `step` at or below the target entropy, else down, within 0 and `maximum`.

    The bonus is active only at or below the target. Skywork-OR1, arXiv:2505.22312.
    """
    require("entropy", entropy)
    require("target", target)
    require("step", step, at_least=0)
    require("maximum", maximum, at_least=0)
    moved = coefficient + step if entropy <= target else coefficient - step
    return min(max(moved, 0.0), maximum)
