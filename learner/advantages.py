"""Advantage estimators: from the rewards of a batch to how much better than expected each answer was.

Contract. Every selectable method (`__all__`) is called `method(rewards, groups, **data, **options)`:

- `rewards` [N], one number per answer; NaN marks an unscored answer, which enters no mean and no deviation
  and gets advantage 0 (an infinite one is a ValueError). `groups` int64 [N] is the group number of each row:
  any numbers, any order, groups of any size. Rows are matched by group number, never by position.
- Data that a method needs besides these are keyword arguments without a default; `needs` names them. Options
  are keyword arguments with a default.
- The result is [N] (one advantage per answer) for the methods in `GROUP_RELATIVE`, and [N, T] (one per token,
  0 outside the response mask) for `gae` and `reinforce_pp`.

Statistics are always those of the whole global batch that is given. They are computed in float64, without
gradient, and returned in the dtype of `rewards` (float32 for shorter ones, float64 for integers). A group of
equal rewards has advantages of exactly 0, as has a group with a single scored member; equal are also rewards
that differ by the rounding of their sums, as 0.1 + 0.2 and 0.3 do, in the dtype of the result. `std` is "sample"
(divides by n - 1) or "population" (by n): code bases differ, so it is an option everywhere.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from learner.group_relative import GROUP_RELATIVE as GROUP_RELATIVE
from learner.guards import require, require_same_shape, wide

__all__ = [
    "dr_grpo",
    "gae",
    "gdpo",
    "grpo",
    "lite_ppo",
    "maxrl",
    "opo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "rloo",
]


@functools.cache
def needs(method: Callable[..., Any]) -> frozenset[str]:
    """Names of the data that `method` wants: its keyword-only arguments without a default."""
    return frozenset(
        name
        for name, parameter in inspect.signature(method).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
    )


def _ddof(std: str) -> int:
    """Degrees of freedom taken off the count in a variance."""
    choices = {"sample": 1, "population": 0}
    if std not in choices:
        raise ValueError(f"std is {std!r}, expected 'sample' or 'population'")
    return choices[std]


def _result_dtype(rewards: Tensor) -> torch.dtype:
    if not rewards.is_floating_point():
        return torch.float64
    return torch.promote_types(rewards.dtype, torch.float32)


def _rounding(dtype: torch.dtype) -> float:
    """What rounding may leave of numbers added up in this dtype, as a share of their size."""
    return 8 * torch.finfo(dtype).eps


def _refuse_infinite(rewards: Tensor) -> None:
    if rewards.isinf().any():
        raise ValueError("rewards must be finite, or NaN for an unscored answer, got an infinite one")


def _divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Quotient, 0 where the denominator is not positive."""
    positive = denominator > 0
    return torch.where(positive, numerator / torch.where(positive, denominator, 1.0), 0.0)


class _Batch:
    """Reductions over the scored members of each row's group; every result is float64 [N], one value a
    row.
    """

    def __init__(self, rewards: Tensor, groups: Tensor) -> None:
        if rewards.dim() != 1 or groups.shape != rewards.shape:
            raise ValueError(
                f"rewards and groups must both be [N], got {tuple(rewards.shape)} and {tuple(groups.shape)}"
            )
        rewards = rewards.detach()
        _refuse_infinite(rewards)
        self.dtype = _result_dtype(rewards)
        self.scored = ~rewards.isnan()
        self.rewards = rewards.double().nan_to_num(nan=0.0)
        numbers, self._group = torch.unique(groups, return_inverse=True)
        self._group_count = len(numbers)
        self.size = self.total(torch.ones_like(self.rewards))
        highest, lowest = self._extreme("amax"), self._extreme("amin")
        self.rounding = _rounding(self.dtype)
        self.differ = highest - lowest > self.rounding * torch.maximum(highest.abs(), lowest.abs())

    def total(self, values: Tensor) -> Tensor:
        """Sum of `values` over the scored members of each row's group."""
        sums = torch.zeros(self._group_count, dtype=torch.float64, device=values.device)
        return sums.index_add(0, self._group, torch.where(self.scored, values, 0.0))[self._group]

    def _extreme(self, reduction: str) -> Tensor:
        """Largest ("amax") or smallest ("amin") scored reward of each row's group."""
        outside = -torch.inf if reduction == "amax" else torch.inf
        values = torch.where(self.scored, self.rewards, outside)
        result = torch.full((self._group_count,), outside, dtype=torch.float64, device=values.device)
        return result.scatter_reduce(0, self._group, values, reduction)[self._group]

    def minus(self, baseline: Tensor) -> Tensor:
        """Rewards minus a baseline. Exactly 0 for unscored rows and in groups whose rewards do not differ."""
        return torch.where(self.scored & self.differ, self.rewards - baseline, 0.0)

    def centred(self) -> Tensor:
        """Rewards minus their group's mean."""
        return self.minus(self.total(self.rewards) / self.size.clamp(min=1))

    def group_std(self, centred: Tensor, std: str) -> Tensor:
        """Standard deviation of each row's group, from centred values."""
        return (self.total(centred.square()) / (self.size - _ddof(std)).clamp(min=1)).sqrt()

    def batch_std(self, values: Tensor, std: str) -> Tensor:
        """Standard deviation of `values` over all scored rows of the batch, a scalar; 0 for a single row."""
        scored = values[self.scored]
        if len(scored) <= _ddof(std):
            return values.new_zeros(())
        return scored.var(correction=_ddof(std)).sqrt()

    def result(self, advantages: Tensor) -> Tensor:
        return advantages.to(self.dtype)


