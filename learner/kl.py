"""Divergence between policies: estimators per token, their placement, and distillation forms.

Contract. The selectable estimators (`__all__`) are called `method(logprobs, ref_logprobs, **data) ->
Tensor`, any shape, one value per token drawn from the current policy; d = logprob - ref_logprob. Each
estimates KL(current || reference) in value, but as a term of a loss or of a reward they pull differently
(arXiv:2506.09477, 2512.21852). In expectation over the current policy:

| | value | gradient as a loss | as a penalty in the reward |
|---|---|---|---|
| k1 = d | unbiased, noisy | 0: no pull at all | gradient of KL(current, reference): right |
| k2 = d^2 / 2 | biased | gradient of KL(current, reference): right | biased |
| k3 = exp(-d) - 1 + d | unbiased, low noise | gradient of KL(reference, current): the forward one | biased |

Masking is the caller's, and before the call: a `torch.where` on what comes out hides the NaN of a padding token,
and its gradient is still 0 * NaN = NaN. Only `logprobs` get a gradient. Shorter numbers than float32 are
computed and returned as float32, in which exp(20) is finite.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from learner.guards import require, require_advantages, require_same_shape, wide
from learner.losses import MAX_LOG_RATIO

__all__ = ["k1", "k2", "k3", "k3_unbiased"]


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """d. For the reward (see `reward_penalty`) and for monitoring: as a loss its expected gradient is 0."""
    require_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    return wide(logprobs) - wide(ref_logprobs).detach()


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """d^2 / 2. As a loss its gradient d is that of KL(current || reference), as k1's in the reward."""
    return 0.5 * k1(logprobs, ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor, *, cap: float = 10.0) -> Tensor:
    """exp(-d) - 1 + d, at most `cap`. As a loss its gradient is that of the forward KL(reference || current).

    d is clamped to +-20 before exp, so a capped token has gradient 0 and not 0 * infinity. The cap of 10 is
    reached at d = -2.61 and at d = 11; it bounds what one token can do to a step.
    http://joschu.net/blog/kl-approx.html
    """
    require("cap", cap, above=0)
    d = k1(logprobs, ref_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (torch.expm1(-d) + d).clamp(max=cap)


def k3_unbiased(logprobs: Tensor, ref_logprobs: Tensor, *, old_logprobs: Tensor, cap: float = 10.0) -> Tensor:
    """k3 times the ratio current / old, through which the gradient flows too. DeepSeek-V3.2,
    arXiv:2512.02556.

    As a loss over tokens drawn from the old policy its gradient is that of KL(current || reference).
    """
    log_ratio = k1(logprobs, old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.exp() * k3(logprobs, ref_logprobs, cap=cap)


def reward_penalty(logprobs: Tensor, ref_logprobs: Tensor, response_mask: Tensor, *, coefficient: float) -> Tensor:
    """Rewards per token, [B, T]: -coefficient k1 on sampled tokens, 0 elsewhere, without gradient.

    The `token_rewards` of `learner.advantages.reinforce_pp` and `gae`. InstructGPT, arXiv:2203.02155.
    """
    require("coefficient", coefficient, at_least=0)
    require_same_shape(logprobs=logprobs, response_mask=response_mask)
    penalty = -coefficient * k1(logprobs, ref_logprobs).detach()
    return torch.where(response_mask.bool(), penalty, 0.0)


def adaptive_coefficient(coefficient: float, kl: float, *, target: float, samples: int, horizon: int) -> float:
    """The coefficient after `samples` more answers: * (1 + clip(kl / target - 1, +-0.2) samples / horizon).

    Ziegler et al., arXiv:1909.08593. ValueError unless target > 0 and samples <= horizon: with many more it would turn negative.
    """
    require("kl", kl)
    require("target", target, above=0)
    require("horizon", horizon, at_least=1)
    require("samples", samples, at_least=0, at_most=horizon)
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * samples / horizon)


def categorical_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Exact KL(p || q) over the last dimension, from log-probabilities. [..., V] -> [...].

    With a teacher and a student: (teacher, student) is the forward, (student, teacher) the reverse KL. A
    log-probability of -inf in p adds nothing.
    """
    log_p, log_q = wide(log_p), wide(log_q)
    possible = log_p.detach().exp() > 0
    # Filled before the product: beyond the mask its gradient would be 0 * infinity.
    log_p, log_q = log_p.masked_fill(~possible, 0.0), log_q.masked_fill(~possible, 0.0)
    return torch.where(possible, log_p.exp() * (log_p - log_q), 0.0).sum(-1)


def jensen_shannon(log_p: Tensor, log_q: Tensor, *, share: float = 0.5) -> Tensor:
    """share KL(p || m) + (1 - share) KL(q || m), m = share p + (1 - share) q. [..., V] -> [...]. GKD,
    arXiv:2306.13649. ValueError unless 0 < share < 1: at either end it is 0, not one of the two divergences.
    """
    require("share", share, above=0, below=1)
    log_p, log_q = wide(log_p), wide(log_q)
    possible = torch.maximum(log_p, log_q) > -torch.inf
    log_m = torch.logaddexp(
        (log_p + math.log(share)).masked_fill(~possible, 0.0), (log_q + math.log(1 - share)).masked_fill(~possible, 0.0)
    )
    return share * categorical_kl(log_p, log_m) + (1 - share) * categorical_kl(log_q, log_m)


def distillation_advantages(
    advantages: Tensor,
    logprobs: Tensor,
    teacher_logprobs: Tensor,
    response_mask: Tensor,
    *,
    coefficient: float = 1.0,
) -> Tensor:
    """On-policy distillation: A_t - coefficient (student - teacher logprob), 0 outside the mask. All [B, T], the advantages
    also [B, 1].

    No gradient: through the difference the teacher would vanish (k1 as a loss pulls nowhere).
    """
    require("coefficient", coefficient, at_least=0)
    require_advantages(advantages, response_mask)
    require_same_shape(logprobs=logprobs, response_mask=response_mask)
    penalised = wide(advantages).detach() - coefficient * k1(logprobs, teacher_logprobs).detach()
    return torch.where(response_mask.bool(), penalised, 0.0)
