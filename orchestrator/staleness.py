"""The one definition of staleness, and the admission arithmetic that bounds it.

A version is the number of publishes so far; there is one publish per consumed batch. The staleness of a
trajectory is the version the learner is about to improve minus the oldest version among the trajectory's
sampled tokens, as the engine reported them. It has two parts that add up to it: what passed in flight
(newest minus oldest version of its own tokens: weights changed under it) and what passed in the queue
(learner version minus its newest version: it waited).

Two mechanisms bound it. Admission bounds the aggregate and wastes nothing: groups that are dispatched and
not yet trained never exceed `capacity`, so generation is at most `max_staleness` batches ahead of the batch
in training. A batch counts as untrained until its version is acknowledged. `oldest_trainable` is the hard bound
for each trajectory, applied at consumption.

`AdaptiveBound` moves the first mechanism within the second one's limit: it lets generation run less far ahead
while what comes back is too far off-policy. `StalenessPolicy` and the summaries are pure; nothing here has a
clock or I/O.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TokenVersions = Sequence[tuple[int, int]]  # (version, number of tokens sampled under it), one entry per span


def staleness(learner_version: int, versions: Iterable[int]) -> int:
    """`learner_version` minus the oldest of `versions`, in publishes.

    Raises ValueError when a version is one that the learner has not reached, or when there is none.
    """
    oldest, newest = _span(versions)
    _reached(learner_version, newest)
    return learner_version - oldest


def in_flight(versions: Iterable[int]) -> int:
    """The part of the staleness that passed while the trajectory was sampled: newest minus oldest version."""
    oldest, newest = _span(versions)
    return newest - oldest


def in_queue(learner_version: int, versions: Iterable[int]) -> int:
    """The part of the staleness that passed after the last token: `learner_version` minus newest version."""
    _, newest = _span(versions)
    _reached(learner_version, newest)
    return learner_version - newest


@dataclass(frozen=True)
class StalenessPolicy:
    """How far, in versions, a token's policy may lag the policy that learns from it.

    `max_staleness` 0 is synchronous, 1 is one-step-off, more is fully asynchronous.
    """

    max_staleness: int
    groups_per_batch: int

    def __post_init__(self) -> None:
        if not self.max_staleness >= 0:  # so put, it refuses nan too
            raise ValueError(f"staleness.max must be at least 0, got {self.max_staleness}")
        if self.groups_per_batch < 1:
            raise ValueError(f"sampling.groups_per_batch must be at least 1, got {self.groups_per_batch}")

    @functools.cached_property
    def capacity(self) -> int:
        """Most groups that may be dispatched and not yet trained: one batch, and one per version of lag."""
        return (self.max_staleness + 1) * self.groups_per_batch

    def room(self, untrained: int) -> int:
        """How many more groups may be dispatched beside `untrained` ones."""
        return max(0, self.capacity - untrained)

    def oldest_trainable(self, learner_version: int) -> int:
        """The oldest version that a token may have for its trajectory to be within the bound."""
        return learner_version - self.max_staleness

    def expires(self, oldest: int) -> int:
        """The first learner version at which a trajectory with this oldest version is over the bound."""
        return oldest + self.max_staleness + 1


class AdaptiveBound:
    """How many versions generation may run ahead, from how far off-policy the batches turn out to be.

    A batch whose effective sample size is below `min_ess` (a share of its tokens) or whose mismatch KL is above
    `max_kl` (nats a token) halves the bound; `patience` batches in a row within both limits raise it by one, up to
    `max_staleness`: additive increase, multiplicative decrease, as a sender finds a network's capacity. What is
    dispatched already is not touched.
    """

    def __init__(self, max_staleness: int, *, min_ess: float, max_kl: float, patience: int) -> None:
        self.versions = max_staleness
        self._max_staleness = max_staleness
        self._min_ess = min_ess
        self._max_kl = max_kl
        self._patience = patience
        self._good = 0  # batches in a row within the limits

    def observe(self, ess: float, kl: float) -> int:
        """Take one batch's figures in; the bound from now on. Figures that are not finite count as over the limit."""
        if ess >= self._min_ess and kl <= self._max_kl:
            self._good += 1
            if self._good >= self._patience:
                self._good = 0
                self.versions = min(self.versions + 1, self._max_staleness)
        else:
            self._good = 0
            self.versions //= 2
        return self.versions

    def state(self) -> dict[str, Any]:
        """JSON-able."""
        return {"versions": self.versions, "good": self._good}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; a smaller `max_staleness` than before limits it."""
        self.versions = min(state["versions"], self._max_staleness)
        self._good = state["good"]


@dataclass(frozen=True)
class BatchStaleness:
    """Staleness over the trained trajectories of one batch, in versions; `mean` is the sum of its two parts.

    `stale_ratio` is the share of trajectories with staleness > 0, `stale_token_ratio` the share of sampled
    tokens whose own version is older than the learner's. `histogram` maps a staleness to its trajectories.
    """

    trajectories: int
    tokens: int
    stale_ratio: float
    stale_token_ratio: float
    mean: float
    max: int
    in_flight_mean: float
    in_queue_mean: float
    histogram: Mapping[int, int]

    def metrics(self) -> dict[str, float]:
        """All of it under metric names, `staleness/...`."""
        shares = {f"staleness/share/{lag}": count / self.trajectories for lag, count in self.histogram.items()}
        return shares | {
            "staleness/stale_ratio": self.stale_ratio,
            "staleness/stale_token_ratio": self.stale_token_ratio,
            "staleness/mean": self.mean,
            "staleness/max": float(self.max),
            "staleness/in_flight_mean": self.in_flight_mean,
            "staleness/in_queue_mean": self.in_queue_mean,
        }


def batch_staleness(learner_version: int, trajectories: Iterable[TokenVersions]) -> BatchStaleness:
    """Summarise the trained trajectories of a batch, each given as its `(version, token count)` spans.

    Raises ValueError for no trajectories, a trajectory without sampled tokens, or a version that the
    learner has not reached.
    """
    # One pass of plain counting: a batch has thousands of trajectories, a simulation thousands of batches.
    by_oldest: dict[int, int] = {}  # trajectories
    by_newest: dict[int, int] = {}
    by_version: dict[int, int] = {}  # tokens
    for spans in trajectories:
        if not spans:
            raise ValueError("a trajectory without sampled tokens has no staleness")
        if len(spans) == 1:
            ((oldest, count),) = spans
            newest = oldest
            by_version[oldest] = by_version.get(oldest, 0) + count
        else:
            oldest, newest = min(spans)[0], max(spans)[0]
            for version, count in spans:
                by_version[version] = by_version.get(version, 0) + count
        by_oldest[oldest] = by_oldest.get(oldest, 0) + 1
        by_newest[newest] = by_newest.get(newest, 0) + 1
    if not by_oldest:
        raise ValueError("the staleness of a batch without trajectories is not defined")
    if not all(by_version.values()):
        raise ValueError("a span of no tokens has no staleness")
    _reached(learner_version, max(by_newest))
    histogram = {learner_version - oldest: count for oldest, count in sorted(by_oldest.items(), reverse=True)}
    trajectory_count, tokens = sum(by_oldest.values()), sum(by_version.values())
    stale_tokens = tokens - by_version.get(learner_version, 0)
    flight_sum = sum(v * n for v, n in by_newest.items()) - sum(v * n for v, n in by_oldest.items())
    queue_sum = sum((learner_version - v) * n for v, n in by_newest.items())
    return BatchStaleness(
        trajectories=trajectory_count,
        tokens=tokens,
        stale_ratio=1 - histogram.get(0, 0) / trajectory_count,
        stale_token_ratio=stale_tokens / tokens,
        mean=(flight_sum + queue_sum) / trajectory_count,
        max=max(histogram),
        in_flight_mean=flight_sum / trajectory_count,
        in_queue_mean=queue_sum / trajectory_count,
        histogram=histogram,
    )


def _span(versions: Iterable[int]) -> tuple[int, int]:
    """Oldest and newest version."""
    listed = tuple(versions)
    if not listed:
        raise ValueError("a trajectory without sampled tokens has no staleness")
    return min(listed), max(listed)


def _reached(learner_version: int, newest: int) -> None:
    if newest > learner_version:
        raise ValueError(f"tokens were sampled under version {newest}, but the learner is at {learner_version}")