def grpo(rewards: Tensor, groups: Tensor, *, std: str = "sample", eps: float = 1e-6) -> Tensor:
    """A = (r - mean) / (std + eps), over the group. [N] -> [N]. GRPO, arXiv:2402.03300."""
    require("eps", eps, at_least=0)
    batch = _Batch(rewards, groups)
    centred = batch.centred()
    return batch.result(_divide(centred, batch.group_std(centred, std) + eps))


def dr_grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """A = r - mean over the group. [N] -> [N]. Dr. GRPO, arXiv:2503.20783 (aggregation: `seq_sum_const`)."""
    batch = _Batch(rewards, groups)
    return batch.result(batch.centred())


def rloo(rewards: Tensor, groups: Tensor, *, normalise: bool = False, std: str = "sample", eps: float = 1e-6) -> Tensor:
    """A = r - mean of the group's other members = n / (n - 1) (r - mean). [N] -> [N]. RLOO, arXiv:2402.14740.

    `normalise` divides by the standard deviation of the others, plus `eps`. Where the others are equal there
    is no scale to divide by: the advantage stays undivided instead of growing to 1 / eps.
    """
    require("eps", eps, at_least=0)
    batch = _Batch(rewards, groups)
    centred = batch.centred()
    others = (batch.size - 1).clamp(min=1)
    advantages = centred * batch.size / others
    if not normalise:
        return batch.result(advantages)
    squares = batch.total(centred.square())
    squares_of_others = (squares - centred.square() * batch.size / others).clamp(min=0)
    degrees = others - _ddof(std)
    # Below 1e-12 of the group's own spread the difference of squares is rounding, not spread.
    spread = (squares_of_others > 1e-12 * squares) & (degrees > 0)
    deviation = (squares_of_others / degrees.clamp(min=1)).sqrt() + eps
    return batch.result(torch.where(spread, advantages / torch.where(spread, deviation, 1.0), advantages))


def lite_ppo(rewards: Tensor, groups: Tensor, *, std: str = "sample", eps: float = 1e-4) -> Tensor:
    """A = (r - group mean) / (std of the batch's raw rewards + eps). [N] -> [N]. Lite PPO,
    arXiv:2508.08221.
    """
    require("eps", eps, at_least=0)
    batch = _Batch(rewards, groups)
    return batch.result(_divide(batch.centred(), batch.batch_std(batch.rewards, std) + eps))


def reinforce_pp_baseline(rewards: Tensor, groups: Tensor, *, std: str = "sample", eps: float = 1e-8) -> Tensor:
    """A = c / (std of c over the batch + eps), c = r - group mean. [N] -> [N]. arXiv:2501.03262.

    Unlike `lite_ppo` the deviation is that of the centred rewards. ScaleRL (arXiv:2510.13786) calls this
    batch-level normalisation.
    """
    require("eps", eps, at_least=0)
    batch = _Batch(rewards, groups)
    centred = batch.centred()
    return batch.result(_divide(centred, batch.batch_std(centred, std) + eps))


def maxrl(rewards: Tensor, groups: Tensor) -> Tensor:
    """A = (r - mean) / mean over the group, 0 where the mean is not positive. [N] -> [N]. arXiv:2602.02710.

    Meant for rewards in {0, 1}: a prompt solved with probability p weighs about 1 / p. Of rewards of both signs
    that add up to 0, the mean is 0 and not what rounding leaves of it.
    """
    batch = _Batch(rewards, groups)
    total = batch.total(batch.rewards)
    total = torch.where(total > batch.rounding * batch.total(batch.rewards.abs()), total, 0.0)
    return batch.result(_divide(batch.centred(), total / batch.size.clamp(min=1)))


