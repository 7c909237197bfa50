"""The loss of one micro-batch, composed from the chosen parts, and the counts that its metrics need.

    loss = sum over sampled tokens of  token_weight * (policy loss * correction + kl_coefficient * KL - entropy_coefficient * H)

`token_weight` holds every normaliser and was computed for the whole optimizer update, so losses of micro-batches and
ranks simply add up. Three policies are told apart: behaviour wrote the tokens (the engine's logprobs), current is being
optimised, and proximal is the denominator of the policy ratio:

- `behaviour`: the behaviour policy itself. The ratio then holds the whole off-policy correction, so no importance weight
  may multiply in; a correction that only drops tokens (`learner.corrections.MASKS`) may, and compares current and behaviour.
- `recompute`: the learner's policy before the batch's first update.
- `interpolate`: between behaviour and current by version numbers, without a forward pass; see
  `learner.corrections.proximal_share`.

With the last two the correction is the importance weight of proximal over behaviour.

A selection (`learner.selection`) treats some tokens apart: their policy loss is dropped, or a penalty is added to it.

What stands outside the response mask is never read, be it NaN, and gets no gradient; nor do other policies than the current.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from learner import mismatch
from learner.advantages import needs
from learner.batch import Coefficients
from learner.corrections import interpolate_loglinear, proximal_share
from learner.guards import LEAST_LOGPROB
from learner.selection import Marked
from learner.tally import Tally
from learner.tensors import MicroBatchTensors

PROXIMAL = ("behaviour", "recompute", "interpolate")
# What corrections and KL estimators can ask for by the name of a keyword-only argument.
CORRECTION_DATA = frozenset({"advantages"})  # float32 [R, L]
KL_DATA = frozenset({"old_logprobs"})  # float32 [R, L], of the policy that wrote the tokens


@dataclass(frozen=True)
class TokenReturns:
    """Advantages per token, from the answers' rewards: `learner.advantages.reinforce_pp` over the whole batch.

    With a `kl_coefficient` every token is charged for what it moved away from the reference (`learner.kl.reward_penalty`).
    """

    gamma: float = 1.0
    std: str = "sample"
    eps: float = 1e-8
    kl_coefficient: float = 0.0


@dataclass(frozen=True)
class Objective:
    """`loss`, `correction` and `kl` are functions of learner.losses, learner.corrections and learner.kl (or a user's).

    Which of them go together is for the caller to see to, by `learner.losses.FIXED_PROXIMAL` and `learner.corrections.MASKS`.
    """

    loss: Callable[..., Any]
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    proximal: str = "behaviour"
    correction: Callable[..., torch.Tensor] | None = None
    correction_options: Mapping[str, Any] = field(default_factory=dict)
    kl: Callable[..., torch.Tensor] | None = None
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0
    selection: Callable[..., Marked] | None = None
    selection_options: Mapping[str, Any] = field(default_factory=dict)
    returns: TokenReturns | None = None  # then a row's `advantage` is its answer's reward

    @property
    def needs_reference(self) -> bool:
        """Whether logprobs of the frozen initial policy enter it."""
        return self.kl is not None or (self.returns is not None and self.returns.kl_coefficient != 0)

    def with_coefficients(self, coefficients: Coefficients) -> Objective:
        """The same with the coefficients of one batch. A KL coefficient is that of the term there is, in loss or reward."""
        changes: dict[str, Any] = {}
        if coefficients.entropy is not None:
            changes["entropy_coefficient"] = coefficients.entropy
        if coefficients.kl is not None and self.kl is not None:
            changes["kl_coefficient"] = coefficients.kl
        elif coefficients.kl is not None and self.returns is not None:
            changes["returns"] = dataclasses.replace(self.returns, kl_coefficient=coefficients.kl)
        return dataclasses.replace(self, **changes)


def micro_batch_loss(
    objective: Objective,
    batch: MicroBatchTensors,
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    *,
    version: int,
    max_staleness: int,
    first_pass: bool = True,
    proximal_logprobs: torch.Tensor | None = None,
    ref_logprobs: torch.Tensor | None = None,
    selected: Marked | None = None,
) -> tuple[torch.Tensor, Tally]:
    """Loss (scalar, its gradient is this micro-batch's share) and tally; tensors are float32 [R, L].

    `version` is the one that the batch improves, `max_staleness` the last staleness that the tally tells apart.
    `first_pass` says that no earlier forward pass of the batch saw these tokens: only then is the mismatch counted.
    `proximal_logprobs`, only with proximal `recompute`, are of before the first update; None: nothing was updated yet, so
    they are those of this pass. `selected` are the tokens [R, L] that the selection marks. A behaviour logprob that the engine
    could not give (NaN) counts as the learner's own.

    Raises ValueError, naming the function, where a user's returns anything else than one number a token.
    """
    mask = batch.response_mask
    logprobs = logprobs.masked_fill(~mask, 0.0).clamp(min=LEAST_LOGPROB)
    current = logprobs.detach()
    own = current if proximal_logprobs is None else proximal_logprobs.clamp(min=LEAST_LOGPROB)
    reported = batch.behaviour_logprobs.isfinite()
    behaviour = torch.where(reported, batch.behaviour_logprobs, own)
    if objective.proximal == "interpolate":
        share = proximal_share(batch.versions, version, version + 1)
        old = interpolate_loglinear(current, behaviour, share)
    else:
        old = own if objective.proximal == "recompute" else behaviour
    advantages = batch.advantages.expand_as(logprobs)
    terms = objective.loss(logprobs, old, advantages, mask, **objective.loss_options)
    token_loss = _per_token(objective.loss, terms.token_loss, mask)
    counted = {"tokens": mask, "entropy": entropy, "ppo_kl": old - current, "clipped": terms.clipped}
    if selected is not None:
        token_loss = _treated_apart(selected, token_loss, logprobs - old)
        counted["selected"] = selected.tokens
    if objective.correction is not None:
        compared = current if objective.proximal == "behaviour" else old
        data = _wanted(objective.correction, {"advantages": advantages}, objective.correction_options)
        weights = _per_token(
            objective.correction, objective.correction(compared, behaviour, mask, **data), mask
        ).detach()
        token_loss = token_loss * weights
        counted |= {"correction": weights, "masked": weights == 0}
    if objective.kl is not None and ref_logprobs is not None:
        data = _wanted(objective.kl, {"old_logprobs": behaviour.masked_fill(~mask, 0.0)}, {})
        kl = objective.kl(logprobs, ref_logprobs.masked_fill(~mask, 0.0).clamp(min=LEAST_LOGPROB), **data)
        kl = torch.where(mask, _per_token(objective.kl, kl, mask), 0.0)
        token_loss = token_loss + objective.kl_coefficient * kl
        counted["kl_ref"] = kl.detach()
    elif ref_logprobs is not None:  # its pull is in the advantages
        counted["kl_ref"] = current - ref_logprobs
    if objective.entropy_coefficient:
        token_loss = token_loss - objective.entropy_coefficient * torch.where(mask, entropy, 0.0)
    token_loss = batch.token_weights * torch.where(mask, token_loss, 0.0)
    counted["loss"] = token_loss
    sampled = (batch.answer, batch.offset)
    with torch.no_grad():
        sums, maxima = {name: values.detach()[sampled] for name, values in counted.items()}, {}
        if first_pass:
            sums |= mismatch.sums(own[sampled], behaviour[sampled], reported[sampled])
            maxima = mismatch.maxima(own[sampled], behaviour[sampled])
        staleness = (version - batch.versions[sampled]).clamp(max=max_staleness)
        tally = Tally.of(staleness, stalenesses=max_staleness + 1, sums=sums, maxima=maxima)
    return token_loss.sum(), tally


def _treated_apart(selected: Marked, token_loss: torch.Tensor, log_ratio: torch.Tensor) -> torch.Tensor:
    """The policy loss [R, L] with what becomes of the selected tokens."""
    if selected.penalty is None:
        return token_loss.masked_fill(selected.tokens, 0.0)
    return token_loss + torch.where(selected.tokens, selected.penalty * log_ratio.abs(), 0.0)


def _per_token(function: Callable[..., Any], values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What a function of the objective returned; broadcasting another shape would be a wrong loss without an error."""
    if values.shape != mask.shape:
        name = getattr(function, "__qualname__", repr(function))
        raise ValueError(f"{name} returned {list(values.shape)}, expected one number a token, {list(mask.shape)}")
    return values


def _wanted(
    method: Callable[..., Any], supplied: Mapping[str, torch.Tensor], options: Mapping[str, Any]
) -> dict[str, Any]:
    """The keyword arguments of a call: options, and the supplied data that the method asks for."""
    return {name: supplied[name] for name in needs(method) & supplied.keys()} | dict(options)
