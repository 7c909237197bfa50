"""Losses on preference pairs: reward models (Bradley-Terry) and direct preference optimisation.

Contract. Pure functions, one loss per pair [B], to be averaged by the caller. Reward-model losses take
scores [B]; the others take sums of logprobs over each answer's tokens, [B], of the trained policy and of
the reference, which gets no gradient. h = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected).
Shorter numbers than float32 are computed and returned as float32: a sum of logprobs needs its digits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from learner.guards import require, require_same_shape, wide


def bradley_terry(chosen: Tensor, rejected: Tensor, *, margin: Tensor | float = 0.0, centring: float = 0.0) -> Tensor:
    """-log sigmoid(chosen - rejected - margin) + centring (chosen + rejected)^2. [B] -> [B].

    `margin` by how clear the preference was (Llama 2, arXiv:2307.09288); `centring`, e.g. 0.01, keeps scores
    near 0 (arXiv:2312.09244).
    """
    require("centring", centring, at_least=0)
    if not isinstance(margin, Tensor):
        require("margin", margin)
    require_same_shape(chosen=chosen, rejected=rejected, margin=torch.as_tensor(margin))
    chosen, rejected = wide(chosen), wide(rejected)
    return -logsigmoid(chosen - rejected - margin) + centring * (chosen + rejected).square()


def ranked_bradley_terry(best_first: Tensor) -> Tensor:
    """Mean over all K(K-1)/2 pairs of answers ranked best first. [..., K] -> [...]. InstructGPT,
    arXiv:2203.02155. ValueError unless K > 1.
    """
    count = best_first.shape[-1]
    require("K", count, at_least=2)
    better, worse = torch.triu_indices(count, count, offset=1, device=best_first.device)
    return bradley_terry(best_first[..., better], best_first[..., worse]).mean(-1)


def preference_margin(
    policy_chosen: Tensor, policy_rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor
) -> Tensor:
    """h, [B]; beta h is the difference of the implicit rewards beta (policy - reference)."""
    chosen, rejected = _gain(policy_chosen, ref_chosen), _gain(policy_rejected, ref_rejected)
    require_same_shape(policy_chosen=chosen, policy_rejected=rejected)
    return chosen - rejected


def dpo(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """-log sigmoid(beta h). DPO, arXiv:2305.18290.

    `label_smoothing` e, the share of pairs that may be the wrong way round, gives conservative DPO:
    -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h).
    """
    require("beta", beta, above=0)
    require("label_smoothing", label_smoothing, at_least=0, at_most=0.5)
    z = beta * preference_margin(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    return -(1 - label_smoothing) * logsigmoid(z) - label_smoothing * logsigmoid(-z)


def robust_dpo(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.1,
) -> Tensor:
    """DPO made unbiased under a share e < 0.5 of swapped labels. arXiv:2403.00409.

    (-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2 e).
    """
    require("beta", beta, above=0)
    require("label_smoothing", label_smoothing, at_least=0, below=0.5)
    z = beta * preference_margin(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    return (label_smoothing * logsigmoid(-z) - (1 - label_smoothing) * logsigmoid(z)) / (1 - 2 * label_smoothing)


def ipo(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
) -> Tensor:
    """(h - 1 / (2 beta))^2. IPO, arXiv:2310.12036, on summed logprobs as in the paper."""
    require("beta", beta, above=0)
    h = preference_margin(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    return (h - 1 / (2 * beta)).square()


def slic_hinge(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
) -> Tensor:
    """max(0, 1 - beta h). SLiC-HF, arXiv:2305.10425."""
    require("beta", beta, above=0)
    return (1 - beta * preference_margin(policy_chosen, policy_rejected, ref_chosen, ref_rejected)).relu()


def length_normalised_dpo(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    beta: float = 0.1,
) -> Tensor:
    """-log sigmoid(beta ((pc - rc) / |c| - (pr - rr) / |r|)), lengths in tokens [B]. Tulu 3,
    arXiv:2411.15124.
    """
    require("beta", beta, above=0)
    chosen = _per_token(_gain(policy_chosen, ref_chosen), chosen_lengths)
    rejected = _per_token(_gain(policy_rejected, ref_rejected), rejected_lengths)
    require_same_shape(policy_chosen=chosen, policy_rejected=rejected)
    return -logsigmoid(beta * (chosen - rejected))


def simpo(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    *,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    beta: float = 2.5,
    gamma: float = 1.375,
) -> Tensor:
    """-log sigmoid(beta (pc / |c| - pr / |r|) - gamma): no reference policy. SimPO, arXiv:2405.14734."""
    require("beta", beta, above=0)
    require("gamma", gamma)
    chosen, rejected = _per_token(policy_chosen, chosen_lengths), _per_token(policy_rejected, rejected_lengths)
    require_same_shape(policy_chosen=chosen, policy_rejected=rejected)
    return -logsigmoid(beta * (chosen - rejected) - gamma)


def _gain(policy: Tensor, ref: Tensor) -> Tensor:
    """How much more likely an answer is than under the reference, which gets no gradient."""
    require_same_shape(policy=policy, ref=ref)
    return wide(policy) - wide(ref).detach()


def _per_token(values: Tensor, lengths: Tensor) -> Tensor:
    """Of an answer without tokens the sum is 0, and so is the mean."""
    require_same_shape(logprobs=values, lengths=lengths)
    return wide(values) / lengths.clamp(min=1)
