"""How far the learner's logprobs are from those of the policy that wrote the tokens, as the engine reported them.

Contract. `sums` and `maxima` give quantities per token for a `learner.tally.Tally`; `metrics` divides once, after all
micro-batches and ranks are merged. r = exp(logprob - behaviour logprob), the difference clamped to +-20 before exp. At
staleness 0 the mismatch is numerical difference between engine and learner alone; older tokens add what the policy moved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from learner.losses import MAX_LOG_RATIO
from learner.tally import Tally


def sums(logprobs: Tensor, behaviour_logprobs: Tensor, reported: Tensor) -> dict[str, Tensor]:
    """What `metrics` needs added up: float64 [N] each, of N sampled tokens.

    Where the engine `reported` (bool) no logprob, `behaviour_logprobs` must hold the learner's own: a ratio of 1.
    """
    log_ratio = _log_ratio(logprobs, behaviour_logprobs)
    ratio = log_ratio.exp()
    return {
        "mismatch_tokens": torch.ones_like(log_ratio),
        "mismatch_missing": (~reported).double(),
        "mismatch_k1": -log_ratio,
        "mismatch_k3": log_ratio.expm1() - log_ratio,
        "mismatch_log_ratio_squared": log_ratio.square(),
        "mismatch_ratio": ratio,
        "mismatch_ratio_squared": ratio.square(),
    }


def maxima(logprobs: Tensor, behaviour_logprobs: Tensor) -> dict[str, Tensor]:
    """What `metrics` needs the maximum of: float64 [N] each."""
    log_ratio = _log_ratio(logprobs, behaviour_logprobs)
    return {
        "mismatch_ratio": log_ratio.exp(),
        "mismatch_logprob_gap": log_ratio.abs(),
        "mismatch_probability_gap": (logprobs.double().exp() - behaviour_logprobs.double().exp()).abs(),
    }


def metrics(tally: Tally) -> dict[str, float]:
    """Over all tokens of the tally; empty without any.

    `kl` and `kl_k1` estimate KL(behaviour || learner) from tokens of the behaviour policy, as the means of r - 1 - ln r
    (low noise, never negative) and of -ln r. `m2`, the mean of (ln r)^2, is the second moment that M2PO bounds,
    arXiv:2510.01161. `ess` is the effective sample size of the ratios as a share of the tokens, (sum r)^2 / (n sum r^2).
    `missing_ratio` is the share of tokens without a reported logprob.
    """
    tokens = tally.total("mismatch_tokens")
    if not tokens:
        return {}
    ratio = tally.total("mismatch_ratio")
    return {
        "kl": tally.total("mismatch_k3") / tokens,
        "kl_k1": tally.total("mismatch_k1") / tokens,
        "m2": tally.total("mismatch_log_ratio_squared") / tokens,
        "ess": ratio**2 / (tokens * tally.total("mismatch_ratio_squared")),
        "ratio_mean": ratio / tokens,
        "ratio_max": tally.largest("mismatch_ratio"),
        "logprob_gap_max": tally.largest("mismatch_logprob_gap"),
        "probability_gap_max": tally.largest("mismatch_probability_gap"),
        "missing_ratio": tally.total("mismatch_missing") / tokens,
    }


def _log_ratio(logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    return (logprobs.detach() - behaviour_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).double()