def opo(rewards: Tensor, groups: Tensor, *, lengths: Tensor) -> Tensor:
    """A = r - sum(length r) / sum(length), over the group, 0 where nothing was sampled. `lengths` [N] sampled tokens.
    arXiv:2505.23585.
    """
    require_same_shape(rewards=rewards, lengths=lengths)
    batch = _Batch(rewards, groups)
    weight = lengths.detach().double()
    if not (weight >= 0).all():
        raise ValueError(f"lengths must be at least 0, got {weight.min().item():g}")
    total = batch.total(weight)
    baseline = _divide(batch.total(weight * batch.rewards), total)
    return batch.result(torch.where(total > 0, batch.minus(baseline), 0.0))


def gdpo(
    rewards: Tensor,
    groups: Tensor,
    *,
    component_rewards: Tensor,
    component_weights: Tensor,
    std: str = "sample",
    eps: float = 1e-4,
) -> Tensor:
    """Every reward component is normalised in its group, then weighted, added and scaled.
    arXiv:2601.05242.

    `component_rewards` [N, K], NaN where a component was skipped; `component_weights` [K]. `rewards` only
    says which rows are scored. S = sum_k w_k (r_k - mean_k) / (std_k + eps) in the group, A = S / (std(S)
    + eps) over the batch; the mean of S is 0 by construction. [N] -> [N].
    """
    require("eps", eps, at_least=0)
    if component_weights.dim() != 1 or component_rewards.shape != (len(rewards), len(component_weights)):
        raise ValueError(
            f"component_rewards must be [N, K] with N={len(rewards)} and component_weights [K], got "
            f"{list(component_rewards.shape)} and {list(component_weights.shape)}"
        )
    if not component_weights.isfinite().all():
        raise ValueError(f"component_weights must be finite, got {component_weights.tolist()}")
    batch = _Batch(rewards, groups)
    total, size = torch.zeros_like(batch.rewards), torch.zeros_like(batch.rewards)
    for column, weight in zip(component_rewards.unbind(1), component_weights.double(), strict=True):
        component = _Batch(torch.where(batch.scored, column, torch.nan), groups)
        centred = component.centred()
        scaled = weight * _divide(centred, component.group_std(centred, std) + eps)
        total, size = total + scaled, size + scaled.abs()
    # Components that cancel out leave what rounding leaves, and that would be divided by itself.
    total = torch.where(total.abs() > batch.rounding * batch.total(size), total, 0.0)
    return batch.result(_divide(total, batch.batch_std(total, std) + eps))


def reinforce_pp(
    rewards: Tensor,
    groups: Tensor,
    *,
    response_mask: Tensor,
    token_rewards: Tensor | None = None,
    gamma: float = 1.0,
    std: str = "sample",
    eps: float = 1e-8,
) -> Tensor:
    """Discounted returns, whitened over all tokens of the batch. REINFORCE++, arXiv:2501.03262. -> [N, T].

    The answer's reward falls on its last sampled token; `token_rewards` [N, T] are added, usually the KL
    penalty of `learner.kl.reward_penalty`. G_t = r_t + gamma G_{t+1}; A = (G - mean) / sqrt(var + eps).
    `groups` is not used.
    """
    returns = discounted_returns(rewards, response_mask, token_rewards=token_rewards, gamma=gamma)
    mask = response_mask.bool() & ~rewards.isnan()[:, None]
    return whiten(returns, mask, std=std, eps=eps).to(_result_dtype(rewards))


def discounted_returns(
    rewards: Tensor, response_mask: Tensor, *, token_rewards: Tensor | None = None, gamma: float = 1.0
) -> Tensor:
    """G_t = r_t + gamma G_{t+1}, float64 [N, T], 0 outside the mask and in unscored rows; rewards as in `reinforce_pp`."""
    require("gamma", gamma, at_least=0, at_most=1)
    mask, per_token = _token_rewards(rewards, response_mask, token_rewards)
    if gamma == 1.0:  # of long answers the loop below is slow
        return torch.where(mask, per_token.flip(1).cumsum(1).flip(1), 0.0)
    returns, carry = torch.zeros_like(per_token), per_token.new_zeros(len(per_token))
    for t in reversed(range(per_token.shape[1])):
        # A token that was not sampled takes no time: the return passes through it undiscounted.
        carry = torch.where(mask[:, t], per_token[:, t] + gamma * carry, carry)
        returns[:, t] = torch.where(mask[:, t], carry, 0.0)
    return returns


