"""Sums and maxima over sampled tokens, split by how stale each token is.

Contract. `sums[name][s]` adds a quantity up over the tokens that were written s versions before the one that the batch
improves; the last entry also holds everything older. `maxima` likewise, -inf where there was no token. Tallies of any
split of a batch merge to the tally of the whole batch, so merge micro-batches and ranks first and divide once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Tally:
    """All entries have one length, the number of stalenesses that are told apart; a name never counted is absent."""

    sums: dict[str, tuple[float, ...]] = field(default_factory=dict)
    maxima: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, staleness: Tensor, *, stalenesses: int, sums: Mapping[str, Tensor], maxima: Mapping[str, Tensor]
    ) -> Tally:
        """Count N tokens: `staleness` int64 [N] in 0 … `stalenesses` - 1, each quantity [N]. One transfer to the host."""
        added, compared = (_stack(values, staleness) for values in (sums, maxima))
        totals = added.new_zeros(len(sums), stalenesses).index_add_(1, staleness, added)
        highest = compared.new_full((len(maxima), stalenesses), -math.inf)
        highest.scatter_reduce_(1, staleness.expand_as(compared), compared, "amax")
        rows = map(tuple, torch.cat([totals, highest]).tolist())
        return cls({name: next(rows) for name in sums}, {name: next(rows) for name in maxima})

    def merge(self, other: Tally) -> None:
        """Add the tokens of `other`."""
        for name, values in other.sums.items():
            mine = self.sums.get(name, (0.0,) * len(values))
            self.sums[name] = tuple(a + b for a, b in zip(mine, values, strict=True))
        for name, values in other.maxima.items():
            mine = self.maxima.get(name, values)
            self.maxima[name] = tuple(max(a, b) for a, b in zip(mine, values, strict=True))

    def total(self, name: str) -> float:
        """Sum over all tokens, 0 for a name that was never counted."""
        return sum(self.sums.get(name, ()))

    def largest(self, name: str) -> float:
        """Maximum over all tokens, -inf without any."""
        return max(self.maxima.get(name, ()), default=-math.inf)

    def split(self) -> list[Tally]:
        """One tally for each staleness, from 0."""
        count = max(map(len, self.sums.values()), default=0)
        return [
            Tally(
                {name: values[s : s + 1] for name, values in self.sums.items()},
                {name: values[s : s + 1] for name, values in self.maxima.items()},
            )
            for s in range(count)
        ]


def _stack(values: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """float64 [quantities, N], also for no quantities."""
    empty = torch.empty(0, len(like), dtype=torch.float64, device=like.device)
    return torch.cat([empty, *(value.double()[None] for value in values.values())])
