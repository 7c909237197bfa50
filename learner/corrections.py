"""Off-policy corrections: weights for tokens that another policy wrote than the one the ratio is taken
against.

Contract. Every selectable method (`__all__`) is called `method(old_logprobs, behaviour_logprobs,
response_mask, **data, **options) -> weights`; all tensors are [B, T], one whole row an answer.
`behaviour_logprobs` are the engine's, NaN where it gave none, `old_logprobs` those of the proximal policy,
which the loss takes its ratio against; rho = exp(old - behaviour), the difference (and its sum over a row)
clamped to +-20 before exp, and 1 where behaviour is NaN: what is not known is not corrected. The weights carry
no gradient, are 0 outside the mask, and multiply the token losses; a weight of 0 takes a token out of the
numerator only, so the aggregation's weights stay those of the whole batch. A cap or band must hold the ratio 1.
Shorter numbers than float32 are computed and returned as float32.

They belong to a loss whose ratio is current over old. A loss whose ratio is current over behaviour already
has the correction in it: weighting it again would count the mismatch twice. Those in `MASKS` only drop
tokens, so they may go with such a loss too; `old_logprobs` are then the current policy's.

Below the selectable methods: statistics of rows, and approximations of the proximal policy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from learner.guards import LEAST_LOGPROB, require, require_advantages, require_band, require_same_shape, wide
from learner.losses import MAX_LOG_RATIO

__all__ = [
    "geometric_mask",
    "icepop",
    "negative_sequence_mask",
    "probability_gap_mask",
    "sequence_k3_mask",
    "sequence_mask",
    "sequence_mis",
    "sequence_tis",
    "token_mask",
    "token_tis",
    "untruncated",
]

# Those whose weights are 0 and 1: they choose tokens and correct no distribution.
MASKS = frozenset({"geometric_mask", "negative_sequence_mask", "probability_gap_mask", "sequence_k3_mask"})

# Those that drop single tokens; of `learner.losses.WHOLE_ROWS` none can be left out.
DROP_TOKENS = frozenset({"icepop", "probability_gap_mask", "token_mask"})


def untruncated(old_logprobs: Tensor, behaviour_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """w_t = rho_t. Decoupled PPO, arXiv:2110.00641 and AReaL, arXiv:2505.24298."""
    return _token_ratio(old_logprobs, behaviour_logprobs, response_mask)


def token_tis(old_logprobs: Tensor, behaviour_logprobs: Tensor, response_mask: Tensor, *, cap: float = 2.0) -> Tensor:
    """w_t = min(rho_t, cap). Truncated importance sampling, Yao et al. 2025."""
    require("cap", cap, at_least=1)
    return _token_ratio(old_logprobs, behaviour_logprobs, response_mask).clamp(max=cap)


def icepop(
    old_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    response_mask: Tensor,
    *,
    low: float = 0.5,
    high: float = 5.0,
) -> Tensor:
    """w_t = rho_t if low <= rho_t <= high, else 0. IcePop, arXiv:2510.18855."""
    require_band("low", low, "high", high)
    return _inside(_token_ratio(old_logprobs, behaviour_logprobs, response_mask), low, high)


def token_mask(
    old_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    response_mask: Tensor,
    *,
    low: float = 0.5,
    high: float = 2.0,
) -> Tensor:
    """`icepop` with a narrower band, as masked importance sampling of tokens is usually run."""
    return icepop(old_logprobs, behaviour_logprobs, response_mask, low=low, high=high)


def sequence_tis(
    old_logprobs: Tensor, behaviour_logprobs: Tensor, response_mask: Tensor, *, cap: float = 2.0
) -> Tensor:
    """w = min(product of the row's rho, cap), on every token of the row. Seq-TIS, Liu et al. 2025.

    The product drifts to 0 or to the cap as answers grow: see `geometric_mask` for long ones.
    """
    require("cap", cap, at_least=1)
    return _on_tokens(sequence_ratio(old_logprobs, behaviour_logprobs, response_mask).clamp(max=cap), response_mask)


def sequence_mis(
    old_logprobs: Tensor, behaviour_logprobs: Tensor, response_mask: Tensor, *, cap: float = 2.0
) -> Tensor:
    """w = product of the row's rho if at most cap, else 0. Seq-MIS, Liu et al. 2025."""
    require("cap", cap, at_least=1)
    ratio = sequence_ratio(old_logprobs, behaviour_logprobs, response_mask)
    return _on_tokens(_inside(ratio, 0.0, cap), response_mask)


def sequence_mask(
    old_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    response_mask: Tensor,
    *,
    low: float = 0.5,
    high: float = 2.0,
) -> Tensor:
    """w = product of the row's rho if low <= it <= high, else 0: `sequence_mis` bounded on both sides."""
    require_band("low", low, "high", high)
    ratio = sequence_ratio(old_logprobs, behaviour_logprobs, response_mask)
    return _on_tokens(_inside(ratio, low, high), response_mask)


def geometric_mask(
    old_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    response_mask: Tensor,
    *,
    low: float = 0.999,
    high: float = 1.001,
) -> Tensor:
    """w = 1 if low <= geometric mean of the row's rho <= high, else 0: a rejection that does not depend on
    length (1.1 a token is 2.6 after 10 tokens and 13780 after 100). Geo-RS, Liu et al. 2025.
    """
    require_band("low", low, "high", high)
    ratio = geometric_ratio(old_logprobs, behaviour_logprobs, response_mask)
    return _on_tokens(((ratio >= low) & (ratio <= high)).to(ratio.dtype), response_mask)


def sequence_k3_mask(
    old_logprobs: Tensor, behaviour_logprobs: Tensor, response_mask: Tensor, *, max_k3: float = 0.01
) -> Tensor:
    """w = 1 if the row's mean of rho - 1 - log rho is at most max_k3, else 0. arXiv:2512.23075."""
    require("max_k3", max_k3, at_least=0)
    k3 = sequence_k3(old_logprobs, behaviour_logprobs, response_mask)
    return _on_tokens((k3 <= max_k3).to(k3.dtype), response_mask)


def probability_gap_mask(
    old_logprobs: Tensor, behaviour_logprobs: Tensor, response_mask: Tensor, *, max_gap: float = 0.3
) -> Tensor:
    """w_t = 1 if |exp(old) - exp(behaviour)| <= max_gap, else 0, whatever the sign of the advantage.

    The mask of prime-rl's IPO loss, which uses the current policy for `old_logprobs`.
    """
    require("max_gap", max_gap, at_least=0)
    old, behaviour, mask = _inputs(old_logprobs, behaviour_logprobs, response_mask)
    return (((old.exp() - behaviour.exp()).abs() <= max_gap) & mask).to(old.dtype)


def negative_sequence_mask(
    old_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    response_mask: Tensor,
    *,
    advantages: Tensor,
    max_kl: float = 0.5,
) -> Tensor:
    """w = 0 on rows with A < 0 and mean of behaviour - old above max_kl, else 1. DeepSeek-V3.2,
    arXiv:2512.02556.

    `advantages` [B, T], one value per row (the mean of its tokens' is used). The paper gives no max_kl.
    """
    require("max_kl", max_kl, at_least=0)
    require_advantages(advantages, response_mask)
    log_ratio, mask = _log_ratio(old_logprobs, behaviour_logprobs, response_mask)
    kl = _row_mean(-log_ratio, mask)
    negative = _row_mean(wide(advantages).detach().expand_as(mask).masked_fill(~mask, 0.0), mask) < 0
    return _on_tokens((~(negative & (kl > max_kl))).to(kl.dtype), response_mask)


# Row statistics, [B]


def sequence_ratio(old_logprobs: Tensor, behaviour_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Product of each row's rho, [B], within exp(+-20)."""
    log_ratio, _ = _log_ratio(old_logprobs, behaviour_logprobs, response_mask)
    return log_ratio.sum(1).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def geometric_ratio(old_logprobs: Tensor, behaviour_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Geometric mean of each row's rho, [B]; 1 for an empty row."""
    return _row_mean(*_log_ratio(old_logprobs, behaviour_logprobs, response_mask)).exp()


def sequence_k2(old_logprobs: Tensor, behaviour_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Each row's mean of (log rho)^2 / 2, [B]."""
    log_ratio, mask = _log_ratio(old_logprobs, behaviour_logprobs, response_mask)
    return _row_mean(0.5 * log_ratio.square(), mask)


def sequence_k3(old_logprobs: Tensor, behaviour_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Each row's mean of rho - 1 - log rho, [B]: an estimate of KL(behaviour || old)."""
    log_ratio, mask = _log_ratio(old_logprobs, behaviour_logprobs, response_mask)
    return _row_mean(log_ratio.expm1() - log_ratio, mask)


# Weights as a whole


def batch_normalised(weights: Tensor, response_mask: Tensor) -> Tensor:
    """Weights divided by their mean over the masked tokens; 0 where all of them are. [B, T] must be the whole global
    batch: the mean of a micro-batch would make the gradient depend on the split.
    """
    require_same_shape(weights=weights, response_mask=response_mask)
    mask = response_mask.bool()
    kept = wide(weights).detach().masked_fill(~mask, 0.0)
    total = kept.sum()
    return kept * (mask.sum() / torch.where(total == 0, 1.0, total))


def effective_sample_size(weights: Tensor, response_mask: Tensor) -> Tensor:
    """(sum w)^2 / sum w^2 over the masked tokens, between 1 and their number; 0 where all weights are 0, NaN where one is.

    A scalar.
    """
    require_same_shape(weights=weights, response_mask=response_mask)
    kept = wide(weights).detach()[response_mask.bool()]
    shares = kept / torch.where(kept.sum() == 0, 1.0, kept.sum())  # no square of them overflows
    squares = shares.square().sum()
    return torch.where(squares == 0, 0.0, 1 / torch.where(squares == 0, 1.0, squares))


# The proximal policy


def proximal_share(behaviour_version: Tensor, proximal_version: Tensor | int, current_version: Tensor | int) -> Tensor:
    """How far the proximal policy lies from behaviour (0) to current (1), by version numbers: (proximal -
    behaviour) / (current - behaviour); 0 for a token the current version wrote. Any shapes that broadcast.
    A-3PO, arXiv:2512.06547: the proximal policy is one version behind the current one.

    For a batch that improves version n, n is the proximal and n + 1, the one being made, the current version.
    A token of staleness s has share s / (s + 1): 0 where version n itself wrote it, and 1/2 one version later.
    """
    behind = current_version - behaviour_version
    share = (proximal_version - behaviour_version) / behind.clamp(min=1)
    return torch.where(behind > 0, share.clamp(0, 1), torch.zeros_like(share))


def interpolate_loglinear(logprobs: Tensor, behaviour_logprobs: Tensor, share: Tensor | float) -> Tensor:
    """Proximal logprobs without a forward pass: behaviour + share (current - behaviour). No gradient.
    A-3PO.
    """
    own, other = (wide(x).detach().clamp(min=LEAST_LOGPROB) for x in (logprobs, behaviour_logprobs))
    return other.lerp(own, torch.as_tensor(share, dtype=own.dtype, device=own.device))


def interpolate_linear(logprobs: Tensor, behaviour_logprobs: Tensor, share: Tensor | float) -> Tensor:
    """As `interpolate_loglinear`, between probabilities: log((1 - share) e^behaviour + share e^current).

    Finite also where both probabilities are too small to be written down.
    """
    own, other = wide(logprobs).detach(), wide(behaviour_logprobs).detach()
    share = torch.as_tensor(share, dtype=own.dtype, device=own.device)
    return torch.logaddexp((1 - share).log() + other, share.log() + own)


def _inputs(old_logprobs: Tensor, behaviour_logprobs: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The policies' logprobs, without gradient and 0 outside the bool mask, which comes third."""
    require_same_shape(old_logprobs=old_logprobs, behaviour_logprobs=behaviour_logprobs, response_mask=response_mask)
    mask = response_mask.bool()
    old, behaviour = (
        wide(x).detach().masked_fill(~mask, 0.0).clamp(min=LEAST_LOGPROB) for x in (old_logprobs, behaviour_logprobs)
    )
    return old, torch.where(behaviour.isnan(), old, behaviour), mask


def _log_ratio(old_logprobs: Tensor, behaviour_logprobs: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """log rho, 0 outside the mask, and the bool mask."""
    old, behaviour, mask = _inputs(old_logprobs, behaviour_logprobs, response_mask)
    return (old - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), mask


def _token_ratio(old_logprobs: Tensor, behaviour_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    log_ratio, mask = _log_ratio(old_logprobs, behaviour_logprobs, response_mask)
    return log_ratio.exp() * mask


def _inside(ratio: Tensor, low: float, high: float) -> Tensor:
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def _row_mean(values: Tensor, mask: Tensor) -> Tensor:
    return values.sum(1) / mask.sum(1).clamp(min=1)


def _on_tokens(row_values: Tensor, response_mask: Tensor) -> Tensor:
    return row_values[:, None] * response_mask.bool()