def gae(
    rewards: Tensor,
    groups: Tensor,
    *,
    values: Tensor,
    response_mask: Tensor,
    token_rewards: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 0.95,
    whitened: bool = True,
    std: str = "sample",
) -> Tensor:
    """Generalised advantages of a value model, arXiv:1506.02438, whitened as PPO's are. -> [N, T].

    `values` [N, T] is V before each token. The answer's reward falls on its last sampled token;
    `token_rewards` [N, T] are added. `gae_and_returns` gives the targets of the value model. `groups` is
    not used.
    """
    mask, per_token = _token_rewards(rewards, response_mask, token_rewards)
    advantages, _ = gae_and_returns(per_token, values.double(), mask, gamma=gamma, lam=lam)
    return (whiten(advantages, mask, std=std) if whitened else advantages).to(_result_dtype(rewards))


def gae_and_returns(
    token_rewards: Tensor, values: Tensor, response_mask: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both [N, T] and 0 outside the mask, arXiv:1506.02438.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, return_t = A_t + V_t, with V = 0
    after the last sampled token. Tool, prompt and padding tokens are skipped: value and carry pass through
    them, so the result is that of the sequence with those tokens cut out. Neither carries a gradient: the
    returns are what the value model is to learn.
    """
    require("gamma", gamma, at_least=0, at_most=1)
    require("lam", lam, at_least=0, at_most=1)
    require_same_shape(token_rewards=token_rewards, values=values, response_mask=response_mask)
    mask, token_rewards, values = response_mask.bool(), wide(token_rewards.detach()), wide(values.detach())
    advantages = torch.zeros_like(values)
    next_value, carry = values.new_zeros(len(values)), values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        delta = token_rewards[:, t] + gamma * next_value - values[:, t]
        carry = torch.where(mask[:, t], delta + gamma * lam * carry, carry)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(mask[:, t], carry, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


def whiten(values: Tensor, mask: Tensor, *, std: str = "sample", eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(var + eps) over the masked entries; 0 outside the mask, and everywhere where there are too few
    for a variance or all are equal. Same shape as `values`.
    """
    mask = mask.bool()
    return whiten_by(values, mask, *mean_and_variance([values[mask]], std=std), eps=eps)


def whiten_by(values: Tensor, mask: Tensor, mean: float, variance: float, *, eps: float = 1e-8) -> Tensor:
    """`whiten` by the `mean_and_variance` of a larger batch that `values` are a part of."""
    require("eps", eps, at_least=0)
    whitened = torch.zeros_like(values, dtype=torch.float64)
    if variance > 0:
        whitened = (values.detach().double() - mean) / math.sqrt(variance + eps)
    return torch.where(mask.bool(), whitened, 0.0).to(torch.promote_types(values.dtype, torch.float32))


def mean_and_variance(
    parts: Sequence[Tensor], *, std: str = "sample", total: Callable[[Tensor], Tensor] = lambda of_rank: of_rank
) -> tuple[float, float]:
    """Of all values in all parts, on all ranks over which `total` adds a tensor up. Infinite variance: too few values.

    The mean is known before deviations are squared: of large returns that differ little, sums of squares hold nothing.
    ValueError, on every rank, for values that are not finite: one of them would make every advantage 0.
    """
    ddof = _ddof(std)
    values = torch.cat([part.detach().double().flatten() for part in parts])
    count, added = total(torch.stack([values.new_tensor(float(len(values))), values.sum()])).tolist()
    mean = added / count if count else 0.0
    if not math.isfinite(mean):
        raise ValueError(f"values to be whitened must be finite, their sum is {added}")
    squares = float(total((values - mean).square().sum()))
    rounding = _rounding(torch.float64) * mean
    if squares <= count * rounding * rounding:  # equal values, and what rounding made of their mean
        squares = 0.0
    return mean, squares / (count - ddof) if count > ddof else math.inf


def at_last_token(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """[N], [N, T] -> [N, T]: each reward on its row's last sampled token, 0 elsewhere."""
    mask = response_mask.bool()
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    return torch.where(last, rewards[:, None], 0.0)


def _token_rewards(rewards: Tensor, response_mask: Tensor, token_rewards: Tensor | None) -> tuple[Tensor, Tensor]:
    """The mask without unscored rows, and float64 rewards per token, both [N, T]."""
    if rewards.dim() != 1 or response_mask.dim() != 2 or len(response_mask) != len(rewards):
        raise ValueError(
            f"rewards must be [N] and response_mask [N, T], got {list(rewards.shape)} and {list(response_mask.shape)}"
        )
    _refuse_infinite(rewards)
    mask = response_mask.bool() & ~rewards.isnan()[:, None]
    per_token = at_last_token(rewards.detach().double(), mask)
    if token_rewards is not None:
        require_same_shape(token_rewards=token_rewards, response_mask=response_mask)
        per_token = per_token + torch.where(mask, token_rewards.detach().double(), 0.0)
    return mask, per_token
