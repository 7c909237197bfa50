"""Losses on preference pairs: reward models (Bradley-Terry) and direct preference optimisation.

Contract. Pure functions, one loss per pair [B], to be averaged by the caller. Reward-model losses take
scores [B]; the others take sums of logprobs over each answer's tokens, [B], of the trained policy and of
the reference. h = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus


def bradley_terry(chosen: Tensor, rejected: Tensor, *, margin: Tensor | float = 0.0, centring: float = 0.0) -> Tensor:
    """-log sigmoid(chosen - rejected - margin) + centring (chosen + rejected)^2. [B] -> [B].

    `margin` by how clear the preference was (Llama 2, arXiv:2307.09288); `centring`, e.g. 0.01, keeps scores
    near 0 (arXiv:2312.09244).
    """
    return softplus(-(chosen - rejected - margin)) + centring * (chosen + rejected).square()


def ranked_bradley_terry(best_first: Tensor) -> Tensor:
    """Mean over all K(K-1)/2 pairs of answers ranked best first. [..., K] -> [...]. InstructGPT,
    arXiv:2203.02155.
    """
    count = best_first.shape[-1]
    better, worse = torch.triu_indices(count, count, offset=1, device=best_first.device)
    return bradley_terry(best_first[..., better], best_first[..., worse]).mean(-1)


def preference_margin(
    policy_chosen: Tensor, policy_rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor
) -> Tensor:
    """h, [B]; beta h is the difference of the implicit rewards beta (policy - reference)."""
    return (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)


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
    z = beta * preference_margin(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    return (1 - label_smoothing) * softplus(-z) + label_smoothing * softplus(z)


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
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be at least 0 and below 0.5, got {label_smoothing}")
    z = beta * preference_margin(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    return ((1 - label_smoothing) * softplus(-z) - label_smoothing * softplus(z)) / (1 - 2 * label_smoothing)


def ipo(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
) -> Tensor:
    """(h - 1 / (2 beta))^2. IPO, arXiv:2310.12036, on summed logprobs as in the paper."""
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
    chosen = (policy_chosen - ref_chosen) / chosen_lengths
    rejected = (policy_rejected - ref_rejected) / rejected_lengths
    return softplus(-beta * (chosen - rejected))


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
    return softplus(gamma - beta * (policy_chosen / chosen_lengths - policy_rejected / rejected_lengths))
