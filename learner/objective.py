"""The loss of one micro-batch, composed from the chosen parts, and the sums that its metrics need.

    loss = sum over sampled tokens of  token_weight * (policy loss * correction + kl_coefficient * KL - entropy_coefficient * H)

`token_weight` holds every normaliser and was computed for the whole optimizer update, so losses of micro-batches and
ranks simply add up. The denominator of the policy ratio is either the behaviour policy (the engine's logprobs) or a
proximal policy recomputed by the learner; only in the latter case an off-policy correction multiplies in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from learner.batch import MicroBatchTensors
from learner.losses import MAX_LOG_RATIO


@dataclass(frozen=True)
class Objective:
    """`loss`, `correction` and `kl` are functions of learner.losses, learner.corrections and learner.kl (or a user's)."""

    loss: Callable[..., Any]
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    correction: Callable[..., torch.Tensor] | None = None
    correction_options: Mapping[str, Any] = field(default_factory=dict)
    kl: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0


@dataclass
class Tally:
    """Sums and maxima over sampled tokens, to be added up over micro-batches and ranks before any division."""

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, **values: torch.Tensor | float) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)

    def raise_to(self, **values: torch.Tensor | float) -> None:
        for name, value in values.items():
            self.maxima[name] = max(self.maxima.get(name, float("-inf")), float(value))

    def merge(self, other: Tally) -> None:
        self.add(**other.sums)
        self.raise_to(**other.maxima)


def micro_batch_loss(
    objective: Objective,
    batch: MicroBatchTensors,
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    *,
    proximal_logprobs: torch.Tensor | None = None,
    ref_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Tally]:
    """Loss (scalar, its gradient is this micro-batch's share) and tally; tensors are float32 [R, L].

    `proximal_logprobs` None means the behaviour policy is the denominator. A behaviour logprob that the engine
    could not give (NaN) counts as the learner's own: a ratio of 1, with the gradient of the loss kept.
    """
    mask = batch.response_mask
    current = logprobs.detach()
    behaviour = torch.where(torch.isfinite(batch.behaviour_logprobs), batch.behaviour_logprobs, current)
    old = behaviour if proximal_logprobs is None else proximal_logprobs
    terms = objective.loss(logprobs, old, batch.advantages.expand_as(logprobs), mask, **objective.loss_options)
    token_loss = terms.token_loss
    if objective.correction is not None:
        token_loss = token_loss * objective.correction(old, behaviour, mask, **objective.correction_options)
    tally = Tally()
    if objective.kl is not None and ref_logprobs is not None:
        kl = torch.where(mask, objective.kl(logprobs, ref_logprobs), 0.0)
        token_loss = token_loss + objective.kl_coefficient * kl
        tally.add(kl_ref=kl.detach().sum())
    if objective.entropy_coefficient:
        token_loss = token_loss - objective.entropy_coefficient * torch.where(mask, entropy, 0.0)
    loss = (batch.token_weights * torch.where(mask, token_loss, 0.0)).sum()
    with torch.no_grad():
        _observe(tally, batch, current, entropy, behaviour, old, terms.clipped)
        tally.add(loss=loss)
    return loss, tally


def _observe(
    tally: Tally,
    batch: MicroBatchTensors,
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    behaviour: torch.Tensor,
    old: torch.Tensor,
    clipped: torch.Tensor,
) -> None:
    mask = batch.response_mask
    if not mask.any():
        return
    log_ratio = (logprobs - behaviour)[mask].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    tally.add(
        tokens=mask.sum(),
        entropy=entropy[mask].sum(),
        ppo_kl=(old - logprobs)[mask].sum(),
        clipped=(clipped & mask).sum(),
        # KL(behaviour || learner) per token by the k3 estimator: samples come from the behaviour policy.
        mismatch_kl=(ratio - 1 - log_ratio).sum(),
        ratio=ratio.sum(),
        ratio_squared=(ratio**2).sum(),
        missing_logprobs=(~torch.isfinite(batch.behaviour_logprobs[mask])).sum(),
    )
    tally.raise_to(ratio_max=ratio.max())
