"""Policy losses: what is minimised, token by token.

Contract. Every selectable method (`__all__`) is called `method(logprobs, old_logprobs, advantages,
response_mask, **options) -> LossTerms`; all tensors are [B, T], one row an answer, whole (a sequence-level
ratio needs all of a row's tokens in one call). `old_logprobs` are those of the policy the ratio is taken
against; one that is NaN, since the engine gave none, counts as the current one. r = exp(logprobs -
old_logprobs) throughout, the difference clamped to +-20 before exp: a value that overflows in exp has no
usable gradient, whatever is done to it afterwards. What stands at masked positions (prompt, tool output,
padding) is never read, be it NaN. Only `logprobs` get a gradient; a ratio that lies on a bound is not
clipped. Shorter numbers than float32 are computed and returned as float32.

The loss is sum(weight * token_loss) with the weights of `learner.aggregation`. Losses in
`FIXED_AGGREGATION` are defined with one aggregation only, those in `FIXED_PROXIMAL` with some old policies
only. Sequence-level losses put their row's loss on each of its tokens, so that `seq_mean_token_mean` gives
the mean over rows; they use one advantage per row (the mean of its tokens').
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.guards import LEAST_LOGPROB, require, require_advantages, require_band, require_same_shape, wide

__all__ = [
    "cispo",
    "dppo_kl",
    "dppo_tv",
    "gmpo",
    "gspo",
    "gspo_token",
    "luspo",
    "ppo_clip",
    "reinforce",
    "sapo",
    "two_sided_clip",
    "vespo",
]

# The aggregations a loss may be paired with, where its paper fixes them; all others take any.
FIXED_AGGREGATION: Mapping[str, tuple[str, ...]] = {
    "gmpo": ("seq_mean_token_mean",),
    "gspo": ("seq_mean_token_mean",),
    "gspo_token": ("seq_mean_token_mean",),
    "luspo": ("seq_mean_token_mean",),
    "vespo": ("token_mean",),
}

# The policies that `old_logprobs` may be of, where that is not free (algorithm.proximal); all others take any.
FIXED_PROXIMAL: Mapping[str, tuple[str, ...]] = {
    # The trust region is around the policy that wrote the tokens (arXiv:2602.04879), not around a recomputed one.
    "dppo_kl": ("behaviour",),
    "dppo_tv": ("behaviour",),
    # No ratio: of an interpolated policy's importance weight the other half would be missing.
    "reinforce": ("behaviour", "recompute"),
}

# Losses that put the whole row's loss on each token, gradients of all others included: no token of it can be left out.
WHOLE_ROWS = frozenset({"gmpo", "gspo", "luspo"})

MAX_LOG_RATIO = 20.0  # the one bound of all of the learner: beyond, exp has no usable gradient


@dataclass(frozen=True)
class LossTerms:
    """A loss per token and what the clip did. The loss is sum(weight * token_loss) over the global batch."""

    token_loss: Tensor  # [B, T], 0 outside the mask
    clipped: Tensor  # bool [B, T]: tokens whose gradient the clip took away (in `cispo`: whose weight it limited)
    level: str = "token"  # token | sequence: over what the ratio is taken


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
) -> LossTerms:
    """l = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A). PPO, arXiv:1707.06347; the defaults are DAPO's
    clip-higher, arXiv:2503.14476.

    `dual_clip` c bounds the loss of A < 0 by -c A (arXiv:1912.09729); ValueError unless c > 1.
    """
    if dual_clip is not None:
        require("dual_clip", dual_clip, above=1)  # it bounds the ratio from above where A < 0
    new, old, A, _ = _inputs(logprobs, old_logprobs, advantages, response_mask)
    ratio = _log_ratio(new, old).exp()
    bound, clipped = _clip(ratio, A, clip_low, clip_high)
    if dual_clip is not None:
        beyond = (A < 0) & (ratio > dual_clip)
        bound, clipped = bound.masked_fill(beyond, dual_clip), clipped | beyond
    return LossTerms(-A * torch.where(clipped, bound, ratio), clipped)


def two_sided_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    delta: float = 4.0,
) -> LossTerms:
    """l = -min(min(r, delta) A, clip(r, 1 - clip_low, 1 + clip_high) A). INTELLECT-2, arXiv:2505.07291.

    The same function as `ppo_clip` with `dual_clip=delta`: with A > 0 the ordinary clip binds first.
    ValueError unless delta > 1 + clip_high, where that would not hold.
    """
    require("clip_high", clip_high, at_least=0)
    require("delta", delta)
    if not delta > 1 + clip_high:
        raise ValueError(f"delta must be > 1 + clip_high = {1 + clip_high}, got {delta}")
    return ppo_clip(
        logprobs,
        old_logprobs,
        advantages,
        response_mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=delta,
    )


def reinforce(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor) -> LossTerms:
    """l = -A logprob: no ratio, no clip; `old_logprobs` is not used. Williams 1992. Meant for one update a
    batch, with a correction (e.g. `token_tis` of the current over the behaviour policy) where the data
    is older.
    """
    new, _, A, mask = _inputs(logprobs, old_logprobs, advantages, response_mask)
    return LossTerms(-A * new, torch.zeros_like(mask))


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    ratio_min: float = 0.0,
    ratio_max: float = 5.0,
) -> LossTerms:
    """l = -sg(clip(r, ratio_min, ratio_max)) A logprob, sg = no gradient. MiniMax-M1, arXiv:2506.13585.

    Every token keeps a gradient. The bounds are absolute: another code base's eps_high is ratio_max - 1;
    ValueError unless ratio_min <= 1 <= ratio_max. The default cap is one that ScaleRL (arXiv:2510.13786) found
    as good as others between 4 and 8.
    """
    require_band("ratio_min", ratio_min, "ratio_max", ratio_max)
    new, old, A, _ = _inputs(logprobs, old_logprobs, advantages, response_mask)
    ratio = _log_ratio(new, old).exp().detach()
    weight = ratio.clamp(ratio_min, ratio_max)
    return LossTerms(-weight * A * new, weight != ratio)


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> LossTerms:
    """l = -(4 / tau) sigmoid(tau (r - 1)) A, tau = tau_pos if A > 0 else tau_neg. SAPO, arXiv:2511.20347.

    A soft gate instead of a clip: the gradient at r = 1 is -A, and fades on both sides. Nothing is ever
    clipped.
    """
    require("tau_pos", tau_pos, above=0)
    require("tau_neg", tau_neg, above=0)
    new, old, A, mask = _inputs(logprobs, old_logprobs, advantages, response_mask)
    ratio = _log_ratio(new, old).exp()
    tau = _by_sign(A > 0, A, tau_pos, tau_neg)
    return LossTerms(-(4 / tau) * (tau * (ratio - 1)).sigmoid() * A, torch.zeros_like(mask))


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> LossTerms:
    """l = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean over the row's tokens of log r).

    Sequence level; aggregate with `seq_mean_token_mean`. GSPO, arXiv:2507.18071.
    """
    new, old, A, mask = _inputs(logprobs, old_logprobs, advantages, response_mask)
    row_loss, clipped = _sequence_clip(_log_ratio(new, old), A, mask, clip_low, clip_high)
    return LossTerms(row_loss[:, None] * mask, clipped[:, None] & mask, level="sequence")


def luspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 2e-3,
    clip_high: float = 2.5e-3,
) -> LossTerms:
    """`gspo` times the row's number of tokens. Sequence level; aggregate with `seq_mean_token_mean`, which
    gives the mean over rows of length * loss. LUSPO, arXiv:2602.05261.
    """
    new, old, A, mask = _inputs(logprobs, old_logprobs, advantages, response_mask)
    row_loss, clipped = _sequence_clip(_log_ratio(new, old), A, mask, clip_low, clip_high)
    return LossTerms((row_loss * mask.sum(1))[:, None] * mask, clipped[:, None] & mask, level="sequence")


def gspo_token(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> LossTerms:
    """`gspo` with the value of s but each token's own gradient: s_t = sg(s) exp(logprob - sg(logprob)).

    Equal to `gspo` in value and gradient for one advantage per row, and allows one per token. Aggregate with
    `seq_mean_token_mean`. arXiv:2507.18071, equations 13 and 14.
    """
    new, old, A, mask = _inputs(logprobs, old_logprobs, advantages, response_mask)
    row_ratio = _row_mean(_log_ratio(new, old), mask).exp().detach()
    ratio = row_ratio[:, None] * (new - new.detach()).exp()
    bound, clipped = _clip(ratio, A, clip_low, clip_high)
    return LossTerms(-A * torch.where(clipped, bound, ratio), clipped, level="sequence")


def gmpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    log_clip: float = 0.4,
) -> LossTerms:
    """l = -A exp(mean over the row's tokens of d'), d' = log r clipped at +log_clip where A > 0, at -log_clip
    where A < 0. Sequence level; aggregate with `seq_mean_token_mean`. GMPO, arXiv:2507.20673."""
    require("log_clip", log_clip, at_least=0)
    new, old, A, mask = _inputs(logprobs, old_logprobs, advantages, response_mask)
    log_ratio = _log_ratio(new, old)
    clipped = torch.where(A > 0, log_ratio > log_clip, log_ratio < -log_clip) & (A != 0)
    limited = torch.where(clipped, A.sign() * log_clip, log_ratio)
    row_loss = -_row_mean(A, mask) * _row_mean(limited, mask).exp()
    return LossTerms(row_loss[:, None] * mask, clipped & mask, level="sequence")


def vespo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    k_pos: float = 2.0,
    lam_pos: float = 3.0,
    k_neg: float = 3.0,
    lam_neg: float = 2.0,
) -> LossTerms:
    """l = -sg(W^k exp(lam (1 - W))) A logprob, W = product of the row's ratios; (k, lam) by the sign of A, 0
    counting as positive. Sequence-level weight; aggregate with `token_mean`. VESPO, arXiv:2602.10693."""
    for name, value in (("k_pos", k_pos), ("lam_pos", lam_pos), ("k_neg", k_neg), ("lam_neg", lam_neg)):
        require(name, value, at_least=0)
    new, old, A, mask = _inputs(logprobs, old_logprobs, advantages, response_mask)
    log_weight = _log_ratio(new, old).detach().sum(1, keepdim=True)
    log_weight = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k = _by_sign(A >= 0, A, k_pos, k_neg)
    lam = _by_sign(A >= 0, A, lam_pos, lam_neg)
    phi = (k * log_weight + lam * (1 - log_weight.exp())).exp()
    return LossTerms(-phi * A * new, torch.zeros_like(mask), level="sequence")


def dppo_tv(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    threshold_low: float = 0.15,
    threshold_high: float = 0.15,
    ratio_max: float = 20.0,
) -> LossTerms:
    """l = -sg(min(r, ratio_max)) A logprob, without tokens whose probability already moved too far the way A
    pushes: p - q > threshold_high with A > 0, p - q < -threshold_low with A <= 0 (p = exp(logprob), q the old
    policy's). DPPO with the binary total variation, arXiv:2602.04879."""
    _check_thresholds(threshold_low, threshold_high)
    new, old, A, _ = _inputs(logprobs, old_logprobs, advantages, response_mask)
    moved = (new.exp() - old.exp()).detach()
    dropped = torch.where(A > 0, moved > threshold_high, moved < -threshold_low)
    return _dppo(new, old, A, dropped, ratio_max)


def dppo_kl(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    threshold_low: float = 0.05,
    threshold_high: float = 0.05,
    ratio_max: float = 20.0,
) -> LossTerms:
    """`dppo_tv` with the KL divergence of the two-outcome distribution (this token, any other) as the
    measure of distance: q log(q / p) + (1 - q) log((1 - q) / (1 - p)). arXiv:2602.04879.
    """
    _check_thresholds(threshold_low, threshold_high)
    new, old, A, _ = _inputs(logprobs, old_logprobs, advantages, response_mask)
    divergence = binary_kl(new.detach(), old)
    threshold = _by_sign(A > 0, A, threshold_high, threshold_low)
    away = torch.where(A > 0, new > old, new < old)
    return _dppo(new, old, A, (divergence > threshold) & away, ratio_max)


def binary_kl(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """KL(old || new) of whether this very token is drawn. [B, T] -> [B, T], finite for probabilities of 1, and 0 log 0 = 0."""
    new, old = wide(logprobs), wide(old_logprobs)
    p, q, tiny = new.exp(), old.exp(), 1e-8
    drawn = torch.where(q > 0, q * (old - new), 0.0)
    not_p, not_q = (1 - p).clamp(min=0), (1 - q).clamp(min=0)  # a rounded logprob may be a little above 0
    return drawn + not_q * ((not_q + tiny) / (not_p + tiny)).log()


def value_clip(
    values: Tensor, old_values: Tensor, returns: Tensor, response_mask: Tensor, *, clip: float = 0.2
) -> LossTerms:
    """Loss of a value model: 0.5 max((v - R)^2, (clip(v, v_old +- clip) - R)^2), [B, T]. PPO,
    arXiv:1707.06347.
    """
    require("clip", clip, at_least=0)
    require_same_shape(values=values, old_values=old_values, returns=returns, response_mask=response_mask)
    new, old, R, _ = _inputs(values, old_values, returns, response_mask)
    limited = torch.clamp(new.detach(), old - clip, old + clip)
    error, limited_error = (new - R).square(), (limited - R).square()
    clipped = limited_error > error.detach()
    return LossTerms(0.5 * torch.where(clipped, limited_error, error), clipped)


def _inputs(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The arguments of a loss, [B, T] and of one type, 0 outside the bool mask also for NaN and infinity, in value and in
    gradient. Only the first has a gradient."""
    require_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, response_mask=response_mask)
    require_advantages(advantages, response_mask)
    mask = response_mask.bool()
    # Of a token that can't be (-inf) the loss is finite and the gradient 0, as the clamp of the ratio has it.
    new = wide(logprobs).masked_fill(~mask, 0.0).clamp(min=LEAST_LOGPROB)
    old, A = (x.detach().to(new.dtype).masked_fill(~mask, 0.0) for x in (old_logprobs, advantages.expand_as(mask)))
    return new, torch.where(old.isnan(), new.detach(), old.clamp(min=LEAST_LOGPROB)), A, mask


def _log_ratio(new: Tensor, old: Tensor) -> Tensor:
    """log r. Where the clamp is active the gradient is 0."""
    return (new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _by_sign(condition: Tensor, like: Tensor, then: float, otherwise: float) -> Tensor:
    """Two constants chosen per element, in the dtype of `like` (`torch.where` of two floats is float32)."""
    return torch.full_like(like, otherwise).masked_fill(condition, then)


def _clip(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """The pessimistic side of PPO's clip: the bound that applies, and where the ratio is beyond it."""
    require("clip_low", clip_low, at_least=0, at_most=1)
    require("clip_high", clip_high, at_least=0)
    positive = advantages > 0
    bound = _by_sign(positive, advantages, 1 + clip_high, 1 - clip_low)
    return bound, torch.where(positive, ratio > bound, ratio < bound) & (advantages != 0)


def _row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """[B, T] -> [B]: mean over the masked tokens of values that are 0 elsewhere; 0 for an empty row."""
    return values.sum(1) / mask.sum(1).clamp(min=1)


def _sequence_clip(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Clipped loss of each row with the geometric mean of its ratios: loss [B], clipped bool [B]."""
    A = _row_mean(advantages, mask)
    ratio = _row_mean(log_ratio, mask).exp()
    bound, clipped = _clip(ratio, A, clip_low, clip_high)
    return -A * torch.where(clipped, bound, ratio), clipped


def _check_thresholds(threshold_low: float, threshold_high: float) -> None:
    require("threshold_low", threshold_low, at_least=0)
    require("threshold_high", threshold_high, at_least=0)


def _dppo(new: Tensor, old: Tensor, advantages: Tensor, dropped: Tensor, ratio_max: float) -> LossTerms:
    require("ratio_max", ratio_max, at_least=1)
    weight = _log_ratio(new, old).exp().detach().clamp(max=ratio_max)
    dropped = dropped & (advantages != 0)
    return LossTerms((-weight * advantages * new).masked_fill(dropped, 0.0), dropped)
