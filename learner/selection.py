"""Tokens that are treated apart in an update because of how they stand among all of its tokens.

Contract. Every selectable method (`__all__`) is called `method(tokens, total, **options) -> Marked`: some of the tokens of
this rank, and what becomes of them. Where a token stands is decided over the whole update,
on all micro-batches and ranks: `total` adds a tensor up over the ranks, so no cut of the batch changes what is marked. A
token whose values are not finite is never marked.

The values are the policy's at the start of the update, which costs a forward pass without gradient.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from learner.entropy import FUZZ, covariance
from learner.guards import require

__all__ = ["clip_cov", "kl_cov", "top_entropy"]

Total = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Marked:
    """Tokens and what becomes of their policy loss: it is 0 where `penalty` is None (the normalisers stay), else `penalty`
    |log ratio| is added to it."""

    tokens: Tensor  # bool: [N] of one rank, or [R, L] of a micro-batch
    penalty: float | None = None


@dataclass(frozen=True)
class Tokens:
    """Of the N sampled tokens of one rank. `draws` are uniform in [0, 1) and belong to the token, wherever it lies."""

    entropy: Tensor  # float32 [N], nats
    logprobs: Tensor  # float32 [N]
    advantages: Tensor  # float32 [N]
    draws: Tensor  # float32 [N]

    def __len__(self) -> int:
        return len(self.entropy)


def top_entropy(tokens: Tokens, total: Total, *, fraction: float = 0.2) -> Marked:
    """Marks all but the `fraction` of tokens with the highest entropy: only forks in the text are learned from. 80/20,
    arXiv:2506.01939. ValueError unless 0 < fraction <= 1.
    """
    require("fraction", fraction, above=0, at_most=1)
    count = int(total(tokens.entropy.isfinite().sum()))
    # As `learner.entropy.top_fraction_mask`: at or above the interpolated quantile.
    keep = count - math.ceil((1 - fraction) * (count - 1) - FUZZ)
    return Marked((tokens.entropy < largest(tokens.entropy, keep, total)) & tokens.entropy.isfinite())


def clip_cov(tokens: Tokens, total: Total, *, share: float = 2e-4, low: float = 1.0, high: float = 5.0) -> Marked:
    """Marks a random `share` of all tokens, among those whose covariance lies between `low` and `high`. arXiv:2505.22617.

    ValueError unless 0 < share <= 1 and low < high.
    """
    require("share", share, above=0, at_most=1)
    require("low", low)
    require("high", high)
    if not low < high:
        raise ValueError(f"low must be below high, got {low} and {high}")
    found = _covariance(tokens, total)
    candidates = (found > low) & (found < high)
    lowest_first = torch.where(candidates, -tokens.draws, -torch.inf)
    wanted = min(int(total(candidates.sum())), max(1, round(share * _count(tokens, total))))
    if wanted == 0:
        return Marked(candidates)
    return Marked(candidates & (lowest_first >= largest(lowest_first, wanted, total)))


def kl_cov(tokens: Tokens, total: Total, *, share: float = 2e-4, coefficient: float = 1.0) -> Marked:
    """Marks the `share` of tokens with the highest covariance, where that is positive; `coefficient` is the weight of their
    penalty. arXiv:2505.22617. ValueError unless 0 < share <= 1 and coefficient >= 0.
    """
    require("share", share, above=0, at_most=1)
    require("coefficient", coefficient, at_least=0)
    found = _covariance(tokens, total)
    highest = largest(found, max(1, round(share * _count(tokens, total))), total)
    return Marked((found >= highest) & (found > 0), penalty=coefficient)


def largest(values: Tensor, place: int, total: Total) -> float:
    """The `place`-th largest of the finite values on all ranks (from 1), exactly; -inf where there are not so many.

    Every rank sorts its own and counts: 32 sums of one number each, whatever the size of the batch.
    """
    own = values.detach().float()
    own = own[own.isfinite()].sort().values
    if int(total(torch.tensor(len(own), device=values.device))) < place:
        return -torch.inf
    low, high = (
        _ordered(np.float32(-np.inf)),
        _ordered(np.float32(np.inf)),
    )  # at least `place` are >= low, fewer >= high
    while high - low > 1:
        middle = (low + high) // 2
        below = torch.searchsorted(own, torch.tensor(_float(middle), device=own.device))
        if int(total(len(own) - below)) >= place:
            low = middle
        else:
            high = middle
    return float(_float(low))


def draws(identities: Sequence[tuple[str, int]], lengths: Sequence[int], step: int) -> Tensor:
    """One uniform number for each sampled token of the answers, float32 [sum of lengths]: of the answer and the step."""
    parts = [
        np.random.default_rng([zlib.crc32(group_id.encode()), index, step]).random(length, dtype=np.float32)
        for (group_id, index), length in zip(identities, lengths, strict=True)
    ]
    return torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *parts]))


def _covariance(tokens: Tokens, total: Total) -> Tensor:
    """float32 [N] of all ranks' finite tokens, -inf for the others."""
    finite = tokens.advantages.isfinite() & tokens.logprobs.isfinite()
    found = covariance(tokens.logprobs.double(), tokens.advantages, finite, total=total)
    return torch.where(finite, found, -torch.inf).float()


def _count(tokens: Tokens, total: Total) -> int:
    return int(total(torch.tensor(len(tokens), device=tokens.entropy.device)))


def _ordered(value: np.float32) -> int:
    """An integer for each float32, in the same order."""
    bits = int(value.view(np.int32))
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)


def _float(ordered: int) -> np.float32:
    bits = ordered if ordered >= 0 else -ordered - 2**31
    return np.int32(bits).view(np.float32)
