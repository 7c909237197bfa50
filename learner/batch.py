"""How one batch is cut: optimizer updates, ranks, micro-batches, rows.

`plan_updates` decides everything from lengths alone, on the driver, so token data goes straight to the ranks that need
it. The plan keeps three promises: every trainable answer appears exactly once per epoch; every rank has the same
number of micro-batches in every update (ZeRO-3 gathers parameters in lockstep), with empty ones where it has no data;
and the weights of the answers' tokens are global, so no cut changes the gradient.

A packed row holds answers of one group. The plan counts on their sharing the prompt; a rank, which sees the tokens, computes
all that they share only once (`learner.tensors`), so a length planned here is an upper bound.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One answer as the plan knows it.

    `payload` and `position` say where its trajectory is (which payload, which place in it). `advantage` is its reward where
    the objective has advantages per token (`learner.objective.TokenReturns`). `token_weight` is the weight
    of each of its sampled tokens in the loss, denominators included.
    """

    group_id: str
    index: int
    payload: int
    position: int
    prompt_length: int
    response_length: int  # sampled tokens
    advantage: float
    token_weight: float
    other_length: int = 0  # tokens behind the prompt that were not sampled

    @property
    def own_length(self) -> int:
        """Tokens behind the prompt."""
        return self.response_length + self.other_length

    @property
    def length(self) -> int:
        return self.prompt_length + self.own_length


PackedRow = tuple[Row, ...]  # answers that share one prompt
MicroBatch = tuple[PackedRow, ...]


@dataclass(frozen=True)
class Coefficients:
    """What the KL term and the entropy bonus weigh in one batch, where that is adapted; None: what the objective says."""

    kl: float | None = None
    entropy: float | None = None


FIXED = Coefficients()


@dataclass(frozen=True)
class RankPlan:
    """What one rank does with a batch that improves `version`.

    `updates[u]` are its micro-batches in optimizer update `u` of an epoch; `epochs` of these follow one another. Metrics
    tell stalenesses up to `max_staleness` apart.
    """

    updates: tuple[tuple[MicroBatch, ...], ...]
    version: int
    max_staleness: int
    epochs: int = 1
    coefficients: Coefficients = FIXED

    @property
    def payloads(self) -> tuple[int, ...]:
        """The payloads this rank needs, in order of first use."""
        seen: dict[int, None] = {}
        for micro_batches in self.updates:
            for micro_batch in micro_batches:
                for packed in micro_batch:
                    for row in packed:
                        seen.setdefault(row.payload)
        return tuple(seen)


def packed_length(packed: PackedRow) -> int:
    """Tokens of a packed row: the shared prompt once, then the answers."""
    return packed[0].prompt_length + sum(row.own_length for row in packed)


def plan_updates(
    updates: Sequence[Sequence[Sequence[Row]]],
    *,
    version: int,
    max_staleness: int,
    epochs: int = 1,
    ranks: int,
    max_tokens: int,
    share_prefixes: bool,
) -> list[RankPlan]:
    """One plan per rank. `updates[u][g]` are the trainable rows of group g in optimizer update u of an epoch.

    `share_prefixes`: answers of one group stand together in packed rows, as many as `max_tokens` allows.
    """
    per_rank: list[list[tuple[MicroBatch, ...]]] = [[] for _ in range(ranks)]
    for groups in updates:
        packed_rows = [packed for group in groups for packed in _pack(group, max_tokens if share_prefixes else 0)]
        shares = [_micro_batches(share, max_tokens) for share in _balance(packed_rows, ranks)]
        count = max(1, *(len(share) for share in shares))
        for plan, share in zip(per_rank, shares, strict=True):
            plan.append(tuple(share + [()] * (count - len(share))))
    return [RankPlan(tuple(plan), version, max_staleness, epochs) for plan in per_rank]


def _pack(group: Sequence[Row], max_tokens: int) -> list[PackedRow]:
    """Answers of one group in as few packed rows as `max_tokens` allows, by powers of two; one each where it allows none."""
    counts = itertools.takewhile(lambda count: count < len(group), (2**i for i in itertools.count()))
    spreads = (_spread(group, count) for count in counts)
    apart: list[PackedRow] = [(row,) for row in group]
    return next((packed for packed in spreads if max(map(packed_length, packed)) <= max_tokens), apart)


def _spread(group: Sequence[Row], count: int) -> list[PackedRow]:
    """The group in `count` packed rows of about equal length."""
    packed: list[list[Row]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for row in sorted(group, key=lambda row: -row.own_length):
        load, number = loads[0]
        packed[number].append(row)
        heapq.heapreplace(loads, (load + row.own_length, number))
    return [tuple(sorted(rows, key=lambda row: row.index)) for rows in packed]


def _balance(packed_rows: Sequence[PackedRow], ranks: int) -> list[list[PackedRow]]:
    """Spread rows over ranks by length, longest first to the least loaded."""
    shares: list[list[PackedRow]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for packed in sorted(packed_rows, key=packed_length, reverse=True):
        load, rank = heapq.heappop(loads)
        shares[rank].append(packed)
        heapq.heappush(loads, (load + packed_length(packed), rank))
    return shares


def _micro_batches(share: Sequence[PackedRow], max_tokens: int) -> list[MicroBatch]:
    """Rows of like length together, up to `max_tokens` with padding; a longer row is a micro-batch of its own."""
    micro_batches: list[list[PackedRow]] = []
    for packed in sorted(share, key=packed_length, reverse=True):
        # Sorted, so the first row of a micro-batch is its longest and sets the padded width.
        if micro_batches and (len(micro_batches[-1]) + 1) * packed_length(micro_batches[-1][0]) <= max_tokens:
            micro_batches[-1].append(packed)
        else:
            micro_batches.append([packed])
    return [tuple(rows) for rows in micro_batches]
